"""The state of DDP's hook with buckets that are made here: parameters, gradients and residuals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

SIZES = (3000, 700, 1, 64, 5000)  #: of the parameters
WHOLE = ((0, 1, 2, 3, 4),)
TWO = ((4, 3), (2, 1, 0))
LAYOUTS = (WHOLE, TWO, TWO, ((3,), (0, 4), (1, 2)), TWO, WHOLE)
"""Which parameters DDP has in its buckets, from step to step."""


@dataclass
class Bucket:
    """What the state asks of DDP's."""

    number: int
    last: bool
    members: list[torch.Tensor]
    values: torch.Tensor

    def index(self):
        return self.number

    def is_last(self):
        return self.last

    def parameters(self):
        return self.members

    def buffer(self):
        return self.values


class Model:
    """Parameters, and a gradient of this rank's in each step."""

    def __init__(self, rank, dtype=torch.float32):
        self.rank = rank
        self.parameters = [torch.zeros(size, dtype=dtype) for size in SIZES]

    def gradients(self, step):
        rng = np.random.default_rng([self.rank, step])
        dtype = self.parameters[0].numpy().dtype
        return [rng.standard_normal(size).astype(dtype) for size in SIZES]

    def buckets(self, layout, gradients):
        for number, members in enumerate(layout):
            values = np.concatenate([gradients[i] for i in members])
            parameters = [self.parameters[i] for i in members]
            last = number == len(layout) - 1
            yield Bucket(number, last, parameters, torch.from_numpy(values))

    def means(self, state, layout, gradients):
        """What each parameter gets."""
        buckets = [*self.buckets(layout, gradients)]
        futures = [state.begin(bucket) for bucket in buckets]
        means = {}
        for members, future in zip(layout, futures, strict=True):
            ends = np.cumsum([SIZES[i] for i in members])
            parts = np.split(future.wait().numpy(), ends[:-1])
            means |= dict(zip(members, parts, strict=True))
        return [means[i] for i in range(len(SIZES))]


def residuals_of(state):
    """Of one rank, of each parameter by name, in float64."""
    found = {}
    for name, one in state.state_dict()["residuals"].items():
        total = one["worker_error"].numpy().astype(float)
        begin, owner = one["owner_begin"], one["owner_error"].numpy()
        total[begin : begin + owner.size] += owner
        found[name] = total
    return found


def summed(comm, arrays):
    """Of all ranks, one vector."""
    return np.sum(comm.allgather_object(np.concatenate(arrays).astype(float)), axis=0)


def left(comm, state):
    """All residuals of all ranks, in the order of the parameters: their names are the order in
    which the first step's buckets had them."""
    own = residuals_of(state)
    return summed(comm, [own.get(str(i), np.zeros(size)) for i, size in enumerate(SIZES)])


def same_state(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(one[name][error], other[name][error])
        for name in one
        for error in ("worker_error", "owner_error")
    )
