"""Ranks that find each other through PyTorch: torchrun, or a process group."""
