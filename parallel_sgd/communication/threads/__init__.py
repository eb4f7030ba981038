"""Ranks as threads of one process, for tests and simulation."""
