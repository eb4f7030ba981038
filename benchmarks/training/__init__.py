"""The benchmark of whole steps, beside PyTorch DDP."""
