"""The collectives, each on parts of every size including none."""

from __future__ import annotations

import io
import itertools
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from cases import case

from parallel_sgd import Parameters
from parallel_sgd.communication import InBackground, Subset
from parallel_sgd.errors import SharedError
from parallel_sgd.exchange import Exchange

pytestmark = pytest.mark.messages

DTYPES = [np.uint8, np.int64, np.float32, np.float64]

every_dtype = pytest.mark.parametrize("dtype", DTYPES)
#: How many values each rank has.
PARTS = {
    "three each": lambda k: 3,
    "as many as its number": lambda k: k,
    "every other one none": lambda k: 2 * (k % 2),
    "the first alone": lambda k: 5 * (k == 0),
    "none": lambda k: 0,
}
#: How many values go from rank i to rank j.
BETWEEN = {
    "two": lambda i, j: 2,
    "another number for each": lambda i, j: (3 * i + 2 * j) % 4,
    "as many as its number": lambda i, j: i,
    "to itself": lambda i, j: 4 * (i == j),
    "from the first": lambda i, j: 4 * (i == 0 and j > 0),
    "none": lambda i, j: 0,
}


@pytest.fixture(params=[None, 99], ids=["at once", "in pieces"])
def most(request, mpi_counts_to):
    """Of the values that a rank has: where it is told, MPI is said to count to 3 only."""
    if request.param:
        mpi_counts_to(3)
    return request.param


in_pieces_too = pytest.mark.usefixtures("most")


def part(rank, count, dtype):
    return (10 * rank + 1 + np.arange(count)).astype(dtype)


@in_pieces_too
@every_dtype
def test_allgather(comm, dtype):
    for (name, count), in_place in itertools.product(PARTS.items(), (False, True)):
        counts = [count(k) for k in range(comm.size)]
        receive = np.full(sum(counts), 99, dtype)
        send = part(comm.rank, counts[comm.rank], dtype)
        if in_place:
            own = receive[sum(counts[: comm.rank]) :][: counts[comm.rank]]
            own[:] = send
            send = own
        with case(name, "in place" if in_place else "from elsewhere"):
            comm.allgather(send, receive, counts)
            expected = [part(k, counts[k], dtype) for k in range(comm.size)]
            assert np.array_equal(receive, np.concatenate(expected))
            assert np.array_equal(send, expected[comm.rank])


@every_dtype
def test_alltoall(comm, dtype, most):
    ranks, me = range(comm.size), comm.rank
    for name, count in BETWEEN.items():

        def values(i, j, count=count):
            return (50 * i + 10 * j + np.arange(count(i, j))).astype(dtype)

        send = np.concatenate([values(me, j) for j in ranks])
        sent = send.copy()
        receive = np.full(sum(count(i, me) for i in ranks), 99, dtype)
        counts = [count(me, j) for j in ranks], [count(i, me) for i in ranks]
        with case(name):
            comm.alltoall(send, counts[0], receive, counts[1], most=most)
            assert np.array_equal(receive, np.concatenate([values(i, me) for i in ranks]))
            assert np.array_equal(send, sent)


@in_pieces_too
@every_dtype
def test_broadcast(comm, dtype):
    for n in (0, 1, 1000):
        for root in range(comm.size):
            array = part(comm.rank, n, dtype)
            comm.broadcast(array, root)
            assert np.array_equal(array, part(root, n, dtype)), (n, root)
        array = part(comm.rank, n, dtype)
        comm.broadcast(array)
        assert np.array_equal(array, part(0, n, dtype)), n


@in_pieces_too
def test_integers_are_summed_exactly(comm):
    given = np.array([comm.rank, -1, 2**60 + comm.rank, 0], np.int64)
    ranks = sum(range(comm.size))
    total = comm.sum_integers(given)
    assert total.dtype == np.int64
    assert total.tolist() == [ranks, -comm.size, 2**60 * comm.size + ranks, 0]
    assert given[0] == comm.rank


@in_pieces_too
def test_objects_are_gathered_in_rank_order(comm):
    gathered = comm.allgather_object({"rank": comm.rank, "text": "x" * comm.rank})
    assert gathered == [{"rank": k, "text": "x" * k} for k in range(comm.size)]


def test_objects_arrive_as_they_are(comm):
    own = [(comm.rank, [1.0]), {2: b"", None: ()}, {comm.rank}, Path("a"), np.float32(1)]
    for rank, theirs in enumerate(comm.allgather_object(own)):
        own[0], own[2] = (rank, [1.0]), {rank}
        assert repr(theirs) == repr(own)
    array = np.arange(comm.rank + 2.0, dtype=np.float32)
    everywhere = comm.allgather_object(array)
    everywhere[comm.rank][:] = -1  # a copy, also on this rank
    array += 1
    assert [a.dtype for a in everywhere] == [np.float32] * comm.size
    assert [len(a) for a in everywhere] == [k + 2 for k in range(comm.size)]
    assert array.tolist() == [1 + i for i in range(comm.rank + 2)]


