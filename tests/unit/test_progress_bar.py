"""Where the progress bar is drawn: on the terminal, in a cell as text, or there as a widget."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from parallel_sgd.training.session import progress_bar
from parallel_sgd.training.session.progress_bar import ProgressBar

pytest.importorskip("tqdm")


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """IPython as a kernel of Jupyter, and not on a terminal."""
    ipython = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", ipython)


def widgets(monkeypatch: pytest.MonkeyPatch, *, installed: bool) -> None:
    right = importlib.util.find_spec
    monkeypatch.setattr(
        progress_bar.importlib.util,
        "find_spec",
        lambda name: (object() if installed else None) if name == "ipywidgets" else right(name),
    )


def test_on_a_terminal_the_bar_is_removed_and_what_is_printed_goes_to_its_stream(capsys):
    bar = ProgressBar(100, 0)
    bar.show(50)
    with bar.hidden():
        print("a row")
    bar.close()
    out, err = capsys.readouterr()
    assert out == ""
    assert "a row\n" in err and "100" in err
    assert err.split("\r")[-2].strip() == ""  # written over


def test_in_a_cell_without_widgets_the_bar_is_text_that_stays(kernel, monkeypatch, capsys):
    widgets(monkeypatch, installed=False)
    bar = ProgressBar(100, 0)
    bar.show(100)
    with bar.hidden():
        print("a row")
    bar.close()
    out, err = capsys.readouterr()
    assert err == ""
    assert "a row\n" in out and "100%" in out.splitlines()[-1]


def test_in_a_cell_with_widgets_the_bar_is_one(kernel, monkeypatch, capsys):
    made: dict[str, Any] = {}
    module = ModuleType("tqdm.notebook")
    module.tqdm = lambda **options: made.update(options) or SimpleNamespace(n=0)
    monkeypatch.setitem(sys.modules, "tqdm.notebook", module)
    widgets(monkeypatch, installed=True)
    bar = ProgressBar(100, 20)
    assert (made["total"], made["initial"], made["leave"]) == (100, 20, True)
    with bar.hidden():  # a widget needs no place on the lines
        print("a row")
    assert capsys.readouterr() == ("a row\n", "")


def test_ipython_on_a_terminal_is_no_notebook(monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=SimpleNamespace))
    assert not progress_bar.in_notebook()
