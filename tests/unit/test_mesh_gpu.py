"""Collectives of a GPU's arrays without MPI: the same bits as NumPy's, by NCCL or through the host.

On stand-ins for CuPy and NCCL, whose streams are late (`fake_cupy`, `fake_nccl`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_nccl import Machine
from meshes import on_ranks

from parallel_sgd.communication.c10d.communicator import MOST_DIRECT, C10dCommunicator
from parallel_sgd.errors import UserError

SIZE = 3
COUNTS = [0, 1, 5000]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def no_nccl(machine: Machine) -> None:
    machine.nccl.available = False


def share_a_gpu(machine: Machine) -> None:
    machine.buses[2] = machine.buses[0]


def nothing(machine: Machine) -> None:
    pass


def values(seed: int, rank: int, count: int, dtype: Any) -> Any:
    return np.random.default_rng([seed, rank]).integers(-100, 100, count).astype(dtype)


def allgather(comm: C10dCommunicator, number: int, dtype: Any, on_gpu: Callable[..., Any]) -> Any:
    counts = [COUNTS[(k + number) % 3] for k in range(SIZE)]
    receive = on_gpu(np.full(sum(counts), 77, dtype))
    comm.allgather(on_gpu(values(number, comm.rank, counts[comm.rank], dtype)), receive, counts)
    return receive


def alltoall(comm: C10dCommunicator, number: int, dtype: Any, on_gpu: Callable[..., Any]) -> Any:
    counts = [[COUNTS[(i + 2 * j + number) % 3] for j in range(SIZE)] for i in range(SIZE)]
    out, into = counts[comm.rank], [counts[k][comm.rank] for k in range(SIZE)]
    receive = on_gpu(np.full(sum(into), 77, dtype))
    comm.alltoall(on_gpu(values(number, comm.rank, sum(out), dtype)), out, receive, into)
    return receive


def broadcast(comm: C10dCommunicator, number: int, dtype: Any, on_gpu: Callable[..., Any]) -> Any:
    count = (0, 5, MOST_DIRECT, 50_000)[number]
    array = on_gpu(values(number, comm.rank, count, dtype))
    comm.broadcast(array, root=number % SIZE)
    return array


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8, np.int64])
@pytest.mark.parametrize("change", [nothing, no_nccl, share_a_gpu], ids=lambda f: f.__name__)
def test_collectives_have_numpys_bits(machine: Machine, change: Any, dtype: Any) -> None:
    """For counts that differ, with an empty one, and for parts of large arrays."""
    change(machine)

    def body(comm: C10dCommunicator) -> int:
        machine.rank.number = comm.rank
        compared = 0
        for number in range(4):
            for collective in (allgather, alltoall, broadcast):
                expected = collective(comm, number, dtype, lambda array: array)
                with machine.gpu.late_stream() as stream:
                    received = collective(comm, number, dtype, machine.cupy.asarray)
                    stream.synchronize()
                assert type(received) is machine.cupy.ndarray
                assert np.array_equal(np.array(received), expected), (collective, number)
                compared += 1
        return compared

    assert on_ranks(SIZE, body) == [12] * SIZE
    by_nccl = change is nothing
    assert len(machine.nccl.meetings) == by_nccl
    assert bool(machine.gpu.copies) == (not by_nccl)
    assert len(machine.nccl.destroyed) == (SIZE if by_nccl else 0)


@pytest.mark.parametrize("change", [nothing, no_nccl], ids=lambda f: f.__name__)
@pytest.mark.parametrize("count", [5, 50_000])
def test_what_the_stream_makes_of_an_array_is_sent(
    machine: Machine, change: Any, count: int
) -> None:
    change(machine)

    def body(comm: C10dCommunicator) -> Any:
        machine.rank.number = comm.rank
        array = machine.cupy.zeros(count, np.float32)
        with machine.gpu.late_stream() as stream:
            stream.do(lambda: array.fill(comm.rank + 1))
            comm.broadcast(array, root=1)
            stream.do(lambda: array.__imul__(10))
            stream.synchronize()
        return np.unique(array).tolist()

    assert on_ranks(SIZE, body) == [[20.0]] * SIZE


def test_different_counts_through_the_host(machine: Machine) -> None:
    no_nccl(machine)

    def body(comm: C10dCommunicator) -> None:
        machine.rank.number = comm.rank
        comm.broadcast(machine.cupy.zeros(2 + comm.rank, np.float32))

    sender, *others = on_ranks(SIZE, body)
    assert sender is None
    assert all(isinstance(error, UserError) for error in others)
    said = {str(error).partition(":")[0] for error in others}
    expects = "rank 10 has sent 8 bytes, but this rank expects"
    assert said == {f"{expects} 12", f"{expects} 16"}
