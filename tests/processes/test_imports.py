"""Modules that are imported only when needed: each test looks into a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest
from limits import patience


def printed(script: str) -> str:
    """What a script prints in a process of its own, which writes nothing to stderr."""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60 * patience()
    )
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("module", ["parallel_sgd", "parallel_sgd.launcher.run"])
def test_importing_the_package_starts_nothing(module):
    script = (
        f"import sys, {module}\n"
        "heavy = {'mpi4py.MPI', 'numba', 'llvmlite', 'cupy', 'torch', 'sklearn', 'matplotlib'}\n"
        "heavy |= {'PIL', 'pyarrow', 'numpy'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert printed(script) == "[]\n"


def test_public_names_are_imported_when_they_are_asked_for():
    script = (
        "import sys, parallel_sgd as psgd\n"
        "print('parallel_sgd.training' in sys.modules, 'torch' in sys.modules)\n"
        "found = [getattr(psgd, name) for name in psgd.__all__]\n"
        "print(len(found) > 40, set(psgd.__all__) <= set(dir(psgd)))\n"
        "print(psgd.compression.register.__name__, hasattr(psgd, 'Lerner'))\n"
        "sys.modules['torch'] = None  # as where there is no PyTorch\n"
        "import inspect\n"
        "print('torch' in dict(inspect.getmembers(psgd)))\n"
    )
    assert printed(script) == "False False\nTrue True\nregister False\nFalse\n"


def test_a_run_imports_nothing_before_its_first_epoch_that_it_does_not_need(tmp_path):
    script = (
        "import os, sys\n"
        "from parallel_sgd.command_line.train import command as train\n"
        "heavy = {'matplotlib', 'pandas', 'sklearn', 'scipy.sparse', 'torch', 'PIL'}\n"
        "def after_an_epoch(*arguments):\n"
        "    print('numba' in sys.modules, sorted(heavy & set(sys.modules)), flush=True)\n"
        "    os._exit(0)\n"
        "train.print_progress = after_an_epoch\n"
        "train.main(['--data', 'digits', '--gradient-bits', '1', '--epochs', '1'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60 * patience(),
    )
    assert done.stdout.endswith("\nTrue []\n"), done.stderr
