"""What ranks send each other as objects: it arrives as it was, or is refused before it is sent."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, namedtuple
from dataclasses import dataclass
from enum import IntEnum
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parallel_sgd import UserError
from parallel_sgd.communication import packed, unpacked
from parallel_sgd.communication.serialization import DEEPEST, message
from parallel_sgd.errors import NotFinite, SharedProblem

repeatable = settings(
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],
)

RECORD = np.array([(1, 2.5)], [("a", ">i4"), ("b", "<f8", (2,))])


def alike(one, other):
    """Whether two values are of one type and equal, all through."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray | np.generic):
        same = (one.dtype, one.shape) == (other.dtype, other.shape)
        return same and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return alike([*one.items()], [*other.items()])
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    if isinstance(one, set | frozenset):  # in any order: the order of hashes is another in each run
        same = (any(alike(item, candidate) for candidate in other) for item in one)
        return len(one) == len(other) and all(same)
    if isinstance(one, float):
        return (one, math.copysign(1, one)) == (other, math.copysign(1, other))
    return one == other


HASHABLE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.binary()
    | st.complex_numbers(allow_nan=False)
    | st.sampled_from([np.float32(0.1), np.int8(-3), np.bool_(True), Path("a/\udcff")])
    | st.builds(SharedProblem, st.text())
    | st.builds(NotFinite, st.text()),
    lambda one: st.lists(one, max_size=3).map(tuple) | st.frozensets(one, max_size=3),
    max_leaves=5,
)
ANY = st.recursive(
    HASHABLE,
    lambda one: (
        st.lists(one, max_size=3)
        | st.lists(one, max_size=3).map(tuple)
        | st.dictionaries(HASHABLE, one, max_size=3)
        | st.sets(HASHABLE, max_size=3)
    ),
    max_leaves=8,
)


@repeatable
@given(ANY)
def test_what_arrives_is_what_was_sent(item):
    assert alike(unpacked(packed(item)), item)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.int16).reshape(3, 4)[:, ::2],
        np.zeros((2, 0, 3), ">f4"),
        np.array(2.5),
        np.array(["a", "bcd"]),
        np.array(["2026-01-01", "NaT"], "datetime64[D]"),
        np.longdouble([1 / 3]),
        RECORD,
        RECORD[0],
    ],
)
def test_arrays_keep_shape_and_dtype(array):
    again = unpacked(packed(array))
    assert alike(again, array)
    if isinstance(again, np.ndarray):
        again[...] = again  # may be written to


def test_a_mapped_array_arrives_as_one_in_memory(tmp_path):
    mapped = np.memmap(tmp_path / "x", np.int32, "w+", shape=(3,))
    again = unpacked(packed(mapped))
    assert type(again) is np.ndarray and (again == 0).all()


class Colour(IntEnum):
    RED = 1


Point = namedtuple("Point", "x y")
CYCLE: list[object] = []
CYCLE.append((CYCLE,))
LOOP: list[object] = []
LOOP.append(LOOP)
DEEP: object = ()
for _ in range(DEEPEST + 1):
    DEEP = (DEEP,)


