"""Values by patterns of names, or by size: the first that matches counts."""

from __future__ import annotations

import pytest

from parallel_sgd import UserError
from parallel_sgd.patterns import Patterns

SIZES = {"W": 1200, "layers[0].bias": 30, "b": 3}


@pytest.mark.parametrize(
    ("patterns", "values"),
    [
        ({"*": 1, "b": 2}, [1, 1, 1]),
        ({"b": 2, "*": 1}, [1, 1, 2]),
        ({"*.bias": 1}, [None, 1, None]),
        ({"layers[0].bias": 1, "layers[[]0].bias": 2}, [None, 1, None]),
        ({"w": 1, "B": 2, "bia": 3}, [None, None, None]),
        ({"<31": 1, "<1200": 2}, [None, 1, 1]),
        ({"<30": 1, "[!W]": 2, "?": 3}, [3, None, 1]),
        ({"<": 1, "<3x": 2, "<-1": 3}, [None, None, None]),
    ],
)
def test_what_matches(patterns, values):
    of = Patterns(patterns)
    assert [of.value_of(name, size) for name, size in SIZES.items()] == values


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ({"W": 1, "*bias*s": 2}, "bits_of: '*bias*s' matches no parameter of W (1200 values), "),
        ({"<3": 1}, "bits_of: '<3' matches no parameter of W (1200 values), layers[0].bias (30"),
        (
            {"<100": 1, "b": 2},
            "bits_of: 'b' has no effect: patterns before it match all that it does: b",
        ),
    ],
)
def test_a_pattern_that_counts_for_nothing(patterns, message):
    with pytest.raises(UserError) as caught:
        Patterns(patterns).require_matches("bits_of", SIZES)
    assert str(caught.value).startswith(message)


def test_a_long_list_of_names_is_cut():
    with pytest.raises(UserError, match=r"x29 \(1 values\), and 70 more$"):
        Patterns({"y": 1}).require_matches("bits_of", {f"x{i}": 1 for i in range(100)})
