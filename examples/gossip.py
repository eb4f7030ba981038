"""Gossip over an exponential graph, an algorithm that parallel_sgd does not have.

    parallel-sgd run -n 4 examples/gossip.py            trains on scikit-learn's digits
    parallel-sgd run -n 4 examples/gossip.py --check    holds it to what every algorithm must be

docs/new_algorithm.md explains how an algorithm is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from on_digits import main

import parallel_sgd as psgd
from parallel_sgd.algorithms import Minibatch, Work
from parallel_sgd.compression import problem_with
from parallel_sgd.exchange import Exchange
from parallel_sgd.options import options
from parallel_sgd.state import Component, across, workspace


@dataclass(kw_only=True)
class GossipState(Component):
    """
    Attributes:
        steps: so far.
        received: [n], the model of another rank.
        messages: between two ranks.
        exchange: of all ranks, at the end.
        bytes_sent: by this rank, in steps.
    """

    steps: int = across("same", least=0, default=0)
    received: Any = workspace()
    messages: Any = workspace()
    exchange: Exchange = workspace()
    bytes_sent: int = workspace(default=0)


@options
class Gossip(psgd.Algorithm[GossipState]):
    """After its step, each rank takes the mean of its model and that of one other rank:

        x_k = (x_k + x_j) / 2,   j = k - 2^(t mod ceil(log2 K)) mod K

    Each rank sends one vector a step, to one rank. After K = 2^m ranks have taken m such steps
    without a gradient, all have the mean of all models.

    Source: Ying, Yuan, Chen, Hu, Pan, Yin, "Exponential Graph is Provably Efficient for
    Decentralized Deep Training", NeurIPS 2021.
    """

    has_common_model = False

    def init(self, work: Work) -> GossipState:
        return GossipState(
            received=np.empty_like(work.parameters.flat),
            messages=work.comm.messages(),
            exchange=Exchange(work.parameters, work.comm),
        )

    def step(self, state: GossipState, work: Work, minibatch: Minibatch) -> None:
        work.optimizer(work.gradient.flat, minibatch.samples, minibatch.total)
        x, rank, size = work.parameters.flat, work.comm.rank, work.comm.size
        if size > 1:
            apart = 1 << state.steps % (size - 1).bit_length()
            swap(state, x, receiver=(rank + apart) % size, sender=(rank - apart) % size)
            x += state.received
            x /= 2
        state.steps += 1

    def finish(self, state: GossipState, work: Work) -> None:
        x = work.parameters.flat
        work.comm.agree(problem_with(x, name="model"))
        state.exchange.sum(x)
        x /= work.comm.size


def swap(state: GossipState, x: Any, receiver: int, sender: int) -> None:
    """Send a model to one rank, and receive another rank's into `state.received`."""
    messages, under_way = state.messages, {"send", "receive"}
    end = under_way.discard
    messages.receive(state.received, sender, 0, lambda: end("receive"))
    messages.send(x, receiver, 0, lambda: end("send"))
    with messages.watched("another rank's model"):
        backoff = messages.backoff()
        while under_way:
            if not messages.progress():
                backoff.pause()
    state.bytes_sent += x.nbytes


PROMISES = {
    "algorithm": Gossip(),
    "exceptions": {
        "weights": "all models count alike, whatever their samples",
        "dry_ranks_count_nothing": "the models of dry ranks count, too",
    },
}
"""For `check_algorithm`."""


if __name__ == "__main__":
    main(Gossip(), psgd.SGD(lr=0.1), **PROMISES)
