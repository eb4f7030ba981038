"""The scenarios: a fault, families, options, and the expected outcome."""

from __future__ import annotations

from dataclasses import replace

from .diary import Place
from .families import SYNCHRONOUS
from .faults import (
    CLOCK_BACK,
    FULL_DISK,
    PLACES,
    REMOVED_FOLDER,
    WAYS,
    cut,
    for_a_while,
    for_good,
    kill_job,
    kill_rank,
    slow,
    stop,
    truncate,
)
from .target import Fault, Scenario


def _over_hosts(scenario: Scenario) -> Scenario:
    return replace(scenario, what=f"{scenario.what}; over emulated hosts", hosts=True)


def _checkpoints(what: str, fault: Fault) -> Scenario:
    return replace(_resume, what=what, fault=fault, most=1)


_survive = Scenario(
    "a rank killed, with --survive", kill_rank(), "survives", survive=True, saves=False
)
_twice = replace(_survive, what="two ranks killed, one after the other, with --survive", kills=2)
_survive_start = Scenario(
    "a rank killed before its learner is made, with --survive",
    kill_rank((Place.START,), share=1.0),
    "goes on",
    families=("32-bit", "session", "sync-worker"),
    survive=True,
    training=False,
)
_spares = replace(
    _survive,
    what="a rank killed, with --survive and a spare",
    spares=1,
    families=SYNCHRONOUS,
)
_ends = Scenario("a rank killed", kill_rank((Place.START, *PLACES)), "ends", training=False)
_resume = Scenario(
    "the whole job killed, and started again by hand",
    kill_job(*WAYS),
    "resumes",
    families=(*SYNCHRONOUS, "sync-server"),
    training=False,
    most=3,
)
_lost_host = replace(
    _checkpoints(
        "a host lost for good, with --restarts, and one more in the hostfile", for_good(cut)
    ),
    restarts=True,
    hosts=True,
    training=True,
    timeout_s=10.0,
)

SCENARIOS = {
    "survive": _survive,
    "survive-twice": _twice,
    "survive-hosts": _over_hosts(_survive),
    "survive-twice-hosts": _over_hosts(_twice),
    "survive-saving": replace(
        _survive,
        what="a rank killed, with --survive, while checkpoints are written",
        families=SYNCHRONOUS,
        saves=True,
    ),
    "survive-stop": replace(
        _survive,
        what="a rank stopped for good, with --survive",
        fault=for_good(stop),
        timeout_s=6.0,
    ),
    "survive-start": _survive_start,
    "survive-start-hosts": _over_hosts(_survive_start),
    "spares": _spares,
    "spares-hosts": _over_hosts(_spares),
    "ends": _ends,
    "ends-hosts": _over_hosts(_ends),
    "stop": Scenario("a rank stopped for good", for_good(stop), "ends", timeout_s=6.0),
    "pause": Scenario(
        "a rank stopped, and continued", for_a_while(stop), "goes on", timeout_s=60.0
    ),
    "resume": _resume,
    "restarts": replace(
        _resume,
        what="all ranks, mpiexec, or one rank killed, with --restarts",
        fault=kill_job("ranks", "mpiexec", "rank"),
        restarts=True,
    ),
    "cut": Scenario(
        "a host's link cut for good", for_good(cut), "ends", hosts=True, timeout_s=10.0
    ),
    "lost-host": _lost_host,
    "lost-host-survive": replace(
        _lost_host,
        what="a host lost for good, with --survive, --restarts, and one more in the hostfile",
        survive=True,
    ),
    "mended": Scenario(
        "a host's link cut, and restored", for_a_while(cut, longest_s=3.0), "goes on", hosts=True
    ),
    "slow": Scenario(
        "a host's link slow for a while", for_a_while(slow, shortest_s=0.2), "goes on", hosts=True
    ),
    "disk": replace(_checkpoints("the checkpoints' disk full", FULL_DISK), root=True),
    "truncated": _checkpoints("a file of the newest checkpoint truncated", truncate(*WAYS)),
    "truncated-restarts": replace(
        _checkpoints(
            "all ranks killed, and a file of the newest checkpoint truncated, with --restarts",
            truncate("ranks"),
        ),
        restarts=True,
    ),
    "removed": _checkpoints("the folder of checkpoints removed", REMOVED_FOLDER),
    "clock": _checkpoints("the clock set back, and the job killed", CLOCK_BACK),
}
