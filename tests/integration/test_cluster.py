"""The emulated cluster for real: plain mpiexec over its hosts, and nothing left behind by any end.

Needs root, and a kernel that lets it make network namespaces.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from jobs import ENVIRONMENT, PARALLEL_SGD, SECONDS, TORCH, TRAIN, alive, executed, started, within

from parallel_sgd.__main__ import main
from parallel_sgd.command_line import BURST, emulated_hosts, payload_rate
from parallel_sgd.command_line.cluster.namespaces import PROGRAMS

CUT_S = 40.0  #: a job whose host is cut off has ended after so long


def _missing() -> str:
    """What these tests need and this machine lacks; or nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    programs = [name for name in PROGRAMS if shutil.which(name) is None]
    if programs:
        return f"needs {', '.join(programs)} (Debian: iproute2, util-linux)"
    made = subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True, text=True)
    return "" if made.returncode == 0 else f"may not make namespaces: {made.stderr.strip()}"


MISSING = _missing()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)


def cluster(*arguments: str) -> tuple[str, ...]:
    return (*PARALLEL_SGD, "cluster", *arguments)


def left_by(pid: int) -> list[str]:
    """What there is of a process's hosts: namespaces and folders."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    names = [line.split()[0] for line in listed.splitlines()]
    names += os.listdir(tempfile.gettempdir())
    return [name for name in names if name.startswith(f"psgd-hosts-{pid}-")]


def test_plain_mpiexec_trains_on_four_hosts(folder: Path) -> None:
    train = f"mpiexec -hostfile hosts python {TRAIN} --epochs 2 --gradient-bits 1 --output run"
    both = f"mpiexec -hostfile hosts sh -c 'touch at-$(hostname)' && {train}"
    code, output = executed(cluster("--hosts", "4", "--", "sh", "-c", both))
    assert code == 0, output
    assert "parallel-sgd: 4 hosts, slots=1, links of 1000 Mbit/s, in hosts: sh -c" in output
    assert len({path.name for path in folder.glob("at-psgd-hosts-*")}) == 4
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["4 ranks, 1 bit"]["samples"] == 2 * 1438
    written = {path.name for path in (folder / "run").iterdir()}
    assert written >= {"metrics.jsonl", "model.npz", "loss.png", "options.json", "summary.json"}
    assert not (folder / "hosts").exists()


@pytest.mark.any_mpi
def test_pytorchs_processes_find_each_other(folder: Path) -> None:
    """On hosts whose names no name service knows."""
    run = (*PARALLEL_SGD, "run", "-n", "4", "--hostfile", "hosts", TORCH, "ddp")
    code, output = executed(cluster("--hosts", "2", "--slots", "2", "--", *run))
    assert code == 0, output
    assert all(f"rank {rank} done" in output for rank in range(4)), output


#: Each rank's host and the number of ranks there; and how long a message from the first to the last
#: rank, on another host, has taken.
PLACES = """
import time
from mpi4py import MPI
comm = MPI.COMM_WORLD
near = comm.Split_type(MPI.COMM_TYPE_SHARED)
places = comm.gather((MPI.Get_processor_name(), near.size))
message, times = bytearray(1 << 20), []
for _ in range(4):
    comm.Barrier()
    start = time.monotonic()
    if comm.rank == 0:
        comm.Send(message, comm.size - 1)
    elif comm.rank == comm.size - 1:
        comm.Recv(message, 0)
    comm.Barrier()
    times.append(time.monotonic() - start)
if comm.rank == 0:
    import json
    json.dump({"places": places, "seconds": min(times)}, open("places.json", "w"))
