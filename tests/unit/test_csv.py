"""CSV files: columns by name, numbers and names of classes; what is refused names the line."""

from __future__ import annotations

import gzip
import re

import numpy as np
import pytest

from parallel_sgd import UserError, data
from parallel_sgd.command_line import read, read_data
from parallel_sgd.data.readers import csv_file

PEOPLE = """\
height,age,smokes,city,label
1.5,30,true,"Rome, Italy",cat
2,41,False,Oslo,dog

-1e-3,7,FALSE,"a
b",cat
"""


@pytest.fixture
def written(tmp_path):
    def write(text, name="d.csv"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        content = text if isinstance(text, bytes) else text.encode()
        path.write_bytes(gzip.compress(content) if name.lower().endswith(".gz") else content)
        return path

    return write


def test_more_rows_than_are_converted_at_a_time(written):
    rows = [f"{number},{number % 3}" for number in range(csv_file.ROWS + 9)]
    x, y = data.load(written("\n".join(["a,y", *rows]))).arrays()
    assert (x[:, 0] == np.arange(len(rows))).all() and (y == np.arange(len(rows)) % 3).all()
    rows[-1] += ",0"
    with pytest.raises(UserError, match=f"line {len(rows) + 1}: 3 cells: must be 2, as in line 1"):
        data.load(written("\n".join(["a,y", *rows])))


def test_columns_by_name_and_classes_by_theirs(written):
    table = data.load(written(PEOPLE), x=["age", "height", "smokes"])
    x, y = table.read(np.array([2, 0]))
    assert x.dtype == np.float32 and np.allclose(x, [[7, -1e-3, 0], [30, 1.5, 1]])
    assert y.dtype == np.int64 and y.tolist() == [0, 0] and table.classes == 2
    assert (table.names, table.x_columns) == (("cat", "dog"), ("age", "height", "smokes"))
    assert data.task_of(table) == data.Task("classification", 2, 2)
    whole = data.load(written(PEOPLE), x="age", y="smokes")
    assert whole.read(np.arange(3), dtype=None)[0].dtype == np.int64
    assert whole.arrays()[1].tolist() == [1, 0, 0] and whole.names is None
    assert data.load(written(PEOPLE), x="age", y="city").names == ("Oslo", "Rome, Italy", "a\nb")
    several = data.load(written(PEOPLE), x="age", y=["height", "age"])
    assert np.allclose(several.arrays()[1], [[1.5, 30], [2, 41], [-1e-3, 7]])
    assert data.load(written(PEOPLE), x="age", y="height").arrays()[1].dtype == np.float32
    turned = data.load(written(PEOPLE), x="age", names=["dog", "cat"])
    assert turned.arrays()[1].tolist() == [1, 0, 1]


@pytest.mark.parametrize("name", ["d.csv", "d.TSV", "d.csv.gz", "D.Tsv.GZ"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_names_compression_and_ends_of_lines(written, name, mark):
    sign = "\t" if "tsv" in name.lower() else ","
    lines = ["a,b,y", "1,2,0", "3,4,1", ""]
    text = mark + "\r\n".join(lines).replace(",", sign).encode()
    table = data.load(written(text, name))
    assert table.arrays()[0].tolist() == [[1, 2], [3, 4]] and table.arrays()[1].tolist() == [0, 1]
    assert table.x_columns == ("a", "b")


def test_delimiters_and_files_without_a_header(written):
    path = written("a;y\n1,5;0\n")
    with pytest.raises(UserError, match=r"d.csv has one column, 'a;y': give delimiter=';'"):
        data.load(path)
    assert data.load(written("a;y\n1.5;0\n"), delimiter=";").arrays()[0].tolist() == [[1.5]]
    path = written("5,6,0\n7,8,1\n")
    with pytest.raises(UserError, match=r"it begins with \['5', '6', '0'\]; give header=False"):
        data.load(path, y="0")
    table = data.load(path, header=False, y=-1)
    assert table.arrays()[0].tolist() == [[5, 6], [7, 8]] and table.arrays()[1].tolist() == [0, 1]
    assert data.load(path, header=False, x=[1], y=0).arrays()[0].tolist() == [[6], [8]]
    assert data.load(path, header=True, x="5", y=0).arrays()[1].tolist() == [1]


@pytest.mark.parametrize("first", ["", "Unnamed: 0"])
def test_names_of_rows_are_no_feature(written, first):
    """As pandas and R write them."""
    table = data.load(written(f"{first},a,y\n7,1.5,0\n9,2.5,1\n"))
    assert table.x_columns == ("a",) and table.arrays()[0].tolist() == [[1.5], [2.5]]


@pytest.mark.parametrize(
    ("text", "options", "problem"),
    [
        ("a,y\n1,0\n,1\n", {}, "line 3: column 'a' is missing: must be a number"),
        ("a,y\n1,0\nNA,1\n", {}, "line 3: column 'a' is missing ('NA'): must be a number"),
        ("a,y\n1,0\nnan,1\n", {}, "line 3: column 'a' is missing ('nan'): must be a number"),
        ("a,y\n1,0\n2,\n", {}, "line 3: column 'y' is missing"),
        ("a,y\n1,0\n2,?\n", {}, "line 3: column 'y' is missing ('?')"),
        ("a,y\n1,0\nx,1\n", {}, "line 3: column 'a' is 'x': must be a number, or the column excl"),
        ("a,y\n1_0,0\n", {}, "line 2: column 'a' is '1_0': must be a number"),
        ("a,y\n1,0\n2,b\n", {}, "line 3: column 'y' is 'b': must be a number, as '0' is, or all c"),
        ("a,y\ntrue,0\n2,0\n", {}, "line 2: column 'a' is 'true': must be a number"),
        ("a,y\n1,0\n\n2\n", {}, "line 4: 1 cells: must be 2, as in line 1"),
        ("a,y\n1,0,\n", {}, "line 2: 3 cells: must be 2, as in line 1"),
        ("a,y\n1,b\n2,c\n", {"names": ["b"]}, "line 3: column 'y' is 'c': must be one of ['b']"),
        ("a,y\n1,b\n", {"names": "b"}, "names='b' must be a list of names"),
        ("a,y\n1,0\n", {"y": ["y"], "names": ["0"]}, "names=['0'] has no effect without a single"),
        ("a,a,y\n1,2,0\n", {}, "x='a' of {} occurs twice"),
        ("a,y\n1,0\n", {"x": "b"}, "x='b' is not a column of {}"),
        ("a,b\n1,0\n", {}, "y must name a column of {}, which has no 'y' or 'label' or 'target'"),
        ("a,y\n1,0\n", {"y": 1.5}, "y=1.5 must be the name of a column"),
        ("a,y\n1,0\n", {"delimiter": "::"}, "delimiter='::' must be one character"),
        ("a,y\n1,0\n", {"delimiter": '"'}, "must not be a quote"),
        ("a,y\n1,0\n", {"header": "no"}, "header='no' must be one of"),
        ("", {}, "{} must begin with the names of its columns: it is empty"),
        (
            'a,y\n"1,0\n',
            {},
            "{} is not a well-formed CSV file in UTF-8, after line 1: unexpected end",
        ),
        (
            b"a,y\n\xff,0\n",
            {},
            "{} is not a well-formed CSV file in UTF-8, after line 0: 'utf-8' codec",
        ),
        (
            "a,y\n" + "9" * 200_000 + ",0\n",
            {},
            "{} is not a well-formed CSV file in UTF-8, after line ",
        ),
    ],
)
def test_what_is_wrong_is_told_by_its_line(written, text, options, problem):
    path = written(text)
    with pytest.raises(UserError, match=re.escape(problem.format(path))) as refused:
        data.load(path, **options)
    assert "\n" not in str(refused.value)


def test_folders_and_parts_share_columns_and_classes(written, tmp_path):
    written("a,b,y\n1,2,dog\n", "one/p-0.csv")
    written("b,a,y\n2,1,cat\n", "one/p-1.tsv".replace("tsv", "csv"))
    one = data.load(tmp_path / "one")
    assert one.arrays()[0].tolist() == [[1, 2]] * 2 and one.arrays()[1].tolist() == [1, 0]
    written("a,b,y\n1,2,dog\n1,2,cat\n1,2,owl\n", "two/my_train.csv")
    written("y,more,b,a\ndog,9,2,1\nowl,9,2,1\n", "two/my_test.csv")
    train, test = data.load_train_test(tmp_path / "two")
    assert train.names == test.names == ("cat", "dog", "owl")
    assert test.arrays()[0].tolist() == [[1, 2]] * 2 and test.arrays()[1].tolist() == [1, 2]
    with pytest.raises(UserError, match=r"data.load_train_test opens both"):
        data.load(tmp_path / "two")
    written("a,b,y\n1,2,cow\n", "two/my_test.csv")
    with pytest.raises(
        UserError, match=r"my_test.csv, line 2: column 'y' is 'cow': must be one of"
    ):
        data.load_train_test(tmp_path / "two")
    (tmp_path / "two" / "photos").mkdir()
    assert not data.FORMATS["csv"].matches(tmp_path / "two")  # labels of images, say


def test_a_file_that_changes_between_its_header_and_its_rows(written):
    path = written("a,y\n1,0\n")
    file = csv_file.CSVFile(path)
    written("a,y\n1,0\n3,1\n")
    with pytest.raises(UserError, match=r"d.csv has changed since it was opened"):
        next(file.blocks(["a"]))


def test_train_py_takes_columns_by_name(written):
    path = written("a,b,c,price\n" + "".join(f"{i},{i},{i},{i}.5\n" for i in range(10)))
    options, _, _ = read(["--data", str(path), "--x", "a", "c", "--y", "price"])
    found = read_data(options)
    assert found.train.read(np.arange(3))[0].shape == (3, 2) and found.task.name == "regression"
    assert found.sources.startswith("regression, training data: Subset(8 samples of CSVTable(")
    options, _, _ = read(["--data", str(path), "--x", "a", "--y", "b", "c"])
    assert read_data(options).train.read(np.arange(3))[1].shape == (3, 2)
    with pytest.raises(UserError, match="reader='y=c': --y gives the same already"):
        read(["--data", str(path), "--y", "b", "--reader", "y=c"])
    with pytest.raises(UserError, match=r"x=\['a'\]: digits has x of its own"):
        read(["--x", "a"])
