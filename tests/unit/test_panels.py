"""Figures: labels of lines and points do not cover each other, and contenders keep their colors."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from benchmarks.convergence.contenders import CONTENDERS as OF_STUDIES
from benchmarks.panels import COLORS, Label, label_ends, label_points, panels, spread
from benchmarks.speedup.contenders import CONTENDERS as OF_SPEEDUP
from benchmarks.training.figures import SHOWN


@pytest.fixture
def drawn(monkeypatch):
    """Return the figures that are closed, in order."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    closed = []
    monkeypatch.setattr(pyplot, "close", closed.append)
    return closed


def boxes(figure):
    from matplotlib.text import Text

    figure.draw_without_rendering()
    texts = [text for axes in figure.axes for text in axes.texts if text.get_text()]
    return [Text.get_window_extent(text) for text in texts]  # without the line to the point


@pytest.mark.parametrize("label", [label_ends, label_points])
def test_labels_do_not_cover_each_other(label, drawn, tmp_path):
    names = ("32 bit", "4 bit", "1 bit", "PowerSGD", "block momentum", "DDP")
    with panels({"": "six lines"}, tmp_path / "f.png", "lines that end together") as grid:
        for i, name in enumerate(names):
            grid[""].plot([0, 1, 2], [2.0, 1.0, 0.5 + i / 50], color=COLORS[name])
        ends = [Label(name, 2, 0.5 + i / 50, COLORS[name]) for i, name in enumerate(names)]
        label(grid[""], ends)
    found = boxes(drawn[0])
    assert len(found) == len(names)
    inside = drawn[0].bbox
    assert all(inside.x0 <= box.x0 and box.x1 <= inside.x1 for box in found)
    assert not [pair for pair in combinations(found, 2) if pair[0].padded(-1).overlaps(pair[1])]


def test_places_are_far_enough_apart():
    places = spread([0.0, 0.1, 0.2, 5.0], [1.0, 2.0, 1.0])
    assert (np.diff(places) >= np.array([1.0, 2.0, 1.0]) - 1e-9).all()
    assert places[-1] == 5.0 and places[:3].mean() == pytest.approx(0.1)


def test_a_contender_has_the_same_color_in_every_figure():
    of_studies = {"32": "32 bit", "4": "4 bit", "1": "1 bit", "PowerSGD-4": "PowerSGD rank 4"}
    of_studies |= {"BMUF": "block momentum", "averaging": "model averaging", "SlowMo": "SlowMo"}
    for name, other in of_studies.items():
        assert OF_STUDIES[name].style[0] == OF_SPEEDUP[other].color
    assert COLORS[SHOWN[False]["1 bit"]] == OF_SPEEDUP["1 bit"].color
    assert COLORS[SHOWN[False]["DDP, PowerSGD rank 4"]] == OF_SPEEDUP["PowerSGD rank 4"].color
    assert all(len(methods) <= 6 for methods in SHOWN.values())
    for methods in SHOWN.values():
        assert len({COLORS[method] for method in methods.values()}) == len(methods)