def test_what_cannot_be_sent_is_refused_on_all_ranks(comm):
    last = comm.size - 1
    with pytest.raises(SharedError) as caught:
        comm.allgather_object([object() if comm.rank == last else "fine"])
    text = str(caught.value)
    assert text.startswith("an object cannot be sent to other ranks: send None, bool, int, ")
    assert text.endswith(f"(on rank {comm.world_ranks[last]})") and "\n" not in text
    assert comm.allgather_object(comm.rank) == [*range(comm.size)]


def test_rank_0_prints(comm):
    said = io.StringIO()
    comm.print("step", 3, sep="=", file=said)
    assert said.getvalue() == ("" if comm.rank else "step=3\n")


def test_hosts(on_ranks):
    """All ranks of a test run on one machine."""

    def body(comm):
        assert comm.hosts == [comm.host] * comm.size
        return comm.rank, comm.local_rank, comm.local_size

    results = on_ranks(body)
    assert results == [(k, k, len(results)) for k in range(len(results))]


def test_many_collectives_in_a_row_with_ranks_out_of_step(comm):
    """No rank may take what another has already overwritten for the next call."""
    pace = random.Random(comm.rank)
    buffer = np.zeros(comm.size, np.int64)
    for step in range(60):
        if pace.random() < 0.2:
            time.sleep(0.001)
        buffer[comm.rank] = 100 * comm.rank + step
        own = buffer[comm.rank : comm.rank + 1]
        comm.allgather(own, buffer, [1] * comm.size)
        assert buffer.tolist() == [100 * k + step for k in range(comm.size)]
        comm.broadcast(buffer[:1], root=step % comm.size)
        root = step % comm.size
        assert buffer[0] == (100 * 0 + step)
        mine = np.array([step * (comm.rank + 1)])
        comm.broadcast(mine, root)
        assert mine[0] == step * (root + 1)
        assert comm.sum_integers(mine)[0] == comm.size * mine[0]
        mine[0] = -1


def test_a_duplicate_works_beside_the_original(comm):
    """In a thread of its own, while the main thread has other collectives in another order."""
    apart = comm.duplicate()
    assert (apart.rank, apart.size) == (comm.rank, comm.size)
    go_on = threading.Event()

    def sums():
        go_on.wait(20)
        return [int(apart.sum_integers(np.array([comm.rank + i]))[0]) for i in range(50)]

    background = InBackground("sums", sums)
    assert not background.done
    for i in range(50):
        assert comm.allgather_object((comm.rank, i)) == [(k, i) for k in range(comm.size)]
        if i == 10:
            go_on.set()
    ranks = sum(range(comm.size))
    assert background.result() == [ranks + comm.size * i for i in range(50)]
    assert background.done


def test_an_error_in_the_background_is_raised_where_the_result_is_asked_for(comm):
    apart = comm.duplicate()
    background = InBackground("error", lambda: apart.raise_together("disk full"))
    with pytest.raises(SharedError, match="disk full"):
        background.result()


def test_a_subset_has_the_same_collectives(comm):
    """Whatever its ranks and their order, and one after the other with no wait between them."""
    ranks, duplicate = [*range(comm.size)], comm.duplicate()
    for members in (ranks, ranks[::-1], ranks[::2], ranks[1:], [*ranks[2:], 0], [comm.rank]):
        if comm.rank in members:
            subset = Subset(duplicate, members)
            assert (subset.size, members[subset.rank]) == (len(members), comm.rank)
            assert [*subset.world_ranks] == [comm.world_ranks[member] for member in members]
            test_allgather(subset, np.float32)
            test_alltoall(subset, np.int64, None)
            test_broadcast(subset, np.float64)
            test_integers_are_summed_exactly(subset)
            test_objects_arrive_as_they_are(subset)
            test_what_cannot_be_sent_is_refused_on_all_ranks(subset)
    duplicate.close()


@pytest.mark.parametrize("transport", ["collective", "pipelined"])
def test_a_subset_exchanges(comm, transport):
    ranks, duplicate = [*range(comm.size)], comm.duplicate()
    for members in (ranks[::-1], ranks[1:], ranks[:2]):
        if comm.rank in members:
            parameters = Parameters({"w": np.full(5000, 1 + comm.rank, np.float32)})
            Exchange(parameters, Subset(duplicate, members), transport=transport).sum(
                parameters.flat
            )
            assert (parameters.flat == sum(1 + member for member in members)).all()
    duplicate.close()
