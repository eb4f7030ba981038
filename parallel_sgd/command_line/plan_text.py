"""The lines that `parallel-sgd plan` prints: the job, the kernels' speeds, and a table."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..compression import registered_bits
from ..planning import Candidate, Job
from ..planning.candidates import Servers

TERMS = ("compute", "kernels", "wire", "startup", "hidden")  #: parts of the time of a step
NODES = [2**i for i in range(11)]  #: 1 to 1,024, for figures, JSON and the column of memory


def job_text(job: Job) -> str:
    ranks = f" of {job.ranks_per_node:,} ranks" if job.ranks_per_node > 1 else ""
    link = job.link
    rate = "unlimited" if link.bytes_per_s == math.inf else f"{link.bytes_per_s / 1e6:,.0f} MB/s"
    return (
        f"{job.nodes:,} nodes{ranks}, links of {rate} (payload) and {link.latency_s * 1e6:g} us; "
        f"{job.parameters:,} parameters, {job.step_s * 1e3:g} ms a step of {job.minibatch:,} "
        "samples a rank"
    )


def speeds_text(job: Job) -> str:
    """Return the measured speeds of this machine's kernels as a line."""
    speeds = job.speeds
    kernels = [
        f"{bits} bit {speeds.encode[bits] / 1e9:.1f}, {speeds.decode_add[bits] / 1e9:.1f}, "
        f"{speeds.decode[bits] / 1e9:.1f}"
        for bits in sorted(registered_bits(), reverse=True)
        if bits < 32
    ]
    return (
        f"kernels here, G values/s: plain sum {speeds.decode_add[32] / 1e9:.1f}; encode, decode "
        f"and add, decode: {'; '.join(kernels)}"
    )


def table(estimates: Sequence[Candidate], job: Job) -> str:
    """Return a table with a row for each algorithm; times in milliseconds."""
    most = NODES[-1]
    head = ["ms a step", "bits", *TERMS, "all"]
    rows = [[*head, "speed-up", "efficiency", "samples/s", "MB/rank", f"on {most:,}"]]
    for candidate in estimates:
        cost = candidate.cost(job)
        terms = (cost.compute_s, cost.kernels_s, cost.wire_s, cost.startup_s, -cost.hidden_s)
        rows.append(
            [
                candidate.name,
                str(candidate.bits),
                *(_ms(term) for term in (*terms, cost.total_s)),
                f"{cost.efficiency * job.nodes:,.1f}",
                f"{cost.efficiency:.1%}",
                f"{samples_per_s(candidate, job):,.0f}",
                f"{sum(candidate.memory(job).values()) / 1e6:,.0f}",
                f"{sum(candidate.memory(job.on(most)).values()) / 1e6:,.0f}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
    return "\n".join("  ".join(line) for line in lines)


def servers_text(estimates: Sequence[Candidate], job: Job) -> str:
    """Return a line with the number of parameter servers and the memory of each."""
    for candidate in estimates:
        if isinstance(candidate, Servers):
            here, most = (candidate.server_memory(job.on(n)) / 1e6 for n in (job.nodes, NODES[-1]))
            return (
                f"\nparameter servers: {candidate.servers(job):,}, on nodes of their own, each "
                f"with {here:,.0f} MB (on {NODES[-1]:,} nodes {most:,.0f})"
            )
    return ""


def samples_per_s(candidate: Candidate, job: Job) -> float:
    return job.ranks * job.minibatch * candidate.cost(job).efficiency / job.step_s


def _ms(duration_s: float) -> str:
    return f"{duration_s * 1e3:,.2f}" if abs(duration_s) < 1 else f"{duration_s * 1e3:,.0f}"
