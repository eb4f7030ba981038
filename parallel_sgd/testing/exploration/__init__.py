"""Explore the orders in which ranks may run, with failures: a seeded scheduler of threads."""
