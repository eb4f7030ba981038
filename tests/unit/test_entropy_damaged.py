"""Messages that no encoder has written are refused, or read alike by each body."""

from __future__ import annotations

import itertools
import mmap
from ctypes import CDLL, addressof, c_char, c_int, c_size_t, c_void_p
from typing import Any

import numpy as np
import pytest
from entropy_cases import F32, STEP, addends, damage, decode_alike, good_messages, split, values
from kernel_bodies import CUDA, Both, both_of

from parallel_sgd.kernels.entropy_reference import (
    DAMAGED,
    LARGEST,
    head_bytes,
    least_bytes,
    most_bytes,
)


@pytest.fixture(params=["numba", *CUDA])
def both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Both:
    """Each body of the kernels with its arrays."""
    return both_of(request.param, monkeypatch)


def test_damaged_messages(both: Both) -> None:
    random, refused = np.random.default_rng(0), 0
    for n, message in good_messages():
        for _ in range(60):
            refused += decode_alike(both, damage(message, random), n) == DAMAGED
    assert 150 < refused < 290


def test_messages_of_the_wrong_length(both: Both) -> None:
    for n, message in good_messages():
        for end in (*range(13), len(message) - 1):
            assert decode_alike(both, message[:end], n) == DAMAGED
        longer = np.concatenate([message, np.zeros(9, np.uint8)])
        assert decode_alike(both, longer, n) == len(message)
        for wrong in (0, 7, 8, len(message) - 1, len(message) + 1, 2**31, 2**32 - 1):
            longer[:4] = np.array([wrong], "<u4").view(np.uint8)
            assert decode_alike(both, longer, n) == DAMAGED


@pytest.mark.parametrize("step", [0, -0.0, -1, np.inf, -np.inf, np.nan])
def test_steps_that_are_refused(both: Both, step: float) -> None:
    n, message = good_messages()[1]
    message[4:8] = np.array([step], F32).view(np.uint8)
    assert decode_alike(both, message, n) == DAMAGED


def test_marks_behind_the_last_block(both: Both) -> None:
    n, message = good_messages()[-1]
    for block in (5, 31):
        marked = message.copy()
        marked[8:12].view(np.uint32)[0] |= np.uint32(1) << np.uint32(block)
        assert decode_alike(both, marked, n) == DAMAGED


def _one_block(header: int, payload: Any) -> Any:
    """A message of one block."""
    head = np.array([16 + len(payload), 0, 1, header], "<u4")
    head[1:2] = np.array([STEP], F32).view(np.uint32)
    return np.concatenate([head.view(np.uint8), payload])


