"""The programs that show how PyTorch's models are trained, on ranks, with little data.

Most run one after the other in one start of the ranks, which takes longer than they do.
"""

from __future__ import annotations

import difflib
import json
import re
import shutil
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from jobs import ROOT, executed, finished

ALONE, PARALLEL = ROOT / "examples" / "torch_alone.py", ROOT / "train_torch.py"
LANGUAGE, DDP = ROOT / "examples" / "torch_language.py", ROOT / "examples" / "torch_ddp.py"
LSTM, FSDP = (ROOT / "examples" / f"torch_{name}.py" for name in ("lstm", "fsdp"))
RANKS = 2
EPOCH = re.compile(r"^epoch (\d): test accuracy (\d+\.\d\d)%, loss (\d\.\d{4})$", re.MULTILINE)
SCORES = re.compile(r"^(\d) test loss (\d\.\d{4}), accuracy (\d+\.\d\d)%$", re.MULTILINE)
STEP = re.compile(r"^step \d+: .*$", re.MULTILINE)
SHORT = ["--minibatch", "16", "--epochs", "2", "--lr", "0.05"]
TINY = ["--model", "tiny", "--context", "32", "--minibatch", "64", "--lr", "0.01"]
OTHERS = {
    "block-momentum": [
        *["--steps", "3", "--algorithm", "block-momentum", "--gradient-bits", "8"],
        *["--optimizer", "momentum"],
    ],
    "power": ["--steps", "3", "--algorithm", "power", "--amp", "bf16"],
}

PAGES = r"""
import re, sys, torch
import parallel_sgd as psgd
from pathlib import Path
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

first, *others = (
    block
    for page in sys.argv[1:]
    for block in re.findall(r"```python\n(.*?)```", Path(page).read_text(), flags=re.DOTALL)
)
names = {}
exec(first, names)
comm, model = names["comm"], names["model"]
for number, block in enumerate(others, 1):
    if comm.rank == 0:
        print(f"block {number}:", block.splitlines()[0], flush=True)
    optimizer = names["optimizer"] = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if "learner" in block and "learner = " not in block:
        names["learner"] = psgd.torch.Learner(model, optimizer, psgd.DataParallelSGD(), comm)
        sampler = psgd.torch.sampler(names["train"], names["learner"], 16)
        names["loader"] = DataLoader(names["train"], batch_sampler=sampler)
    exec(block, names)
    learner = names["learner"]
    assert learner.serves or learner.samples or "learner.step" not in block
    learner.close()
"""

Started = tuple[Path, dict[str, str]]


def write_idx(path: Path, array: np.ndarray) -> None:
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    path.write_bytes(header + array.tobytes())


def images_in(folder: Path) -> str:
    """Fashion-MNIST's four files with 50 and 21 images, in which a bar is where the class says."""
    random = np.random.default_rng(0)
    for part, count in (("train", 50), ("t10k", 21)):
        y = (np.arange(count) % 10).astype(np.uint8)
        x = random.integers(0, 60, (count, 28, 28), dtype=np.uint8)
        for image, label in zip(x, y, strict=True):
            image[2 * label : 2 * label + 4] += 150
        write_idx(folder / f"{part}-images-idx3-ubyte", x)
        write_idx(folder / f"{part}-labels-idx1-ubyte", y)
    return str(folder)


def text_in(folder: Path) -> str:
    (folder / "text").mkdir()
    (folder / "text" / "numbers.txt").write_text(" ".join(map(str, range(2000))))
    return str(folder / "text")


def on_ranks(script: Path, *arguments: str, ranks: int = RANKS, folder: Path | None = None) -> str:
    """What a program has printed that has ended well on all ranks."""
    code, output = finished("run", "-n", str(ranks), str(script), *arguments, folder=folder)
    assert code == 0, output
    return output


def whole_run(text: str, checkpoints: str = "saved-text") -> list[str]:
    """The arguments of a run that saves what it has come to, and goes on from there."""
    run = ["--data", text, *TINY, "--evaluate-every", "2", "--epochs", "2", "--steps", "7"]
    return [*run, "--checkpoints", checkpoints]


