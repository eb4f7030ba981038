"""Measurements on a GPU: kernels, and exchanges of ranks on the same GPU.

Every kernel first runs beside the reference on the same random data, and all arrays are compared
byte for byte. Then the kernel runs on vectors that fill the chip. Its bandwidth counts the bytes
that must be moved, as a fraction of a device-to-device copy in the same run. The entropy code adds
to some sectors only, but is counted as adding to all; its time includes the waits for the device.
Sums of ranks that share the GPU are compared with NumPy's bit for bit before the timing. NCCL needs
a GPU for each rank, so runs on a single rank: this shows that the calls work, and says nothing of
speed.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import statistics
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from parallel_sgd import Communicator, Parameters, UserError
from parallel_sgd.compression import codec_for
from parallel_sgd.compression.step_search import find_step
from parallel_sgd.exchange import Exchange
from parallel_sgd.exchange.nccl import start_nccl
from parallel_sgd.kernels import cuda, reference
from parallel_sgd.kernels.blocks import Blocks, cut, payload_offsets

from .kernels import BLOCK, ENTROPY_BITS, layered, normal
from .on_ranks import on_ranks
from .report import Report, positive
from .timing import Call, in_turn, median_s

RANKS = 2
EXCHANGED = 2**24  #: values of the vectors that ranks sum
COMPARED = 2**20 + 37  #: values of the vectors on which the reference, which is slow, runs too
SMALL = 2**16  #: random values; the vectors that are timed repeat them
CHECKED = 100_003  #: values of which ranks compare a sum with the same exchange in NumPy
STEPS = 3
TRANSPORTS = ("collective", "pipelined")  #: of one GPU; NCCL wants one for each rank

Arrays = dict[str, Any]
#: Row, kernel, arguments, and the bytes that must be moved for a value.
KernelCall = tuple[str, str, tuple[Any, ...], float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    values = "values in the vectors (default: 2**27)"
    parser.add_argument("--values", type=positive, default=1 << 27, help=values)
    parser.add_argument("--repeats", type=positive, default=50, help="of a kernel (default: 50)")


def main(options: argparse.Namespace) -> Report:
    """Compare, then measure. Raises UserError without a GPU."""
    cupy = _cupy()
    values = -(-options.values // SMALL) * SMALL
    compare(cupy)
    name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    report = Report(f"CUDA kernels on {name}, {values} values in blocks of {BLOCK}")
    measure(cupy, report, values, options.repeats)
    sharing_ranks(report, min(values, EXCHANGED))
    alone_with_nccl(cupy, report, min(values, EXCHANGED))
    return report


def compare(cupy: Any) -> None:
    """Run every kernel and its reference, and compare all arrays after each."""
    here = _arrays(COMPARED)
    there = {name: cupy.asarray(array) for name, array in here.items()}
    for expected, got in zip(_calls(here), _calls(there), strict=True):
        row, kernel, _, _ = expected
        results = getattr(reference, kernel)(*expected[2]), getattr(cuda, kernel)(*got[2])
        different = [name for name in here if here[name].tobytes() != there[name].tobytes()]
        if different or results[0] != results[1]:
            raise AssertionError(f"{row} differs from the reference in {different or results}")


def measure(cupy: Any, report: Report, values: int, repeats: int) -> None:
    """Add a row for the copy and one for every kernel, in GB/s."""
    arrays = {}
    for name, small in _arrays(SMALL).items():
        arrays[name] = cupy.empty(values // SMALL * small.size, small.dtype)
        arrays[name].reshape(-1, small.size)[...] = cupy.asarray(small)

    def copy() -> None:
        arrays["x"].data.copy_from_device_async(arrays["gradient"].data, arrays["x"].nbytes)

    def again() -> None:
        """Clear the residual: messages of the entropy code must not grow from call to call."""
        copy()
        arrays["residual"].fill(0)

    copied = 8 * values / _seconds(cupy, copy, copy, repeats) / 1e9
    limit = f"copy, device to device, {copied:.0f} GB/s"
    report.add("copy, device to device", copied, "GB/s", "itself: the limit", 1.0)
    for row, kernel, arguments, size in _calls(arrays):
        launch = functools.partial(getattr(cuda, kernel), *arguments)
        seconds = _seconds(cupy, launch, again, repeats)
        moved = size * values / seconds / 1e9
        remark = ""
        if "entropy" in kernel:
            sent = int(arrays["payload"][:4].view(np.uint32)[0])  # as every message begins
            remark = f"; {8 * sent / values:.3g} bits a value"
        report.add(row, moved, "GB/s", limit + remark, moved / copied)


def sharing_ranks(report: Report, values: int, rounds: int = 9) -> None:
    """Check the sums of MPI ranks that share the GPU, and add their rows."""
    seconds = on_ranks(RANKS, "gpu:measure_ranks", {"values": values, "rounds": rounds})
    for name, median in seconds.items():
        name = f"sum of {values} values over {RANKS} ranks sharing the GPU, {name}"
        full = 1e3 * seconds["32 collective"]
        report.compare(name, 1e3 * median, "ms", "32 bit collective", full)


def measure_ranks(comm: Communicator, values: int, rounds: int) -> dict[str, float]:
    """Compare sums on the GPU with sums on the CPU, then time them, on ranks that share the GPU.

    Returns:
        By bits and transport ("1 pipelined"): the median seconds of the slowest rank.
    """
    cupy: Any = importlib.import_module("cupy")
    for transport in TRANSPORTS:
        _compare_sums(comm, cupy, transport)
    parameters = Parameters({"W": cupy.zeros(values, np.float32)})
    vector = cupy.asarray(np.random.default_rng(comm.rank).standard_normal(values, np.float32))
    exchanges = {
        f"{bits} {transport}": Exchange(
            parameters, comm, codec_for(bits) if bits < 32 else None, transport=transport
        )
        for bits in (32, 1)
        for transport in TRANSPORTS
    }
    residuals = exchanges["1 pipelined"].residuals(parameters)
    total, wait = vector.copy(), cupy.cuda.Device().synchronize

    def given() -> None:
        total[...] = vector
        wait()

    def summed(exchange: Exchange) -> None:
        exchange.sum(total, residuals)
        wait()

    calls = {name: functools.partial(summed, one) for name, one in exchanges.items()}
    seconds = in_turn(calls, rounds, comm, before=given)
    return {name: statistics.median(of_call) for name, of_call in seconds.items()}


def _compare_sums(comm: Communicator, cupy: Any, transport: str) -> None:
    """Check that sums with NumPy and with CuPy agree in every bit, residuals included."""
    host = Parameters({"W": np.zeros(CHECKED - 7, np.float32), "b": np.zeros(7, np.float32)})
    device = Parameters({name: cupy.asarray(host[name]) for name in host})
    random = np.random.default_rng(comm.rank)
    for bits in (1, 2, 4, 8, 16, 32):
        sides = [Exchange(p, comm, codec_for(bits), transport=transport) for p in (host, device)]
        residuals = [e.residuals(p) for e, p in zip(sides, (host, device), strict=True)]
        for _ in range(STEPS):
            given = random.standard_normal(CHECKED).astype(np.float32)
            sums = [given.copy(), cupy.asarray(given)]
            for exchange, total, kept in zip(sides, sums, residuals, strict=True):
                exchange.sum(total, kept)
            worker = [r.worker_error for r in residuals]
            owner = [r.owner_error["0"] for r in residuals]
            pairs = [sums, worker, owner]
            if any(a.tobytes() != cupy.asnumpy(b).tobytes() for a, b in pairs):
                raise UserError(
                    f"the {transport} sum over ranks at {bits} bits differs between GPU and CPU"
                )


def alone_with_nccl(cupy: Any, report: Report, values: int, rounds: int = 9) -> None:
    """Add rows for NCCL's transport on a single rank; sums must equal those without NCCL."""
    comm = Communicator.single()
    parameters = Parameters({"W": cupy.zeros(values, np.float32)})
    given = cupy.asarray(np.random.default_rng(0).standard_normal(values, np.float32))
    try:
        started = [start_nccl(parameters, comm, "auto", lossless=bits == 32) for bits in (32, 1)]
    except UserError as error:
        print(f"benchmarks: skipped: {error}", file=sys.stderr)
        return
    for bits, (topology, nccl) in zip((32, 1), started, strict=True):
        codec = codec_for(bits) if bits < 32 else None
        exchange = Exchange(parameters, comm, codec, transport="nccl", topology=topology, nccl=nccl)
        plain = Exchange(parameters, comm, codec, transport="pipelined")
        sums = [given.copy(), given.copy()]
        for variant, total in zip((exchange, plain), sums, strict=True):
            variant.sum(total, variant.residuals(parameters))
        if sums[0].tobytes() != sums[1].tobytes():
            raise AssertionError(f"a sum of one rank through NCCL differs at {bits} bits")
        nccl.broadcast_all([(sums[0], 0)])
        if sums[0].tobytes() != sums[1].tobytes():
            raise AssertionError("NCCL's broadcast of one rank to itself changes values")
        seconds = median_s(functools.partial(nccl.all_reduce, sums[0]), rounds, warm_up=0)
        name = f"NCCL's all-reduce of {values} values, one rank, waited for, {bits} bit"
        report.add(name, seconds * 1e3, "ms", "nothing: it shows that the calls work", None)


