"""Processes that ranks start, and children of ranks."""

import os
import signal
import socket
import subprocess
import sys
from functools import partial
from typing import Any

import pytest

from parallel_sgd.communication import without_launcher

APART = """
import multiprocessing, os, sys
import numpy as np
import parallel_sgd as psgd

comm = psgd.Communicator.world()  # also in what is started by "spawn", as for a DataLoader


def trains(comm):
    parameters = psgd.Parameters({"w": np.ones(3, np.float32)})
    psgd.Learner(parameters, psgd.SGD(lr=0.1), psgd.DataParallelSGD(), comm)


def child(case):
    if case == "its only one":
        os.environ["WORLD_SIZE"] = "1"
    try:
        trains(psgd.Communicator.single() if case == "apart" else comm)
    except psgd.UserError as error:
        print(case, error, flush=True)
    else:
        print(case, "trains", flush=True)


if __name__ == "__main__":
    trains(comm)
    for case in ("its own", "apart", "its only one"):
        process = multiprocessing.get_context(sys.argv[1]).Process(target=child, args=(case,))
        process.start()
        process.join()
"""


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_processes_of_multiprocessing_that_train_apart(how: str, tmp_path: Any) -> None:
    (tmp_path / "apart.py").write_text(APART)
    run = [sys.executable, str(tmp_path / "apart.py"), how]
    environ = without_launcher(os.environ)
    ended = subprocess.run(run, env=environ, capture_output=True, text=True, timeout=100)
    own, apart, only = ended.stdout.splitlines()
    assert own.startswith("its own multiprocessing started this process ("), ended
    assert "Communicator.single() is for a separate model" in own
    assert (apart, only) == ("apart trains", "its only one trains")


STARTED = """
import os, socket, subprocess, sys
import parallel_sgd

FAILS = "import parallel_sgd; raise ValueError('no display')"
if sys.argv[1] == "forked":
    child = os.fork()
    if not child:
        raise ValueError("no display")
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
else:
    code = subprocess.run([sys.executable, "-c", FAILS], close_fds=False).returncode
others = parallel_sgd.communication.liveness.abort.has_other_ranks()
print(code, "has_other_ranks" if others else "is alone")
"""


@pytest.mark.parametrize("how", ["forked", "started"])
@pytest.mark.parametrize("number", ["a socket", "a file"])
def test_only_the_rank_ends_the_job(how: str, number: str, tmp_path: Any) -> None:
    """A process that it starts has its environment, its exception hook and its descriptors."""
    own, hydras = socket.socketpair()
    with own, hydras, (tmp_path / "file").open("w") as file:
        given = own.fileno() if number == "a socket" else file.fileno()
        hydra = {"PMI_SIZE": "4", "PMI_RANK": "2", "MPI_LOCALNRANKS": "3", "PMI_FD": str(given)}
        environ = without_launcher(os.environ) | hydra
        run = partial(subprocess.run, env=environ, pass_fds=[given], capture_output=True, text=True)
        ended = run([sys.executable, "-c", STARTED, how])
        hydras.setblocking(False)
        assert ended.stdout == "1 has_other_ranks\n", ended
        assert "ValueError: no display" in ended.stderr and "[rank" not in ended.stderr
        with pytest.raises(BlockingIOError):
            hydras.recv(99)
        code = "import parallel_sgd; raise ValueError('the rank itself')"
        ended = run([sys.executable, "-c", code])
        assert "[rank 2] ValueError: the rank itself" in ended.stderr
        if number == "a socket":
            assert hydras.recv(99) == b"cmd=abort exitcode=1\n"
            assert ended.returncode == -signal.SIGKILL
        else:  # another program has closed Hydra's, and opened that one
            assert ended.returncode == 1
    assert (tmp_path / "file").read_text() == ""


CLOSES = """
import os
from parallel_sgd.communication.liveness.rank_process import close_in_children
reads, writes = os.pipe()
close_in_children(writes)
child = os.fork()
if child == 0:  # its own file has that number now, also in what it forks itself
    assert os.open(os.devnull, os.O_RDONLY) == writes
    child = os.fork()
    if child == 0:
        os.fstat(writes)
        os._exit(0)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
assert os.waitpid(child, 0)[1] == 0
os.close(writes)
assert os.read(reads, 1) == b""
"""


def test_a_descriptor_is_closed_once_in_children() -> None:
    ended = subprocess.run([sys.executable, "-c", CLOSES], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
