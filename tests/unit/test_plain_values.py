"""Plain Python values as JSON: each comes back as it was, or is refused, naming its place."""

from __future__ import annotations

import enum
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path

import numpy as np
import pytest

from parallel_sgd.errors import UserError
from parallel_sgd.plain_values import DEEPEST, from_json, to_json
from parallel_sgd.validation import shown

Point = namedtuple("Point", "x y")


class Shade(enum.IntEnum):
    DARK = 1


def back(value):
    """A value through a file of strict JSON."""
    return from_json(json.loads(json.dumps(to_json("extra", value), allow_nan=False)))


def assert_same(value, other):
    """Equal, and of the same types, all the way down; NaN is NaN."""
    assert type(value) is type(other)
    if isinstance(value, dict):
        assert getattr(value, "default_factory", None) is getattr(other, "default_factory", None)
        assert list(map(repr, value)) == list(map(repr, other))
        for (key, entry), (other_key, other_entry) in zip(
            value.items(), other.items(), strict=True
        ):
            assert_same(key, other_key)
            assert_same(entry, other_entry)
    elif isinstance(value, list | tuple | deque):
        assert len(value) == len(other)
        for entry, other_entry in zip(value, other, strict=True):
            assert_same(entry, other_entry)
    elif isinstance(value, np.ndarray | np.generic):
        assert (value.dtype, value.shape) == (other.dtype, other.shape)
        assert value.tobytes() == other.tobytes()
    elif isinstance(value, float):
        assert struct.pack("d", value) == struct.pack("d", other)
    elif isinstance(value, complex):
        assert_same([value.real, value.imag], [other.real, other.imag])
    else:
        assert value == other


HELD = [
    None,
    True,
    0,
    -(1 << 64),
    10**5000,
    -(10**5000),
    1.5,
    -0.0,
    5e-324,
    math.nan,
    -math.nan,
    struct.unpack("d", b"\1\0\0\0\0\0\xf8\x7f")[0],
    math.inf,
    -math.inf,
    complex(-0.0, math.nan),
    "",
    "text \0 \n é 😀",
    "\ud83d\ude00",  # two lone surrogates: JSON alone makes one character of them
    b"",
    b"\0\xff",
    bytearray(b"ab"),
    [],
    (),
    {},
    [1, [2.0, ["3"]], ()],
    (1, (2, [3])),
    {1, 2.5, "three"},
    frozenset({(1, 2)}),
    deque([1, 2], 5),
    deque([1]),
    {"a": {"b": [1]}},
    {3: 0.1, 6: 0.2},
    {1: "whole", "1": "text", 1.5: "half", None: 0, (1, "a"): 2, b"b": 3},
    {True: 1},
    {math.nan: 1},
    {"$dict": [1]},
    {"$": 0},
    {"\ud83d\ude00": 1},
    {"z": 1, "a": 2},
    OrderedDict([("z", 1), ("a", 2)]),
    OrderedDict([(2, 1)]),
    Counter({3: 1, 6: 2}),
    defaultdict(list, {"loss": [0.5], 2: []}),
    {"history": defaultdict(dict, {"a": defaultdict(int, b=1)})},
    defaultdict(None, a=1),
    np.float32(0.1),
    np.float64(math.nan),
    np.int8(-1),
    np.uint64(2**64 - 1),
    np.bool_(True),
    np.complex64(1 - 2j),
    np.str_("text"),
    np.str_(""),
    np.bytes_(b"ab"),
    np.datetime64("2020-01-02", "ns"),
    np.timedelta64(3, "s"),
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.arange(6).reshape(2, 3).T,
    np.array(3.5),
    np.zeros((0, 4), np.int16),
    np.array([True, False]),
    np.array([1.0, np.nan, -0.0], ">f8"),
    np.array([1j], np.complex128),
    np.array(["ab", "c"]),
    np.array([1, 2], np.longdouble),
    {"state": {"key": np.arange(624, dtype=np.uint32), "pos": 624}, 0: [np.int64(1)]},
]


@pytest.mark.parametrize("value", HELD, ids=shown)
def test_a_value_comes_back_as_it_was(value):
    assert_same(value, back(value))


def test_generators_of_python_and_numpy_come_back():
    import random

    own, other = random.Random(1), random.Random(2)
    own.gauss(0, 1)
    other.setstate(back(own.getstate()))
    assert own.random() == other.random()
    for kind in (np.random.MT19937, np.random.PCG64, np.random.Philox, np.random.SFC64):
        numpy_own, numpy_other = kind(1), kind(2)
        numpy_own.random_raw(3)
        numpy_other.state = back(numpy_own.state)
        assert numpy_own.random_raw() == numpy_other.random_raw()


