"""Ranks that are threads of one process, for tests and simulation."""
