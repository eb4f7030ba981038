"""Sums over all ranks in turn: MPI's and ours, and gloo's where PyTorch is."""

from __future__ import annotations

import importlib.util
import statistics
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from parallel_sgd import Communicator, Parameters, UserError
from parallel_sgd.algorithms import ExchangeState
from parallel_sgd.exchange import ExchangeOptions

from ..on_ranks import process_group
from ..timing import Call, seconds_of

Array = npt.NDArray[np.float32]

ALLREDUCE, GLOO = "MPI_Allreduce", "gloo"

CHECKED = 1024  #: values of a sum that are compared with the exact one
ROUNDING = 1e-5  #: of a sum in full precision


def measure(
    comm: Communicator,
    sizes: list[int],
    rounds: int,
    cases: dict[str, Any],
    gloo: bool = False,
    burst: int = 0,
) -> list[dict[str, Any]]:
    """Measure all cases for vectors of each size.

    Args:
        sizes: numbers of values.
        cases: of ours, `ExchangeOptions` by name.
        gloo: measure gloo, too.
        burst: bytes that an idle link accepts at once. As many are sent before each sum, so that
            a short one takes as long as the link's rate says.
    Returns:
        for each size: "values"; "seconds" by case, of the slowest rank, medians of all sums; of
        ours "bytes" that a rank sends in a sum, and "plans", as in `ExchangeState.report`.
    """
    wanted = gloo and importlib.util.find_spec("torch") is not None
    with process_group(comm, wanted):
        return [measure_size(comm, values, rounds, cases, wanted, burst) for values in sizes]


def measure_size(
    comm: Communicator,
    values: int,
    rounds: int,
    cases: dict[str, Any],
    gloo: bool = False,
    burst: int = 0,
) -> dict[str, Any]:
    """Measure all cases in turn; a first round does not count."""
    parameters = Parameters({"W": _vector_of(comm.rank, values)})
    total = parameters.like().flat
    ours = {
        name: ExchangeState.init(ExchangeOptions(**options), parameters, lambda: 0, comm)
        for name, options in cases.items()
    }
    calls: dict[str, Call] = {name: partial(one.sum, total) for name, one in ours.items()}
    calls = _peers(total, gloo) | calls
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 1):
        for name, call in calls.items():
            bits = cases[name]["gradient_bits"] if name in cases else None
            of_turn = turn(comm, name, call, parameters.flat, total, bits, burst)
            seconds[name] += of_turn if i > 0 else []
    count = (rounds + 1) * (1 + times(values))
    return {
        "values": values,
        "seconds": {name: statistics.median(of_case) for name, of_case in seconds.items()},
        "bytes": {name: one.bytes_sent / count for name, one in ours.items()},
        "plans": {name: one.report() for name, one in ours.items()},
    }


def _peers(total: Array, gloo: bool) -> dict[str, Call]:
    """Return the sums over the ranks of `total` in place by MPI, and by gloo."""
    from mpi4py import MPI

    calls: dict[str, Call] = {ALLREDUCE: lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, total)}
    if gloo:
        import torch

        calls[GLOO] = partial(torch.distributed.all_reduce, torch.from_numpy(total))
    return calls


def turn(
    comm: Communicator,
    name: str,
    call: Callable[[], object],
    given: Array,
    total: Array,
    bits: Any = None,
    burst: int = 0,
) -> list[float]:
    """Return the seconds of each sum, of the slowest rank.

    The first one is not counted: TCP still has the rate of the case before, and takes a while to
    recover from lost packets.

    Args:
        given: this rank's vector.
        total: room for the sum; gets the vector before each call.
        bits: of ours; None: a peer.
        burst: see `measure`.
    Raises:
        UserError: a sum in full precision is wrong, or our sums differ between ranks.
    """
    seconds = []
    for _ in range(1 + times(len(total))):
        total[...] = given
        if burst:
            _send_to_all(comm, burst)
        seconds.append(seconds_of(call, comm))
    few = min(CHECKED, len(total))
    exact = np.sum([_vector_of(rank, few) for rank in range(comm.size)], axis=0, dtype=np.float64)
    error = np.abs(total[:few] - exact).max() / np.abs(exact).max()
    digest = zlib.crc32(total[:: 1 + total.size // 100_000].tobytes())
    errors, digests = zip(*comm.allgather_object((float(error), digest)), strict=True)
    if bits in (32, None) and not max(errors) < ROUNDING:
        raise UserError(f"{name} has not summed up: relative error {max(errors):g}")
    if bits is not None and len(set(digests)) > 1:
        raise UserError(f"{name} has left other sums on some ranks than on others")
    return seconds[1:]


def _send_to_all(comm: Communicator, nbytes: int) -> None:
    """Send at least so many bytes from each rank, and to each rank."""
    from mpi4py import MPI

    part = -(-nbytes // max(1, comm.size - 1))
    sent, received = (np.zeros(comm.size * part, np.uint8) for _ in range(2))
    MPI.COMM_WORLD.Alltoall(sent, received)


def times(values: int) -> int:
    """Return the number of sums in a turn, which take about as long as its start."""
    return max(1, min(8, 10_000_000 // values))


def _vector_of(rank: int, values: int) -> Array:
    """Return a rank's addend."""
    return np.random.default_rng(rank).standard_normal(values, np.float32)