def _cupy() -> Any:
    try:
        cupy: Any = importlib.import_module("cupy")
        cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # no CuPy, no driver, no device: each has its own
        raise UserError(f"the gpu benchmark needs CuPy and an NVIDIA GPU: {error}") from None
    return cupy


def _arrays(n: int) -> Arrays:
    """Make the kernels' arrays in the host's memory: n values each, and room for any payload."""
    random = np.random.default_rng(0)
    names = ("gradient", "residual", "x", "m")
    vectors = {name: random.standard_normal(n).astype(np.float32) for name in names}
    payload = np.zeros(2 * n, np.uint8)
    layers = layered(normal(n))
    return {**vectors, "v": vectors["m"] ** 2, "payload": payload, "layers": layers}


def _calls(arrays: Arrays) -> Iterator[KernelCall]:
    """Yield every kernel with its arguments; each decodes the payload encoded just before."""
    gradient, residual, x, m, v, payload, layers = arrays.values()
    n = len(x)
    for bits in (1, 4, 8):
        starts = cut([n], BLOCK)
        blocks = Blocks(starts, payload_offsets(starts, bits))
        part = payload[blocks.bytes]
        if bits == 1:
            for mean in (True, False):
                row = "encode_1bit, threshold " + ("mean" if mean else "0")
                yield row, "encode_1bit", (blocks, gradient, residual, part, mean), 12.125
            yield "decode_1bit, write", "decode_1bit", (blocks, part, x, False), 4.125
            yield "decode_1bit, add", "decode_1bit", (blocks, part, x, True), 8.125
        else:
            levels = bits, blocks, gradient, residual, part
            yield f"encode_levels, {bits} bits", "encode_levels", levels, 12 + bits / 8
            added = bits, blocks, part, x, True
            yield f"decode_levels, {bits} bits, add", "decode_levels", added, 8 + bits / 8
    for few in ENTROPY_BITS:
        message = layers, residual, payload, find_step(layered(normal(SMALL)), few, n).size
        yield f"encode_entropy, {few:g} bits", "encode_entropy", message, 12 + few / 8
        for add, how in ((False, "write"), (True, "add")):
            row, moved = f"decode_entropy, {few:g} bits, {how}", few / 8 + (8 if add else 4)
            yield row, "decode_entropy", (payload, x, add), moved
    for bfloat in (False, True):
        kind = "bfloat16" if bfloat else "float16"
        yield f"encode_half, {kind}", "encode_half", (gradient, residual, payload, bfloat), 14.0
        yield f"decode_half, {kind}, add", "decode_half", (payload, x, True, bfloat), 10.0
    yield "largest_magnitude, with its answer on the host", "largest_magnitude", (x,), 4.0
    yield "sgd_step", "sgd_step", (x, gradient, 1e-3), 12.0
    momentum = x, m, gradient, 1e-3, 0.9, 1.0, True
    yield "momentum_step, Nesterov", "momentum_step", momentum, 20.0
    adam = x, m, v, gradient, 1.0, 1e-3, 0.9, 0.999, 1e-8, 1e-5
    yield "adam_step", "adam_step", adam, 28.0


def _seconds(cupy: Any, launch: Call, before: Call, repeats: int) -> float:
    """Return the median time of a launch, by events around the launch.

    `before` keeps the device busy until launch and events are queued, so the host's time for the
    launch is not counted.
    """
    launch()  # compiles
    times: list[float] = []
    for _ in range(repeats):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        before()
        start.record()
        launch()
        end.record()
        end.synchronize()
        times.append(float(cupy.cuda.get_elapsed_time(start, end)) / 1e3)
    return statistics.median(times)
