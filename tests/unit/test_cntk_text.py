"""CNTK's text format: what is read back, what is refused and how it is named, and damaged bytes."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from damaged import NUMBER, damaged, repeatable
from hypothesis import given
from numpy.testing import assert_array_equal as same

from parallel_sgd import Communicator, simulate
from parallel_sgd.data import (
    Dense,
    Padded,
    Sparse,
    load,
    load_cntk_sequences,
    load_cntk_text,
    task_of,
)
from parallel_sgd.errors import UserError

SINGLE = b"""\
|# four samples, of which one is empty
|x 1 2.5 -3e-1\t|label 2:1 |# "|#" is escaped: |#x 9 9 9
|label 0:1|x\t4  5 +6 \r

|#1|label 1:1 |#|x 7 8 9|# |# bye
|x 0 0 .5 |label 3:1"""
X = [[1, 2.5, -0.3], [4, 5, 6], [7, 8, 9], [0, 0, 0.5]]
STREAMS = {"features": Dense(3, "x"), "label": Sparse(4, one_hot=True)}

SEQUENCES = b"""\
7\t|word 3:1 |tag 1 0 |whole 2
7|word 5:1\t|tag 0 1 |# x |#
 |word 0:1
7 |tag 0 1
8 |whole -1 |tag 1 0|word 2:1
7 |word 1:1|tag 1 0 |whole 5
|word 1:1
"""
TAGGED = {
    "word": Sparse(6, one_hot=True),
    "whole": Dense(1, per_sequence=True),
    "tag": Dense(2, one_hot=True),
}


@pytest.fixture
def written(tmp_path):
    def written(content):
        (tmp_path / "a.ctf").write_bytes(content)
        return tmp_path / "a.ctf"

    return written


def test_samples(written):
    path = written(SINGLE)
    data = load_cntk_text(path, STREAMS)
    x, y = data.read(np.array([3, 0, 1, 2]), classes=4)
    assert x.dtype == np.float32 and y.dtype == np.int64
    same(x, np.array(X, np.float32)[[3, 0, 1, 2]])
    assert y.tolist() == [3, 2, 0, 1]
    assert data.targets(np.arange(4)).tolist() == [2, 0, 1, 3]
    assert task_of(data).classes == 4
    same(load(path, streams=STREAMS).read(np.arange(4))[0], np.array(X, np.float32))
    plain = {"features": {"dense": 3, "alias": "x"}, "label": {"sparse": 4, "one_hot": True}}
    same(load(path, streams=plain).arrays()[1], data.arrays()[1])
    with pytest.raises(UserError, match="streams=None must be a mapping from names to streams"):
        load(path)
    x, y = load_cntk_text(path, {"label": Sparse(4), "x": Dense(3)}).arrays(dtype=None)
    assert x.dtype == y.dtype == np.float64
    assert x.tolist() == np.eye(4)[[2, 0, 1, 3]].tolist() and y.tolist() == X
    empty, _ = data.read(np.empty(0, np.int64))
    assert empty.shape == (0, 3)


def test_streams_that_are_skipped(written):
    """And one of them whose name begins another's."""
    content = b"1 |a 1 |b 5 |ab x y z\n2 |ab |a 2 |b 6\n"
    data = load_cntk_text(written(content), {"a": Dense(1), "b": Dense(1), "ab": None})
    assert [part.tolist() for part in data.arrays()] == [[[1], [2]], [[5], [6]]]
    sequences = load_cntk_sequences(written(content), {"a": Dense(1), "ab": None, "b": Dense(1)})
    assert sequences.lengths.tolist() == [1, 1]


def test_sequences(written):
    data = load_cntk_sequences(written(SEQUENCES), TAGGED)
    assert data.lengths.tolist() == [3, 1, 2]  # the third has the first one's id
    x, y = data.read(np.array([1, 0, 2]), classes=2, y_fill=-100)
    assert x.lengths.tolist() == [1, 3, 2]
    assert x.values.tolist() == [[2, 0, 0], [3, 5, 0], [1, 1, 0]]
    assert isinstance(y, Padded)
    assert y.lengths.tolist() == [1, 3, 1]
    assert y.values.tolist() == [[0, -100, -100], [0, 1, 1], [0, -100, -100]]
    whole = data.read_streams(np.array([2, 0, 1]))["whole"]
    assert whole.tolist() == [[5], [2], [-1]]
    same(x.mask.sum(1), x.lengths)


