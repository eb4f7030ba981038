"""Ranks as threads in a kernel of Jupyter: the tutorial, and what a cell shows if something goes
wrong. A real kernel is started."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")
nbclient = pytest.importorskip("nbclient")

from limits import patience  # noqa: E402
from nbclient.exceptions import CellExecutionError  # noqa: E402
from run_notebook import executed, joined  # noqa: E402

TUTORIAL = Path(__file__).parents[2] / "examples" / "tutorial.ipynb"
LARGEST_BYTES = 100_000

#: Run after the tutorial's cells: what its prose says.
HOLDS = """
four, one, bit = rows_32[-1], rows_serial[-1], rows_1[-1]
assert abs(four.metrics["test_loss"] - one.metrics["test_loss"]) < 1e-4
assert bit.metrics["test_accuracy"] > 0.94
assert one.bytes_sent == 0 and four.bytes_sent > 25 * bit.bytes_sent
"""


@pytest.fixture(autouse=True)
def own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reads no settings of the user's."""
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))


def texts(cell: Any) -> Iterator[str]:
    """What a cell shows, without numbers with a point, which differ between machines, and bars."""
    for output in joined(cell.outputs):
        if output.output_type == "stream":
            text = re.sub(r"(?m)^.*%\|.*\n", "(a bar)\n", output.text)
        else:
            text = output.data.get("text/plain", "")
            assert ("image/png" in output.data) == text.startswith("<Figure")
        yield re.sub(r"\d+\.\d+", "#", text)


def test_the_tutorial_shows_what_is_kept(tmp_path: Path) -> None:
    assert TUTORIAL.stat().st_size < LARGEST_BYTES
    kept = nbformat.read(TUTORIAL, as_version=4)
    run = executed(kept, tmp_path, [HOLDS])
    assert [[*texts(cell)] for cell in run.cells if cell.cell_type == "code"] == [
        [*texts(cell)] for cell in kept.cells if cell.cell_type == "code"
    ]
    assert any(
        "(a bar)" in text for cell in run.cells[:6] if "outputs" in cell for text in texts(cell)
    )
    program = [sys.executable, "digits_program.py"]
    limit = 120 * patience()
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=limit)
    assert done.returncode == 0, done.stderr
    assert "test_accuracy" in done.stdout


def test_a_cell_that_fails_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(CellExecutionError, match="AssertionError"):
        executed(nbformat.v4.new_notebook(), tmp_path, ["assert 1 + 1 == 3"])


class Kernel:
    """A kernel that runs cells one after the other."""

    def __init__(self, folder: Path) -> None:
        self._notebook = nbformat.v4.new_notebook()
        self._client = nbclient.NotebookClient(
            self._notebook,
            timeout=int(120 * patience()),
            kernel_name="python3",
            allow_errors=True,
            resources={"metadata": {"path": str(folder)}},
        )

    def __enter__(self) -> Kernel:
        self._started = self._client.setup_kernel()
        self._started.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._started.__exit__(*error)

    def run(self, source: str, *, interrupted: bool = False) -> tuple[str, str]:
        """Run a cell; what it prints, and the error that it shows, without colors.

        Args:
            interrupted: by the user, as soon as the cell has printed something.
        """
        cell = nbformat.v4.new_code_cell(source)
        self._notebook.cells.append(cell)
        ended = threading.Event()

        def interrupt() -> None:
            while not cell.outputs:
                if ended.wait(0.05):
                    return
            asyncio.run(self._client.km.interrupt_kernel())

        if interrupted:
            threading.Thread(target=interrupt).start()
        try:
            self._client.execute_cell(cell, len(self._notebook.cells) - 1)
        finally:
            ended.set()
        outputs = joined(cell.outputs)
        printed = "".join(each.text for each in outputs if each.output_type == "stream")
        errors = ["\n".join(each.traceback) for each in outputs if each.output_type == "error"]
        return printed, re.sub(r"\x1b\[[\d;]*m", "", "\n".join(errors))


