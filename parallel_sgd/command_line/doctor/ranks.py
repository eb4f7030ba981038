"""Run the rank's part of `parallel-sgd doctor`: started by the doctor as a module, or by srun."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ...communication import Communicator
from ...communication.job_environment import INTERFACE
from ..on_ranks import answer
from . import checks, speed
from .checks import Finding
from .facts import Facts, collect_facts
from .network import Pair, clock_offsets, measure_pairs

TIMEOUT_S = 60.0  #: limit of each wait for a rank


def examine_ranks() -> dict[str, Any]:
    """Return the findings and measurements of all ranks; the same on every rank.

    Collective. Cost: some tenths of a second for each host.
    """
    comm = Communicator.world(timeout_s=TIMEOUT_S)
    hosts = comm.hosts
    measures = comm.local_rank == 0
    comm.barrier()  # no rank measures while some still start
    local = comm.together(lambda: collect_facts(comm.host, measures=measures))
    facts = [Facts(**values) for values in comm.allgather_object(vars(local))]
    offsets = clock_offsets(comm)
    pairs = measure_pairs(comm, hosts)
    return {
        "findings": [asdict(finding) for finding in run_checks(facts, offsets, pairs)],
        "ranks": [asdict(fact) for fact in facts],
        "pairs": [asdict(pair) for pair in pairs],
    }


def run_checks(
    facts: Sequence[Facts], offsets: Sequence[float], pairs: Sequence[Pair]
) -> list[Finding]:
    """Return the findings of all checks. Local.

    Args:
        facts: the facts of each rank.
        offsets: each rank's clock minus the first rank's, in seconds.
        pairs: the measurements between hosts.
    """
    return [
        *checks.versions(facts),
        *checks.cores(facts),
        *checks.load(facts),
        *checks.shared_memory(facts),
        *checks.limits(facts),
        *checks.clocks(facts, offsets),
        *checks.names(facts),
        *checks.networks(facts, os.environ.get(INTERFACE)),
        *checks.congestion(facts),
        *speed.hosts(facts),
        *speed.links(pairs),
    ]


if __name__ == "__main__":
    answer(examine_ranks)
