"""What one of 8, 16 or 32 values promises, on the reference; and that each promise is looked at.

The other kernels write the same bytes: `test_kernels`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import numpy as np
import pytest
from kernel_cases import CASES
from test_reference import ONE_BIT, ONE_OF, Format, each_block

from parallel_sgd.kernels import reference
from parallel_sgd.kernels.blocks import cut
from parallel_sgd.kernels.reference import F32, SMALLEST_LARGEST, lane_places, nothing

every_format = pytest.mark.parametrize("fmt", ONE_OF, ids=str)


def noise(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([n, seed]).standard_normal(n).astype(F32)


def steps(fmt: Format, gradient: np.ndarray, count: int):
    """v, q and the residual of each step with the same gradient."""
    blocks, r = fmt.blocks(cut([len(gradient)], 1024)), np.zeros_like(gradient)
    for _ in range(count):
        v = gradient + r
        q, r, _ = fmt(blocks, gradient, r)
        yield v, q, r


def lanes_are_a_partition(group: int) -> None:
    """Of any number of values each is in one lane, at the row that has its place in the block."""
    for n in range(1, 2101):
        places = lane_places(n, group)
        assert np.array_equal(np.sort(places[places < n]), np.arange(n))
        rows = np.arange(group)[:, None]
        assert (places // places.shape[1] == rows)[places < n].all()


def is_sent_well(v: np.ndarray, q: np.ndarray) -> bool:
    """No value is sent with another sign, nor as one that is farther from it than half of it."""
    return bool((np.abs(v - q) <= np.abs(v) / 2).all() and (q * v > 0).all())


def few_are_sent_well(fmt: Format, case) -> None:
    """Of every lane the largest, well, and the first of equals; of the others nothing.

    A lane sends if it has 2**(1 - none) of the block's largest, and does not below 2**-none of it.
    """
    none = nothing(fmt.group)
    for v, q, r, raw in each_block(fmt, case):
        if raw:
            continue
        sent = q != 0
        assert is_sent_well(v[sent], q[sent])
        assert np.array_equal(r[~sent].astype(F32).view("u4"), v[~sent].astype(F32).view("u4"))
        places = lane_places(len(v), fmt.group)
        magnitudes, chosen = np.append(np.abs(v), 0)[places], np.append(sent, False)[places]
        sends, largest = chosen.any(axis=0), magnitudes.max(axis=0)
        assert (chosen.sum(axis=0) <= 1).all()
        assert np.array_equal(chosen.argmax(axis=0)[sends], magnitudes.argmax(axis=0)[sends])
        s = largest.max()
        if s < SMALLEST_LARGEST:
            assert not sent.any()
            continue
        assert sends[largest >= s * 2.0 ** (1 - none)].all()
        assert not sends[largest < s * 2.0**-none].any()
        first = np.abs(v).argmax()
        assert (q[first], r[first]) == (v[first], 0), "the largest does not go over exactly"


def all_cases_are_sent_well(fmt: Format) -> None:
    for case in CASES:
        few_are_sent_well(fmt, case)


def equals_take_turns(fmt: Format) -> None:
    """Equal magnitudes, all the time: a row in every step, what it has gathered so far, exactly."""
    for n in (1024, fmt.group * 7):
        columns = n // fmt.group
        gradient = np.copysign(F32(0.75), noise(n))
        for step, (v, q, r) in enumerate(steps(fmt, gradient, 3 * fmt.group)):
            row = slice(step % fmt.group * columns, (step % fmt.group + 1) * columns)
            expected = np.zeros_like(v)
            expected[row] = gradient[row] * F32(min(step + 1, fmt.group))
            assert np.array_equal(q, expected)
            assert not r[row].any()


def a_large_column_is_sent_whole(fmt: Format) -> None:
    """Matrices one row of which is as long as a row of lanes, or some of them: the values of a
    column are in different lanes, so that the large ones do not wait for each other."""
    columns = 1024 // fmt.group
    for width in (columns, 2 * columns, 4 * columns):
        matrix = noise(1024).reshape(-1, width)
        for column in (0, 5, width - 1):
            scaled = matrix.copy()
            scaled[:, column] = np.copysign(100 + np.arange(len(matrix)), scaled[:, column])
            q, _ = fmt.of(scaled.ravel())
            assert q.reshape(scaled.shape)[:, column].all(), "a column waits for itself"


def one_value_goes_over_exactly(fmt: Format) -> None:
    for n in (17, 100, 1024, 2000):
        for place in range(0, n, 7):
            for value in (-1e30, 3.3, 2.0**-112):
                v = np.zeros(n, F32)
                v[place] = value
                q, r = fmt.of(v)
                assert np.array_equal(q, v)
                assert not r.any()


@pytest.mark.parametrize("group", [8, 16, 32])
def test_lanes_are_a_partition(group):
    lanes_are_a_partition(group)


@every_format
@pytest.mark.parametrize("case", CASES, ids=str)
def test_few_values_are_sent_well(fmt, case):
    few_are_sent_well(fmt, case)


def test_signs_are_not_sent_well():
    """Else the check would say nothing: values near zero are sent as the mean of their class."""
    v = noise(1024)
    q, _ = ONE_BIT.of(v)
    assert q.all()
    assert not is_sent_well(v, q)


@every_format
def test_equal_values_take_turns(fmt):
    equals_take_turns(fmt)


@every_format
def test_a_large_column_is_sent_whole(fmt):
    a_large_column_is_sent_whole(fmt)


@every_format
def test_one_value_goes_over_exactly(fmt):
    one_value_goes_over_exactly(fmt)


@every_format
def test_what_may_not_be_normal_waits(fmt):
    v = np.zeros(100, F32)
    v[40] = np.nextafter(SMALLEST_LARGEST, F32(0))
    q, r = fmt.of(v)
    assert not q.any()
    assert np.array_equal(r, v)
    second = [q for _, q, _ in steps(fmt, v, 2)][1]
    assert second[40] == 2 * v[40]


@every_format
@pytest.mark.parametrize("scale", [1e-45, 1e-40, 1e30, 3e37])
def test_short_blocks_of_any_scale(fmt, scale):
    """Up to 17 values: which of them are raw is for the bytes to say."""
    for n in range(1, 18):
        v = (np.clip(noise(n), -1, 1) * scale).astype(F32)
        q, r = fmt.of(v)
        assert np.isfinite(q).all() and np.isfinite(r).all()
        sent = q != 0
        assert is_sent_well(v[sent].astype(float), q[sent].astype(float))
        assert np.array_equal(r[~sent], v[~sent])
        assert sent.any() or scale < SMALLEST_LARGEST


@every_format
def test_keeps_up_with_a_constant_gradient(fmt):
    """No |v| is beyond 2.1 L²G, and each value is sent once in 3.2 L²G / |g| steps, at least.

    Let lanes have L values, |g| <= G, and S be the sum of |v| in a lane. A lane that sends loses at
    least half of its largest, which is at least S / L. So S becomes at most (1 - 1/2L) S + LG: it
    stays below 2 L²G, and what it has beyond that shrinks by 1 - 1/2L in each step.

    Let V be the largest |v| so far. Before it came to be, its lane may have sent nothing, and then
    had only values below V/4, as they were below 3/16 of the block's largest. From V/4 to V it took
    3V/4G steps at least, in which it did send. Were V more than 2 L²G, these would be 3L²/2:

        V <= S <= 2 L²G + (LV / 4) (1 - 1/2L)**(3L²/2) <= 2 L²G + (LV / 4) exp(-3L/4) <= 2.1 L²G

    A value that is not sent goes on by g in each step. It begins, at worst, with a residual V/2 of
    the other sign, and cannot go beyond V: 1.5 V / |g| steps.
    """
    gradient = noise(1024) * F32(10) ** np.random.default_rng(1).uniform(-2, 0, 1024).astype(F32)
    most, size = float(np.abs(gradient).max()), fmt.group**2
    often = np.abs(gradient) >= most / 2
    waited = np.zeros(1024)
    for v, q, _ in steps(fmt, gradient, int(3.2 * size * 2) + 2):
        assert np.abs(v).max() <= 2.1 * size * most
        waited = np.where(q == 0, waited + 1, 0)
        assert (waited[often] * np.abs(gradient[often]) <= 3.2 * size * most).all()


#: Faults in the reference: in which function, what is there, what takes its place, and the checks
#: of which each must notice it.
FAULTS: dict[str, tuple[str, str, str, list[Callable[[Format], None]]]] = {
    "no rotation": (
        "lane_places",
        "ROTATION * row",
        "0 * row",
        [a_large_column_is_sent_whole],
    ),
    "two rows in the same order": (
        "lane_places",
        "ROTATION * row",
        "ROTATION * (row // 2)",
        [a_large_column_is_sent_whole],
    ),
    "beyond the lanes": (
        "lane_places",
        ") % lanes, n)",
        "), n)",
        [lambda fmt: lanes_are_a_partition(fmt.group)],
    ),
    "exponent one more": (
        "encode_one_of",
        "+ (1 << 22)) >> 23",
        "+ (3 << 22)) >> 23",
        [all_cases_are_sent_well, one_value_goes_over_exactly],
    ),
    "exponent rounded down": (
        "encode_one_of",
        "+ (1 << 22)) >> 23",
        ") >> 23",
        [all_cases_are_sent_well],
    ),
    "exponent one less on the wire": (
        "encode_one_of",
        "| c[sent]\n",
        "| np.maximum(c[sent] - 1, 0)\n",
        [all_cases_are_sent_well],
    ),
    "residual cleared where nothing was sent": (
        "encode_one_of",
        "r[:] = v\n",
        "r[:] = 0\n",
        [all_cases_are_sent_well, equals_take_turns],
    ),
    "residual kept where something was sent": (
        "encode_one_of",
        "v[winner] - q",
        "v[winner]",
        [all_cases_are_sent_well, equals_take_turns, one_value_goes_over_exactly],
    ),
    "place of another row": (
        "encode_one_of",
        "place[sent] << shift",
        "(place[sent] ^ 1) << shift",
        [all_cases_are_sent_well, equals_take_turns, one_value_goes_over_exactly],
    ),
    "of equals the last": (
        "encode_one_of",
        "magnitudes.argmax(axis=0)",
        "len(magnitudes) - 1 - magnitudes[::-1].argmax(axis=0)",
        [all_cases_are_sent_well, equals_take_turns],
    ),
    "sign lost": (
        "encode_one_of",
        "negative.astype(np.uint8) << 7",
        "0",
        [all_cases_are_sent_well, equals_take_turns, one_value_goes_over_exactly],
    ),
}


@pytest.mark.parametrize(
    ("fault", "check"),
    [(fault, check) for fault, (*_, checks) in FAULTS.items() for check in range(len(checks))],
)
@every_format
def test_a_fault_is_noticed(fault, check, fmt, monkeypatch):
    name, right, wrong, checks = FAULTS[fault]
    source = inspect.getsource(getattr(reference, name))
    assert source.count(right) == 1
    names = dict(vars(reference))
    exec(source.replace(right, wrong), names)
    monkeypatch.setattr(reference, name, names[name])
    monkeypatch.setitem(globals(), name, names[name])
    with pytest.raises(AssertionError):
        checks[check](fmt)
