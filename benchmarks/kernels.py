"""The CPU kernels beside this machine's memory and beside plain NumPy, on one thread.

The limit is the bandwidth of ``x -= a * y`` in place, which reads two vectors and writes one. Every
kernel's bytes are unavoidable: encoding at 1 bit reads g, reads and writes r and writes a bit,
12.125 bytes a value; decoding and adding moves 8.125.

Two thirds of axpy's bytes are reads, and an ordinary store reads its line first. So if reads are
the bottleneck, `largest magnitude` and decoding 16 bits end at 0.67 of axpy.

The entropy code encodes and decodes a vector with layers of unlike sizes, with the step of an
exchange with the same bits. Decoding adds to fewer lines than all, but is counted as adding to all.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from parallel_sgd.compression.step_search import find_step, message_room, sample_of_sums
from parallel_sgd.kernels import Blocks, cpu, cut, memory, payload_offsets

from .report import Report, positive
from .timing import Call, seconds_of

Array = npt.NDArray[Any]
Pair = tuple[Call, Callable[[bool], object]]  #: encode, and decode with whether to add
BLOCK = 1024
ENTROPY_BITS = (2, 1, 0.5, 0.25, 0.1)
LAYERS = 64


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        moved: bytes that the call must move for each value.
        before: called before each call, outside of its time.
        remark: beside the limit, in the table.
    """

    name: str
    moved: float
    call: Call
    before: Call = lambda: None
    remark: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--values", type=positive, default=1 << 24, help="values in the vector (default: 2**24)"
    )
    parser.add_argument("--rounds", type=positive, default=15, help="of all kernels (default: 15)")


