"""The examples of docs/data.md run, and print what stands beside them."""

from __future__ import annotations

import pathlib
import re

import numpy as np
import pytest

import parallel_sgd as psgd

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "data.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_an_example_prints_what_it_says(block, tmp_path, monkeypatch, capsys):
    for library in ("PIL", "pyarrow"):
        if library in block:
            pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    before = dict(psgd.data.FORMATS)
    try:
        exec(block, {"np": np, "psgd": psgd, "pathlib": pathlib})
    finally:
        psgd.data.FORMATS.clear()
        psgd.data.FORMATS.update(before)
    said = re.findall(r"^ *print\(.*\)  # (.*)$", block, flags=re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == said


def test_there_are_examples():
    assert len(BLOCKS) >= 10
