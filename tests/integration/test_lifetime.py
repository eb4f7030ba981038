"""More learners than an MPI has room for communicators, and errors that nobody asks for."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from jobs import executed, finished
from limits import patience

#: Most programs begin like this.
HEAD = """
import errno, threading, time, warnings
import numpy as np
import parallel_sgd as psgd
from parallel_sgd.training.checkpoint import files as checkpoint_files

comm, write_rank = psgd.Communicator.world(timeout_s=60), checkpoint_files.write_rank


def learner_of(algorithm, values=3):
    parameters = psgd.Parameters({"w": np.ones(values, np.float32)})
    return psgd.Learner(parameters, psgd.SGD(lr=0.1), algorithm, comm)
"""


def run(program: str, *, ranks: int, servers: int | None = None) -> tuple[int, str]:
    """Exit code and all output of a program on so many ranks."""
    Path("program.py").write_text(program)
    options = [] if servers is None else ["--servers", str(servers)]
    return finished("run", "-n", str(ranks), *options, "program.py")


MANY = """
warnings.simplefilter("ignore")
learners = {
    psgd.DataParallelSGD(overlap=True): 2200,
    psgd.BlockMomentumSGD(sync_steps=1, overlap_samples=2): 50,
    psgd.DataParallelASGD(servers=0): 1100,
}
for algorithm, count in learners.items():
    for number in range(count):
        with learner_of(algorithm) as learner, psgd.Checkpoints("all", keep=1) as checkpoints:
            if number % 100 == 0:
                learner.step(samples=1)
                checkpoints.save(learner)
    assert threading.active_count() <= 3, threading.enumerate()
print("all of them", flush=True)
"""


@pytest.mark.any_mpi
def test_more_learners_than_communicators(folder: Path) -> None:
    """MPICH ended after 2,045 communicators."""
    code, output = run(HEAD + MANY, ranks=1)
    assert code == 0 and "all of them" in output, output


UNASKED = """
def full(part, rank, *arguments):
    if rank == comm.size - 1:
        raise OSError(errno.ENOSPC, "No space left on device")
    return write_rank(part, rank, *arguments)


checkpoint_files.write_rank = full
learner = learner_of(psgd.DataParallelSGD())
checkpoints = psgd.Checkpoints("checkpoints")
checkpoints.save(learner)
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_error_that_nobody_has_asked_for(ranks: int, folder: Path) -> None:
    """The program ends with its line, and with an exit code that says so."""
    code, output = run(HEAD + UNASKED, ranks=ranks)
    line = f"No space left on device (on rank {ranks - 1})"
    assert code != 0 and output.count(line) == 1, output
    assert "Traceback" not in output, output
    assert os.listdir(folder / "checkpoints") == []  # nor the lock


UNFINISHED = """
def late(*arguments):
    time.sleep(1)
    return write_rank(*arguments)


checkpoint_files.write_rank = late
tables = (psgd.Embedding(name="t", width=2),)
algorithm = psgd.DataParallelASGD(servers=0, sync_steps=1, pipeline=True, tables=tables)
learner = learner_of(algorithm)
learner.tables["t"].push(np.arange(5), np.ones((5, 2), np.float32), samples=1)
learner.step(samples=1)
psgd.Checkpoints("checkpoints").save(learner)
for _ in range(5):
    learner.step(samples=1)
"""


def test_a_program_that_ends_while_it_saves_rows(folder: Path) -> None:
    """Without learner.finish(): the servers beside the workers have to write them before."""
    began = time.monotonic()
    code, output = run(HEAD + UNFINISHED, ranks=2)
    assert code == 0, output
    assert time.monotonic() - began < 30 * patience(), output
    (path,) = (folder / "checkpoints").glob("[!.]*")  # but for the lock
    assert len(list(path.glob("tables-*.safetensors"))) == 2


LAST = """
import time
import numpy as np
import parallel_sgd as psgd


def main():
    with psgd.Communicator.world(timeout_s=60) as comm:
        array = np.full(3, comm.rank)
        if comm.rank == 2:
            time.sleep(4)
        comm.broadcast(array)  # to rank 3 by way of rank 2, as MPICH does it
        assert (array == 0).all()


main()
"""