def main(options: argparse.Namespace) -> Report:
    n = -(-options.values // BLOCK) * BLOCK
    bench = KernelBench(n)
    seconds: dict[str, list[float]] = {case.name: [] for case in bench.cases}
    axpy: dict[str, list[float]] = {case.name: [] for case in bench.cases}
    for case in bench.cases:
        case.call()  # compiles
    for _ in range(options.rounds):
        for case in bench.cases:
            case.before()
            axpy[case.name].append(
                seconds_of(bench.axpy)
            )  # right before: others may load memory, too
            seconds[case.name].append(seconds_of(case.call))
    limit = 12 * n / statistics.median(one for times in axpy.values() for one in times)
    report = Report(f"kernels on one thread, {n} values, blocks of {BLOCK}")
    report.add("axpy in place", limit / 1e9, "GB/s", "itself: the limit", 1.0)
    for case in bench.cases:
        speed = case.moved * n / statistics.median(seconds[case.name])
        pairs = zip(axpy[case.name], seconds[case.name], strict=True)
        ratio = case.moved / 12 * statistics.median(theirs / ours for theirs, ours in pairs)
        reference = f"axpy in place, {limit / 1e9:.1f} GB/s{case.remark}"
        report.add(case.name, speed / 1e9, "GB/s", reference, ratio)
    small = BLOCK * 4096
    numpy_bench = KernelBench(min(n, small))
    for name, peer in numpy_bench.numpy_peers.items():
        theirs = numpy_bench.n / min(seconds_of(peer) for _ in range(3))
        ours = n / statistics.median(seconds[name])
        words = "NumPy with masks and packbits"
        name = f"{name}, against NumPy"
        report.compare(name, ours / 1e9, "G values/s", words, theirs / 1e9, ".3f")
    return report


class KernelBench:
    """Vectors of n values, and calls of every kernel on them."""

    def __init__(self, n: int) -> None:
        self.n = n
        starts = cut([n], BLOCK)
        self.gradient = memory.empty(n, np.float32)
        self.gradient[:] = np.random.default_rng(0).standard_normal(n, np.float32)
        self.residual, self.out, self.m, self.v = (memory.zeros(n, np.float32) for _ in range(4))
        self.payload = memory.zeros(4 * n, np.uint8)
        self.cases: list[Case] = []
        for bits in (1, 4, 8):
            blocks = Blocks(starts, payload_offsets(starts, bits))
            self._add(f"{bits} bit", bits, *self._quantized(bits, blocks))
        self._add("1 bit, mean threshold", 1, *self._quantized(1, Blocks(
            starts, payload_offsets(starts, 1)), mean=True))  # fmt: skip
        for name, bfloat in (("float16", False), ("bfloat16", True)):
            self._add(name, 16, *self._half(bfloat))
        self.layers, self.error = memory.empty(n, np.float32), memory.zeros(n, np.float32)
        scales = np.exp(1.5 * np.random.default_rng(1).standard_normal(LAYERS)).astype(np.float32)
        self.layers[:] = self.gradient * np.repeat(scales, -(-n // LAYERS))[:n]
        for few in ENTROPY_BITS:
            self._entropy(few)
        g, x, m, v = self.gradient, self.out, self.m, self.v
        lr, beta = 1e-6, 0.9
        self.cases += [
            Case("largest magnitude", 4, lambda: cpu.largest_magnitude(g)),
            Case("momentum step", 20, lambda: cpu.momentum_step(x, m, g, lr, beta, 1.0, False)),
            Case("adam step", 28, lambda: cpu.adam_step(
                x, m, v, g, 1.0, lr, beta, 0.999, 1e-8, 0.0)),
        ]  # fmt: skip
        self.numpy_peers = {
            "encode 1 bit": self._numpy_encode,
            "decode and add 1 bit": self._numpy_decode_add,
        }

    def axpy(self) -> None:
        cpu.sgd_step(self.out, self.gradient, 1e-6)

    def _add(self, name: str, bits: float, encode: Call, decode: Callable[[bool], object]) -> None:
        self.cases += [
            Case(f"encode {name}", 12 + bits / 8, encode),
            Case(f"decode and add {name}", 8 + bits / 8, lambda: decode(True)),
            Case(f"decode {name}", 4 + bits / 8, lambda: decode(False)),
        ]

    def _quantized(self, bits: int, blocks: Blocks, mean: bool = False) -> Pair:
        g, r, out, p = self.gradient, self.residual, self.out, self.payload[blocks.bytes]
        if bits == 1:
            return (
                lambda: cpu.encode_1bit(blocks, g, r, p, mean),
                lambda add: cpu.decode_1bit(blocks, p, out, add),
            )
        return (
            lambda: cpu.encode_levels(bits, blocks, g, r, p),
            lambda add: cpu.decode_levels(bits, blocks, p, out, add),
        )

    def _entropy(self, bits: float) -> None:
        """Add cases of the entropy code, all with the same message, of the layers alone."""
        v, r, out, n = self.layers, self.error, self.out, self.n
        step = find_step(sample_of_sums([(None, v)]), bits, n).size
        room = memory.zeros(message_room(n), np.uint8)
        r.fill(0)
        length = cpu.encode_entropy(v, r, room, step)
        sent, hit = room[:length].copy(), 8 * length / n
        remark = f"; {hit:.3g} bits a value"
        self.cases += [
            Case(
                f"encode {bits:g} bit, entropy code",
                12 + hit / 8,
                lambda: cpu.encode_entropy(v, r, room, step),
                before=lambda: r.fill(0),
                remark=remark,
            ),
            *(
                Case(
                    f"decode{' and add' if add else ''} {bits:g} bit, entropy code",
                    (8 if add else 4) + hit / 8,
                    lambda add=add: cpu.decode_entropy(sent, out, add),  # type: ignore[misc]
                    remark=remark,
                )
                for add in (True, False)
            ),
        ]

    def _half(self, bfloat: bool) -> Pair:
        p = self.payload[: 2 * self.n]
        return (
            lambda: cpu.encode_half(self.gradient, self.residual, p, bfloat),
            lambda add: cpu.decode_half(p, self.out, add, bfloat),
        )

    def _numpy_encode(self) -> None:
        """Encode without kernels: whole-vector NumPy, as fast as possible."""
        v = (self.gradient + self.residual).reshape(-1, BLOCK)
        bit = v >= 0
        ones = bit.sum(axis=1)
        high = np.where(bit, v, 0).sum(axis=1) / np.maximum(ones, 1)
        low = np.where(bit, 0, v).sum(axis=1) / np.maximum(BLOCK - ones, 1)
        self._packed = np.packbits(bit, axis=1, bitorder="little")
        self._levels = low.astype(np.float32), high.astype(np.float32)
        q = np.where(bit, self._levels[1][:, None], self._levels[0][:, None])
        np.subtract(v, q, out=self.residual.reshape(-1, BLOCK))

    def _numpy_decode_add(self) -> None:
        bit = np.unpackbits(self._packed, axis=1, bitorder="little").view(bool)
        low, high = self._levels
        out = self.out.reshape(-1, BLOCK)
        out += np.where(bit, high[:, None], low[:, None])
