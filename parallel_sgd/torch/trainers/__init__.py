"""Compressed gradients in the trainers of other packages: imported only by those who use them."""
