"""The entropy code beside the entropy of its values and beside interleaved rANS, on one thread.

The step is that of an exchange with the same bits. The vector is that of
`python -m benchmarks kernels`: its layers have unlike sizes. H0 is the entropy of the quantized
values: no code with a single table for the whole vector is shorter. Our code has a header for each
2,048 values, and is shorter if layers are unlike. Rows "alike" are of normal numbers of equal size.

rANS gets quantized values, as symbols. So the time of rANS has neither the quantization nor the
residual; our time has both. rANS is compiled by Numba, and divides instead of multiplying by a
table of reciprocals.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from parallel_sgd.compression.step_search import find_step, message_room, sample_of_sums
from parallel_sgd.kernels import cpu, memory

from . import rans
from .kernels import ENTROPY_BITS, layered, normal
from .report import Report, positive
from .timing import Call, in_turn, median_s

Array = npt.NDArray[Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--values", type=positive, default=1 << 24, help="values in the vector (default: 2**24)"
    )
    parser.add_argument("--rounds", type=positive, default=5, help="of each (default: 5)")


def main(options: argparse.Namespace) -> Report:
    n = options.values
    vector, out = normal(n), memory.zeros(n, np.float32)
    layers = layered(vector)
    report = Report(f"the entropy code beside rANS on one thread, {n} values")
    for bits in ENTROPY_BITS:
        coded = Coded(vector, bits)
        report.add(f"length, {bits:g} bit, alike", *coded.length(len(coded.message)))
    for bits in ENTROPY_BITS:
        _add_rows(report, layers, out, bits, options.rounds)
    axpy = partial(cpu.sgd_step, out, vector, 1e-6)
    limit = median_s(axpy, 2 * options.rounds, warm_up=0)
    report.add("axpy in place", 1e9 * limit / n, "ns/value", "the kernels' limit", None)
    return report


class Coded:
    """A vector in both codes.

    Attributes:
        values, symbols: the distinct values, and the number of each place's value.
        message, stream: our code, uint8, and rANS, uint16.
    """

    def __init__(self, vector: Array, bits: float) -> None:
        self.n = len(vector)
        self.step = find_step(sample_of_sums([(None, vector)]), bits, self.n).size
        self.room = memory.zeros(message_room(self.n), np.uint8)
        residual = memory.zeros(self.n, np.float32)
        length = cpu.encode_entropy(vector, residual, self.room, self.step)
        self.message = self.room[:length].copy()
        quantized = memory.empty(self.n, np.float32)
        cpu.decode_entropy(self.message, quantized, False)
        self.values, symbols = np.unique(quantized, return_inverse=True)
        self.symbols = symbols.astype(np.uint16)
        self.parts = rans.frequencies(self.symbols)
        self.space = np.empty(self.n + 64, np.uint16)
        self.stream = self.space[rans.encode(self.symbols, self.parts, self.space) :].copy()
        again = np.empty_like(quantized)
        rans.decode(self.stream, self.parts, self.values, again, False)
        assert np.array_equal(again, quantized)

    def length(self, octets: int) -> tuple[float, str, str, float]:
        """Return the last columns of a row, for a message of `octets` bytes."""
        share = np.bincount(self.symbols) / self.n
        entropy = float(-(share * np.log2(share)).sum())
        bits = 8 * octets / self.n
        return bits, "bits/value", f"H0, {entropy:.4g}", bits / entropy


def _add_rows(report: Report, v: Array, out: Array, bits: float, rounds: int) -> None:
    """Add lengths and times of the vector with layers."""
    r = memory.zeros(len(v), np.float32)
    coded, name = Coded(v, bits), f"{bits:g} bit"
    report.add(f"length, {name}", *coded.length(len(coded.message)))
    table = 4 * len(coded.values)
    report.add(f"length of rANS, {name}", *coded.length(coded.stream.nbytes + table))
    calls: dict[str, tuple[Call, Call]] = {
        "encode": (
            lambda: cpu.encode_entropy(v, r, coded.room, coded.step),
            lambda: rans.encode(coded.symbols, coded.parts, coded.space),
        ),
        "decode and add": (
            lambda: cpu.decode_entropy(coded.message, out, True),
            lambda: rans.decode(coded.stream, coded.parts, coded.values, out, True),
        ),
    }
    for call, (our_call, their_call) in calls.items():
        pair = {"ours": our_call, "theirs": their_call}
        seconds = in_turn(pair, rounds, before=lambda: r.fill(0), warm_up=0)
        ours, theirs = (1e9 * statistics.median(seconds[side]) / len(v) for side in pair)
        report.compare(f"{call}, {name}", ours, "ns/value", "time of rANS", theirs, ".3g")
