"""The job of a plan: model and cluster, and the cost of a training step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..costs import ExchangeCost, KernelSpeeds, Link, exchange_s
from ..exchange import TransportOptions


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model, a cluster, and the speed of its ranks.

    Attributes:
        nodes: machines with one link each.
        ranks_per_node: ranks sharing a node's link.
        link: of every node.
        parameters: number of float32 values of the model.
        step_s: seconds of a rank alone for its part of a minibatch and the update.
        minibatch: samples of a rank in a step, for any number of ranks.
        optimizer_vectors: number of the optimizer's vectors, each of the model's size.
        speeds: of a rank's kernels.
    """

    nodes: int
    ranks_per_node: int
    link: Link
    parameters: int
    step_s: float
    minibatch: int
    optimizer_vectors: int
    speeds: KernelSpeeds

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def on(self, nodes: int) -> Job:
        """Return the same job on another number of nodes."""
        return replace(self, nodes=nodes)

    @property
    def bucket_counts(self) -> list[int]:
        """Numbers of buckets to consider: the default, and fewer."""
        most = max(1, self.parameters // TransportOptions().bucket_values)
        return [most >> i for i in range(most.bit_length())]

    def exchange(self, bits: float, buckets: int, searches: int = 1) -> ExchangeCost:
        """Return the cost of a sum over all ranks of a vector of the model's size.

        Args:
            bits, buckets, searches: see `exchange_s`.
        """
        return exchange_s(
            self.parameters,
            bits,
            self.ranks,
            self.link,
            self.speeds,
            ranks_per_host=self.ranks_per_node,
            buckets=buckets,
            searches=searches,
        )

    def passes_s(self, passes: float) -> float:
        """Return the seconds of a number of passes over the model in memory."""
        return passes * self.parameters / self.speeds.decode_add[32]


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Seconds of a step, averaged over different kinds of steps.

    Attributes:
        compute_s: of the model, for a rank alone.
        kernels_s: of a core: encoding, adding, decoding.
        wire_s: of a node's link.
        startup_s: latencies and messages.
        total_s: of the whole step.
        training: fraction of nodes with ranks that train.
        buckets: number of buckets of the vector.
    """

    compute_s: float
    kernels_s: float = 0.0
    wire_s: float = 0.0
    startup_s: float = 0.0
    total_s: float
    training: float = 1.0
    buckets: int = 1

    @property
    def hidden_s(self) -> float:
        """Seconds of the four terms hidden by overlap."""
        return self.compute_s + self.kernels_s + self.wire_s + self.startup_s - self.total_s

    @property
    def efficiency(self) -> float:
        """Samples per second of a node, relative to a node without communication."""
        return self.training * self.compute_s / self.total_s
