"""Interleaved rANS, the yardstick of `python -m benchmarks entropy-code`.

Range asymmetric numeral systems (Duda, arXiv 1311.2540) with a single table of frequencies for the
whole message: within a thousandth the shortest code for single values. Eight
states take turns, as Giesen proposes (arXiv 1402.3392), so a processor works at several at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from parallel_sgd.kernels.compiled import compiled

Array = npt.NDArray[Any]

STATES = 8
SCALE = 14  #: frequencies add up to 2**SCALE
LOW = 1 << 16  #: a state is not below between two values; 16 bits are written at a time


def frequencies(symbols: Array) -> Array:
    """Return each symbol's frequency, uint32, in parts of 2**SCALE; at least 1 if present."""
    counts = np.bincount(symbols)
    parts = np.maximum(np.round(counts * (2**SCALE / len(symbols))), counts > 0).astype(np.int64)
    parts[parts.argmax()] += 2**SCALE - parts.sum()
    return np.asarray(parts, np.uint32)


@compiled
def encode(symbols: Array, parts: Array, out: Array) -> int:
    """Fill `out`, uint16, from its end. Returns where the message begins."""
    begins = np.zeros(len(parts), np.uint32)
    for s in range(1, len(parts)):
        begins[s] = begins[s - 1] + parts[s - 1]
    states = np.full(STATES, LOW, np.uint32)
    at = len(out)
    for i in range(len(symbols) - 1, -1, -1):
        s, lane = symbols[i], i % STATES
        x, part = states[lane], parts[s]
        if np.uint64(x) >= np.uint64(part) << np.uint64(32 - SCALE):
            at -= 1
            out[at] = np.uint16(x & np.uint32(0xFFFF))
            x >>= np.uint32(16)
        states[lane] = np.uint32((x // part << np.uint32(SCALE)) + x % part + begins[s])
    for lane in range(STATES - 1, -1, -1):
        at -= 2
        out[at] = np.uint16(states[lane] & np.uint32(0xFFFF))
        out[at + 1] = np.uint16(states[lane] >> np.uint32(16))
    return at


@compiled
def decode(message: Array, parts: Array, values: Array, out: Array, add: bool) -> None:
    """Undo `encode`: the value of each symbol into `out`, or added to it."""
    begins = np.zeros(len(parts), np.uint32)
    for s in range(1, len(parts)):
        begins[s] = begins[s - 1] + parts[s - 1]
    of_slot = np.empty(1 << SCALE, np.uint16)
    for s in range(len(parts)):
        of_slot[begins[s] : begins[s] + parts[s]] = s
    states = np.empty(STATES, np.uint32)
    for lane in range(STATES):
        states[lane] = np.uint32(message[2 * lane]) | np.uint32(message[2 * lane + 1]) << np.uint32(
            16
        )
    at = 2 * STATES
    for i in range(len(out)):
        lane = i % STATES
        x = states[lane]
        slot = x & np.uint32((1 << SCALE) - 1)
        s = of_slot[slot]
        x = np.uint32(parts[s] * (x >> np.uint32(SCALE)) + slot - begins[s])
        if x < LOW:
            x = np.uint32(x << np.uint32(16) | np.uint32(message[at]))
            at += 1
        states[lane] = x
        out[i] = out[i] + values[s] if add else values[s]
