"""The scenarios: a fault, families, options, and the expected outcome."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from .diary import Place
from .families import FAMILIES, SYNCHRONOUS
from .faults import (
    ClockBack,
    Cut,
    Fault,
    FullDisk,
    KillJob,
    KillRank,
    RemovedFolder,
    Slow,
    Stop,
    Truncated,
)

Expected = Literal["survives", "ends", "goes on", "resumes"]
"""survives: the other ranks go on without the lost one, to a model as good as any; ends: not 0, in
seconds; goes on: as if nothing had been, bit for bit; resumes: started again, it goes on from its
newest checkpoint, bit for bit."""

ALL = tuple(FAMILIES)
SAVING = (*SYNCHRONOUS, "sync-server")
EVERYWHERE = (Place.START, *KillRank().places)


@dataclass(frozen=True)
class Scenario:
    """
    Attributes:
        what: the fault in words.
        fault: the object that strikes.
        expected: the expected outcome.
        families: in this scenario.
        options: of `parallel-sgd run`.
        spares: ranks in reserve for a failed rank.
        hosts: whether each rank is on its own emulated host.
        training: whether the fault strikes in training, and never while the job starts.
        saves: whether saving families write checkpoints; always if a server fails.
        most: the most faults in a run, each after a new start.
        kills: number of ranks killed in turn, without a new start.
        timeout_s: of the ranks' communicator.
        root: whether the scenario needs root.
    """

    what: str
    fault: Fault
    expected: Expected
    families: tuple[str, ...] = ALL
    options: tuple[str, ...] = ()
    spares: int = 0
    hosts: bool = False
    training: bool = True
    saves: bool = True
    most: int = 1
    kills: int = 1
    timeout_s: float = 300.0
    root: bool = False
    needs: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        flags = {word for word in self.options if word.startswith("--")}
        object.__setattr__(self, "needs", tuple(sorted(flags)))


_survive = Scenario(
    "a rank killed, with --survive", KillRank(), "survives", options=("--survive",), saves=False
)
_twice = replace(_survive, what="two ranks killed, one after the other, with --survive", kills=2)
_saving = replace(
    _survive,
    what="a rank killed, with --survive, while checkpoints are written",
    families=SYNCHRONOUS,
    saves=True,
)
_spares = replace(
    _survive,
    what="a rank killed, with --survive and a spare",
    options=("--survive", "--spares", "1"),
    spares=1,
    families=SYNCHRONOUS,
)
_survive_stop = replace(
    _survive, what="a rank stopped for good, with --survive", fault=Stop(), timeout_s=6.0
)
_survive_start = Scenario(
    "a rank killed before its learner is made, with --survive",
    KillRank((Place.START,), share=1.0),
    "goes on",
    options=("--survive",),
    families=("32-bit", "session", "sync-worker"),
    training=False,
)
_ends = Scenario("a rank killed", KillRank(EVERYWHERE), "ends", training=False)
_stop = Scenario("a rank stopped for good", Stop(), "ends", timeout_s=6.0)
_pause = Scenario("a rank stopped, and continued", Stop(passes=True), "goes on", timeout_s=60.0)
_resume = Scenario(
    "the whole job killed, and started again by hand",
    KillJob(),
    "resumes",
    families=SAVING,
    training=False,
    most=3,
)


def _over_hosts(scenario: Scenario) -> Scenario:
    what = f"{scenario.what}; over emulated hosts"
    return replace(scenario, what=what, hosts=True, root=True)


_lost_host = replace(
    _over_hosts(_resume),
    what="a host lost for good, with --restarts, and one more in the hostfile",
    fault=Cut(),
    training=True,
    options=("--restarts", "5"),
    timeout_s=10.0,
    most=1,
)
_over_links = _over_hosts(replace(_ends, what="", training=True))


SCENARIOS = {
    "survive": _survive,
    "survive-twice": _twice,
    "survive-hosts": _over_hosts(_survive),
    "survive-twice-hosts": _over_hosts(_twice),
    "survive-saving": _saving,
    "survive-stop": _survive_stop,
    "survive-start": _survive_start,
    "survive-start-hosts": _over_hosts(_survive_start),
    "spares": _spares,
    "spares-hosts": _over_hosts(_spares),
    "ends": _ends,
    "ends-hosts": _over_hosts(_ends),
    "stop": _stop,
    "pause": _pause,
    "resume": _resume,
    "restarts": replace(
        _resume,
        what="all ranks, mpiexec, or one rank killed, with --restarts",
        fault=KillJob(("ranks", "mpiexec", "rank")),
        options=("--restarts", "5"),
    ),
    "cut": replace(_over_links, what="a host's link cut for good", fault=Cut(), timeout_s=10.0),
    "lost-host": _lost_host,
    "lost-host-survive": replace(
        _lost_host,
        what="a host lost for good, with --survive, --restarts, and one more in the hostfile",
        options=("--survive", *_lost_host.options),
    ),
    "mended": replace(
        _over_links,
        what="a host's link cut, and restored",
        fault=Cut(passes=True, longest_s=3.0),
        expected="goes on",
    ),
    "slow": replace(
        _over_links,
        what="a host's link slow for a while",
        fault=Slow(passes=True, shortest_s=0.2),
        expected="goes on",
    ),
    "disk": replace(
        _resume, what="the checkpoints' disk full", fault=FullDisk(), most=1, root=True
    ),
    "truncated": replace(
        _resume, what="a file of the newest checkpoint truncated", fault=Truncated(), most=1
    ),
    "truncated-restarts": replace(
        _resume,
        what="all ranks killed, and a file of the newest checkpoint truncated, with --restarts",
        fault=Truncated(("ranks",)),
        options=("--restarts", "5"),
        most=1,
    ),
    "removed": replace(
        _resume, what="the folder of checkpoints removed", fault=RemovedFolder(), most=1
    ),
    "clock": replace(
        _resume, what="the clock set back, and the job killed", fault=ClockBack(), most=1
    ),
}
