"""The CPU kernels beside this machine's memory, on one thread.

The limit is the bandwidth of ``x -= a * y`` in place, which reads two vectors and writes one. Every
kernel's bytes are unavoidable: encoding at 1 bit reads g, reads and writes r and writes a bit,
12.125 bytes a value; decoding and adding moves 8.125.

Two thirds of axpy's bytes are reads, and an ordinary store reads its line first. So if reads are
the bottleneck, `largest magnitude` and decoding 16 bits end at 0.67 of axpy.

The entropy code encodes and decodes a vector with layers of unlike sizes, with the step of an
exchange with the same bits. Decoding adds to fewer lines than all, but is counted as adding to all.
The largest 64 of 4,096 values are encoded beside NumPy's and PyTorch's selection of as many, if
PyTorch is there: these only find the places, and are counted as if they did all of encoding.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallel_sgd.compression.step_search import find_step, message_room, sample_of_sums
from parallel_sgd.kernels import Blocks, cpu, cut, memory, payload_offsets
from parallel_sgd.kernels.top_k_reference import top_k_offsets

from .report import Report, positive
from .timing import Call, seconds_of

Array = npt.NDArray[Any]
BLOCK = 1024
ENTROPY_BITS = (2, 1, 0.5, 0.25, 0.1)
LAYERS = 64
TOP, TOP_OF = 64, 4096  #: values that are sent of as many


class Case(NamedTuple):
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
    values = "values in the vector (default: 2**24)"
    parser.add_argument("--values", type=positive, default=1 << 24, help=values)
    parser.add_argument("--rounds", type=positive, default=15, help="of all kernels (default: 15)")
    only = "kernels with one of these words in their names (default: all)"
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help=only)


def main(options: argparse.Namespace) -> Report:
    n = -(-options.values // BLOCK) * BLOCK
    x, gradient = memory.zeros(n, np.float32), normal(n)
    cases = [*quantized(gradient, x), *entropy(gradient, x), *largest(gradient, x)]
    cases += steps(gradient, x)
    cases = [case for case in cases if any(word in case.name for word in options.only)]
    for case in cases:
        case.call()  # compiles
    axpy: list[list[float]] = [[] for _ in cases]
    seconds: list[list[float]] = [[] for _ in cases]
    for _ in range(options.rounds):
        for case, limits, times in zip(cases, axpy, seconds, strict=True):
            case.before()
            # right before: others may load memory, too
            limits.append(seconds_of(lambda: cpu.sgd_step(x, gradient, 1e-6)))
            times.append(seconds_of(case.call))
    limit = 12 * n / statistics.median(chain(*axpy)) / 1e9
    report = Report(f"kernels on one thread, {n} values, blocks of {BLOCK}")
    report.add("axpy in place", limit, "GB/s", "itself: the limit", 1.0)
    for case, limits, times in zip(cases, axpy, seconds, strict=True):
        speed = case.moved * n / statistics.median(times) / 1e9
        faster = statistics.median(a / b for a, b in zip(limits, times, strict=True))
        reference = f"axpy in place, {limit:.1f} GB/s{case.remark}"
        report.add(case.name, speed, "GB/s", reference, case.moved / 12 * faster)
    return report


def normal(n: int) -> Array:
    """Return n normal numbers, float32."""
    vector = memory.empty(n, np.float32)
    vector[:] = np.random.default_rng(0).standard_normal(n, np.float32)
    return vector


def layered(vector: Array) -> Array:
    """Return the vector with layers of unlike sizes."""
    scales = np.exp(1.5 * np.random.default_rng(1).standard_normal(LAYERS)).astype(np.float32)
    layers = memory.empty(len(vector), np.float32)
    layers[:] = vector * np.repeat(scales, -(-len(vector) // LAYERS))[: len(vector)]
    return layers


def quantized(g: Array, x: Array) -> Iterator[Case]:
    """Yield cases of messages with a fixed length."""
    n, residual = len(g), memory.zeros(len(g), np.float32)
    starts, payload = cut([n], BLOCK), memory.zeros(4 * n, np.uint8)
    for bits, mean in ((1, False), (4, False), (8, False), (1, True)):
        blocks = Blocks(starts, payload_offsets(starts, bits))
        part = payload[blocks.bytes]
        encode: Call = partial(cpu.encode_levels, bits, blocks, g, residual, part)
        decode = partial(cpu.decode_levels, bits, blocks, part, x)
        if bits == 1:
            encode = partial(cpu.encode_1bit, blocks, g, residual, part, mean)
            decode = partial(cpu.decode_1bit, blocks, part, x)
        name = f"{bits} bit{', mean threshold' * mean}"
        yield Case(f"encode {name}", 12 + bits / 8, encode)
        yield from decoding(name, bits, decode)
    for name, bfloat in (("float16", False), ("bfloat16", True)):
        half = payload[: 2 * n]
        yield Case(f"encode {name}", 14, partial(cpu.encode_half, g, residual, half, bfloat))
        yield from decoding(name, 16, partial(cpu.decode_half, half, x, bfloat=bfloat))


def entropy(g: Array, x: Array) -> Iterator[Case]:
    """Yield cases of the entropy code, all with the same message, of the layers alone."""
    n, room = len(g), memory.zeros(message_room(len(g)), np.uint8)
    layers, error = layered(g), memory.zeros(n, np.float32)
    for few in ENTROPY_BITS:
        step = find_step(sample_of_sums([(None, layers)]), few, n).size
        encode = partial(cpu.encode_entropy, layers, error, room, step)
        clear = partial(error.fill, 0)
        clear()
        sent = room[: encode()].copy()
        bits, name = 8 * len(sent) / n, f"{few:g} bit, entropy code"
        remark = f"; {bits:.3g} bits a value"
        yield Case(f"encode {name}", 12 + bits / 8, encode, clear, remark)
        for case in decoding(name, bits, partial(cpu.decode_entropy, sent, x)):
            yield case._replace(remark=remark)


def largest(g: Array, x: Array) -> Iterator[Case]:
    """Yield cases of the largest values of each block, and of their selection by others."""
    starts, error, name = cut([len(g)], TOP_OF), memory.zeros(len(g), np.float32), "top 64 of 4096"
    blocks = Blocks(starts, top_k_offsets(starts, TOP, TOP_OF))
    sent = memory.zeros(blocks.bytes.stop, np.uint8)
    bits, clear = 8 * len(sent) / len(g), partial(error.fill, 0)
    encode: Call = partial(cpu.encode_top_k, TOP, TOP_OF, blocks, g, error, sent)
    yield Case(f"encode {name}", 12 + bits / 8, encode, clear)
    yield from decoding(name, bits, partial(cpu.decode_top_k, TOP, TOP_OF, blocks, sent, x))
    rows = g[: len(g) // TOP_OF * TOP_OF].reshape(-1, TOP_OF)
    yield Case(
        f"numpy.argpartition, {name}",
        12 + bits / 8,
        lambda: np.argpartition(np.abs(rows), -TOP, axis=1),
    )
    if importlib.util.find_spec("torch"):
        import torch

        torch.set_num_threads(1)
        tensor = torch.from_numpy(rows)
        yield Case(
            f"torch.topk, {name}",
            12 + bits / 8,
            lambda: torch.topk(tensor.abs(), TOP, sorted=False),
        )


def decoding(name: str, bits: float, decode: Callable[..., object]) -> Iterator[Case]:
    """Yield cases of a kernel whose next argument says whether to add."""
    yield Case(f"decode and add {name}", 8 + bits / 8, partial(decode, True))
    yield Case(f"decode {name}", 4 + bits / 8, partial(decode, False))


def steps(g: Array, x: Array) -> Iterator[Case]:
    """Yield cases of kernels that encode and decode nothing."""
    m, v = (memory.zeros(len(g), np.float32) for _ in range(2))
    lr, beta = 1e-6, 0.9
    momentum = x, m, g, lr, beta, 1.0, False
    adam = x, m, v, g, 1.0, lr, beta, 0.999, 1e-8, 0.0
    yield Case("largest magnitude", 4, partial(cpu.largest_magnitude, g))
    yield Case("momentum step", 20, partial(cpu.momentum_step, *momentum))
    yield Case("adam step", 28, partial(cpu.adam_step, *adam))
