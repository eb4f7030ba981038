"""Kernels are compiled once by all processes, and before training."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from limits import patience
from numba.core.errors import TypingError

import parallel_sgd as psgd
from parallel_sgd.kernels import cpu, machine_code

KERNELS = """
from parallel_sgd.kernels.compiled import compiled

@compiled
def part(x):
    return x + 1

@compiled
def one(x):
    return part(x) + 1

@compiled
def two(x):
    return part(x) + 2

@compiled
def three(x):
    return x + 3
"""

#: Prepares the kernels, beginning with one of them; prints what was said, and what was compiled.
PREPARE = """
import json, sys
from numba.core import event
from parallel_sgd.kernels import machine_code
import some_kernels as k

class Compiled(event.Listener):
    def on_start(self, told):
        names.append(told.data["dispatcher"].__name__)
    def on_end(self, told):
        pass

names, said = [], []
event.register("numba:compile", Compiled())
calls = [lambda: k.one(1), lambda: k.two(1), lambda: k.three(1)]
machine_code.prepare(calls, int(sys.argv[1]), said.append)
assert (k.one(1), k.two(1), k.three(1)) == (3, 4, 4)
ours = [name for name in names if hasattr(k, name)]
print(json.dumps([said, ours]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "some_kernels.py").write_text(KERNELS)
    return tmp_path


def start(folder: Path, first: int, **environment: str) -> subprocess.Popen[str]:
    """A process that prepares the kernels in a folder, beginning with one of them."""
    paths = {"PYTHONPATH": str(folder), "NUMBA_CACHE_DIR": str(folder / "cache")}
    return subprocess.Popen(
        [sys.executable, "-c", PREPARE, str(first)],
        env=os.environ | paths | environment,
        stdout=subprocess.PIPE,
        text=True,
    )


def prepared(process: subprocess.Popen[str]) -> tuple[list[str], list[str]]:
    """What a process has said, and which kernels it has compiled."""
    output, _ = process.communicate(timeout=60 * patience())
    assert process.returncode == 0
    said, names = json.loads(output)
    return said, names


def test_processes_compile_each_kernel_once(folder):
    results = [prepared(process) for process in [start(folder, first) for first in range(3)]]
    compiled = sorted(name for _, names in results for name in names)
    assert compiled == ["one", "part", "three", "two"]
    assert all(said in ([], [machine_code.COMPILING]) for said, _ in results)
    assert any(said for said, _ in results)
    assert prepared(start(folder, 0)) == ([], [])  # from the disk


def test_without_a_folder_each_process_compiles_and_says_what_helps(folder):
    (folder / "__pycache__").write_text("no folder")
    nowhere = {"NUMBA_CACHE_DIR": "", "XDG_CACHE_HOME": str(folder / "__pycache__")}
    said, names = prepared(start(folder, 0, **nowhere))
    assert said == [machine_code.COMPILING_ANEW] and "NUMBA_CACHE_DIR" in said[0]
    assert sorted(names) == ["one", "part", "three", "two"]


@pytest.fixture
def kernels(folder, monkeypatch) -> Callable[[], ModuleType]:
    """Loads the kernels anew, as another process would."""
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(folder / "cache"))
    monkeypatch.setattr(machine_code._Lock, "timed_out", False)

    def load() -> ModuleType:
        spec = importlib.util.spec_from_file_location("some_kernels", folder / "some_kernels.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def short_waits(monkeypatch) -> None:
    """Locks of other processes are waited for 0.2 s."""
    monkeypatch.setattr(machine_code, "WAIT_S", 0.2)


def misses(kernel: Any) -> int:
    return sum(kernel.stats.cache_misses.values())


def files_of(kernel: str, folder: Path, kind: str = "nbc") -> list[Path]:
    return sorted((folder / "cache").glob(f"*/some_kernels.{kernel}-*.{kind}"))


def is_locked(kernel: str, folder: Path) -> bool:
    with files_of(kernel, folder, "lock")[0].open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.mark.parametrize(
    ("calls", "order"),
    [
        (("one", "three", "two"), ("one", "two", "three")),
        (("three", "one", "two"), ("three", "one", "two")),  # that is another process's work
    ],
)
def test_a_kernel_that_another_process_compiles_is_put_off_and_waited_for_no_longer_than_that(
    kernels, short_waits, folder, calls, order
):
    first = kernels()
    first.three(1)
    lock = next((folder / "cache").glob("*/some_kernels.three-*.lock"))
    os.remove(files_of("three", folder)[0])
    second, called = kernels(), []

    def call(name: str) -> Callable[[], object]:
        return lambda: called.append((name, getattr(second, name)(1)))

    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # and is never given back
        machine_code.prepare([call(name) for name in calls], 0, lambda line: None)
    results = {"one": 3, "two": 4, "three": 4}
    assert called == [(name, results[name]) for name in order]
    assert misses(second.three) == 1


@pytest.mark.parametrize(
    ("cores", "first_calls"), [(8, "abca"), (2, "abab"), (1, "abab")], ids=["8", "2", "bound"]
)
def test_as_many_processes_as_cores_begin_with_different_calls(cores, first_calls):
    begun = ""
    for number in range(4):
        called: list[str] = []
        calls = [lambda name=name, called=called: called.append(name) for name in "abc"]
        machine_code.prepare(calls, number, lambda line: None, cores)
        begun += called[0]
        assert sorted(called) == ["a", "b", "c"]
    assert begun == first_calls


def test_a_change_of_any_file_of_the_kernels_counts(kernels, monkeypatch):
    kernels().three(1)
    unchanged = kernels()
    unchanged.three(1)
    assert misses(unchanged.three) == 0
    monkeypatch.setattr(machine_code, "_stamp", lambda: b"after a change")
    changed = kernels()
    changed.three(1)
    assert misses(changed.three) == 1


class Killed(BaseException):
    """In the place of a signal that ends the process."""


@pytest.mark.parametrize("error", [OSError("no space left on device"), Killed()])
def test_no_machine_code_of_other_sources_is_loaded_where_new_one_could_not_be_written(
    kernels, monkeypatch, folder, error
):
    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as older:
        older.setattr(machine_code, "_stamp", lambda: b"older sources")
        kernels().three(1)
    with monkeypatch.context() as failing:
        failing.setattr("numba.core.caching.IndexDataCacheFile._save_data", fail)
        with contextlib.suppress(Killed):
            kernels().three(1)
    assert not is_locked("three", folder)
    fresh = kernels()
    assert fresh.three(1) == 4
    assert misses(fresh.three) == 1


def test_machine_code_of_other_sources_is_removed_when_new_one_is_written(
    kernels, monkeypatch, folder
):
    with monkeypatch.context() as older:
        older.setattr(machine_code, "_stamp", lambda: b"older sources")
        kernels().three(1)
        kernels().one(1)
    old = files_of("three", folder)
    fresh = kernels()
    fresh.three(1)
    fresh.three(1.0)
    assert len(old) == 1 and len(files_of("three", folder)) == 2
    assert not set(old) & set(files_of("three", folder))
    assert len(files_of("one", folder)) == 1


def test_a_file_of_other_sources_that_cannot_be_removed_is_left(kernels, monkeypatch, folder):
    with monkeypatch.context() as older:
        older.setattr(machine_code, "_stamp", lambda: b"older sources")
        kernels().three(1)
    (old,) = files_of("three", folder)
    old.unlink()
    old.mkdir()  # which nobody can unlink
    said: list[str] = []
    machine_code.prepare([lambda: kernels().three(1)], 0, said.append)
    assert said == [machine_code.COMPILING] and old.is_dir()
    warm = kernels()
    assert (warm.three(1), misses(warm.three)) == (4, 0)


def test_damaged_or_unreadable_files_are_compiled_anew(kernels, folder):
    kernels().three(1)
    for damage in (b"", b"\0" * 100, b"\x80\x05K\x01.", None):
        for path in files_of("three", folder, "nb?"):
            path.unlink()
            if damage is None:
                path.mkdir()  # opening it raises an OSError, for any user
            else:
                path.write_bytes(damage)
        second, said = kernels(), []
        machine_code.prepare([lambda second=second: second.three(1)], 0, said.append)
        assert second.three(1) == 4 and misses(second.three) == 1
        assert any(machine_code.UNREADABLE in line for line in said)
        if damage is not None:
            third = kernels()
            assert third.three(1) == 4 and misses(third.three) == 0


def test_a_lock_is_given_back_where_machine_code_cannot_be_written(kernels, monkeypatch, folder):
    def save(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile._save_data", save)
    said: list[str] = []
    machine_code.prepare([lambda: kernels().three(1)], 0, said.append)
    assert said == [machine_code.COMPILING, machine_code.COMPILING_ANEW]
    assert not is_locked("three", folder)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_lock_is_given_back_where_compiling_raises(kernels, monkeypatch, folder, error):
    def compile_(*_: object) -> None:
        raise error

    module = kernels()
    with monkeypatch.context() as failing:
        failing.setattr(module.part._compiler, "compile", compile_)
        with pytest.raises(error):
            module.one(1)
    assert not is_locked("one", folder) and not is_locked("part", folder)
    assert machine_code._thread_state.locks == 0
    assert module.one(1) == 3


def test_a_lock_is_given_back_where_an_argument_is_wrong(kernels, folder):
    with pytest.raises(TypingError):
        kernels().three("no number")
    assert not is_locked("three", folder)
    assert machine_code._thread_state.locks == 0


def test_a_process_waits_in_vain_only_once_and_says_so(kernels, short_waits, monkeypatch, folder):
    first = kernels()
    first.one(1), first.two(1), first.three(1)
    for path in (folder / "cache").glob("*/*.nb?"):
        path.unlink()
    sleeps: list[float] = []
    clock = SimpleNamespace(  # of this module alone: other threads may sleep, too
        sleep=lambda s: sleeps.append(sleep(s)), monotonic=monotonic
    )
    monkeypatch.setattr(machine_code, "time", clock)
    second, said, counts = kernels(), [], []

    def call(name: str) -> Callable[[], object]:
        def called() -> None:
            getattr(second, name)(1)
            counts.append((len(sleeps), machine_code._thread_state.locks))

        return called

    with contextlib.ExitStack() as held:
        for path in (folder / "cache").glob("*/*.lock"):
            fcntl.flock(held.enter_context(path.open("w")), fcntl.LOCK_EX)
        machine_code.prepare([call("three"), call("one"), call("two")], 0, said.append)
    assert said == [machine_code.COMPILING, machine_code.LOCK_TIMED_OUT]
    assert counts == [(len(sleeps), 0)] * 3 and sleeps
    third = kernels()
    assert (third.one(1), misses(third.one)) == (3, 0)  # written without the lock, too


def test_a_forked_process_does_not_keep_a_lock(tmp_path):
    lock = machine_code._Lock()
    lock.acquire(tmp_path / "kernel.lock")
    assert lock._file is not None
    assert not os.get_inheritable(lock._file)
    copy = os.dup(lock._file)  # as a forked process has one
    lock.release()
    with (tmp_path / "kernel.lock").open("w") as free:
        fcntl.flock(free, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(copy)


def test_a_link_in_the_place_of_a_lock_is_not_followed(tmp_path):
    (tmp_path / "kernel.lock").symlink_to(tmp_path / "elsewhere")
    lock = machine_code._Lock()
    lock.acquire(tmp_path / "kernel.lock")
    lock.release()
    assert not (tmp_path / "elsewhere").exists()


def kind(argument: object) -> object:
    """What Numba decides by which machine code an argument needs."""
    return argument.dtype if isinstance(argument, np.ndarray) else type(argument)


ALGORITHMS = {
    **{
        f"{bits} bits": psgd.DataParallelSGD(gradient_bits=bits)
        for bits in (32, 16, 8, 4, 2.5, 1, 0.1)
    },
    "signs": psgd.DataParallelSGD(gradient_bits=1, code="sign"),
    "bfloat16": psgd.DataParallelSGD(gradient_bits=16, half_format="bfloat16"),
    "bits by samples": psgd.DataParallelSGD(gradient_bits={0: 4, 4: 1}),
    "bits by parameter": psgd.DataParallelSGD(gradient_bits=4, bits_of={"w": 8}),
    "overlap": psgd.DataParallelSGD(gradient_bits=1, overlap=True),
    "averaging": psgd.ModelAveragingSGD(sync_steps=1),
    "block momentum": psgd.BlockMomentumSGD(sync_steps=1, gradient_bits=4),
    "block momentum, overlapped": psgd.BlockMomentumSGD(sync_steps=2, overlap_samples=1),
    "SlowMo": psgd.SlowMo(sync_steps=1),
    "DiLoCo": psgd.DiLoCo(sync_steps=1),
    "low rank": psgd.PowerSGD(rank=1),
}
OPTIMIZERS = [psgd.SGD(lr=0.1), psgd.MomentumSGD(lr=0.1), psgd.NesterovSGD(lr=0.1)]
OPTIMIZERS += [psgd.Adam(lr=0.1), psgd.Adagrad(lr=0.1)]


@pytest.fixture
def used(monkeypatch) -> set[object]:
    """The kernels that are called from now on, each with the kinds of its arguments."""
    used: set[object] = set()

    def spy(name: str) -> Callable[..., object]:
        function = getattr(cpu, name)

        def called(*arguments: object) -> object:
            used.add((name, *map(kind, arguments)))
            return function(*arguments)

        return called

    for name in cpu.__all__:
        monkeypatch.setattr(cpu, name, spy(name))
    return used


@pytest.mark.parametrize(
    ("algorithm", "optimizer", "dtype"),
    [
        *((algorithm, OPTIMIZERS[0], np.float32) for algorithm in ALGORITHMS),
        *(("32 bits", optimizer, np.float32) for optimizer in OPTIMIZERS[1:]),
        ("1 bits", OPTIMIZERS[3], np.float32),
        *((name, OPTIMIZERS[3], np.float64) for name in ("32 bits", "averaging", "low rank")),
    ],
)
def test_no_step_needs_a_kernel_that_the_learner_has_not_prepared(
    algorithm, optimizer, dtype, used
):
    def train(comm: psgd.Communicator) -> tuple[set[object], int]:
        sizes = {"w": (40, 40), "b": (3000,)}
        x = psgd.Parameters({name: np.ones(shape, dtype) for name, shape in sizes.items()})
        with psgd.Learner(x, optimizer, ALGORITHMS[algorithm], comm) as learner:
            comm.barrier()
            prepared = set(used)
            comm.barrier()
            for _ in range(4):
                learner.gradient.flat[...] = 1 + comm.rank
                learner.step(samples=1)
            learner.finish()
        return prepared, comm.size

    results = psgd.simulate(2, train)
    assert all(size == 2 for _, size in results)
    assert used and used - results[0][0] == set()


def test_no_step_of_a_pytorch_learner_needs_a_kernel_that_it_has_not_prepared(used):
    import torch

    def train(comm: psgd.Communicator) -> set[object]:
        model = torch.nn.Linear(80, 80)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        algorithm = psgd.DataParallelSGD(gradient_bits=4)
        with psgd.torch.Learner(model, optimizer, algorithm, comm) as learner:
            comm.barrier()
            prepared = set(used)
            comm.barrier()
            for _ in range(2):
                model(torch.full((1, 80), 1.0 + comm.rank)).sum().backward()
                learner.step(samples=1)
            learner.finish()
        return prepared

    prepared = psgd.simulate(2, train)[0]
    assert {name for name, *_ in used} == {"encode_levels", "decode_levels", "largest_magnitude"}
    assert used - prepared == set()
