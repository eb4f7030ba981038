"""A rank that lets the others wait ends the job in time, and every rank says where it is."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from jobs import alive, finished
from limits import patience

#: What each rank does while rank 0 waits: its stack holds the name of a function.
STUCK = """
import os, re, signal
import numpy as np
import parallel_sgd as psgd

comm = psgd.Communicator.world()
comm.sum_integers(np.array([1]))
open(f"{comm.rank}.pid", "w").write(str(os.getpid()))


def in_c_with_pythons_lock():
    re.match(r"(a+)+$", "a" * 60 + "b")


def in_python():
    while True:
        pass


def is_stopped():
    os.kill(os.getpid(), signal.SIGSTOP)


def waits():
    comm.sum_integers(np.array([1]))


[waits, in_c_with_pythons_lock, is_stopped, in_python][comm.rank]()
"""


def test_every_rank_says_where_it_is(folder: Path) -> None:
    (folder / "stuck.py").write_text(STUCK)
    began = time.monotonic()
    code, output = finished(
        *("run", "-n", "4", "--wait-timeout-s", "5", "--log-dir", "logs", "stuck.py")
    )
    assert code not in (0, 124), output
    assert time.monotonic() - began < 20 * patience()
    errors = [(folder / "logs" / f"rank-{rank}.err").read_text() for rank in range(4)]
    assert "waited more than timeout_s=5 s for the other ranks in sum_integers" in errors[0]
    pids = [int((folder / f"{rank}.pid").read_text()) for rank in range(4)]
    assert f"rank 1 (pid {pids[1]}) does not answer: it holds Python's lock" in errors[0]
    assert f"rank 2 (pid {pids[2]}) is stopped, by a signal" in errors[0]
    assert re.search(r"rank 3 has not arrived: it computes, .* \(stuck.py:1[56]\)", errors[0])
    assert "in waits\n" in errors[0]
    assert "in in_c_with_pythons_lock\n" in errors[1]
    assert "in in_python\n" in errors[3]
    assert not any(map(alive, pids))


ENDED = """
import os, signal
import parallel_sgd as psgd

comm = psgd.Communicator.world()
if comm.rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.any_mpi
def test_a_rank_that_is_stopped_while_the_others_end(folder: Path) -> None:
    (folder / "ended.py").write_text(ENDED)
    code, output = finished("run", "-n", "3", "--wait-timeout-s", "5", "ended.py")
    assert code not in (0, 124), output
    line = "this rank has finished, and waits for rank 1, which has not answered for timeout_s=5 s"
    assert f"[rank 0] parallel_sgd: {line}" in output
    assert "is stopped, by a signal or a debugger" in output


LATE = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
import parallel_sgd as psgd

comm = psgd.Communicator.world()
pids = comm.allgather_object(os.getpid())
leaves = "leaves" in sys.argv
parameters = psgd.Parameters({"w": np.zeros(1000, np.float32)})
algorithm = psgd.DiLoCo(sync_steps=2, quorum=2, gradient_bits=1)
x, y = np.ones((120, 1000)), np.zeros(120)
with psgd.Learner(parameters, psgd.SGD(lr=0.1), algorithm, comm) as learner:
    source = psgd.data.Source(x, y, minibatch_size=6)
    for step, (inputs, _) in enumerate(source.minibatches(learner)):
        if comm.rank == 2 and step == 5:
            sys.exit() if leaves else os.kill(os.getpid(), signal.SIGSTOP)
        learner.gradient.flat[...] = inputs.sum(0)
        learner.step(samples=len(inputs))
    if comm.rank == 0:
        while Path(f"/proc/{pids[2]}/stat").read_text().rpartition(") ")[2][0] != "T":
            time.sleep(0.1)
        print("two ranks have trained, and rank 2 is stopped", flush=True)
        os.kill(pids[2], signal.SIGCONT)
    learner.finish()
    models = comm.allgather_object(parameters.flat.tobytes())
    assert len(set(models)) == 1
    print(f"rank {comm.rank}: {learner.report()['outer_steps']}", flush=True)
"""


def test_a_stopped_rank_holds_up_no_outer_step_of_a_quorum(folder: Path) -> None:
    """It joins once it goes on; else the others wait for it at the end."""
    (folder / "late.py").write_text(LATE)
    code, output = finished("run", "-n", "3", "--wait-timeout-s", "60", "late.py")
    assert code == 0, output
    assert "two ranks have trained, and rank 2 is stopped" in output
    assert re.search(r"rank 2: {'taken': \d+, 'late': [1-9]", output)


def test_a_rank_that_leaves_ends_the_outer_steps_of_all(folder: Path) -> None:
    (folder / "late.py").write_text(LATE)
    began = time.monotonic()
    code, output = finished("run", "-n", "3", "--wait-timeout-s", "60", "late.py", "leaves")
    assert code not in (0, 124), output
    assert time.monotonic() - began < 20 * patience()
    assert "rank 2" in output


SURVIVING = """
import os, signal
import numpy as np
import parallel_sgd as psgd
from parallel_sgd.communication import launched_rank

comm = psgd.Communicator.world()
first = launched_rank()
parameters = psgd.Parameters({"w": np.zeros(3, np.float32)})
learner = psgd.Learner(parameters, psgd.SGD(lr=0.1), psgd.DataParallelSGD(), comm)
while learner.samples < 80:
    if learner.samples == 40 and first == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    if learner.samples == 40 and first == 2:
        while True:
            pass
    learner.gradient["w"][:] = 1
    learner.step(samples=1)
learner.finish()
print(f"rank {first} is done, one of {comm.size}", flush=True)
"""


@pytest.mark.open_mpi
def test_ranks_that_survive_go_on_without_one_that_does_not_move(folder: Path) -> None:
    """A rank in reserve, for which nobody waits, takes the place of one of two."""
    (folder / "surviving.py").write_text(SURVIVING)
    options = ("--survive", "--spares", "1", "--wait-timeout-s", "5")
    code, output = finished("run", "-n", "5", *options, "surviving.py")
    assert code == 0, output
    assert all(f"rank {rank} is done, one of 3" in output for rank in (0, 3, 4)), output
    told = re.findall(r" for ranks? ([\d, ]+): killed; the remaining ranks continue", output)
    assert {*", ".join(told).split(", ")} == {"1", "2"}, output  # at once, or one after the other
