"""Checkpoints: saved while training continues, loaded on any number of ranks."""
