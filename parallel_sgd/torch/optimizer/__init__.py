"""A PyTorch optimizer as the local update rule of every algorithm."""