@pytest.mark.parametrize("fill", ["zeros", "ones", "random"])
def test_headers_of_every_kind(both: Both, fill: str) -> None:
    random, read = np.random.default_rng(3), 0
    for low, size_low in itertools.product(range(16), range(32)):
        n = int(random.choice([7, 32, 70]))
        z, nbytes = int(random.integers(1, n + 2)), int(random.integers(n // 8 + 1, 4 * n))
        payload = random.integers(0, 256, nbytes, np.uint8)
        payload = {"zeros": payload & 0, "ones": payload | 255, "random": payload}[fill]
        if low == 0:  # as many live values as the header says
            bits = np.unpackbits(payload, bitorder="little")
            bits[:n] = np.arange(n) < z
            payload = np.packbits(bits, bitorder="little")
        header = z - 1 | nbytes << 11 | low << 23 | size_low << 27
        read += decode_alike(both, _one_block(header, payload), n) != DAMAGED
    assert read or fill == "ones"


def test_raw_headers_have_no_other_bits(both: Both) -> None:
    payload = np.arange(14, dtype=np.uint8)
    assert decode_alike(both, _one_block(15 << 23, payload), 7) == 30
    for bit in (0, 11, 22, 27, 31):
        header = 15 << 23 | 1 << bit
        assert decode_alike(both, _one_block(header, payload), 7) == DAMAGED


@pytest.mark.parametrize(("n", "read"), [(8, True), (7, True), (6, False), (5, False)])
def test_live_values_behind_the_last(both: Both, n: int, read: bool) -> None:
    """Values 0, 4 and 6 are live, in groups 0 and 1."""
    payload = np.packbits([1, 1, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 0], bitorder="little")
    for z in (1, 2, 3, 4):
        header = z - 1 | len(payload) << 11 | 12 << 23 | 15 << 27
        assert (decode_alike(both, _one_block(header, payload), n) != DAMAGED) == (read and z == 3)


@pytest.mark.parametrize(("more", "read"), [(0, True), (1, False)])
def test_sizes_beyond_the_largest(both: Both, more: int, read: bool) -> None:
    """The highest sizes that 14 low planes can name."""
    size = LARGEST - 1 + more
    planes = [size >> j & 1 for j in range(14)] + [1, 0]
    payload = np.packbits([0, 0, 1, 0, 0, 0, 0, 1, *planes], bitorder="little")
    header = len(payload) << 11 | 14 << 27
    assert (decode_alike(both, _one_block(header, payload), 7) != DAMAGED) == read


def test_random_bytes(both: Both) -> None:
    random = np.random.default_rng(4)
    for _ in range(60):
        payload = random.integers(0, 256, random.integers(1, 300), np.uint8)
        if random.random() < 0.5:
            payload &= random.integers(0, 256, len(payload), np.uint8)  # fewer ones
        z, low = random.integers(1, 60), random.integers(1, 13)
        header = int(z - 1 | len(payload) << 11 | low << 23 | random.choice([0, 1, 3, 15]) << 27)
        decode_alike(both, _one_block(header, payload), 2000)
        decode_alike(both, payload, 100)


class AtTheEnd:
    """Places arrays before memory that no process may read."""

    def __init__(self) -> None:
        self._kept: list[Any] = []

    def __call__(self, array: Any, alignment: int) -> Any:
        """A copy that ends, but for what its alignment takes, where reading ends the process."""
        pages = mmap.mmap(-1, (-(-array.nbytes // mmap.PAGESIZE) + 1) * mmap.PAGESIZE)
        self._kept.append(pages)
        protect = CDLL(None).mprotect
        protect.argtypes = [c_void_p, c_size_t, c_int]
        end = len(pages) - mmap.PAGESIZE
        assert protect(addressof(c_char.from_buffer(pages, end)), mmap.PAGESIZE, 0) == 0
        begin = (end - array.nbytes) // alignment * alignment
        placed = np.frombuffer(pages, np.uint8, array.nbytes, begin).view(array.dtype)
        placed[:] = array
        return placed


@pytest.mark.parametrize("body", ["numba", "emulation"])
def test_nothing_is_read_behind_an_array(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that reads on ends the process: the test says no more than that."""
    both, place = both_of(body, monkeypatch), AtTheEnd()
    alignment = 1 if body == "numba" else 4  # of payloads
    random = np.random.default_rng(5)
    for n, message in good_messages():
        gradient, residual = (place(x, 4) for x in split(values(n)["noise of 3"]))
        for room in (most_bytes(n), least_bytes(n) + n // 4, least_bytes(n)):
            payload = place(np.zeros(room, np.uint8), alignment)
            assert both.kernels.encode_entropy(gradient, residual, payload, STEP) <= room
        out = place(addends(n), 4)
        messages = [message, *(damage(message, random) for _ in range(12))]
        for header in (0x7FFFFF, 0x7FF800, 15 << 23, 2**32 - 1):  # all that follow are moved
            messages.append(message.copy())
            first = head_bytes(n)
            messages[-1][first : first + 4] = np.array([header], "<u4").view(np.uint8)
        for number, damaged in enumerate(messages):
            length = both.kernels.decode_entropy(place(damaged, alignment), out, number % 2 == 1)
            assert number or length == len(message)
