"""Faults: each is prepared, strikes, and is undone."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallel_sgd.command_line.cluster import BURST, EmulatedHosts
from parallel_sgd.command_line.cluster.links import address, port

from .child import CHECKPOINTS
from .diary import Place
from .job import signalled, wait_for_end

if TYPE_CHECKING:
    from .runs import Run

DISK_KIB = 4096
BALLAST = "ballast"
SLOW_BITS_PER_S = 5e6

#: Waits until a host answers, for 30 s at most: that nobody listens there is an answer.
KNOCK = """
import errno, socket, sys, time
until = time.monotonic() + 30
while True:
    with socket.socket() as asks:
        asks.settimeout(1)
        if asks.connect_ex((sys.argv[1], 9)) in (0, errno.ECONNREFUSED):
            break
    if time.monotonic() > until:
        sys.exit(f"{sys.argv[1]} does not answer over a link that was restored")
    time.sleep(0.05)
"""


class Fault(ABC):
    """A fault, once in a run. Each method gets the run."""

    def settings(self, run: Run) -> Mapping[str, Any]:
        """Return settings of the child program, for the first start."""
        return {}

    def prepare(self, run: Run) -> None:  # noqa: B027
        """Prepare the fault before the job starts."""

    def wait(self, run: Run) -> bool:
        """Wait for the moment; return whether the job still runs."""
        return run.wait_for_moment()

    @abstractmethod
    def strike(self, run: Run) -> str:
        """Strike, and say in words what happened."""

    def undo(self, run: Run) -> None:  # noqa: B027
        """Repair, as a user would before a new start of the job."""

    def clear(self, run: Run) -> None:  # noqa: B027
        """Remove all traces of the fault after the run."""


@dataclass(frozen=True)
class KillRank(Fault):
    """SIGKILL to a rank, from outside at any moment, or by the rank itself in a named place.

    Attributes:
        places: for `share` of the runs, a random place of these.
    """

    places: tuple[Place, ...] = (Place.EXCHANGE, Place.CHECKPOINT, Place.FINISH)
    share: float = 0.3

    def settings(self, run: Run) -> Mapping[str, Any]:
        if run.random.random() >= self.share:
            return {}
        possible = [p for p in self.places if p != Place.CHECKPOINT or run.saves]
        place = possible[run.random.integers(len(possible))]
        if run.serves(run.victim):  # it is in no other place
            place = Place.START if place == Place.START else Place.FINISH
        last = {Place.EXCHANGE: 200, Place.CHECKPOINT: 8}.get(place, 1)
        within_s = {Place.EXCHANGE: 0.002, Place.CHECKPOINT: 0.02, Place.FINISH: 0.003}
        if run.serves(run.victim):
            within_s[Place.FINISH] = run.reference.training_s
        die = {
            "rank": run.victim,
            "place": place.name,
            "call": int(run.random.integers(1, last + 1)),
            "after_s": float(run.random.uniform(0, within_s.get(place, 0.05))),
        }
        return {"die": die}

    def wait(self, run: Run) -> bool:
        if not run.settings.die:
            return run.wait_for_moment()
        return run.wait_until(lambda: (run.folder / "died").exists())

    def strike(self, run: Run) -> str:
        if run.settings.die:
            run.struck_s = float((run.folder / "died").read_text() or time.monotonic())
            time.sleep(max(0.0, run.struck_s - time.monotonic()))
            die = run.settings.die
            return f"rank {run.victim} killed itself in {die['place']}, time {die['call']}"
        signalled(run.pid(run.victim), signal.SIGKILL)
        return f"SIGKILL to rank {run.victim} in {run.place(run.victim)}"


@dataclass(frozen=True)
class Passing(Fault):
    """A fault that may pass after a while."""

    passes: bool = False
    shortest_s: float = 0.05
    longest_s: float = 2.0

    @abstractmethod
    def begin(self, run: Run) -> tuple[str, Callable[[], object]]:
        """Begin; return the event in words, and a call that ends the fault."""

    def strike(self, run: Run) -> str:
        said, end = self.begin(run)
        if not self.passes:
            return said
        seconds = run.random.uniform(self.shortest_s, self.longest_s)
        time.sleep(seconds)
        run.struck_s = time.monotonic()
        end()
        return f"{said} for {seconds:.2f} s"


class Stop(Passing):
    """SIGSTOP to a rank, and then SIGCONT."""

    def begin(self, run: Run) -> tuple[str, Callable[[], object]]:
        pid, place = run.pid(run.victim), run.place(run.victim)
        signalled(pid, signal.SIGSTOP)
        said = f"SIGSTOP to rank {run.victim} in {place}"
        return said, lambda: signalled(pid, signal.SIGCONT)


class Cut(Passing):
    """A host's link is cut, and comes back."""

    def begin(self, run: Run) -> tuple[str, Callable[[], object]]:
        hosts = _hosts(run)
        host = int(run.random.integers(run.ranks))
        hosts.cut(host)
        return f"the link of host {host} was cut", lambda: hosts.mend(host)

    def clear(self, run: Run) -> None:
        hosts = _hosts(run)
        for host in range(len(hosts.names)):
            hosts.mend(host)
        for name in hosts.names:  # its kernel has found out that nobody answers, and has to forget
            knock = [sys.executable, "-c", KNOCK, address(0)]
            subprocess.run(["ip", "netns", "exec", name, *knock], check=True)


