"""Text as sequences of bytes: every byte predicted once, and none both trained and tested on."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from parallel_sgd.data import (
    ByteSequences,
    library_sequences,
    library_source,
    text_sequences,
)
from parallel_sgd.errors import UserError

TEXT = np.random.default_rng(0).bytes(101)


@pytest.mark.parametrize("context", [1, 3, 10, 50, 99, 100])
def test_every_byte_is_predicted_once_from_those_before_it(context):
    sequences = ByteSequences(TEXT, context)
    assert len(sequences) == 100 // context
    x, y = sequences.arrays()
    assert x.dtype == y.dtype == np.int64 and x.shape == y.shape == (len(sequences), context)
    predicted = len(sequences) * context
    assert bytes(x.astype("u1").ravel()) == TEXT[:predicted]
    assert bytes(y.astype("u1").ravel()) == TEXT[1 : predicted + 1]


@pytest.mark.parametrize("text", [b"", b"a", TEXT[:5]])
def test_a_text_shorter_than_a_sequence_has_none(text):
    sequences = ByteSequences(text, 5)
    assert len(sequences) == 0
    assert [part.shape for part in sequences.read(np.arange(0))] == [(0, 5), (0, 5)]


def test_what_does_not_fit_is_refused():
    for message, call in [
        ("context=0 must be a whole number, at least 1", lambda: ByteSequences(TEXT, 0)),
        ("text='abc' must be bytes", lambda: ByteSequences("abc", 1)),
    ]:
        with pytest.raises(UserError, match="^" + message):
            call()


def test_a_data_loader_deals_them():
    sequences = ByteSequences(TEXT, 10)
    x, y = next(iter(DataLoader(sequences, batch_size=4)))
    assert x.dtype == y.dtype == torch.int64 and x.shape == y.shape == (4, 10)
    assert (x.numpy() == sequences.arrays()[0][:4]).all()
    shuffled = DataLoader(sequences, batch_size=3, shuffle=True)
    assert sorted(int(y[-1]) for _, ys in shuffled for y in ys) == sorted(TEXT[10::10])


def test_the_library_is_split_as_for_windows():
    for sequences, windows in zip(
        library_sequences(16, most_bytes=200_000),
        library_source(most_bytes=200_000),
        strict=True,
    ):
        assert len(sequences) == (len(windows) - 1) // 16
        predicted = windows.arrays(dtype=None)[1]
        assert (sequences.arrays()[1].ravel() == predicted[1 : len(sequences) * 16 + 1]).all()
    with pytest.raises(UserError, match=r"context=9999 must be less than .* data: \d+ and \d+"):
        library_sequences(9999, most_bytes=20_000)


@pytest.fixture
def folder(tmp_path):
    files = {"b.txt": b"5678", "a/z.txt": b"01234", "a.md": b"mark", "c.txt": b"9", "c.py": b"no"}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


def texts(folder, **options):
    return [bytes(part._bytes) for part in text_sequences(folder, 1, **options)]


def test_a_folders_files_are_joined_in_order_and_split_by_bytes(folder):
    assert texts(folder, test=0.3) == [b"0123456", b"789"]
    assert texts(str(folder), test=0.5, suffixes=[".txt", ".md"]) == [b"mark012", b"3456789"]
    assert b"".join(texts(folder, suffixes=("",), test=0.4)) == b"mark01234" + b"5678no9"


def test_the_order_does_not_come_from_the_file_system(folder, request):
    expected = texts(folder, test=0.5)
    request.getfixturevalue("folders_backwards")
    assert texts(folder, test=0.5) == expected


def test_what_cannot_be_read_is_one_line(folder):
    for message, place, options in [
        ("/no cannot be read: No such file", folder / "no", {}),
        ("must hold files whose names end in .tex or .c", folder, {"suffixes": (".tex", ".c")}),
        ("suffixes='.txt' must be a collection of texts", folder, {"suffixes": ".txt"}),
        ("folder=5 must be the path of a folder", 5, {}),
        ("test=1 must be a finite number, at least 0 and less than 1", folder, {"test": 1}),
        ("context=1 must be less than .* data: 10 and 0", folder, {"test": 0}),
        ("context=0 must be a whole number", folder, {"context": 0}),
    ]:
        with pytest.raises(UserError, match=message) as caught:
            text_sequences(place, **{"context": 1, **options})
        assert "\n" not in str(caught.value)
    (folder / "gone.txt").symlink_to(folder / "nowhere")
    with pytest.raises(UserError, match=r"gone.txt cannot be read: No such file"):
        text_sequences(folder, 1)
    (folder / "gone.txt").unlink()
    os.mkfifo(folder / "pipe.txt")
    with pytest.raises(UserError, match=r"pipe.txt must be a regular file: it is a pipe"):
        text_sequences(folder, 1)
