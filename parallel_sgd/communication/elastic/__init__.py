"""Worlds whose ranks change: failed ranks leave, standby ranks join."""
