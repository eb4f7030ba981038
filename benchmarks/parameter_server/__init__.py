"""The benchmark of parameter servers."""
