"""LIBSVM's format: what is read back, what is refused and how it is named, and damaged bytes."""

from __future__ import annotations

import math
import re
import tracemalloc

import numpy as np
import pytest
from damaged import NUMBER, damaged, repeatable
from hypothesis import given
from numpy.testing import assert_array_equal as same

from parallel_sgd import Communicator, simulate
from parallel_sgd.data import load, load_libsvm, task_of
from parallel_sgd.errors import SharedError, UserError

FILE = b"""\
# made by hand
+1 1:0.5 4:-2e1 # 9:9
-1 qid:7 2:3

  # 8:8
1 qid:8 1:1 3:.25\r
"""
X = [[0.5, 0, 0, -20], [0, 3, 0, 0], [1, 0, 0.25, 0]]


@pytest.fixture
def opened(tmp_path):
    """Opens a file of some content."""

    def opened(content, **options):
        path = tmp_path / "a.svm"
        path.write_bytes(content)
        return load_libsvm(path, **options)

    return opened


def test_what_was_written_is_read(opened):
    data = opened(FILE)
    assert (len(data), data.features) == (3, 4)
    x, y = data.read(np.array([2, 0, 1]))
    assert x.dtype == np.float32 and y.dtype == np.int64
    same(x, np.array(X)[[2, 0, 1]])
    assert y.tolist() == [1, 1, -1]
    assert data.read(np.arange(3), dtype=None)[0].dtype == np.float64
    assert data.query_ids(np.array([2, 1])).tolist() == [8, 7]
    assert opened(FILE[:-2]).arrays()[0].tolist() == X  # no end of the last line
    assert opened(b"\xef\xbb\xbf1 1:2").arrays()[0].tolist() == [[2]]


def test_sparse_rows(opened):
    rows, y = opened(FILE, features=6).read_sparse(np.array([1, 0]))
    assert (rows.begins.tolist(), rows.columns.tolist()) == ([0, 1, 3], [1, 0, 3])
    assert (rows.values.tolist(), rows.shape) == ([3, 0.5, -20], (2, 6))
    assert (rows.values.dtype, y.tolist()) == (np.float32, [-1, 1])
    none, y = opened(FILE).read_sparse(np.empty(0, np.int64))
    assert none.dense().shape == (0, 4) and y.shape == (0,)


def test_what_comments_name_is_no_feature(opened):
    assert opened(b"1 1:1 # 9:9\n2\n").features == 1


def test_indexes_from_zero(opened):
    data = opened(b"3 0:1 2:5\n0 1:2\n", zero_based=True)
    assert data.arrays()[0].tolist() == [[1, 0, 5], [0, 2, 0]]


def test_labels(opened, tmp_path):
    data = opened(FILE, classes=[-1, 1])
    assert data.arrays()[1].tolist() == data.targets(np.arange(3)).tolist() == [1, 0, 1]
    assert (task_of(data).name, task_of(data).classes) == ("classification", 2)
    data = load(tmp_path / "a.svm", classes=[-1, 1])
    assert data.read(np.arange(3))[1].tolist() == [1, 0, 1]
    assert opened(b"3.0 1:1\n1e0 1:1\n").arrays()[1].tolist() == [3, 1]
    y = opened(b"3.5 1:1\n-1e-3 1:1\n", target="value").arrays(dtype=np.float64)[1]
    assert y.tolist() == [3.5, -1e-3]
    many = b"1,3 1:1\n 2:1\n7 1:1\n"
    data = opened(many, target="labels", classes=[1, 3, 7])
    y = data.arrays()[1]
    assert (data.targets(np.arange(3)) == y).all()
    assert y.dtype == np.int64 and y.tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 1]]
    assert opened(many, target="labels", classes=8).arrays()[1].sum(0).tolist() == [
        0, 1, 0, 1, 0, 0, 0, 1
    ]  # fmt: skip


REFUSED = [
    (b"1 0:1", {}, "index 0 is out of range: must be from 1 to 9 (zero_based=True is for files"),
    (b"1 10:1", {}, "index 10 is out of range: must be from 1 to 9"),
    (b"1 9:1", {"zero_based": True}, "index 9 is out of range: must be from 0 to 8"),
    (b"1 -1:1", {}, "index -1 is out of range"),
    (b"1 2:1 2:1", {}, "index 2 follows 2: must be in ascending order"),
    (b"1 3:1 2:1", {}, "index 2 follows 3"),
    (b"1 2:abc", {}, "'2:abc' must be index:value"),
    (b"1 2", {}, "'2' must be index:value"),
    (b"1 2:", {}, "'2:' must be index:value"),
    (b"1 a\nb", {}, "'a' must be index:value"),
    (b"1 1:2:3", {}, "'1:2:3' must be index:value"),
    (b"1 99999999999999999999:3", {}, "'99999999999999999999:3' must be index:value"),
    (b"1 1:1_0", {}, 'must hold numbers only: it has "_"'),
    (b"1 1:1 2:nan", {}, "'2:nan' must be a finite number, in float32"),
    (b"1 1:-inf", {}, "'1:-inf' must be a finite number"),
    (b"1 1:1e39", {}, "'1:1e39' must be a finite number, in float32"),
    (b"1.5 1:1", {}, "label '1.5' must be a whole number"),
    (b"1e30 1:1", {}, "label '1e30' must be a whole number"),
    (b"x 1:1", {}, "label 'x' must be a whole number"),
    (b"1:1", {}, "must begin with a label: it begins with '1:1'"),
    (b"1 qid:x 1:1", {}, "'qid:x' must be qid: and a whole number"),
    (b"7 1:1", {"classes": 7}, "label 7 must be from 0 to 6"),
    (b"-1 1:1", {"classes": 7}, "label -1 must be from 0 to 6"),
    (b"7 1:1", {"classes": [1, 2]}, "label 7 must be one of classes=[1, 2]"),
    (b"nan 1:1", {"target": "value"}, "label 'nan' must be a finite number"),
    (b"1,,2 1:1", {"target": "labels", "classes": 3}, "label '1,,2' must be whole numbers sep"),
    (b"1,3 1:1", {"target": "labels", "classes": 3}, "label 3 must be from 0 to 2"),
]


