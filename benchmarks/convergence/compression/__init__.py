"""Compressed gradients against 32 bits, with SGD, momentum and Adam."""
