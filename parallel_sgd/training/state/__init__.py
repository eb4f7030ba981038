"""A learner's state as plain values and arrays, for checkpoints and for other numbers of ranks."""