@pytest.mark.parametrize(("line", "options", "message"), REFUSED)
def test_what_is_wrong_is_named_by_line_and_byte(opened, tmp_path, line, options, message):
    data = opened(b"1 1:1\n# x\n" + line + b"\n2 1:1\n", features=9, **options)
    data.read(np.array([0, len(data) - 1]))
    with pytest.raises(UserError) as caught:
        data.read(np.array([0, 1]))
    assert str(caught.value).startswith(f"{tmp_path}/a.svm, line 3 (byte 10): {message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"", {}, "a.svm is empty"),
        (b"\n # x\n", {}, "a.svm holds no samples"),
        (b"1\n2 # 3:4\n", {}, "names no features to count"),
        (FILE, {"features": 0}, "features=0 must be a whole number, at least 1"),
        (FILE, {"target": "real"}, "target='real' must be one of"),
        (FILE, {"target": "labels"}, "classes must be given with target='labels'"),
        (FILE, {"target": "value", "classes": 3}, "classes=3 has no effect without"),
        (FILE, {"classes": [1, 1]}, "must be labels without repeats"),
        (FILE, {"classes": "ab"}, "classes='ab' must be a whole number"),
    ],
)
def test_what_cannot_be_opened(opened, content, options, message):
    with pytest.raises(UserError, match=re.escape(message)):
        opened(content, **options)


def test_absurd_indexes_take_no_memory(opened):
    data = opened(b"1 99999999999999999:3\n1 1:1\n")
    tracemalloc.start()
    with pytest.raises(UserError, match=r"needs .* bytes, but this machine's memory has"):
        data.read(np.arange(2))
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()


def test_indexes_that_do_not_ascend_are_told_as_such(opened):
    """Also where the width was taken from the last ones."""
    with pytest.raises(
        UserError, match=r"line 1 .*: index 2 follows 5: must be in ascending order"
    ):
        opened(b"1 5:1 2:3\n0 1:1\n").read(np.arange(2))


@pytest.mark.parametrize("block", [1, 7, 1000])
def test_blocks_of_any_size_and_any_number_of_ranks(opened, tmp_path, text_blocks, block):
    random = np.random.default_rng(0)
    lines = []
    for label in range(60):
        indexes = np.flatnonzero(random.random(30) < 0.2) + 1
        line = f"{label} " + " ".join(f"{i}:{i / 8}" for i in indexes)
        lines += [line + random.choice(["", " # 99:1", "\n", "\n#77:1"])]
    opened("\n".join(lines).encode())
    alone = load_libsvm(tmp_path / "a.svm")
    text_blocks(block)

    def body(comm: Communicator):
        data = load_libsvm(tmp_path / "a.svm", comm=comm)
        assert comm.size == 3
        return data.features, *data.arrays()

    for features, x, y in simulate(3, body):
        assert features == alone.features == x.shape[1] <= 30
        same(x, alone.arrays()[0])
        assert y.tolist() == [*range(60)]


def test_ranks_that_open_other_files(tmp_path):
    def body(comm: Communicator):
        path = tmp_path / f"{comm.rank}.svm"
        if comm.rank < 2:
            path.write_bytes(b"1 1:1\n" * (1 + comm.rank))
        try:
            load_libsvm(path if comm.rank else tmp_path / "0.svm", comm=comm)
        except SharedError as error:
            return str(error)

    for message in simulate(3, body):
        assert message == f"{tmp_path}/2.svm: there is no such file (on rank 2)"


def reference(content):
    """What a file holds, read character by character; None where it must be refused."""
    rows = []
    for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n"):
        tokens = line.split(b"#")[0].split()
        if not tokens and (line.strip() == b"" or line.strip()[:1] == b"#"):
            continue
        if tokens and tokens[1:] and tokens[1].startswith(b"qid:"):
            if not NUMBER.fullmatch(tokens[1][4:]) or float(tokens[1][4:]) % 1:
                return None
            del tokens[1]
        row, last = np.zeros(9), 0
        if not tokens or not NUMBER.fullmatch(tokens[0]) or float(tokens[0]) % 1:
            return None
        for pair in tokens[1:]:
            index, colon, value = pair.partition(b":")
            if not (re.fullmatch(rb"\+?\d+", index) and colon and NUMBER.fullmatch(value)):
                return None
            if not last < int(index) <= 9 or math.isinf(float(value)):
                return None
            last = int(index)
            row[last - 1] = float(value)
        rows.append((float(tokens[0]), row))
    return rows or None


@repeatable
@given(damaged([FILE, b"1 1:1\n", b"2 1:1 9:2e3\n3\n"], b" \t\r\n:#.+-_eqid0123456789"))
def test_damaged_bytes_are_refused_or_read_as_they_are(tmp_path, content):
    (tmp_path / "a.svm").write_bytes(content)
    expected = reference(content)
    for features in (9, None):
        try:
            x, y = load_libsvm(tmp_path / "a.svm", features=features).arrays(dtype=np.float64)
        except UserError as error:
            assert "\n" not in str(error)
            x = None
        if features:
            assert (x is None) == (expected is None)
        if expected is not None and x is not None:
            same(x, np.array([row for _, row in expected])[:, : x.shape[1]])
            assert y.tolist() == [label for label, _ in expected]