#: Leaves a run as it was before its two latest checkpoints.
STOPPED = """
import shutil
from pathlib import Path
import parallel_sgd as psgd

comm = psgd.Communicator.world()
if comm.rank == 0:
    shutil.copytree("saved-text", "saved-again")
    for latest in sorted(Path("saved-again").iterdir())[-2:]:
        shutil.rmtree(latest)
comm.barrier()
"""


#: Runs scripts as `python script …` does, all in one process of each rank.
SCRIPTS = """
import json, runpy, sys
import parallel_sgd as psgd
from pathlib import Path

for name, (script, *arguments) in json.loads(Path("scripts.json").read_text()).items():
    psgd.Communicator.world().print(f"script {name}", flush=True)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
"""


@pytest.fixture(scope="module")
def started_once(tmp_path_factory: pytest.TempPathFactory) -> Started:
    """The folder in which the scripts of these tests have run, and what each has printed."""
    folder = tmp_path_factory.mktemp("examples")
    images, text = images_in(folder), text_in(folder)
    elsewhere = PARALLEL.read_text().replace("/usr/share/datasets", "/nowhere")
    (folder / "elsewhere.py").write_text(elsewhere)
    (folder / "pages.py").write_text(PAGES)
    (folder / "stopped.py").write_text(STOPPED)
    scripts = {
        "parallel": [str(PARALLEL), "--data", images, *SHORT],
        "digits": ["elsewhere.py", "--epochs", "1"],
        "ddp": [str(DDP), "--data", images, *SHORT, "--gradient-bits", "1"],
        "whole": [str(LANGUAGE), *whole_run(text)],
        "stopped": ["stopped.py"],
        "again": [str(LANGUAGE), *whole_run(text, "saved-again")],
        **{name: [str(LANGUAGE), "--data", text, *TINY, *line] for name, line in OTHERS.items()},
        "lstm": [str(LSTM), "--lines", "700", "--tokens", "600", "--epochs", "2"],
        "pages": ["pages.py", str(ROOT / "docs" / "pytorch.md")],
    }
    (folder / "scripts.json").write_text(json.dumps(scripts))
    (folder / "scripts.py").write_text(SCRIPTS)
    output = on_ranks(Path("scripts.py"), folder=folder)
    _, *parts = re.split(r"^script (\S+)$", output, flags=re.MULTILINE)
    assert parts[::2] == [*scripts]
    return folder, dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.any_mpi
def test_six_lines_make_it_parallel() -> None:
    """The program for one process knows nothing of this library."""
    assert "parallel_sgd" not in ALONE.read_text()
    alone, parallel = ALONE.read_text().splitlines(), PARALLEL.read_text().splitlines()
    changes = difflib.SequenceMatcher(None, alone, parallel, autojunk=False).get_opcodes()
    changed = [
        max(len(list(filter(None, lines))) for lines in (alone[i1:i2], parallel[j1:j2]))
        for kind, i1, i2, j1, j2 in changes
        if kind != "equal"
    ]
    assert sum(changed) <= 6
    assert len(parallel) < 110
    (shown,) = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    _, _, _, *whole = difflib.unified_diff(alone, parallel, lineterm="", n=len(alone))
    rest = iter(whole)
    lines = [line for line in shown.splitlines() if line != " …"]
    assert [line for line in lines if line not in rest] == []  # each after the one before it
    added = [line for line in whole if line[0] == "+" and line != "+"]
    assert [line for line in added if line not in lines] == [added[-1]]  # the score's line


@pytest.mark.any_mpi
def test_alone(folder: Path) -> None:
    code, output = executed([sys.executable, str(ALONE), "--data", images_in(folder), *SHORT])
    assert code == 0, output
    assert [epoch for epoch, _, _ in EPOCH.findall(output)] == ["1", "2"]


@pytest.mark.any_mpi
def test_digits_where_there_is_no_fashion(started_once: Started) -> None:
    """Nobody needs Debian to try it."""
    assert PARALLEL.read_text().count('DEBIANS = "/usr/share/datasets/fashion-mnist"') == 1
    said = r"^epoch 1: test accuracy \d+\.\d\d%, loss \d\.\d{4} \(of scikit-learn's digits: .*\)$"
    assert len(re.findall(said, started_once[1]["digits"], re.MULTILINE)) == 1