REFUSED = [
    (b"|x 1 2 |label 0:1", "a sample has 2 values: must be 3"),
    (b"|x 1 2 3 4 |label 0:1", "a sample has 4 values: must be 3"),
    (b"|x |label 0:1", "a sample has 0 values: must be 3"),
    (b"|x 1 2 a|label 0:1", "'a' must be a finite number, in float32"),
    (b"|x 1 2 1_0|label 0:1", "'1_0' must be a finite number, in float32"),
    (b"|x 1 nan 2 |label 0:1", "'nan' must be a finite number, in float32"),
    (b"|x 1 2 1e39 |label 0:1", "'1e39' must be a finite number, in float32"),
    (b"|x 1 2 3 |label 4:1", "index 4 is out of range: must be from 0 to 3"),
    (b"|x 1 2 3 |label -1:1", "'-1:1' must be index:value"),
    (b"|x 1 2 3 |label 1", "'1' must be index:value"),
    (b"|x 1 2 3 |label 1:1:1", "'1:1' must be a finite number, in float64"),
    (b"|x 1 2 3 |label 1:", "'' must be a finite number, in float64"),
    (b"|x 1 2 3 |label 0:1 0:0", "a sample names an index twice"),
    (b"|x 1 2 3 |label 0:1 1:1", "'0:1 1:1' must be a single 1, and zeros"),
    (b"|x 1 2 3 |label 0:.5 1:.5", "'0:.5 1:.5' must be a single 1, and zeros"),
    (b"|x 1 2 3 |label 0:2", "'0:2' must be a single 1, and zeros"),
    (b"|x 1 2 3 |label", "'' must be a single 1, and zeros"),
    (b"|x 1 2 3 |label 99999999999999999999:1", "an index must be index:value"),
    (b"|x 1 2 3 |y 0:1", "stream 'y' is not one of x, label (None as a stream skips it)"),
    (b"|x 1 2 3", "the sequence has no sample of 'label'"),
    (b"|x 1 2 3|x 1 2 3|label 0:1", "the sequence has a second sample of 'features' (load_cntk_s"),
    (b"| x 1 2 3|label 0:1", "the name of a stream must follow"),
    (b"|x 1 2 3|label 0:1|", "the name of a stream must follow"),
    (b"x 1 2 3|label 0:1", "must begin with a sequence id or \"|\": it begins with 'x 1 2 3'"),
    (b"3 |x 1 2 3|label 0:1", "has the sequence id '3', but the first line has none"),
]


@pytest.mark.parametrize(("line", "message"), REFUSED)
def test_what_is_wrong_is_named_by_line_and_byte(written, line, message):
    good = b"|label 0:1 |x 1 2 3\n"
    path = written(good + b"\n" + line + b"\n" + good)
    data = load_cntk_text(path, STREAMS)
    data.read(np.array([0, 2]))
    with pytest.raises(UserError) as caught:
        data.read(np.array([0, 1]))
    assert str(caught.value).startswith(f"{path}, line 3 (byte 21): {message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("lines", "number", "message"),
    [
        (b"1 |tag 1 0|word 1:1|whole 1\n1 |whole 1", 3, "has a second sample of 'whole'"),
        (b"1 |tag 1 0|word 1:1|word 1:1|whole 1", 2, "a line has two samples of 'word'"),
        (b"1 |tag 1 0|word 1:1", 2, "the sequence has no sample of 'whole'"),
        (b"1 |word 1:1|tag 1 0|whole 1\n 1 |word 1:1", 3, "must begin with a sequence id or"),
    ],
)
def test_sequences_that_are_refused(written, lines, number, message):
    data = load_cntk_sequences(written(b"0 |tag 1 0|word 1:1|whole 1\n" + lines), TAGGED)
    with pytest.raises(UserError, match=rf", line {number} \(byte \d+\): .*{message}"):
        data.read(np.array([1]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n |# x\n", "holds no samples"),
        (b"1|word 1:1\n2|tag 1 0\n3|word 1:1", "line 2 (byte 11): the sequence has no sample of"),
        (b"1|word 1:1\n" + b"9" * 19 + b"|word 1:1", "line 2 (byte 11): its sequence id must be"),
    ],
)
def test_what_cannot_be_opened(written, content, message):
    with pytest.raises(UserError, match=re.escape(message)):
        load_cntk_sequences(written(content), TAGGED).read(np.arange(1))


@pytest.mark.parametrize(
    ("streams", "message"),
    [
        ({"x": Dense(3)}, "must be at least two: x is the first, y the last"),
        ({"x": Dense(3), "y": None}, "must be at least two"),
        ({"x": Dense(3), "y": Dense(3, "x")}, "two streams have the name 'x' in the file"),
        ({"x": Dense(3), "y": 3}, "streams['y']=3 must be Dense(…), Sparse(…), or None"),
        ({"x": Dense(3), "y": {"dense": 3, "sparse": 4}}, "streams['y']={'dense': 3, 'sparse': 4}"),
        (
            {"x": Dense(3), "y": {"dense": 3, "hot": 4}},
            "streams['y']={'dense': 3, 'hot': 4}",
        ),
        ({"x": Dense(3), "y": {"dense": "3"}}, "dimension='3' must be a whole number"),
        ({"x": Dense(3), "#": Dense(1)}, "streams: a name='#' must be a text without spaces"),
        ([3], "streams=[3] must be a mapping from names to streams"),
    ],
)
def test_streams_that_are_refused(written, streams, message):
    with pytest.raises(UserError, match=re.escape(message)):
        load_cntk_text(written(SINGLE), streams)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Dense(0), "dimension=0 must be a whole number, at least 1"),
        (lambda: Sparse(3, "a b"), "alias='a b' must be a text without spaces"),
        (lambda: Sparse(3, one_hot=1), "one_hot=1 must be True or False"),
    ],
)
def test_a_stream_that_is_refused(make, message):
    with pytest.raises(UserError, match=re.escape(message)):
        make()


