"""Which server holds which slices of the model: PaddlePaddle Fluid's rules, and their edges."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from parallel_sgd import Parameters, UserError
from parallel_sgd.parameter_server import Placement, Slice, place

repeatable = settings(deadline=None, derandomize=True, database=None, max_examples=300)
shape = st.lists(st.integers(0, 9), max_size=3).map(tuple)
models = st.lists(shape, max_size=8).map(
    lambda shapes: {f"p{i}": dims for i, dims in enumerate(shapes)}
)
servers = st.integers(1, 6)
min_blocks = st.integers(1, 40)
rules = st.sampled_from(["round-robin", "hash", lambda name, number, servers: servers - 1])

MODEL = {"W1": (784, 512), "b1": (512,), "W2": (512, 10), "b2": (10,)}


def slices(placement: Placement) -> list[Slice]:
    """All of them, in the order of the flat vector."""
    every = [slice_ for server in placement.servers for slice_ in server]
    return sorted(every, key=lambda slice_: (slice_.start, slice_.stop))


def held(placement: Placement) -> list[list[str]]:
    return [[slice_.label for slice_ in server] for server in placement.servers]


def test_the_cursor_is_carried_from_parameter_to_parameter() -> None:
    # Set back for each parameter, b1, W2 and b2 would all be at server 0.
    assert held(place(MODEL, 3)) == [
        ["W1[0:262]", "b1"],
        ["W1[262:524]", "W2"],
        ["W1[524:784]", "b2"],
    ]
    assert held(place(MODEL, 2)) == [["W1[0:392]", "b1", "b2"], ["W1[392:784]", "W2"]]
    assert held(place(dict.fromkeys("abcd", (1,)), 3)) == [["a", "d"], ["b"], ["c"]]


@pytest.mark.parametrize(
    ("dimensions", "servers", "min_block", "rows"),
    [
        ((16_383,), 4, 8192, [16_383]),  # 1.9999 blocks' worth is one: rounded down
        ((16_384,), 4, 8192, [8192, 8192]),
        ((8191,), 4, 8192, [8191]),
        ((10,), 3, 3, [4, 4, 2]),  # 3.33 values are four: rounded up
        ((9,), 3, 3, [3, 3, 3]),
        ((9,), 4, 1, [3, 3, 3]),  # rounding up leaves one server without
        ((10,), 6, 1, [2, 2, 2, 2, 2]),
        ((100,), 2, 1, [50, 50]),  # no more slices than servers
        ((100,), 1, 1, [100]),
        ((3,), 5, 1, [1, 1, 1]),
        ((1000, 784), 3, 8192, [334, 334, 332]),  # the figure of Fluid's documentation
        ((10, 7), 3, 1, [4, 4, 2]),  # 24 values are 3.4 rows, which stay whole: four
        ((5, 4), 4, 1, [2, 2, 1]),
        ((4, 3, 2), 3, 1, [2, 2]),  # 8 values are 1.3 rows of six
        ((2, 1000), 8, 1, [1, 1]),  # a row is larger than a block
        ((1, 1000), 8, 1, [1]),
    ],
)
def test_sizes_of_slices(
    dimensions: tuple[int, ...], servers: int, min_block: int, rows: list[int]
) -> None:
    placement = place({"W": dimensions}, servers, min_block=min_block)
    assert [slice_.shape for slice_ in slices(placement)] == [(n, *dimensions[1:]) for n in rows]
    if min_block == 8192:
        assert placement == place({"W": dimensions}, servers)  # as Fluid has it, unless told


def test_parameters_kept_whole() -> None:
    placement = place(MODEL, 3, slice_parameters=False)
    assert held(placement) == [["W1", "b2"], ["b1"], ["W2"]]
    assert placement.shapes(0) == {"W1": (784, 512), "b2": (10,)}
    assert (placement.largest, placement.smallest) == (784 * 512 + 10, 512)


def test_by_hash_the_slices_of_a_parameter_spread() -> None:
    """Literal figures: a hash that differs from process to process would not meet them."""
    placement = place(MODEL, 3, dispatch="hash", min_block=1)
    assert held(placement) == [
        ["b1[0:171]", "W2[342:512]"],
        ["W1[0:262]", "W1[524:784]", "b1[342:512]", "b2[4:8]"],
        ["W1[262:524]", "b1[171:342]", "W2[0:171]", "W2[171:342]", "b2[0:4]", "b2[8:10]"],
    ]
    assert held(place({"größe": (3,)}, 97, dispatch="hash"))[18] == ["größe"]


def test_a_function_of_the_users() -> None:
    asked = []

    def rule(name: str, number: int, servers: int) -> int:
        asked.append((name, number, servers))
        return [2, 0, 2, 2, 0, 2][number]

    placement = place(MODEL, 3, dispatch=rule)
    names = ["W1[0:262]", "W1[262:524]", "W1[524:784]", "b1", "W2", "b2"]
    assert asked == [(name, number, 3) for number, name in enumerate(names)]
    assert held(placement) == [["W1[262:524]", "W2"], [], ["W1[0:262]", "W1[524:784]", "b1", "b2"]]
    assert placement.runs(0) == [(262 * 512, 524 * 512), (784 * 512 + 512, 784 * 512 + 5632)]
    assert placement.runs(1) == []
    assert placement.runs(2) == [  # from the last rows of W1 into b1, one run
        (0, 262 * 512),
        (524 * 512, 784 * 512 + 512),
        (784 * 512 + 5632, 784 * 512 + 5642),
    ]
    as_numpy = place(MODEL, 3, dispatch=lambda name, number, servers: np.int64(1))
    assert len(as_numpy.servers[1]) == 6


@pytest.mark.parametrize("answer", [-1, 3, 1.0, True, None, "0"])
def test_a_function_that_names_no_server(answer: object) -> None:
    with pytest.raises(UserError, match=r"placement of 'W1\[0:262\]': server=.* from 0 to 2"):
        place(MODEL, 3, dispatch=lambda name, number, servers: answer)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        ({"dispatch": "x"}, "placement='x' must be one of 'round-robin', 'hash'"),
        ({"dispatch": None}, "placement=None must be one of"),
        ({"dispatch": ["hash"]}, "placement=\\['hash'\\] must be one of"),
        ({"servers": 0}, "servers=0 must be a whole number, at least 1"),
        ({"servers": 2.0}, "servers=2.0 must be a whole number"),
        ({"min_block": 0}, "min_block=0 must be a whole number, at least 1"),
        ({"slice_parameters": 1}, "slice_parameters=1 must be True or False"),
        ({"shapes": {"W": (3, -1)}}, "shape of 'W': dimension=-1 must be a whole number"),
        ({"shapes": {"W": (3, 2.0)}}, "shape of 'W': dimension=2.0 must be"),
        (
            {"shapes": {"W": (4,), "W[0:2]": (1,)}, "min_block": 1},
            "'W\\[0:2\\]' is both of 'W' and of 'W\\[0:2\\]'",
        ),
    ],
)
def test_what_is_refused(arguments: dict[str, object], wrong: str) -> None:
    with pytest.raises(UserError, match=wrong):
        place(**({"shapes": MODEL, "servers": 2} | arguments))  # type: ignore[arg-type]


def test_parameters_without_values_scalars_and_servers_without_slices() -> None:
    shapes = {"none": (0,), "scalar": (), "rows": (3, 0), "v": (2,)}
    placement = place(shapes, 7, min_block=1)
    assert held(placement) == [["none"], ["scalar"], ["rows"], ["v[0:1]"], ["v[1:2]"], [], []]
    parts = [placement.shapes(server) for server in range(4)]
    assert parts == [{"none": (0,)}, {"scalar": ()}, {"rows": (3, 0)}, {"v[0:1]": (1,)}]
    runs = [placement.runs(server) for server in range(7)]
    assert runs == [[], [(0, 1)], [], [(1, 2)], [(2, 3)], [], []]
    assert placement.shapes(6) == {}
    assert (placement.largest, placement.smallest) == (1, 0)
    one = place(shapes, 1, min_block=1)
    assert one.shapes(0) == shapes
    assert one.runs(0) == [(0, 3)]
    assert place({}, 2).servers == ((), ())
    assert place({}, 2).largest == 0


@repeatable
@given(models, servers, min_blocks, rules, st.booleans())
@example({"p": (0, 3)}, 2, 1, "round-robin", True)
@example({"p": ()}, 2, 1, "hash", True)
@example({"p": (9, 9, 9)}, 6, 1, "round-robin", True)
def test_every_value_is_at_one_server(model, servers, min_block, rule, cut) -> None:
    placement = place(model, servers, dispatch=rule, slice_parameters=cut, min_block=min_block)
    assert len(placement.servers) == servers
    every = slices(placement)
    ends = np.cumsum([0, *(math.prod(dims) for dims in model.values())]).tolist()
    assert [slice_.stop for slice_ in every[:-1]] == [slice_.start for slice_ in every[1:]]
    assert (every[0].start, every[-1].stop) == (0, ends[-1]) if every else ends[-1] == 0
    assert len({slice_.label for slice_ in every}) == len(every)
    for (name, dimensions), (begin, end) in zip(model.items(), pairwise(ends), strict=True):
        own = [slice_ for slice_ in every if slice_.name == name]
        assert (own[0].start, own[-1].stop) == (begin, end)
        assert [math.prod(slice_.shape) for slice_ in own] == [slice_.values for slice_ in own]
        assert len(own) <= (servers if cut else 1)
        if len(own) == 1:
            assert (own[0].label, own[0].shape) == (name, dimensions)
            continue
        assert len({slice_.values for slice_ in own[:-1]}) == 1  # and the last is shorter, or alike
        assert 0 < own[-1].values <= own[0].values
        row = math.prod(dimensions[1:])
        for slice_ in own:
            assert (slice_.start - begin) % row == 0
            assert slice_.shape[1:] == dimensions[1:]
            first, last = (slice_.start - begin) // row, (slice_.stop - begin) // row
            assert slice_.label == f"{name}[{first}:{last}]"
    for server, parts in enumerate(placement.servers):
        assert list(parts) == [slice_ for slice_ in every if slice_ in parts]
        assert placement.values(server) == sum(slice_.values for slice_ in parts)


@repeatable
@given(models.filter(bool), servers, min_blocks, rules)
def test_parameters_of_a_servers_shapes_hold_its_runs(model, servers, min_block, rule) -> None:
    placement = place(model, servers, dispatch=rule, min_block=min_block)
    whole = Parameters({name: np.zeros(dims, np.float32) for name, dims in model.items()})
    whole.flat[:] = np.arange(whole.flat.size)
    for server, parts in enumerate(placement.servers):
        if not parts:
            assert placement.shapes(server) == {}
            assert placement.runs(server) == []
            continue
        shapes = placement.shapes(server)
        part = Parameters({name: np.zeros(dims, np.float32) for name, dims in shapes.items()})
        runs = placement.runs(server)
        assert all(start < stop for start, stop in runs)
        assert all(one[1] < two[0] for one, two in pairwise(runs))  # else they would be merged
        part.flat[:] = np.concatenate(
            [whole.flat[start:stop] for start, stop in runs] or [np.empty(0, np.float32)]
        )
        for slice_ in parts:
            assert part[slice_.label].shape == slice_.shape
            assert part[slice_.label].ravel().tolist() == list(range(slice_.start, slice_.stop))


@repeatable
@given(models, servers, min_blocks, rules)
def test_equal_shapes_are_placed_alike(model, servers, min_block, rule) -> None:
    again = {str(name): list(map(np.int64, dims)) for name, dims in model.items()}
    one = place(model, servers, dispatch=rule, min_block=min_block)
    two = place(again, np.int64(servers), dispatch=rule, min_block=np.int32(min_block))
    assert one == two
    assert hash(one) == hash(two)
    assert repr(one) == repr(two)  # plain Python numbers, whatever was given
