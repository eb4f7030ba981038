"""Runs an example of the gallery and compares the outcome with the example's page."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from limits import patience

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples" / "gallery"))

import make_gallery  # noqa: E402
from make_gallery import EXAMPLES, Example  # noqa: E402

TIMEOUT_S = 90  #: of an example on an idle machine
MOST_BYTES = 60_000  #: of a figure
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")


def names(launcher: str) -> list[str]:
    """The examples whose ranks this launcher starts."""
    return [example.name for example in EXAMPLES if example.launcher == launcher]


def named(name: str) -> Example:
    (example,) = (example for example in EXAMPLES if example.name == name)
    return example


def shown(example: Example) -> list[str]:
    """The lines below the command on an example's page."""
    command = re.escape(f"$ {example.command}\n")
    (block,) = re.findall(
        rf"^```console\n{command}(.*?)^```", example.page.read_text(), re.S | re.M
    )
    return block.splitlines()


def words(line: str) -> str:
    """A line without its numbers, and with single spaces."""
    return " ".join(NUMBER.sub("N", line).split())


def numbers(line: str) -> list[float]:
    return [float(number.replace(",", "")) for number in NUMBER.findall(line)]


def different(lines: list[str], printed: list[str], tolerance: float | None) -> list[str]:
    """Lines of a page unlike those that were printed, in their words or their numbers."""
    if len(lines) != len(printed):
        return [f"{len(lines)} lines on the page, {len(printed)} printed"]
    return [
        f"page: {line}; printed: {new}"
        for line, new in zip(lines, printed, strict=True)
        if words(line) != words(new)
        or (
            tolerance is not None
            and numbers(line) != pytest.approx(numbers(new), rel=tolerance, abs=1e-9)
        )
    ]


def problems_of_figure(path: Path) -> list[str]:
    """Why a file is no figure of the gallery: no PNG, nothing drawn, too large."""
    from PIL import Image

    data = path.read_bytes()
    if not data.startswith(b"\x89PNG\r\n\x1a\n"):
        return ["no PNG"]
    with Image.open(path) as image:
        width, height = image.size
        pixels = np.asarray(image.convert("RGB"))
    colors = len(np.unique(pixels.reshape(-1, 3), axis=0))
    white = float((pixels == 255).all(axis=-1).mean())
    return [
        *([f"{width} by {height} pixels"] if width < 500 or height < 250 else []),
        *([f"{colors} colors"] if colors < 10 else []),
        *([f"{white:.1%} white"] if white > 0.99 else []),
        *([f"{len(data):,} bytes"] if len(data) > MOST_BYTES else []),
    ]


def check(name: str, folder: Path) -> None:
    """Run an example's command, and compare what it prints and draws with its page."""
    example, figure = named(name), folder / "figure.png"
    output = make_gallery.run(example, figure, TIMEOUT_S * patience())
    print(output)
    assert different(shown(example), output.splitlines(), example.tolerance) == []
    assert problems_of_figure(figure) == []