@pytest.mark.parametrize("block", [1, 9, 1000])
def test_blocks_of_any_size_and_any_number_of_ranks(written, text_blocks, block):
    random = np.random.default_rng(0)
    lines = []
    for number in range(40):
        for _ in range(random.integers(1, 6)):
            lines += [f"{number}|word {number % 6}:1|tag 1 0" + random.choice(["", "|# x", "\n"])]
        lines[-1] += f"|whole {number}"
    path = written("\n".join(lines).replace("\n|whole", "|whole").encode())
    alone = load_cntk_sequences(path, TAGGED)
    text_blocks(block)

    def body(comm: Communicator):
        data = load_cntk_sequences(path, TAGGED, comm=comm)
        assert comm.size == 3
        return data.lengths, data.read_streams(np.arange(40))

    for lengths, streams in simulate(3, body):
        same(lengths, alone.lengths)
        same(streams["whole"][:, 0], np.arange(40))
        same(streams["word"].values[:, 0], np.arange(40) % 6)
        same(streams["word"].lengths, lengths)


def sample_of(stream, text):
    """One sample as a list, None where it must be refused."""
    row = [0.0] * stream.dimension
    tokens = text.split()
    if isinstance(stream, Dense):
        tokens = [b"%d:%s" % pair for pair in enumerate(tokens)]
        if len(tokens) != len(row):
            return None
    named = set()
    for token in tokens:
        match = re.fullmatch(rb"\+?(\d+):(.*)", token)
        if not (match and NUMBER.fullmatch(match[2])) or int(match[1]) >= len(row):
            return None
        if int(match[1]) in named or math.isinf(float(match[2])):
            return None
        named.add(int(match[1]))
        row[int(match[1])] = float(match[2])
    if stream.one_hot:
        return row.index(1) if sorted(row) == [0] * (len(row) - 1) + [1] else None
    return row


def reference(content, streams):
    """The sequences of a file, read line by line; None where it must be refused."""
    content = content.removeprefix(b"\xef\xbb\xbf")
    sequences, latest, with_ids = [], None, None
    for line in content.split(b"\n"):
        match = re.fullmatch(rb"(\d*)[ \t\r\v\f]*((?:\|.*)?)", line, re.DOTALL)
        fields = re.split(rb"\|", match[2])[1:] if match else []
        if match and not match[1] and all(field[:1] == b"#" for field in fields):
            continue
        if match is None:
            return None
        if with_ids is None:
            with_ids = match[1] != b""
        if match[1] and not with_ids:
            return None
        own = int(match[1]) if match[1] else latest
        if not sequences or not with_ids or own != latest:
            sequences.append({name: [] for name in streams})
        latest = own
        counts = dict.fromkeys(streams, 0)
        for field in fields:
            if field[:1] == b"#":
                continue
            parts = re.fullmatch(rb"([^ \t\r\v\f]+)(.*)", field, re.DOTALL)
            name = parts and parts[1].decode("latin1")
            if name not in streams:
                return None
            sample = sample_of(streams[name], parts[2])
            counts[name] += 1
            if sample is None or counts[name] > 1:
                return None
            sequences[-1][name].append(sample)
    for sequence in sequences:
        for name, samples in sequence.items():
            if not samples or (streams[name].per_sequence and len(samples) > 1):
                return None
    return sequences or None


FUZZED = b" \t\r\n|#:.+-_12345670xelabwordtagh"


@repeatable
@given(damaged([SINGLE, SEQUENCES, b"|x 1 2 3|label 0:1\n"], FUZZED))
def test_damaged_bytes_are_refused_or_read_as_they_are(written, content):
    path = written(content)
    streams = {"x": Dense(3), "label": Sparse(4, one_hot=True)}
    if b"word" in content:
        streams = TAGGED
    expected = reference(content, streams)
    try:
        data = load_cntk_sequences(path, streams)
        found = data.read_streams(np.arange(len(data)), dtype=np.float64)
    except UserError as error:
        assert "\n" not in str(error)
        assert expected is None
        return
    assert expected is not None
    for name, stream in streams.items():
        values = found[name]
        if stream.per_sequence:
            assert values.tolist() == [sequence[name][0] for sequence in expected]
        else:
            assert values.lengths.tolist() == [len(sequence[name]) for sequence in expected]
            tokens = [token for sequence in expected for token in sequence[name]]
            assert values.values[values.mask].tolist() == tokens
