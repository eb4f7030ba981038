"""The faults: functions that strike a target, some after a preparation."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from parallel_sgd.command_line.cluster import BURST, EmulatedHosts
from parallel_sgd.command_line.cluster.links import port

from .diary import Place, diaries
from .job import signalled, wait_for_end
from .programs import CHECKPOINTS
from .target import Fault, Target

RATE = 1e9  #: of emulated links, bits/s
SLOW_BITS_PER_S = 5e6
DISK_KIB = 4096
BALLAST = "ballast"
WAYS = ("everything", "ranks", "launcher", "mpiexec", "SIGTERM")  #: to kill a job
PLACES = (Place.EXCHANGE, Place.CHECKPOINT, Place.FINISH)  #: to kill a rank

#: Begins a fault; returns the event in words, and a call that ends the fault.
Begin = Callable[[Target], tuple[str, Callable[[], object]]]


def kill_rank(places: tuple[Place, ...] = PLACES, share: float = 0.3) -> Fault:
    """SIGKILL to a rank at any moment, or for `share` of the runs in a random place of these."""

    def wait(target: Target) -> bool:
        if target.random.random() >= share:
            return target.wait_for_moment()
        possible = [place for place in places if place != Place.CHECKPOINT or target.saves]
        place = possible[target.random.integers(len(possible))]
        if place != Place.START and target.serves(target.victim):
            return target.wait_for_step()  # a server is in no other place than `FINISH`
        runs = place in (Place.START, Place.FINISH) or target.wait_for_step()
        return runs and target.wait_for_place(place)

    return Fault(lambda target: target.signal_victim(signal.SIGKILL), wait=wait)


def kill_job(*ways: str) -> Fault:
    """The whole job is killed, in a random way of these."""
    return Fault(lambda target: _kill_job(target, ways))


def truncate(*ways: str) -> Fault:
    """The job is killed, and a file of the newest checkpoint is truncated."""
    return Fault(lambda target: _truncate(target, ways), wait=_wait_for_checkpoint)


def for_good(begin: Begin) -> Fault:
    """A fault without an end."""
    return Fault(lambda target: begin(target)[0])


def for_a_while(begin: Begin, shortest_s: float = 0.05, longest_s: float = 2.0) -> Fault:
    """A fault with an end."""

    def strike(target: Target) -> str:
        said, end = begin(target)
        seconds = target.random.uniform(shortest_s, longest_s)
        time.sleep(seconds)
        target.struck[-1] = time.monotonic()
        end()
        return f"{said} for {seconds:.2f} s"

    return Fault(strike)


def stop(target: Target) -> tuple[str, Callable[[], object]]:
    """SIGSTOP to a rank, and then SIGCONT."""
    pid = target.books(target.victim)[-1].pid
    return target.signal_victim(signal.SIGSTOP), lambda: signalled(pid, signal.SIGCONT)


def cut(target: Target) -> tuple[str, Callable[[], object]]:
    """A host's link is cut, and comes back."""
    assert target.hosts
    hosts, host = target.hosts, int(target.random.integers(target.ranks))
    target.traces.callback(_mend, hosts)
    hosts.cut(host)
    return f"the link of host {host} was cut", lambda: hosts.mend(host)


def slow(target: Target) -> tuple[str, Callable[[], object]]:
    """A host's link is slow, and then as before."""
    assert target.hosts
    hosts, host = target.hosts, int(target.random.integers(target.ranks))
    _limit(hosts, host, SLOW_BITS_PER_S)
    return f"the link of host {host} was slow", lambda: _limit(hosts, host, RATE)


