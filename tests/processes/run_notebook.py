"""Run a notebook in a kernel of its own, and keep what its cells show.

python tests/processes/run_notebook.py examples/tutorial.ipynb     writes them into the file
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

TIMEOUT_S = 300.0  #: of a cell


def executed(notebook: Any, folder: str | Path, more: Sequence[str] = ()) -> Any:
    """The notebook with the outputs of all its cells, run in this folder.

    Args:
        more: cells to run after those of the notebook, and not in the result.
    Raises:
        nbclient.exceptions.CellExecutionError: a cell has failed.
    """
    cells = [*notebook.cells, *map(nbformat.v4.new_code_cell, more)]
    run = nbformat.v4.new_notebook(cells=cells, metadata=dict(notebook.metadata))
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(
        run, timeout=TIMEOUT_S, kernel_name="python3", resources=resources, record_timing=False
    ).execute()
    run.cells = run.cells[: len(notebook.cells)]
    for cell in run.cells:
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)
    return run


def joined(outputs: Sequence[Any]) -> list[Any]:
    """The outputs as a reader sees them: the texts of a stream in one piece, and of a line that
    was written over only the last state."""
    result: list[Any] = []
    for output in outputs:
        last = result[-1] if result else None
        if last and output.output_type == "stream" == last.output_type and output.name == last.name:
            last.text += output.text
        else:
            result.append(output)
    for output in result:
        if output.output_type == "stream":
            output.text = re.sub(r"[^\n]*\r(?!\n)", "", output.text)
    return result


def main(path: str) -> None:
    """Run the notebook, and write its outputs into the file."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        run = executed(notebook, folder)
    for ours, new in zip(notebook.cells, run.cells, strict=True):
        if ours.cell_type == "code":
            ours.outputs, ours.execution_count = new.outputs, new.execution_count
    nbformat.write(notebook, path)


if __name__ == "__main__":
    main(sys.argv[1])
