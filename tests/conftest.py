"""Modules that tests share lie beside them: `kernel_cases`, `invariants`, `jobs`, and others."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
LAYERS = [
    HERE / layer
    for layer in ("unit", "processes", "parallel", "exploration", "torch", "integration")
]

sys.path[:0] = map(str, (HERE, *LAYERS))

# Before anything imports them: what their assertions compare is then shown.
SHARED = [file for layer in LAYERS for file in layer.glob("*.py") if file.stem != "conftest"]
pytest.register_assert_rewrite(*(f.stem for f in SHARED if not f.stem.startswith("test_")))

pytest_plugins = ("limits",)

# As the launcher does for ranks: each of the threads that play them would have PyTorch start more.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which this process makes its temporary files: the test's own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody pulls the plug on these tests; each flush could take the time of many."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[..., Any]]:
    """Faults of the disk while checkpoints are written or read: by the name of a step, what takes
    its place. It is called with the step itself, and then with the arguments of the call."""
    from parallel_sgd.training.checkpoint import files

    faults: dict[str, Callable[..., Any]] = {}

    def step(name: str, right: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            fault = faults.get(name)
            return fault(right, *arguments, **options) if fault else right(*arguments, **options)

        return call

    for name in ("begin", "write_rank", "publish", "read_manifest"):
        monkeypatch.setattr(files, name, step(name, getattr(files, name)))
    return faults


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vector of a few hundred values is exchanged in several pieces, some of them at a time."""
    from parallel_sgd.communication import messages
    from parallel_sgd.exchange import scheduler

    monkeypatch.setattr(messages, "PIECE_VALUES", 128)
    monkeypatch.setattr(scheduler, "WINDOW", 600)  # a piece of float32, and a little


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what is measured before a choice: functions in place of those of `costs.measured`."""
    from parallel_sgd.costs import measured

    def give(**functions: Callable[..., Any]) -> None:
        for name, function in functions.items():
            monkeypatch.setattr(measured, name, function)

    return give


@pytest.fixture
def memory_pages(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how many pages this machine's memory has, and how many bytes a page."""
    return lambda count: monkeypatch.setattr(os, "sysconf", lambda name: count)


@pytest.fixture
def folders_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system lists folders in another order than before."""
    walk = os.walk

    def backwards(*arguments: Any, **options: Any) -> Iterator[tuple[str, list[str], list[str]]]:
        for place, folders, names in walk(*arguments, **options):
            folders.reverse()
            yield place, folders, names[::-1]

    monkeypatch.setattr(os, "walk", backwards)


@pytest.fixture
def text_blocks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how many bytes of a text file are searched at a time."""
    from parallel_sgd.data.readers.text_file import TextFile

    return lambda size: monkeypatch.setattr(TextFile, "block", size)