def _kill_job(target: Target, ways: tuple[str, ...]) -> str:
    way = ways[target.random.integers(len(ways))]
    launcher, *below = target.job.members() or [target.job.process.pid]
    ranks = {book.pid: book.rank for book in diaries(target.folder) if book.pid in below}
    pids = {
        "everything": [launcher, *below],
        "ranks": [*ranks] or below[-1:],
        "rank": [pid for pid, rank in ranks.items() if rank == target.victim] or below[-1:],
        "launcher": [launcher],
        "mpiexec": below[:1] or [launcher],
        "SIGTERM": [launcher],
    }[way]
    target.launcher_killed = way in ("everything", "launcher")
    for pid in pids:
        signalled(pid, signal.SIGTERM if way == "SIGTERM" else signal.SIGKILL)
    return f"the job was killed: {way}"


def _end_job(target: Target, ways: tuple[str, ...]) -> str:
    """Kill the job, and wait for the end of its ranks: they write."""
    ranks = {book.pid for book in diaries(target.folder)} & {*target.job.members()}
    said = _kill_job(target, ways)
    if target.scenario.restarts:  # after a pause, which is long enough
        target.wait_until(lambda: not ranks & {*target.job.members()})
    else:
        target.job.wait(target.limit_s)
        wait_for_end()
    return said


def _truncate(target: Target, ways: tuple[str, ...]) -> str:
    said, newest = _end_job(target, ways), target.newest_checkpoint()
    if newest is None:
        return said
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    path = files[target.random.integers(len(files))]
    size = int(target.random.integers(path.stat().st_size))
    os.truncate(path, size)
    target.repair = lambda: shutil.rmtree(newest)
    return f"{said}; {path.name} of the newest checkpoint cut to {size} bytes"


def _remove_folder(target: Target) -> str:
    shutil.rmtree(target.folder / CHECKPOINTS, ignore_errors=True)
    return "the folder of checkpoints was removed"


def _plan_clock(target: Target) -> None:
    number = int(target.random.integers(1, 100))
    target.settings = replace(target.settings, clock_back=number)


def _set_times(target: Target) -> str:
    """Kill the job, and give its files times in any order."""
    said, folder = _end_job(target, WAYS), target.folder / CHECKPOINTS
    for path in [folder, *folder.rglob("*")]:
        then = time.time() - float(target.random.uniform(-1e6, 1e6))
        os.utime(path, (then, then))
    return f"the clock was set back; {said}; files have times in any order"


def _mount_disk(target: Target) -> None:
    folder = target.folder / CHECKPOINTS
    folder.mkdir()
    line = f"mount -t tmpfs -o size={DISK_KIB}k none {folder}"
    subprocess.run(line.split(), check=True)
    target.traces.callback(subprocess.run, ["umount", str(folder)], check=True)


def _fill_disk(target: Target) -> str:
    path = target.folder / CHECKPOINTS / BALLAST
    with suppress(OSError), path.open("wb", 0) as ballast:
        for size in (1 << 16, 1 << 12, 1):
            with suppress(OSError):
                while True:
                    ballast.write(bytes(size))
                    os.fsync(ballast.fileno())
    target.repair = lambda: path.unlink(missing_ok=True)
    return "the disk of the checkpoints became full"


def _wait_for_checkpoint(target: Target) -> bool:
    return target.wait_for_moment() and target.wait_until(target.newest_checkpoint)


def _mend(hosts: EmulatedHosts) -> None:
    for host, name in enumerate(hosts.names):
        hosts.mend(host)  # its kernel has found out that nobody answers, and has to forget
        subprocess.run(["ip", "-n", name, "neigh", "flush", "all"], check=True)


def _limit(hosts: EmulatedHosts, host: int, rate: float) -> None:
    limit = f"root tbf rate {rate / 1e3:.0f}kbit burst {BURST}b latency 50ms"
    for name, device in ((hosts.switch, port(host)), (hosts.names[host], "eth0")):
        line = f"tc -n {name} qdisc change dev {device} {limit}"
        subprocess.run(line.split(), check=True)


FULL_DISK = Fault(_fill_disk, _mount_disk)
REMOVED_FOLDER = Fault(_remove_folder, wait=_wait_for_checkpoint)
CLOCK_BACK = Fault(_set_times, _plan_clock, _wait_for_checkpoint)
