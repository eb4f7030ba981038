"""The algorithms of a plan: seconds of a step, and memory of a rank.

Memory is in bytes: model, gradient, optimizer, residuals and buffers. The memory for the
computation of the gradient depends on the model, and is not included.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

from ..algorithms import (
    DESLOC,
    Algorithm,
    BlockMomentumSGD,
    DataParallelASGD,
    DataParallelSGD,
    DesyncedAveraging,
    DiLoCo,
    LocalUpdates,
    ModelAveragingSGD,
    Period,
    SlowMo,
    SparseLoCo,
)
from ..compression import auto_bits, codec_for
from ..costs import LINK_EFFICIENCY, closed_throughput
from .job import Job, StepCost

BACKWARD = 2 / 3  #: fraction of a step in backward, which completes the gradient gradually
BLOCK_PASSES = 10  #: passes over the model at the end of a block: see `LocalUpdates`
FEWEST_BITS = 0.25  #: of SparseLoCo's default; of gradients, fewer than learn like 32 bits
FRAGMENTS = 4  #: of a model in fragments
OVERLAP_STEPS = 5  #: beside which the exchange of a fragment runs
PUSH_PASSES = 6  #: passes of a server over its part, for a push: receive, apply, answer
NODES_PER_SERVER = 8

NAMES: dict[type[LocalUpdates], str] = {
    BlockMomentumSGD: "block momentum",
    DESLOC: "DES-LOC",
    DiLoCo: "DiLoCo",
    ModelAveragingSGD: "model averaging",
    SlowMo: "SlowMo",
    SparseLoCo: "SparseLoCo",
}

Memory = dict[str, float]  #: bytes of a rank by purpose


@dataclass(frozen=True)
class Candidate(ABC):
    """An algorithm with its options.

    Attributes:
        bits: per value on the wire.
    """

    bits: float

    @property
    @abstractmethod
    def name(self) -> str:
        """The algorithm's name, without the bits."""

    @property
    @abstractmethod
    def options(self) -> str:
        """Options of train.py, except for bits and buckets."""

    @abstractmethod
    def cost_in(self, job: Job, buckets: int) -> StepCost:
        """Return the cost of a step with vectors cut into `buckets` buckets."""

    def cost(self, job: Job) -> StepCost:
        """Return the cost of a step with the default number of buckets, or with fewer buckets if
        these save more than 1 %.
        """
        default, *fewer = [self.cost_in(job, n) for n in job.bucket_counts]
        best = min([default, *fewer], key=lambda cost: cost.total_s)
        return default if default.total_s <= 1.01 * best.total_s else best

    def is_possible(self, job: Job) -> bool:
        return True

    def memory(self, job: Job) -> Memory:
        """Return the memory of a rank that trains."""
        vector = 4.0 * job.parameters
        memory = {
            "model": vector,
            "gradient": vector,
            "optimizer": job.optimizer_vectors * vector,
            "residuals": 0.0,
            "buffers": vector,
        }
        if self.bits < 32:  # buffers to send and to receive, residuals of both
            memory["residuals"] = vector * (1 + 1 / job.ranks)
            room = codec_for(self.bits).room_bytes(job.parameters)
            of_this_host = vector * (1 - 1 / job.ranks_per_node)
            memory["buffers"] = room * (1 + 1 / job.ranks_per_node) + of_this_host
        return memory


@dataclass(frozen=True)
class DataParallel(Candidate):
    """Data-parallel SGD: every step sums the gradients.

    Attributes:
        overlap: whether gradients are exchanged during backward.
    """

    overlap: bool = False

    @property
    def name(self) -> str:
        return "data-parallel, overlap" if self.overlap else "data-parallel"

    @property
    def options(self) -> str:
        return "--overlap" if self.overlap else ""

    def cost_in(self, job: Job, buckets: int) -> StepCost:
        exchange = job.exchange(self.bits, buckets, searches=buckets if self.overlap else 1)
        total_s = job.step_s + exchange.total_s
        if self.overlap:  # hides wire time only: encoding shares the core
            forward_s = (1 - BACKWARD) * job.step_s
            last_bucket_s = min(exchange.kernels_s, exchange.wire_s) / buckets
            busiest_s = max(job.step_s + exchange.kernels_s, forward_s + exchange.wire_s)
            total_s = busiest_s + last_bucket_s + exchange.startup_s
        terms = vars(replace(exchange, total_s=total_s))
        return StepCost(compute_s=job.step_s, buckets=buckets, **terms)