@pytest.mark.parametrize(
    ("item", "problem"),
    [
        (object(), "an object cannot be sent to other ranks: send None, bool, int,"),
        (print, "cannot be sent to other ranks"),
        (UserError, "the class UserError cannot be sent"),
        (UserError("x"), r"a parallel_sgd\.errors\.UserError cannot be sent"),
        (OrderedDict(a=1), r"a collections\.OrderedDict cannot be sent"),
        (Counter("ab"), r"a collections\.Counter cannot be sent"),
        (Point(1, 2), r"Point cannot be sent"),
        (Colour.RED, r"Colour cannot be sent"),
        (Fraction(1, 3), r"a fractions\.Fraction cannot be sent"),
        (range(3), "a range cannot be sent"),
        (np.ma.zeros(3), r"a numpy\.ma\.MaskedArray cannot be sent"),
        (np.array([None]), "a NumPy array of objects cannot be sent"),
        ([{"a": ({1: object()},)}], "an object cannot be sent"),
        (CYCLE, "tuples, sets or keys more than"),
        (LOOP, "a value cannot be sent to other ranks: recursion"),
        (DEEP, f"tuples, sets or keys more than {DEEPEST} levels deep"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_what_is_refused(item, problem):
    with pytest.raises(UserError, match=problem) as caught:
        packed(item)
    assert "\n" not in str(caught.value)


def nested(tag: int, depth: int) -> bytes:
    """What a damaged or hostile message may be: tags in each other, so many deep."""
    data = packed([])
    for _ in range(depth):
        data = msgpack.packb([msgpack.ExtType(tag, data)])
    return data


@pytest.mark.parametrize("tag", [1, 2, 3, 6, 7])
@pytest.mark.parametrize("depth", [DEEPEST + 1, 200, 5000])
def test_no_message_is_deeper_than_what_is_sent(tag, depth):
    """Each level takes C's stack: at 200 the process ended by SIGSEGV."""
    with pytest.raises(UserError, match=f"tuples, sets or keys more than {DEEPEST} levels deep"):
        unpacked(nested(tag, depth))


def test_what_is_just_not_too_deep_arrives():
    item: object = ()
    for _ in range(DEEPEST - 1):
        item = (item,)
    assert unpacked(packed(item)) == item


WHOLE = packed([None, 2**70, (1.5, {"a": RECORD}), {frozenset({1})}, Path("x"), np.float32(1)])


@repeatable
@given(st.binary(max_size=64) | st.integers(0, len(WHOLE)).map(lambda n: WHOLE[:n]))
def test_bytes_that_are_no_value(data):
    try:
        unpacked(data)
    except UserError as error:
        assert str(error).startswith("a message from another rank is damaged") and len(data) < len(
            WHOLE
        )


@repeatable
@given(st.integers(0, len(WHOLE) - 1), st.integers(0, 255))
def test_a_changed_byte(place, byte):
    data = bytearray(WHOLE)
    data[place] = byte
    try:
        unpacked(data)
    except UserError as error:
        assert "damaged" in str(error)


@pytest.mark.parametrize("tag", [0, 12, 127])
def test_a_tag_that_is_not_known(tag):
    with pytest.raises(UserError, match="damaged, or of another version"):
        unpacked(msgpack.packb(msgpack.ExtType(tag, b"")))


def test_an_array_of_objects_is_not_made():
    data = msgpack.packb(msgpack.ExtType(6, packed(["|O", (1,), b"\0" * 8])))
    with pytest.raises(UserError, match="an array of objects"):
        unpacked(data)


@message
@dataclass
class Inner:
    counts: dict[int, int]


@message
@dataclass
class Outer:
    inner: Inner | None
    array: Any
    names: tuple[str, ...] = ()


@dataclass
class Unregistered:
    value: int = 1


def test_a_registered_dataclass_arrives_by_the_names_of_its_fields() -> None:
    sent = Outer(Inner({3: 4}), np.arange(3, dtype=np.int16), ("a",))
    first, second = unpacked(packed([sent, Inner({})]))
    assert type(first) is Outer
    assert (first.inner, first.names, second) == (sent.inner, sent.names, Inner({}))
    assert np.array_equal(first.array, sent.array)
    assert first.array.dtype == np.int16


def test_a_dataclass_that_is_not_registered_is_not_sent() -> None:
    with pytest.raises(UserError, match="Unregistered cannot be sent"):
        packed(Unregistered())


@pytest.mark.parametrize(
    "content", [["Inner", {}], ["Inner", {"counts": 1, "more": 2}], ["Nothing", {}], ["Inner"], 3]
)
def test_a_dataclass_with_other_fields_is_of_another_version(content: Any) -> None:
    data = msgpack.packb(msgpack.ExtType(11, packed(content)))
    with pytest.raises(UserError, match="damaged, or of another version"):
        unpacked(data)
