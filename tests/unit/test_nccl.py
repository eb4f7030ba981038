"""NCCL's transport on a stand-in for CuPy and NCCL: what it sums, and what it refuses.

Ranks are threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_nccl import Machine, NcclError, fake_nccl

from parallel_sgd import Parameters, UserError, simulate
from parallel_sgd.algorithms import ExchangeState
from parallel_sgd.communication import Nccl
from parallel_sgd.compression import codec_for
from parallel_sgd.errors import SharedError
from parallel_sgd.exchange import Exchange, ExchangeOptions, Topology, cut_buckets, start_nccl

BLOCK = 32
HOSTS = "aabb"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def whole_numbers(rank: int, step: int, size: int, dtype: Any = np.float32) -> Any:
    """Values whose sums are exact, so that every order of summation gives them."""
    values = np.random.default_rng([rank, step]).integers(-1000, 1000, size)
    return values.astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("hosts", ["aabb", "aaab", "aaaa", "a"])
def test_full_precision_is_one_all_reduce(machine: Machine, hosts: str, dtype: Any) -> None:
    """Over all ranks, of uneven hosts too."""

    def body(comm: Any) -> Any:
        parameters = machine.zeros(dtype)
        size = parameters.flat.size
        topology, nccl = start_nccl(parameters, comm, "auto", lossless=True)
        buckets = cut_buckets(parameters, BLOCK, 1)
        assert len(buckets) > 1
        options: Any = {"transport": "nccl", "topology": topology, "nccl": nccl, "buckets": buckets}
        exchange = Exchange(parameters, comm, **options)
        vector = machine.cupy.asarray(whole_numbers(comm.rank, 0, size, dtype))
        exchange.sum(vector)
        expected = sum(whole_numbers(k, 0, size, dtype) for k in range(comm.size))
        assert np.array_equal(vector, expected)
        ring = 2 * (comm.size - 1) / comm.size * parameters.flat.nbytes
        assert exchange.bytes_sent == pytest.approx(ring, abs=len(buckets))

    machine.simulate(hosts, body)


@pytest.mark.parametrize("hosts", ["aabb", "abab", "aabbcc", "aaaa", "ab"])
@pytest.mark.parametrize("bits", [None, 8, 1, {"b": 16, "W": 32}])
def test_hosts_send_one_message(machine: Machine, hosts: str, bits: Any) -> None:
    """The sums and residuals of a pipeline whose ranks sum within hosts, where sums are exact."""

    def body(comm: Any) -> None:
        own = bits if isinstance(bits, dict) else {}
        usual = 1 if own else bits or 32
        options = ExchangeOptions(gradient_bits=usual, bits_of=own, block_size=BLOCK)
        codec = None if bits is None else options.codec(usual)
        parameters = machine.zeros()
        starts = options.codec(32).blocks(parameters).starts
        topology, nccl = start_nccl(parameters, comm, True, lossless=False)
        assert topology == Topology.over(hosts)
        results = []
        for way in ({"transport": "pipelined"}, {"transport": "nccl", "nccl": nccl}):
            buckets = cut_buckets(parameters, BLOCK, 1, starts)
            exchange = Exchange(parameters, comm, codec, topology=topology, buckets=buckets, **way)
            residuals, sums = exchange.residuals(parameters) if codec else None, []
            for step in range(3):
                values = whole_numbers(comm.rank, step, parameters.flat.size)
                vector = machine.cupy.asarray(values)
                exchange.sum(vector, residuals)
                sums.append(np.array(vector))
            results.append((sums, residuals))
        (expected, theirs), (sums, ours) = results
        assert np.array_equal(sums, expected)
        if theirs is not None and ours is not None:
            assert np.array_equal(ours.worker_error, theirs.worker_error)
            assert ours.worker_error.any() and ours.owner_error
            for name, total in theirs.owner_error.items():
                assert np.array_equal(ours.owner_error[name], total)

    machine.simulate(hosts, body)


def test_non_owned_residuals_are_sent(machine: Machine) -> None:
    """What a residual holds of pieces that others exchange is in the next sum, and only there.

    What it holds of this rank's pieces is sent as usual, so that a run that is taken up again by
    as many ranks has the same bits.
    """

    def body(comm: Any) -> None:
        parameters = machine.zeros()
        topology, nccl = start_nccl(parameters, comm, "auto", lossless=False)
        codec, size = codec_for(1, block_size=BLOCK), parameters.flat.size
        place = comm.rank % 2
        results = []
        for options in ({"transport": "pipelined"}, {"transport": "nccl", "nccl": nccl}):
            exchange = Exchange(parameters, comm, codec, topology=topology, **options)
            residuals = exchange.residuals(parameters)
            owners = [topology.hosts[topology.host_of[k]].index(k) for k in range(comm.size)]
            for owner, stripe in enumerate(exchange._transports[0].reductions[0].stripes):
                non_owned = owners[owner] != place
                residuals.worker_error[stripe.values] = 7 if non_owned else 0.1
            vector = machine.cupy.asarray(whole_numbers(comm.rank, 0, size))
            residuals.has_non_owned = True
            exchange.sum(vector, residuals)
            results.append((np.array(vector), residuals.worker_error))
        (expected, theirs), (total, ours) = results
        assert np.array_equal(total, expected)
        assert np.array_equal(ours, theirs)

    machine.simulate(HOSTS, body)


def test_buckets_are_summed_as_they_become_ready(machine: Machine) -> None:
    def body(comm: Any) -> None:
        parameters = machine.zeros()
        size, buckets = parameters.flat.size, cut_buckets(parameters, BLOCK, 1)
        for lossless in (True, False):
            topology, nccl = start_nccl(parameters, comm, "auto", lossless=lossless)
            options: Any = {"transport": "nccl", "topology": topology, "nccl": nccl}
            exchange = Exchange(parameters, comm, buckets=buckets, **options)
            vector = machine.cupy.asarray(np.full(size, np.nan, np.float32))
            asked = [0] * len(buckets)

            def is_ready(bucket: int, vector: Any = vector, asked: Any = asked) -> bool:
                asked[bucket] += 1
                values = buckets[bucket].values
                if asked[bucket] == 2 + comm.rank:
                    vector[values] = whole_numbers(comm.rank, 0, size)[values]
                return bool(asked[bucket] == 2 + comm.rank)

            exchange.sum(vector, None, is_ready)
            assert np.array_equal(vector, sum(whole_numbers(k, 0, size) for k in range(4)))

    machine.simulate(HOSTS, body)


def test_nccl_waits_for_the_current_stream(machine: Machine) -> None:
    def body(comm: Any) -> None:
        values = machine.cupy.zeros(10, np.float32)
        nccl = Nccl(comm, values)
        with machine.gpu.late_stream() as stream:
            stream.do(lambda: values.fill(comm.rank + 1))
            nccl.all_reduce(values)
            assert (values == 3).all()
            stream.do(lambda: values.fill(comm.rank + 1))
            nccl.broadcast_all([(values[:5], 0), (values[5:], 1)])
        assert values.tolist() == [1] * 5 + [2] * 5

    machine.simulate("aa", body)


def test_an_error_of_nccl_ends_the_exchange(machine: Machine) -> None:
    def body(comm: Any) -> None:
        values = machine.cupy.zeros(10 + comm.rank, np.float32)
        nccl = Nccl(comm, values)
        machine.gpu.streams[nccl._stream.ptr - 1].operations.append(lambda: False)
        nccl._comm.meeting.error = "NCCL_ERROR_REMOTE_ERROR"
        nccl.all_reduce(values)

    with pytest.raises(NcclError, match="REMOTE"):
        machine.simulate("aa", body)
    assert machine.nccl.aborted


def test_a_rank_that_never_comes_is_not_waited_for_without_end(machine: Machine) -> None:
    machine.use(fake_nccl(machine.gpu, dies=lambda rank: rank == 1))

    def body(comm: Any) -> None:
        values = machine.cupy.zeros(10, np.float32)
        Nccl(comm, values).all_reduce(values)

    with pytest.raises(UserError, match=r"waits in NCCL's all-reduce for more than timeout_s=0.3"):
        machine.simulate("aa", body, timeout_s=0.3)


def cannot_start() -> None:
    raise NcclError("NCCL_ERROR_SYSTEM_ERROR: no interface")


@pytest.mark.parametrize(
    ("hosts", "lossless", "hierarchical", "change", "message"),
    [
        (
            *("aa", True, "auto", lambda machine: setattr(machine.nccl, "available", False)),
            r"^transport='nccl' needs NCCL, which CuPy does not find",
        ),
        (
            *("aa", True, "auto"),
            lambda machine: setattr(machine.nccl, "get_unique_id", cannot_start),
            r"NCCL, which cannot start: NCCL_ERROR_SYSTEM_ERROR: no interface \(on rank 0\)",
        ),
        (
            *("aaab", True, "auto"),
            lambda machine: machine.buses.__setitem__(2, machine.buses[0]),
            r"^transport='nccl' needs a GPU for each rank, but on a 3 ranks have 2: ranks 0, 2 "
            r"share 0000:00:00.0$",
        ),
        (
            *("aaab", False, "auto", lambda machine: None),
            r"the same number of ranks on every host .* a has 3 and b has 1",
        ),
        (
            *("aabb", False, False, lambda machine: None),
            r"^hierarchical=False must be True or 'auto' with transport='nccl'",
        ),
    ],
)
def test_what_is_refused(
    machine: Machine, hosts: str, lossless: bool, hierarchical: Any, change: Any, message: str
) -> None:
    change(machine)

    def body(comm: Any) -> None:
        start_nccl(machine.zeros(), comm, hierarchical, lossless=lossless)

    with pytest.raises(SharedError, match=message) as caught:
        machine.simulate(hosts, body)
    assert "\n" not in str(caught.value)


def test_gpus_of_different_hosts_may_have_one_name(machine: Machine) -> None:
    machine.buses[:4] = ["0000:01:00.0", "0000:02:00.0"] * 2

    def body(comm: Any) -> int:
        return start_nccl(machine.zeros(), comm, "auto", lossless=False)[1].size

    assert machine.simulate("aabb", body) == [2, 2, 2, 2]


@pytest.mark.parametrize("bits", [32, 1])
def test_an_algorithm_takes_it(machine: Machine, bits: int) -> None:
    """By the user's word, with new bits over the same communicators of NCCL."""

    def body(comm: Any) -> Any:
        parameters = machine.zeros()
        schedule = {0: bits, 1000: 32} if bits < 32 else bits
        options = ExchangeOptions(gradient_bits=schedule, transport="nccl", block_size=BLOCK)
        clock = iter((0, 1000))
        state = ExchangeState.init(options, parameters, lambda: next(clock), comm)
        assert state.plan.transport == "nccl"
        vector = machine.cupy.asarray(whole_numbers(comm.rank, 0, parameters.flat.size))
        for _ in range(2):
            state.sum(vector)
        return np.array(vector)

    sums = machine.simulate(HOSTS, body)
    assert all(np.array_equal(vector, sums[0]) for vector in sums)
    assert len(machine.nccl.meetings) == (1 if bits == 32 else 2)


def test_numpy_parameters_are_refused_by_algorithms() -> None:
    def body(comm: Any) -> None:
        parameters = Parameters({"x": np.zeros(5, np.float32)})
        ExchangeState.init(ExchangeOptions(transport="nccl"), parameters, lambda: 0, comm)

    with pytest.raises(UserError, match=r"^transport='nccl' needs CuPy p.*, but these are NumPy's"):
        simulate(2, body)
