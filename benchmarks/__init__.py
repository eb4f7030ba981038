"""Benchmarks: each measures the project beside a peer or a physical limit in the same run."""
