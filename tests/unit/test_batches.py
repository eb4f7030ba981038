"""How many samples batches have, and how they are cut into pieces."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from parallel_sgd import UserError
from parallel_sgd.data import padded
from parallel_sgd.training.session.batches import mapped, pieces_of, samples_in


class Pair(NamedTuple):
    x: Any
    y: Any


def rows(n: int) -> torch.Tensor:
    return torch.arange(2.0 * n).reshape(n, 2)


PACKED = pack_sequence([torch.zeros(3), torch.zeros(1)])  # 2 sequences, 4 tokens
PADDED = padded([np.zeros(3), np.zeros(1)])

COUNTED: dict[str, tuple[Any, int]] = {
    "a tensor": (rows(5), 5),
    "two inputs": ([[rows(5), rows(5)], torch.zeros(5)], 5),
    "a dict of dicts": ({"x": {"ids": rows(5), "mask": np.ones((5, 3))}, "y": rows(5)}, 5),
    "named": (Pair(rows(5), [rows(5)]), 5),
    "beside them what has no axis": (("train", torch.tensor(0.1), None, rows(5), 3), 5),
    "a string a sample": ([["a", "b", "c"], rows(3)], 3),
    "strings alone": (["a", "b", "c"], 3),
    "one string alone": ([["a"]], 1),
    "a constant text": ([["train"], rows(5), (b"x",)], 5),
    "two inputs, two targets": ([[rows(5), rows(5)], [torch.zeros(5), torch.zeros(5)]], 5),
    "an input and a weight": ([[rows(5), torch.tensor(0.5)], [torch.zeros(5), None]], 5),
    "none": ((rows(0), torch.zeros(0)), 0),
    "padded": ((PADDED, PADDED), 4),
    "packed, a target a sequence": ((PACKED, torch.zeros(2)), 2),
    "packed, a target a token": ((PACKED, torch.zeros(4)), 4),
}


@pytest.mark.parametrize("name", COUNTED)
def test_samples(name):
    batch, samples = COUNTED[name]
    assert samples_in(batch) == samples


IMAGES = [torch.zeros(3, 8, 8), torch.zeros(3, 9, 9)]
ONE_A_SAMPLE = r"two lists of 2 entries, of arrays and of values without an axis, .*; give samples="

UNTOLD: dict[str, tuple[Any, str]] = {
    "images": ((IMAGES, [torch.tensor(1), torch.tensor(0)]), ONE_A_SAMPLE),
    "images by name": ({"x": IMAGES, "y": (torch.tensor(1), torch.tensor(0))}, ONE_A_SAMPLE),
    "images to detect in": (
        (
            tuple(IMAGES),
            [{"image_id": torch.tensor(i), "boxes": torch.zeros(3, 4)} for i in (0, 1)],
        ),
        ONE_A_SAMPLE,
    ),
    "sequence first": ((torch.zeros(7, 5), torch.zeros(5)), r"batch\[0\] has 7, and batch\[1\] ha"),
    "in depth": ({"x": {"ids": rows(5)}, "y": [rows(5), rows(4)]}, r"\['x'\]\['ids'\] has 5, .*4"),
    "padded, a target a sequence": ((PADDED, torch.zeros(2)), r"batch\[0\] has 4, and .* has 2"),
    "packed alone": ((PACKED,), r"batch\[0\] has 2 or 4; give samples="),
    "packed both": ((PACKED, PACKED), r"batch\[0\] has 2 or 4; give samples="),
    "no axis": (torch.tensor(0.5), r"nothing in a torch\.Tensor has an axis; give samples="),
    "nothing": ([], r"nothing in a list has an axis"),
    "an object": ([object()], r"nothing in a list has an axis"),
}


@pytest.mark.parametrize("name", UNTOLD)
def test_samples_that_cannot_be_told(name):
    batch, text = UNTOLD[name]
    with pytest.raises(UserError, match=text) as raised:
        samples_in(batch)
    assert "samples=" in str(raised.value) and "\n" not in str(raised.value)
    assert samples_in(batch, lambda given: 3 if given is batch else 0) == 3


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_have_no_shape():
    batch = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    with pytest.raises(UserError, match=r"nothing in a torch\.Tensor has an axis; give samples="):
        samples_in(batch)
    assert samples_in([batch, torch.zeros(2)]) == 2


@pytest.mark.parametrize("given", [-1, 2.5, None, "3"])
def test_samples_that_are_no_number(given):
    with pytest.raises(UserError, match=r"samples\(batch\)=.* must be a whole number"):
        samples_in(rows(5), lambda _: given)


def test_a_constant_text_goes_with_every_piece():
    assert [piece[1] for piece in pieces_of((rows(3), ["train"]), 2, 3)] == [["train"]] * 2


def test_pieces_are_nested_as_the_batch_is():
    batch = ({"a": rows(5), "b": [rows(5), 3]}, Pair(rows(5), ["a", "b", "c", "d", "e"]))
    pieces = pieces_of(batch, 2, 5)
    assert [samples_in(piece) for piece in pieces] == [2, 2, 1]
    for start, (inputs, target) in zip((0, 2, 4), pieces, strict=True):
        for part in (inputs["a"], inputs["b"][0], target.x):
            assert torch.equal(part, rows(5)[start : start + 2])
        assert inputs["b"][1] == 3 and target.y == ["a", "b", "c", "d", "e"][start : start + 2]
    assert pieces_of(batch, None, 5) == [batch] and pieces_of(batch, 5, 5) == [batch]


@pytest.mark.parametrize(
    "part", [torch.zeros(7, 5), PADDED, PACKED], ids=lambda p: type(p).__name__
)
def test_what_cannot_be_cut(part):
    with pytest.raises(UserError, match=r"microbatch_size=2 must be None .*: batch\[1\] has"):
        pieces_of((torch.zeros(4), part), 2, 4)


def test_collections_stay_what_they_are():
    batch = [Pair(1, (2,)), {"a": 3}, PADDED]
    assert mapped(lambda part: part, batch) == batch
    assert isinstance(mapped(str, batch)[0], Pair) and mapped(str, batch)[1] == {"a": "3"}
