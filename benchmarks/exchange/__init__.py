"""The benchmark of sums over all ranks."""
