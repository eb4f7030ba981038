"""The trainers of other packages, on the two ranks of torchrun or MPI, which all run these tests:

torchrun --standalone --nproc-per-node 2 -m pytest -x tests/trainers
parallel-sgd run -n 2 -m pytest -x tests/trainers
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
pytest.register_assert_rewrite("two_ranks")

import torch.distributed as dist  # noqa: E402
from two_ranks import RANKS, everywhere  # noqa: E402

import parallel_sgd as psgd  # noqa: E402
from parallel_sgd.communication import launched_rank  # noqa: E402


def pytest_configure() -> None:
    """Two ranks that clean up one folder of old `tmp_path`s at a time stumble over each other."""
    rank = os.environ.get("RANK", launched_rank())
    root = Path(tempfile.gettempdir(), f"pytest-trainers-{rank}")
    root.mkdir(exist_ok=True)
    os.environ["PYTEST_DEBUG_TEMPROOT"] = str(root)


@pytest.fixture(scope="session", autouse=True)
def ranks() -> Iterator[None]:
    """Two ranks, with a process group. Trainers find torchrun's ranks by themselves, and MPI's by
    init_process_group."""
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if under_torchrun:
        dist.init_process_group("gloo")
    else:
        comm = psgd.Communicator.world()
        if comm.size == RANKS:
            psgd.torch.init_process_group(comm)
    if not dist.is_initialized() or dist.get_world_size() != RANKS:
        pytest.skip(f"these tests run on {RANKS} ranks")
    yield
    dist.destroy_process_group()


@pytest.fixture
def rank() -> int:
    return dist.get_rank()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, the same for all ranks."""
    common = Path(everywhere(str(tmp_path))[0])
    common.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    monkeypatch.chdir(common)
    return common


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Packages that are not ours warn as they like: `items` are those of all folders."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))
