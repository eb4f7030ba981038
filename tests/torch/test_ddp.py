"""`psgd.torch.compress` in jobs of torchrun, on two ranks and on four: see `ddp_checks`."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import ddp_checks
import ddp_endings
import numpy as np
import pytest
import torch
from ddp_models import mlp
from limits import patience
from rank_checks import outcomes, rank_environment, require

from parallel_sgd import Communicator, simulate
from parallel_sgd.torch import hook_state

Found = dict[str, list[str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ddp")


@pytest.fixture(scope="module")
def two(folder: Path) -> Found:
    return outcomes("ddp_checks.py", 2, folder)


@pytest.fixture(scope="module")
def four(two: Found, folder: Path) -> Found:
    """With the files that the two ranks have saved."""
    return outcomes("ddp_checks.py", 4, folder)


@pytest.mark.parametrize("name", ddp_checks.TWO)
def test_two_ranks(two: Found, name: str) -> None:
    require(two, name, 2)


@pytest.mark.parametrize("name", ddp_checks.FOUR)
def test_four_ranks(four: Found, name: str) -> None:
    require(four, name, 4)


class Bucket:
    """As DDP's, of recorded values."""

    def __init__(self, number: int, last: bool, members: list[torch.Tensor], values: Any) -> None:
        self.index, self.is_last = (lambda: number), (lambda: last)
        self.parameters, self.buffer = (lambda: members), (lambda: values)


def replayed(bits: float, steps_of: Any, comm: Communicator) -> tuple[list[np.ndarray], int]:
    """The means of the recorded buckets, and the bytes sent, by the hook over `comm`."""
    module = mlp()
    named, means = dict(module.named_parameters()), []
    with hook_state(comm, gradient_bits=bits, module=module) as state:
        for buckets in steps_of[comm.rank]:
            for number, (names, values) in enumerate(buckets):
                members, last = [named[name] for name in names], number == len(buckets) - 1
                state.begin(Bucket(number, last, members, torch.from_numpy(values)))
            means.append(np.concatenate([values for _, values in buckets]))
        return means, state.bytes_sent


@pytest.mark.parametrize("bits", ddp_checks.BITS)
def test_the_same_bits_as_over_other_communicators(two: Found, folder: Path, bits: float) -> None:
    """The hook over threads, which are held to have MPI's bits, has the same means of the same
    buckets."""
    require(two, f"recorded: {bits} bits", 2)
    files = [folder / ddp_checks.RECORD.format(bits, rank) for rank in range(2)]
    recorded = [torch.load(file, weights_only=False) for file in files]
    assert recorded[0]["losses"] != recorded[1]["losses"], "ranks had the same data"
    found = simulate(2, partial(replayed, bits, [each["steps"] for each in recorded]))
    for each, (means, sent) in zip(recorded, found, strict=True):
        assert len(means) == len(each["means"]) == 6
        assert all(map(np.array_equal, means, each["means"]))
        assert sent == each["sent"] > 0


def finished(program: str, folder: Path) -> str:
    path = Path(__file__).parent / program
    done = subprocess.run(
        [sys.executable, str(path), str(folder)],
        env=rank_environment(),
        capture_output=True,
        text=True,
        timeout=90 * patience(),
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_spawned_ranks(tmp_path: Path) -> None:
    finished("ddp_spawned.py", tmp_path)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0]["losses"] != ranks[1]["losses"], "ranks had the same data"
    for found in ranks:
        assert found["equal"] and found["moved"] > 1e-2
        assert found["report"]["steps"] == 20 and found["report"]["ratio_to_32_bits"] > 8


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("endings")
    finished("ddp_endings.py", folder)
    return folder


@pytest.mark.parametrize("name", ddp_endings.ENDINGS)
def test_the_end_of_a_rank_ends_the_others(endings: Path, name: str) -> None:
    """Without a launcher that would end them."""
    found = json.loads((endings / "endings.json").read_text())[name]
    outputs = [(endings / f"{name}.{rank}").read_text() for rank in range(2)]
    print(*outputs, sep="\n")
    (other, other_s), (first, first_s) = found["0"], found["1"]
    assert first == {"exception": 1, "sys.exit": 3, "kill": -9, "normal end": 0}[name]
    assert other not in (0, -9)
    assert other_s - first_s < 10 * patience()
    assert outputs[0].startswith("trained\n")
    assert "rank 1" in outputs[0]