class Slow(Passing):
    """A host's link is slow, and then as before."""

    def begin(self, run: Run) -> tuple[str, Callable[[], object]]:
        host = int(run.random.integers(run.ranks))
        self._limit(run, host, SLOW_BITS_PER_S)
        return f"the link of host {host} was slow", lambda: self._limit(run, host, run.rate)

    def _limit(self, run: Run, host: int, rate: float) -> None:
        hosts = _hosts(run)
        limit = f"root tbf rate {rate / 1e3:.0f}kbit burst {BURST}b latency 50ms"
        for name, device in ((hosts.switch, port(host)), (hosts.names[host], "eth0")):
            line = f"tc -n {name} qdisc change dev {device} {limit}"
            subprocess.run(line.split(), check=True)


@dataclass(frozen=True)
class KillJob(Fault):
    """The whole job is killed, in a random way."""

    ways: tuple[str, ...] = ("everything", "ranks", "launcher", "mpiexec", "SIGTERM")

    def strike(self, run: Run) -> str:
        way = self.ways[run.random.integers(len(self.ways))]
        launcher, *below = run.job.members() or [run.job.process.pid]
        ranks = [pid for pid in run.pids() if pid in below]
        targets = {
            "everything": [launcher, *below],
            "ranks": ranks or below[-1:],
            "rank": [pid for pid in ranks if pid == run.pid(run.victim)] or below[-1:],
            "launcher": [launcher],
            "mpiexec": below[:1] or [launcher],
            "SIGTERM": [launcher],
        }[way]
        run.launcher_killed = way in ("everything", "launcher")
        for pid in targets:
            signalled(pid, signal.SIGTERM if way == "SIGTERM" else signal.SIGKILL)
        return f"the job was killed: {way}"


class FullDisk(Fault):
    """The disk with the checkpoints is full, until a user makes room."""

    def prepare(self, run: Run) -> None:
        folder = run.folder / CHECKPOINTS
        folder.mkdir()
        line = f"mount -t tmpfs -o size={DISK_KIB}k none {folder}"
        subprocess.run(line.split(), check=True)

    def strike(self, run: Run) -> str:
        with suppress(OSError), (run.folder / CHECKPOINTS / BALLAST).open("wb", 0) as ballast:
            for size in (1 << 16, 1 << 12, 1):
                with suppress(OSError):
                    while True:
                        ballast.write(bytes(size))
                        os.fsync(ballast.fileno())
        return "the disk of the checkpoints became full"

    def undo(self, run: Run) -> None:
        (run.folder / CHECKPOINTS / BALLAST).unlink(missing_ok=True)

    def clear(self, run: Run) -> None:
        subprocess.run(["umount", str(run.folder / CHECKPOINTS)], check=True)


class Truncated(KillJob):
    """The job is killed, and a file of the newest checkpoint is truncated."""

    def wait(self, run: Run) -> bool:
        return super().wait(run) and run.wait_until(run.newest_checkpoint)

    def strike(self, run: Run) -> str:
        ranks = {pid for pid in run.pids() if pid in run.job.members()}
        said = super().strike(run)
        if run.goes_on_by_itself:  # after a pause, which is long enough
            run.wait_until(lambda: not ranks & {*run.job.members()})
        else:
            run.job.wait(run.limit_s)
            wait_for_end()  # of ranks, too: they write
        newest = run.newest_checkpoint()
        if newest is None:
            return said
        files = sorted(path for path in newest.rglob("*") if path.is_file())
        path = files[run.random.integers(len(files))]
        size = int(run.random.integers(path.stat().st_size))
        os.truncate(path, size)
        run.damaged = newest
        return f"{said}; {path.name} of the newest checkpoint cut to {size} bytes"

    def undo(self, run: Run) -> None:
        if run.damaged:
            shutil.rmtree(run.damaged)
            run.damaged = None


class RemovedFolder(Fault):
    """The folder of checkpoints is removed while the job writes there."""

    def wait(self, run: Run) -> bool:
        return super().wait(run) and run.wait_until(run.newest_checkpoint)

    def strike(self, run: Run) -> str:
        shutil.rmtree(run.folder / CHECKPOINTS, ignore_errors=True)
        return "the folder of checkpoints was removed"


class ClockBack(KillJob):
    """The clock is set back in mid-run; the job is killed; files have times in any order."""

    def settings(self, run: Run) -> Mapping[str, Any]:
        return {"clock_back": int(run.random.integers(1, 100))}

    def wait(self, run: Run) -> bool:
        return super().wait(run) and run.wait_until(run.newest_checkpoint)

    def strike(self, run: Run) -> str:
        said = super().strike(run)
        run.job.wait(run.limit_s)
        wait_for_end()  # of ranks, too: they write
        folder = run.folder / CHECKPOINTS
        for path in [folder, *folder.rglob("*")]:
            then = time.time() - float(run.random.uniform(-1e6, 1e6))
            os.utime(path, (then, then))
        return f"the clock was set back; {said}; files have times in any order"


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint by its name, the number of samples."""
    found = [path for path in folder.glob("*") if path.name.isdecimal()]
    return max(found, key=lambda path: int(path.name), default=None)


def _hosts(run: Run) -> EmulatedHosts:
    assert run.hosts, "a fault of links is for scenarios over hosts"
    return run.hosts
