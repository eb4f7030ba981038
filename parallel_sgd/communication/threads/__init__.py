"""Ranks as threads of a process, for tests and simulation."""