SLOW = """
from parallel_sgd.communication.mpi.endpoint import MpiEndpoint

right = MpiEndpoint.receive
learner = learner_of(psgd.DataParallelASGD(sync_steps=1), 1_000_000)
if not learner.serves:
    learner.gradient.flat[:] = 1
    learner.step(samples=1)


def receive_late(endpoint, peer, body):
    if peer == 3 and threading.current_thread() is threading.main_thread():
        time.sleep(4)
    return right(endpoint, peer, body)


if comm.rank == 1:  # as a worker it has only the final model to receive, from rank 3 at last
    MpiEndpoint.receive = receive_late
learner.finish()
assert (learner.parameters.flat < 0.701).all()  # by the pushes of three workers, or four
"""


@pytest.mark.parametrize(
    ("program", "servers"),
    [
        pytest.param(LAST, 0, id="a broadcast"),
        pytest.param(HEAD + SLOW, 1, id="the final model"),
        pytest.param(HEAD + SLOW, 0, id="of servers beside workers"),
    ],
)
def test_ranks_that_have_done_all_may_end_before_the_others(program: str, servers: int) -> None:
    """Also where their program has let go of the communicator in which others still are."""
    code, output = run(program, ranks=4, servers=servers)
    assert code == 0, output


CHILDREN = """
import os, subprocess, sys, threading

FAILS = "import parallel_sgd; raise ValueError('no display')"


def reports():  # as multiprocessing's thread in a child that hands out descriptors
    try:
        raise ValueError("a client is gone")
    except ValueError:
        sys.excepthook(*sys.exc_info())


def forked(function):
    child = os.fork()
    if not child:
        function()  # what follows it is the rank's alone
        sys.exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def fails():
    raise ValueError("a child")


assert comm.size == 2
if comm.rank == 0:
    assert forked(lambda: None) == 0  # without MPI_Finalize, which waits for the other ranks
    assert forked(reports) == 0
    assert forked(lambda: sys.exit(3)) == 3
    assert forked(fails) == 1
    assert subprocess.run([sys.executable, "-c", FAILS], close_fds=False).returncode == 1
    try:
        code = "import parallel_sgd; parallel_sgd.Communicator.world()"
        subprocess.run([sys.executable, "-c", code], close_fds=False, check=True)
    except subprocess.CalledProcessError as error:
        assert error.returncode == 1
comm.barrier()
print("rank", comm.rank, "goes on", flush=True)
"""


def test_what_a_child_of_a_rank_does_is_no_end_of_the_job(folder: Path) -> None:
    code, output = run(HEAD + CHILDREN, ranks=2)
    assert code == 0 and output.count("goes on") == 2, output
    assert output.count("ValueError: ") == 3, output
    assert "must be called in the process of a rank: rank 0 is process" in output, output


@pytest.mark.any_mpi
def test_the_same_without_mpiexec(folder: Path) -> None:
    alone = (HEAD + UNASKED).replace("world(timeout_s=60)", "single()")
    code, output = executed([sys.executable, "-c", alone])
    assert code == 1
    assert output.startswith("parallel-sgd: error: no checkpoint could be written to "), output


AT_LAST = """
import atexit, os

process = os.getpid()


@atexit.register  # before all that the package registers: it is called after that
def last():
    if os.getpid() == process:
        from mpi4py import MPI
        MPI.COMM_WORLD.Barrier()


class Sees:
    def __del__(self, write=os.write):
        write(1, b"MPI is finalized" if self.is_finalized() else b"MPI is up")


import parallel_sgd, sys
parallel_sgd.Communicator.world()
from mpi4py import MPI
sees = vars(sys)["_sees"] = Sees()  # goes after what was put there before
sees.is_finalized = MPI.Is_finalized
"""


@pytest.mark.any_mpi
def test_exit_handlers_of_the_users_may_use_mpi() -> None:
    code, output = executed([sys.executable, "-c", AT_LAST])
    assert (code, output) == (0, "MPI is finalized")
