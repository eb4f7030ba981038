"""The scenarios: a fault, families, options, and the expected outcome."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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


def _survives(what: str, fault: Fault, **more: Any) -> Scenario:
    options = {"survive": True, "saves": False, **more}
    return Scenario(f"{what}, with --survive", fault, "survives", **options)


def _resumes(what: str, fault: Fault, **more: Any) -> Scenario:
    options = {"families": (*SYNCHRONOUS, "sync-server"), "training": False, **more}
    return Scenario(what, fault, "resumes", **options)


def _loses_host(what: str, **more: Any) -> Scenario:
    what = f"a host lost for good, with {what}--restarts, and one more in the hostfile"
    options = {"restarts": True, "hosts": True, "training": True, "timeout_s": 10.0, **more}
    return _resumes(what, for_good(cut), **options)


_survive = _survives("a rank killed", kill_rank())
_twice = _survives("two ranks killed, one after the other", kill_rank(), kills=2)
_start = Scenario(
    "a rank killed before its learner is made, with --survive",
    kill_rank((Place.START,), share=1.0),
    "goes on",
    families=("32-bit", "session", "sync-worker"),
    survive=True,
    training=False,
)
_spares = replace(_survive, what=f"{_survive.what} and a spare", spares=1, families=SYNCHRONOUS)
_ends = Scenario("a rank killed", kill_rank((Place.START, *PLACES)), "ends", training=False)

SCENARIOS = {
    "survive": _survive,
    "survive-twice": _twice,
    "survive-hosts": _over_hosts(_survive),
    "survive-twice-hosts": _over_hosts(_twice),
    "survive-saving": replace(
        _survive,
        what=f"{_survive.what}, while checkpoints are written",
        families=SYNCHRONOUS,
        saves=True,
    ),
    "survive-stop": _survives("a rank stopped for good", for_good(stop), timeout_s=6.0),
    "survive-start": _start,
    "survive-start-hosts": _over_hosts(_start),
    "spares": _spares,
    "spares-hosts": _over_hosts(_spares),
    "ends": _ends,
    "ends-hosts": _over_hosts(_ends),
    "stop": Scenario("a rank stopped for good", for_good(stop), "ends", timeout_s=6.0),
    "pause": Scenario(
        "a rank stopped, and continued", for_a_while(stop), "goes on", timeout_s=60.0
    ),
    "resume": _resumes("the whole job killed, and started again by hand", kill_job(*WAYS), most=3),
    "restarts": _resumes(
        "all ranks, mpiexec, or one rank killed, with --restarts",
        kill_job("ranks", "mpiexec", "rank"),
        restarts=True,
        most=3,
    ),
    "cut": Scenario(
        "a host's link cut for good", for_good(cut), "ends", hosts=True, timeout_s=10.0
    ),
    "lost-host": _loses_host(""),
    "lost-host-survive": _loses_host("--survive, ", survive=True),
    "mended": Scenario(
        "a host's link cut, and restored", for_a_while(cut, longest_s=3.0), "goes on", hosts=True
    ),
    "slow": Scenario(
        "a host's link slow for a while", for_a_while(slow, shortest_s=0.2), "goes on", hosts=True
    ),
    "disk": _resumes("the checkpoints' disk full", FULL_DISK, root=True),
    "truncated": _resumes("a file of the newest checkpoint truncated", truncate(*WAYS)),
    "truncated-restarts": _resumes(
        "all ranks killed, and a file of the newest checkpoint truncated, with --restarts",
        truncate("ranks"),
        restarts=True,
    ),
    "removed": _resumes("the folder of checkpoints removed", REMOVED_FOLDER),
    "clock": _resumes("the clock set back, and the job killed", CLOCK_BACK),
}