TRAIN = """
import threading
import parallel_sgd as psgd

def train(comm, epochs=2, **options):
    training, _ = psgd.data.digits()
    model = psgd.models.MLP([64, 16, 10], seed=0)
    with psgd.Learner(model.parameters, psgd.SGD(lr=0.3), psgd.DataParallelSGD(), comm) as learner:
        options = {"learner": learner, "objective": model, "train": training, **options}
        rows = psgd.TrainingSession(minibatch_size=64, epochs=epochs, **options).run()
    comm.print(f"rank {comm.rank} of {comm.size}: {rows[-1].samples} samples")

def ranks():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rank")]
"""
FOREVER = """
def forever(comm):
    train(comm, epochs=10**6, report=lambda row: row.epoch == 1 and print("trains"))

def spin(comm):
    comm.print("spins")
    while True:
        pass
"""
#: Ranks of a busy machine end later after an interrupt.
PATIENT = f"""
import parallel_sgd.communication.threads.communicator as threads
threads.PYTHON_S *= {patience()}
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with Kernel(tmp_path_factory.mktemp("kernel")) as started:
        assert started.run(TRAIN + FOREVER + PATIENT) == ("", "")
        yield started


SHOWN = "psgd.simulate(3, lambda comm: train(comm, progress_bar=True, report=show)) and None"


def test_rank_0_prints_into_the_cell_and_shows_a_bar(kernel: Kernel) -> None:
    kernel.run("def show(row):\n    print(f'row of {row.samples}')")
    printed, error = kernel.run(SHOWN)
    assert error == ""
    lines = printed.splitlines()
    assert lines[:2] == ["row of 1437", "row of 2874"]
    assert lines[2].startswith("100%|") and "samples/s" in lines[2]
    assert lines[3:] == ["rank 0 of 3: 2874 samples"]


def test_cells_that_await_can_train(kernel: Kernel) -> None:
    source = "import asyncio\nawait asyncio.sleep(0)\npsgd.simulate(2, train) and None\n"
    assert kernel.run(source + "asyncio.get_running_loop().is_running() and print('runs')") == (
        "rank 0 of 2: 2874 samples\nruns\n",
        "",
    )


@pytest.mark.parametrize(
    "cell",
    [
        "psgd.simulate(3, forever)",
        "psgd.simulate(1, forever)",
        "psgd.simulate(2, spin)",
    ],
)
def test_an_interrupt_ends_the_ranks_and_the_kernel_stays(kernel: Kernel, cell: str) -> None:
    printed, error = kernel.run(cell, interrupted=True)
    assert printed.strip() in ("trains", "spins")
    assert error.count("KeyboardInterrupt") >= 1 and len(error.splitlines()) < 30, error
    assert kernel.run("ranks()") == ("", "")
    assert kernel.run("print(ranks())") == ("[]\n", "")
    assert kernel.run("psgd.simulate(2, train) and None")[0] == "rank 0 of 2: 2874 samples\n"


def test_an_exception_of_one_rank_is_one_error_that_names_the_rank(kernel: Kernel) -> None:
    source = "def fail(comm):\n    comm.barrier()\n    [1, 2][comm.rank]\n    comm.barrier()\n"
    printed, error = kernel.run(source + "psgd.simulate(3, fail)")
    assert printed == ""
    assert error.count("Traceback (most recent call last)") == 1
    assert error.endswith("IndexError: list index out of range\nraised on rank 2 of 3")


def test_a_mistake_is_the_users_own_lines_and_one_line(kernel: Kernel) -> None:
    printed, error = kernel.run("psgd.simulate(3, lambda comm: train(comm, epochs=0))")
    assert printed == ""
    *frames, line = error.splitlines()
    assert line == "SharedError: epochs=0 must be a whole number, at least 1 (on ranks 0, 1, 2)"
    assert [frame.partition(":")[0] for frame in frames] == [
        "line 1, in <module>",
        "line 1, in <lambda>",
        "line 9, in train",
    ]


def test_a_run_folder_with_a_curve_leaves_figures_in_cells(kernel: Kernel) -> None:
    source = "import matplotlib.pyplot as plt\nbackend = plt.get_backend()\n"
    run = "psgd.simulate(2, lambda comm: train(comm, folder=psgd.RunFolder('run', plot=True)))\n"
    shown = "print(plt.get_backend() == backend, backend)\n"
    printed, error = kernel.run(source + run + shown)
    assert error == ""
    assert "True" in printed and "inline" in printed
