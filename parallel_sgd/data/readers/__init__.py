"""Readers of data files, a file for each format."""
