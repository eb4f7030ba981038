"""A table of embeddings in this process: what models are tested with, and a plain reference."""

from __future__ import annotations

import numpy as np


class MemoryRows:
    """Rows in a dict; a row begins as a function of its id alone, and exists once it is pushed to.

    Attributes:
        pushes: samples of each push so far.
        asked: ids of each call of `rows`, as they came.
        prefetched: those of each `prefetch`.
    """

    def __init__(self, width, lr=0.1, deviation=0.5, dtype=np.float32):
        self.width, self.lr, self.deviation, self.dtype = width, lr, deviation, dtype
        self.stored, self.pushes, self.asked, self.prefetched = {}, [], [], []

    def rows(self, ids):
        self.asked.append(ids.copy())
        distinct, places = np.unique(ids, return_inverse=True)
        rows = np.array([self.row(i) for i in distinct.tolist()], self.dtype)
        return rows.reshape(-1, self.width)[places.reshape(ids.shape)]

    def row(self, i):
        if i in self.stored:
            return self.stored[i]
        return self.deviation * np.random.default_rng(i % 2**64).standard_normal(self.width)

    def push(self, ids, gradient, samples):
        """row -= lr * gradient / samples, for each distinct id"""
        assert gradient.shape == (*ids.shape, self.width) and samples >= 1
        assert gradient.dtype == np.float32
        self.pushes.append(samples)
        for i, change in self.summed(ids, gradient).items():
            self.stored[i] = self.row(i) - self.lr * change / samples

    def summed(self, ids, gradient):
        """The gradient of each distinct id, in float64."""
        distinct, places = np.unique(ids, return_inverse=True)
        sums = np.zeros((len(distinct), self.width))
        np.add.at(sums, places.ravel(), gradient.reshape(-1, self.width))
        return dict(zip(distinct.tolist(), sums, strict=True))

    def prefetch(self, ids):
        self.prefetched.append(ids.copy())
