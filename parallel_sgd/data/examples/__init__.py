"""Example data sets that need no download."""
