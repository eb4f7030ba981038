"""What a `RowTable` is to do, on plain dicts: one row after the other, by the dense optimizers."""

from __future__ import annotations

import numpy as np

from parallel_sgd import Parameters

WORD = (1 << 64) - 1
LAST = 2**63 - 1  #: the largest id


def mix(number):
    """SplitMix64's step from `number`, in Python's integers."""
    z = (number + 0x9E3779B97F4A7C15) & WORD
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & WORD
    return z ^ (z >> 31)


def unmix(number):
    """The number that `mix` makes this one of."""

    def unshift(z, by):
        unshifted = z
        for _ in range(64 // by):
            unshifted = z ^ (unshifted >> by)
        return unshifted

    z = unshift(number, 31) * pow(0x94D049BB133111EB, -1, 1 << 64) & WORD
    z = unshift(z, 27) * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & WORD
    return (unshift(z, 30) - 0x9E3779B97F4A7C15) & WORD


def same_hash(hashed, many):
    """Ids whose searches begin at one slot, and that look alike to all slots."""
    ids = (unmix(hashed << 32 | low) for low in range(10**6))
    return [i for i, _ in zip((i for i in ids if i <= LAST), range(many), strict=False)]


POOLS = {
    "sequential": list(range(40)),
    "multiples": [i << 40 for i in range(40)],
    "large": [10**11 + 7919 * i for i in range(40)],
    "last": [LAST - i for i in range(20)] + [2**i for i in range(20)],
    "negative": [-1 - i for i in range(20)] + [i - LAST - 1 for i in range(20)],
    "one hash": same_hash(0x12345678, 20) + same_hash(0x12345679, 20),
    "last hash": same_hash(0xFFFFFFFF, 40),  # the search goes on at the first slot
}


def initial(options, number):
    key = mix(mix(options.seed) ^ number)
    odd = [2 * (mix((key + c + 1) & WORD) >> 41) + 1 - 2**23 for c in range(options.width)]
    return np.float32(odd) * (np.float32(options.initial_scale) * np.float32(2.0**-23))


class RowModel:
    """A whole table; `rows` are {id: [x, state of the dense optimizer, clock of last push]}."""

    def __init__(self, options):
        self.options, self.rows, self.counts = options, {}, {}
        self.samples = self.swept = self.evicted = 0

    def pull(self, ids):
        rows = [self.rows[i][0] if i in self.rows else initial(self.options, i) for i in ids]
        return np.float32(rows).reshape(len(ids), self.options.width)

    def push(self, ids, gradient, samples, lr_factor=1.0):
        before, self.samples = self.samples, self.samples + samples
        for number, g in zip(ids, gradient, strict=True):
            if number not in self.rows and not self._enter(number):
                continue
            row = self.rows[number]
            x, state = row[:2]
            state.samples, state.lr_factor = before, lr_factor
            self.options.optimizer.step(state, x, g, samples)
            state.steps, row[2] = state.steps + 1, self.samples
        after = self.options.evict_after
        if after is not None and self.samples - self.swept >= after / 4:
            self.swept = self.samples
            oldest = self.samples - after
            self.evicted += sum(row[2] <= oldest for row in self.rows.values())
            self.rows = {i: row for i, row in self.rows.items() if row[2] > oldest}
            self.counts = {i: c for i, c in self.counts.items() if c[1] > oldest}

    def _enter(self, number):
        count = self.counts.pop(number, (0, 0))[0] + 1
        if count < self.options.entry_count:
            self.counts[number] = count, self.samples
            return False
        parameters = Parameters({"x": initial(self.options, number)})
        state = self.options.optimizer.init(parameters)
        self.rows[number] = [parameters.flat, state, self.samples]
        return True
