"""What is to be trained and where; what a step of it costs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..costs import ExchangeCost, KernelSpeeds, Link, exchange_s
from ..exchange import TransportOptions


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model, a cluster, and how fast its ranks are.

    Attributes:
        nodes: machines, each with one link.
        ranks_per_node: that share it.
        link: of every node.
        parameters: values of the model, float32.
        step_s: seconds in which a rank alone computes its part of a minibatch, and updates.
        minibatch: samples of one rank in a step, however many ranks there are.
        optimizer_vectors: that the optimizer keeps beside the model, as long as that.
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
        """The same on another number of nodes."""
        return replace(self, nodes=nodes)

    @property
    def bucket_counts(self) -> list[int]:
        """Into how many buckets the vector may be cut: as by default, or fewer."""
        most = max(1, self.parameters // TransportOptions().bucket_values)
        return [most >> i for i in range(most.bit_length())]

    def exchange(self, bits: float, buckets: int) -> ExchangeCost:
        """Of one sum over all ranks of a vector as long as the model."""
        return exchange_s(
            self.parameters,
            bits,
            self.ranks,
            self.link,
            self.speeds,
            ranks_per_host=self.ranks_per_node,
            buckets=buckets,
        )

    def passes_s(self, passes: float) -> float:
        """Seconds of so many passes over the model in memory."""
        return passes * self.parameters / self.speeds.decode_add[32]


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Seconds of a step; on average, where not all steps are alike.

    Attributes:
        compute_s: of the model, what a rank alone would take.
        kernels_s: of a core: encoding, adding, decoding.
        wire_s: of a node's link.
        startup_s: latencies and messages.
        total_s: of the whole step.
        training: the part of the nodes whose ranks train.
        buckets: into which the vector is cut.
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
        """How much of the four terms runs beside others."""
        return self.compute_s + self.kernels_s + self.wire_s + self.startup_s - self.total_s

    @property
    def efficiency(self) -> float:
        """Samples a second of each node, against a node that need not wait for others."""
        return self.training * self.compute_s / self.total_s
