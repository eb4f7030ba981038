"""Copies of pieces through pinned memory beside long copies, for `benchmarks.gpu`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from parallel_sgd.communication.mpi.staging import Staged, is_done, pinned_like

from .report import Report

PIECE = 1 << 18  #: values, as in an exchange


def stage(cupy: Any, report: Report, values: int, rounds: int = 9) -> None:
    """Add rows for copies out of a vector and into another, in GB/s each way."""
    source = cupy.asarray(np.random.default_rng(0).standard_normal(values, np.float32))
    target, host = cupy.zeros(values, np.float32), pinned_like(source)
    stream = cupy.cuda.get_current_stream()

    def out() -> None:
        source.data.copy_to_host_async(host.ctypes.data, source.nbytes, stream)

    def back() -> None:
        target.data.copy_from_host_async(host.ctypes.data, target.nbytes, stream)

    def blocking() -> None:
        """As the collectives do it."""
        source.get(stream=stream, out=host)
        stream.synchronize()
        target.set(host)

    staged = Staged(source)

    def pieces() -> None:
        _through(cupy, staged, source, target)

    rate = {
        name: values * 4 / _median(cupy, function, rounds) / 1e9
        for name, function in (("out", out), ("in", back), ("one", blocking), ("all", pieces))
    }
    if not bool((source == target).all()):
        raise AssertionError("staged pieces differ from what was staged")
    limit = min(rate["out"], rate["in"])
    reference = f"one long copy of pinned memory, the slower way, {limit:.1f} GB/s"
    for name, way in (("out", "device to host"), ("in", "host to device")):
        report.add(f"pinned copy, {way}", rate[name], "GB/s", reference, rate[name] / limit)
    for name, text in (
        ("one", "out, then in, waited for"),
        ("all", "staged in pieces, out and in"),
    ):
        report.add(text, rate[name], "GB/s", reference, rate[name] / limit)


def _through(cupy: Any, staged: Staged, source: Any, target: Any) -> None:
    """Every piece out, and as soon as it is in the host's memory into the other vector."""
    leaving = []
    for first in range(0, source.size, PIECE):
        piece = source[first : first + PIECE]
        room, _, land = staged.begin_receive(target[first : first + PIECE])
        leaving.append((piece, *staged.begin_send(piece), room, land))
    for piece, host, event, room, land in leaving:
        while not is_done(cupy, event):
            pass
        room[...] = host  # what MPI would do between two ranks
        land()
        staged.end_send(piece)


def _median(cupy: Any, function: Callable[[], None], rounds: int) -> float:
    times = []
    for i in range(rounds + 1):
        cupy.cuda.Device().synchronize()
        begin = time.perf_counter()
        function()
        cupy.cuda.Device().synchronize()
        if i > 0:
            times.append(time.perf_counter() - begin)
    return statistics.median(times)