@dataclass(frozen=True)
class DoubleBuffered(Candidate):
    """Double buffering: the sum of a step's gradients overlaps the next step, and is applied a step
    late.
    """

    name = "double buffering"
    options = "--double-buffering"

    def cost_in(self, job: Job, buckets: int) -> StepCost:
        exchange = job.exchange(self.bits, buckets)
        total_s = exchange.startup_s + max(job.step_s + exchange.kernels_s, exchange.wire_s)
        terms = vars(replace(exchange, total_s=total_s))
        return StepCost(compute_s=job.step_s, buckets=buckets, **terms)

    def memory(self, job: Job) -> Memory:
        memory = super().memory(job)
        return memory | {"gradient": 2 * memory["gradient"]}


@dataclass(frozen=True)
class Blocks(Candidate):
    """Local updates.

    Attributes:
        period: the length of a block; None: the algorithm's default.
    """

    algorithm: type[LocalUpdates]
    period: Period | None = None

    @property
    def name(self) -> str:
        return NAMES[self.algorithm]

    @property
    def options(self) -> str:
        return f"--algorithm {NAMES[self.algorithm].replace(' ', '-').lower()}"

    def steps(self, job: Job) -> int:
        """Return a rank's number of steps in a block."""
        return _steps(self.period or self.algorithm.default_period, job)

    def cost_in(self, job: Job, buckets: int) -> StepCost:
        exchange, steps = job.exchange(self.bits, buckets), self.steps(job)
        passes_s = job.passes_s(BLOCK_PASSES)
        return StepCost(
            compute_s=job.step_s,
            kernels_s=(exchange.kernels_s + passes_s) / steps,
            wire_s=exchange.wire_s / steps,
            startup_s=exchange.startup_s / steps,
            total_s=job.step_s + (exchange.total_s + passes_s) / steps,
            buckets=buckets,
        )

    def memory(self, job: Job) -> Memory:
        memory = super().memory(job)
        has_momentum = self.algorithm not in (DESLOC, ModelAveragingSGD, SparseLoCo)
        return memory | {"common model": (1 + has_momentum) * memory["model"]}


@dataclass(frozen=True)
class DesyncedBlocks(Blocks):
    """DES-LOC: moments of the optimizer are averaged in 32 bits, each every so many blocks."""

    algorithm: type[LocalUpdates] = DESLOC

    def cost_in(self, job: Job, buckets: int) -> StepCost:
        own, rare = super().cost_in(job, buckets), DesyncedAveraging()
        moments = job.exchange(32, buckets)
        first = min(job.optimizer_vectors, 1) / rare.first_moment_every
        second = max(job.optimizer_vectors - 1, 0) / rare.second_moment_every
        exchanges = (first + second) / self.steps(job)
        return replace(
            own,
            kernels_s=own.kernels_s + exchanges * moments.kernels_s,
            wire_s=own.wire_s + exchanges * moments.wire_s,
            startup_s=own.startup_s + exchanges * moments.startup_s,
            total_s=own.total_s + exchanges * moments.total_s,
        )


