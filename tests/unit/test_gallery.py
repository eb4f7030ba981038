"""The pages of the gallery are those of its scripts, and what compares them notices differences.

That the examples run is tested in tests/integration and tests/torch.
"""

from __future__ import annotations

from pathlib import Path

import gallery_runs
import make_gallery
import pytest
from make_gallery import EXAMPLES, FOLDER, INDEX

SCRIPTS = make_gallery.ROOT / "examples" / "gallery"
NO_EXAMPLES = {"drawing", "make_gallery"}


def test_every_script_is_an_example_with_a_page_and_a_figure() -> None:
    listed = {example.name for example in EXAMPLES}
    assert {path.stem for path in SCRIPTS.glob("*.py")} - NO_EXAMPLES == listed
    for suffix in ("md", "png"):
        assert {path.stem for path in FOLDER.glob(f"*.{suffix}")} == listed


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_a_page_has_the_prose_and_code_of_its_script(example: make_gallery.Example) -> None:
    """Else `make gallery` must write it again."""
    output = "".join(f"{line}\n" for line in gallery_runs.shown(example))
    assert example.page.read_text() == make_gallery.page_of(example, output)
    assert gallery_runs.problems_of_figure(example.figure) == []


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_a_script_is_short_and_begins_with_a_title(example: make_gallery.Example) -> None:
    title, prose, code = make_gallery.read(example)
    assert 20 <= len(title) <= 80 and len(prose) > 200
    assert len(code.splitlines()) <= 130
    assert 'add_argument("--figure"' in code


def test_the_index_is_that_of_the_scripts() -> None:
    assert INDEX.read_text() == make_gallery.index()


@pytest.mark.parametrize(
    ("lines", "printed", "tolerance", "same"),
    [
        (["loss 1.00"], ["loss  1.04"], 0.05, True),
        (["loss 1.00"], ["loss 1.06"], 0.05, False),
        (["loss 1.00"], ["loss 7.25"], None, True),
        (["1,000 bytes"], ["980 bytes"], 0.05, True),
        (["loss 1.00"], ["lose 1.00"], None, False),
        (["loss 1.00"], [], None, False),
    ],
)
def test_differences_are_noticed(
    lines: list[str], printed: list[str], tolerance: float | None, same: bool
) -> None:
    assert (gallery_runs.different(lines, printed, tolerance) == []) is same


def test_a_figure_without_a_drawing_is_noticed(tmp_path: Path) -> None:
    from PIL import Image

    path = tmp_path / "figure.png"
    path.write_bytes(b"GIF89a")
    assert gallery_runs.problems_of_figure(path) == ["no PNG"]
    Image.new("RGB", (700, 400), "white").save(path)
    assert gallery_runs.problems_of_figure(path) == ["1 colors", "100.0% white"]


def test_labels_that_would_overlap_are_moved_apart() -> None:
    from drawing import _apart

    assert _apart([0, 100], 10) == [0, 100]
    assert _apart([0, 4, 100], 10) == [-3, 7, 100]
    assert _apart([0, 9, 10], 10) == pytest.approx([-11 / 3, 19 / 3, 49 / 3])
    assert _apart([5.0] * 3, 12) == [-7, 5, 17]