"""


def test_ranks_of_one_host_are_neighbours_and_hosts_talk_over_limited_links(folder: Path) -> None:
    (folder / "places.py").write_text(PLACES)
    command = ["mpiexec", "-hostfile", "two", "python", "places.py"]
    options = ["--hosts", "2", "--slots", "2", "--rate", "50mbit", "--hostfile", "two"]
    code, output = executed(cluster(*options, "--", *command))
    assert code == 0, output
    report = json.loads((folder / "places.json").read_text())
    names = [name for name, _ in report["places"]]
    assert names[0] == names[1] != names[2] == names[3]
    assert [near for _, near in report["places"]] == [2, 2, 2, 2]
    least = ((1 << 20) - BURST) / payload_rate(50e6)
    assert least * 0.9 < report["seconds"] < least + 2


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_leaves_nothing_behind(folder: Path, name: str) -> None:
    script = "echo $$ > pid-$(hostname).part && mv pid-$(hostname).part pid-$(hostname); sleep 99"
    command = ["mpiexec", "-hostfile", "hosts", "sh", "-c", script]
    with started(cluster("--hosts", "2", "--", *command)) as job:
        assert within(SECONDS, lambda: len(list(folder.glob("pid-*[01]"))) == 2)
        ranks = [int(path.read_text()) for path in folder.glob("pid-*[01]")]
        assert all(map(alive, ranks)) and len(left_by(job.pid)) == 4
        job.send_signal(signal.Signals[name])
        assert within(SECONDS, lambda: job.poll() is not None)
        assert job.returncode == 128 + signal.Signals[name]
    assert not any(map(alive, ranks))
    assert not left_by(job.pid) and not (folder / "hosts").exists()


@pytest.mark.any_mpi
def test_what_a_killed_cluster_has_left_behind_is_removed_by_the_next(folder: Path) -> None:
    script = "setsid sh -c 'echo $$ > pid.part; mv pid.part pid; exec sleep 99' & wait"
    with started(cluster("--hosts", "1", "--", "sh", "-c", script)) as job:
        assert within(SECONDS, Path("pid").exists)
        job.kill()
        job.wait()
    sleeper = int(Path("pid").read_text())
    assert alive(sleeper) and len(left_by(job.pid)) == 3 and Path("hosts").exists()
    code, output = executed(cluster("--hosts", "1", "--hostfile", "next", "--", "true"))
    assert code == 0, output
    assert not left_by(job.pid) and not Path("hosts").exists()
    assert within(SECONDS, lambda: not alive(sleeper))


def test_a_host_that_is_cut_off_ends_the_job(folder: Path) -> None:
    with emulated_hosts(3, 1e9) as hosts:
        mpiexec = [*hosts.inside, "mpiexec", "-hostfile", str(hosts.folder / "hosts")]
        train = ["python", TRAIN, "--epochs", "1000000", "--timeout-s", "5"]
        environ = ENVIRONMENT | hosts.environment
        with started([*mpiexec, *train], environ=environ) as job:
            assert within(SECONDS, lambda: "\nepoch" in Path("output").read_text())
            hosts.cut(1)
            assert within(CUT_S, lambda: job.poll() is not None)
        code = job.returncode
        output = Path("output").read_text()
        assert code not in (0, -signal.SIGKILL), output
        assert re.search(r"\[rank [02]\] parallel_sgd: waited more than timeout_s=5 s", output)
        inside = [*hosts.names, hosts.switch]
        for name in inside:
            pids = ["ip", "netns", "pids", name]
            assert within(SECONDS, lambda pids=pids: not subprocess.check_output(pids))


@pytest.mark.any_mpi
def test_a_link_that_is_mended_carries_again(folder: Path) -> None:
    with emulated_hosts(2, 1e8) as hosts:
        place = (hosts.addresses[1], 8000)
        ask = f"import socket; socket.create_connection({place}, timeout=1)"
        asking = [*hosts.on(0), sys.executable, "-c", ask]
        listen = [*hosts.on(1), sys.executable, "-m", "http.server", str(place[1])]

        def answers() -> bool:
            return subprocess.run(asking, capture_output=True).returncode == 0

        with started(listen):
            assert within(SECONDS, answers)
            hosts.cut(1)
            assert not answers()
            hosts.mend(1)
            assert within(SECONDS, answers)
            named = subprocess.check_output([*hosts.on(1), "hostname"], text=True)
            assert named.strip() == hosts.names[1] != os.uname().nodename


@pytest.mark.any_mpi
def test_a_command_that_is_missing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "--hosts", "1", "--", "no-such-program"]) == 2
    assert "command must be a program in PATH: 'no-such-program'" in capsys.readouterr().err
    assert not left_by(os.getpid()) and not Path("hosts").exists()