def test_what_comes_back_is_another_object():
    value = {"a": [1], "b": np.zeros(2), "c": {3: []}}
    document = to_json("extra", value)
    value["a"].append(2)
    value["b"][0] = 1
    value["c"][3].append(1)
    assert_same(from_json(document), {"a": [1], "b": np.zeros(2), "c": {3: []}})
    from_json(document)["b"][0] = 5.0  # it can be written to


class Opaque:
    def __repr__(self):
        return "<opaque>"


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (Opaque(), "extra=<opaque> is a "),
        ({"a": [1, Opaque()]}, "extra['a'][1]=<opaque> is a "),
        ({"a": {2: (Opaque(),)}}, "extra['a'][2][0]=<opaque>"),
        ({Opaque(): 1}, "extra[<opaque>]=<opaque>"),
        (Shade.DARK, "test_plain_values.Shade, which checkpoints"),
        ({"p": Point(1, 2)}, "extra['p']=Point(x=1, y=2) is a "),
        ({"p": Point(1, 2)}, "dictionaries or arrays, not of a derived class"),
        ([defaultdict(lambda: 1, a=2)], "extra[0]=defaultdict("),
        (defaultdict(Shade), "has a default that checkpoints cannot keep: it must be dict"),
        (defaultdict(list, a=[Opaque()]), "extra['a'][0]=<opaque>"),
        (Path("a"), "extra='a' is a pathlib"),
        ([{Path("a 'b'"): 1}], """extra[0]["a 'b'"]="a 'b'" is a pathlib"""),
        (len, "extra=<built-in function len> is "),
        (int, "extra=<class 'int'> is the class int"),
        (range(3), "extra=range(0, 3) is a range"),
        (np.array([None]), "has dtype object, which checkpoints cannot keep"),
        (np.zeros(1, "i4,f4"), "which checkpoints cannot keep"),
        (np.ma.zeros(2), "numpy.ma"),
    ],
)
def test_what_cannot_come_back_is_refused_by_its_place(value, place):
    with pytest.raises(UserError) as refused:
        to_json("extra", value)
    assert place in str(refused.value)
    assert "\n" not in str(refused.value)


def nested(depth):
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


def within(n, call):
    """Call from deep in a program."""
    return call() if n == 0 else within(n - 1, call)


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: (v,), lambda v: {1: v}])
def test_what_is_nested_deep_comes_back_wherever_it_is_asked_for(wrap):
    value = 0
    for _ in range(DEEPEST):
        value = wrap(value)
    text = within(400, lambda: json.dumps(to_json("extra", value), indent=1))
    assert within(400, lambda: from_json(json.loads(text))) == value
    with pytest.raises(UserError, match="is nested more than 50 deep"):
        to_json("extra", wrap(value))


def test_what_is_nested_too_deep_is_refused():
    assert back(nested(DEEPEST)) == nested(DEEPEST)
    for depth in (DEEPEST + 1, 100_000):
        with pytest.raises(UserError, match="is nested more than 50 deep, or contains itself"):
            to_json("extra", nested(depth))
    with pytest.raises(UserError, match="is nested more than 200 deep"):
        from_json(nested(900))
    circle: list = []
    circle.append(circle)
    with pytest.raises(UserError, match="or contains itself"):
        to_json("extra", circle)


@pytest.mark.parametrize(
    "document",
    [
        {"$unknown": 1},
        {"$torch.none": 1},
        {"$int": 3},
        {"$int": "zz"},
        {"$float": "00"},
        {"$float": 1},
        {"$complex": [1]},
        {"$str": "AAA"},
        {"$str": "é"},
        {"$bytes": 1},
        {"$set": [[1]]},
        {"$set": 3},
        {"$dict": [[1]]},
        {"$dict": [[[], 1]]},
        {"$Counter": 3},
        {"$defaultdict": []},
        {"$defaultdict": ["eval"]},
        {"$defaultdict": ["list", [1]]},
        {"$deque": [[1], -1]},
        {"$tuple": 5},
        {"$tuple": [1], "$set": [1]},
        {"$tuple": [1], "a": 1},
        {"a": 1, "$tuple": [1]},
        {"$array": ["<f4", [3], ""]},
        {"$array": ["<f4", [-1, -1], "AAAAAA=="]},
        {"$array": ["<f4", [0, 10**30], ""]},
        {"$array": ["<f4", ["1"], "AAAAAA=="]},
        {"$array": ["<f4", [1.0], "AAAAAA=="]},
        {"$array": ["|O8", [1], "AAAAAAAAAAA="]},
        {"$array": ["i4,i4", [1], "AAAAAAAAAAA="]},
        {"$array": [None, [1], "AAAAAAAAAAA="]},
        {"$array": ["<f7", [1], "AAAAAAAAAA=="]},
        {"$array": ["|b1", [1], "Ag=="]},
        {"$array": 4},
        {"$scalar": ["<f4", [], ""]},
    ],
    ids=repr,
)
def test_a_document_of_no_value_is_a_user_error(document):
    with pytest.raises(UserError):
        from_json({"a": [document]})