@pytest.mark.any_mpi
def test_parallel(started_once: Started) -> None:
    """50 samples by 16 for two ranks; the second has fewer of the 21 that are tested on."""
    epochs = EPOCH.findall(started_once[1]["parallel"])
    assert [epoch for epoch, _, _ in epochs] == ["1", "2"]
    assert round(float(epochs[-1][1]) * 21 / 100, 1) % 1 == 0  # of all 21


@pytest.mark.any_mpi
def test_ddp(started_once: Started) -> None:
    output = started_once[1]["ddp"]
    line = r"^epoch \d: loss of rank 0 \d\.\d{4}, (\S+) bytes sent per value$"
    sent = re.findall(line, output, re.MULTILINE)
    assert len(sent) == 2 and all(0.05 < float(bytes_sent) < 0.5 for bytes_sent in sent)


@pytest.mark.any_mpi
def test_language_goes_on_in_the_midst_of_an_epoch(folder: Path, started_once: Started) -> None:
    """As if it had not been stopped; and on another number of ranks."""
    shutil.copytree(started_once[0] / "saved-text", folder / "saved-text")
    run = whole_run(str(started_once[0] / "text"))
    whole = STEP.findall(started_once[1]["whole"])
    assert [line.split(":")[0] for line in whole] == ["step 2", "step 4", "step 6", "step 7"]
    losses = [float(line.split()[4]) for line in whole]
    assert losses[-1] < losses[0]
    assert STEP.findall(started_once[1]["again"]) == whole[2:]
    shutil.rmtree(max((folder / "saved-text").iterdir()))
    (last,) = STEP.findall(on_ranks(LANGUAGE, *run, ranks=3))
    assert float(last.split()[4]) == pytest.approx(losses[-1], abs=0.01)


@pytest.mark.any_mpi
@pytest.mark.parametrize("name", OTHERS)
def test_language_with_other_algorithms(started_once: Started, name: str) -> None:
    (line,) = STEP.findall(started_once[1][name])
    assert re.match(r"step 3: test loss \d\.\d{4} nats a byte, [1-9][\d,]* bytes sent", line)


@pytest.mark.any_mpi
def test_lstm_learns_from_lines_of_uneven_lengths(started_once: Started) -> None:
    """Bytes that are told by how frequent they are have a loss of 3.3 nats."""
    assert len(LSTM.read_text().splitlines()) < 60
    (_, first, _), (_, second, accuracy) = SCORES.findall(started_once[1]["lstm"])
    assert float(second) < float(first) < 3.3
    assert float(second) < 2.9 and float(accuracy) > 25


@pytest.mark.any_mpi
def test_sharded_under_torchrun(folder: Path) -> None:
    """Two ranks to a host, which need no MPI; untrained, bytes have a loss of 5.5 nats."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
    small = ["--data", text_in(folder), "--shards", "2", "--width", "16", "--steps", "25"]
    code, output = executed([*torchrun, str(FSDP), *small, "--lr", "0.01"])
    assert code == 0, output
    said = r"^25 steps: test loss (\d\.\d{4}) nats a byte, ([\d,]+) bytes sent by rank 0"
    ((loss, sent),) = re.findall(said, output, re.MULTILINE)
    assert float(loss) < 3.5
    assert 0 < int(sent.replace(",", "")) < 20_000  # two exchanges of half the model at 4 bits


@pytest.mark.any_mpi
def test_the_documentation_on_pytorch(started_once: Started) -> None:
    """Every block of the page, in its order, on the model that the first one has made."""
    folder, outputs = started_once
    blocks = (ROOT / "docs" / "pytorch.md").read_text().count("```python")
    assert outputs["pages"].count("block ") == blocks - 1
    assert (folder / "model.pt").exists() and (folder / "saved").is_dir()


@pytest.mark.any_mpi
def test_the_lines_for_ddp_in_the_readme() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    (shown,) = (block for block in blocks if "torch.compress" in block)
    program = DDP.read_text()
    assert [line for line in shown.splitlines() if line not in program] == []