@dataclass(frozen=True)
class Fragments(Blocks):
    """Local updates of a model in fragments, whose exchanges run beside training.

    Attributes:
        fragments: number of parts of the model.
        overlap_steps: steps beside which an exchange runs.
    """

    fragments: int = FRAGMENTS
    overlap_steps: float = OVERLAP_STEPS

    @property
    def name(self) -> str:
        parts = f", {self.fragments} fragments" if self.fragments > 1 else ", overlap"
        return f"{super().name}{parts}"

    @property
    def options(self) -> str:
        return f"{super().options} --fragments {self.fragments}"

    def cost_in(self, job: Job, buckets: int) -> StepCost:
        part = replace(job, parameters=-(-job.parameters // self.fragments))
        exchange = part.exchange(self.bits, -(-buckets // self.fragments))
        passes_s, often = job.passes_s(BLOCK_PASSES), self.fragments / self.steps(job)
        # Kernels share the core with training.
        waits_s = max(0.0, exchange.wire_s - self.overlap_steps * job.step_s)
        busy_s = exchange.kernels_s + exchange.startup_s
        return StepCost(
            compute_s=job.step_s,
            kernels_s=often * exchange.kernels_s + passes_s / self.steps(job),
            wire_s=often * exchange.wire_s,
            startup_s=often * exchange.startup_s,
            total_s=job.step_s + often * (busy_s + waits_s) + passes_s / self.steps(job),
            buckets=buckets,
        )

    def memory(self, job: Job) -> Memory:
        memory = super().memory(job)
        return memory | {"buffers": memory["buffers"] + memory["model"]}


@dataclass(frozen=True)
class Servers(Candidate):
    """Asynchronous SGD: pushes and pulls of the whole model, with servers on dedicated nodes.

    A worker's push and pull are sequential. The servers' links carry both directions at once, and
    all workers share them: see `closed_throughput`.
    """

    name = "parameter servers"
    options = "--algorithm async"

    def is_possible(self, job: Job) -> bool:
        return job.nodes > 1

    def servers(self, job: Job) -> int:
        return max(1, job.nodes // NODES_PER_SERVER)

    def steps(self, job: Job) -> int:
        """Return a worker's number of steps between pushes."""
        return _steps(DataParallelASGD.default_period, job)

    def cost_in(self, job: Job, buckets: int) -> StepCost:
        servers, steps = self.servers(job), self.steps(job)
        workers = (job.nodes - servers) * job.ranks_per_node
        model_s = 4 * job.parameters / (LINK_EFFICIENCY * job.link.bytes_per_s)
        own_s = model_s * job.ranks_per_node  # of each direction
        part_s, applied_s = model_s / servers, job.passes_s(PUSH_PASSES) / servers
        startup_s = 2 * (job.link.latency_s + servers * job.link.message_s)
        alone_s = steps * job.step_s + startup_s + 2 * max(0.0, own_s - part_s)
        # Every worker visits all servers at once: these are as one.
        pushes_per_s = closed_throughput(workers, (part_s, applied_s, part_s), alone_s)
        cycle_s = workers / pushes_per_s
        return StepCost(
            compute_s=job.step_s,
            kernels_s=workers * applied_s / steps,
            wire_s=max(2 * own_s, workers * part_s) / steps,
            startup_s=startup_s / steps,
            total_s=cycle_s / steps,
            training=1 - servers / job.nodes,
        )

    def memory(self, job: Job) -> Memory:
        """Return the memory of a worker, including the buffer of a push in flight."""
        memory = super().memory(job)
        return memory | {"buffers": memory["model"]}

    def server_memory(self, job: Job) -> float:
        """Return a server's bytes: its part of the model, of the optimizer, and of a push per
        worker.
        """
        workers = (job.nodes - self.servers(job)) * job.ranks_per_node
        vectors = 1 + job.optimizer_vectors + workers
        return 4.0 * job.parameters / self.servers(job) * vectors


def _steps(period: Period, job: Job) -> int:
    """Return a rank's number of minibatches in a period."""
    samples = period.samples_on(job.ranks)
    if samples is not None:
        return -(-samples // (job.minibatch * job.ranks))
    assert period.sync_steps is not None
    return period.sync_steps


def candidate_of(algorithm: Algorithm[Any], job: Job) -> Candidate | None:
    """Return the candidate of an algorithm with its options, or None if there is none."""
    bits = getattr(algorithm, "gradient_bits", None)
    if not isinstance(bits, int | float):  # a schedule, or a choice by measurements
        return None
    match algorithm:
        case DataParallelSGD(double_buffering=True):
            return DoubleBuffered(bits)
        case DataParallelSGD(overlap=overlap):
            return DataParallel(bits, overlap)
        case DataParallelASGD():
            return Servers(bits)
        case DESLOC(period=period):
            return DesyncedBlocks(bits, DESLOC, period)
        case LocalUpdates(period=period, fragments=fragments, overlap_samples=samples):
            if type(algorithm) not in NAMES:
                return None
            overlap_steps = samples / (job.minibatch * job.ranks)
            if fragments == 1 and not samples:
                return Blocks(bits, type(algorithm), period)
            return Fragments(bits, type(algorithm), period, fragments, overlap_steps)
    return None


def learn_alike(one: Candidate, other: Candidate) -> bool:
    """Return True if two candidates learn alike: the same losses after the same samples.

    Gradients of 1 bit and more learn as those of 32 bits do. Other candidates learn alike only if
    they are equal.
    """
    both = (one, other)
    if all(isinstance(each, DataParallel) and each.bits >= 1 for each in both):
        return True
    return one == other


def candidates(job: Job) -> list[Candidate]:
    """Return all candidates possible on these nodes, in table order."""
    most_first = sorted(auto_bits(), reverse=True)
    block_algorithms = (ModelAveragingSGD, BlockMomentumSGD, SlowMo, DiLoCo)
    every: list[Candidate] = [
        *(DataParallel(bits) for bits in (*most_first, FEWEST_BITS)),
        *(DataParallel(bits, overlap=True) for bits in most_first),
        *(DoubleBuffered(bits) for bits in (32, 1)),
        *(Blocks(bits, algorithm) for algorithm in block_algorithms for bits in (32, 4)),
        Fragments(4, DiLoCo),
        Blocks(FEWEST_BITS, SparseLoCo),
        DesyncedBlocks(32),
        Servers(32),
    ]
    return [candidate for candidate in every if candidate.is_possible(job)]
