"""The benchmark of speed-up against accuracy."""
