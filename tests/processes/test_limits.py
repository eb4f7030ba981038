"""A test that takes too long fails by its name, and the others run; helpers show what they compare.

A hang of ranks is in tests/integration/test_limits.py.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from limits import MOST, patience, times_as_long

from parallel_sgd.communication import without_launcher

TESTS = Path(__file__).parents[1]
HELPERS = [
    file
    for layer in ("unit", "parallel", "integration")
    for file in sorted((TESTS / layer).glob("*.py"))
    if not file.name.startswith(("test_", "conftest"))
]

SLOW = """
import threading, time
import pytest

@pytest.fixture
def slow():
    time.sleep(60)

def test_sleeps():
    time.sleep(60)

def test_waits_for_a_thread():
    threading.Event().wait()

def test_with_a_slow_fixture(slow):
    pass

def test_quick():
    pass
"""

STUBBORN = """
import signal, time

def test_stubborn():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    time.sleep(60)
"""


def tried(folder: Path, text: str, **limits: str) -> tuple[int, str]:
    """Exit code and output of a pytest that has a limit of half a second."""
    (folder / "test_it.py").write_text(text)
    (folder / "conftest.py").write_text("import limits\nlimits.GRACE_S = 0.5\n")
    environ = {"PYTHONPATH": f"{TESTS}:{TESTS.parent}", "PARALLEL_SGD_TEST_PATIENCE": "1"}
    options = ["-q", "-p", "limits", "-p", "no:cacheprovider", "--rootdir", ".", "-c", os.devnull]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-o", "limit_s=0.5", "test_it.py"],
        cwd=folder,
        env=without_launcher(os.environ) | environ,
        capture_output=True,
        text=True,
        timeout=50 * patience(),
    )
    return done.returncode, done.stdout + done.stderr


def test_a_test_that_takes_too_long_fails_and_the_others_run(tmp_path: Path) -> None:
    code, output = tried(tmp_path, SLOW)
    assert code == 1, output
    assert "1 passed, 2 failed, 1 error" in output or "2 failed, 1 passed, 1 error" in output
    for name in ("test_sleeps", "test_waits_for_a_thread", "test_with_a_slow_fixture"):
        assert f"test_it.py::{name} has run longer than 0.5 s" in output
        assert f"test_it.py::{name} - " in output
    assert "ends the run" not in output


def test_one_that_cannot_be_interrupted_ends_the_run_by_its_name(tmp_path: Path) -> None:
    code, output = tried(tmp_path, STUBBORN)
    assert code == 1, output
    assert "test_it.py::test_stubborn has run longer than 0.5 s" in output
    assert "in test_stubborn" in output  # where it hangs
    assert "test_it.py::test_stubborn ends the run" in output


def test_a_busy_machine_has_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for load, expected in ((0.5, 1.0), (5.0, 2.5), (400.0, 8.0)):
        assert times_as_long(load, cores=2) == expected
    monkeypatch.delenv("PARALLEL_SGD_TEST_PATIENCE", raising=False)
    assert 1 <= patience() <= MOST
    monkeypatch.setenv("PARALLEL_SGD_TEST_PATIENCE", "7.5")
    assert patience() == 7.5


def test_assertions_of_helpers_are_rewritten() -> None:
    with_assertions = [
        file
        for file in HELPERS
        if any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(file.read_text())))
    ]
    assert {"cases", "served_training", "jobs"} <= {file.stem for file in with_assertions}
    for file in with_assertions:
        spec = importlib.util.find_spec(file.stem)
        assert spec is not None and spec.origin == str(file), "two modules of one name"
        assert type(spec.loader).__name__ == "AssertionRewritingHook", file.stem
