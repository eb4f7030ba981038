"""What must hold for exchanges that send pieces, and where several ranks share a host."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from cases import gradient_of, zeros

from parallel_sgd import Communicator, Parameters
from parallel_sgd.compression import Codec, codec_for
from parallel_sgd.exchange import Exchange, Residuals, Topology, cut_buckets

Array = np.ndarray
STEPS = 4


def results(
    exchange: Exchange, comm: Communicator, parameters: Parameters, *, lossy: bool
) -> tuple[Array, Residuals | None]:
    """What some sums give, and the residuals after them."""
    residuals = exchange.residuals(parameters) if lossy else None
    sums = []
    for step in range(STEPS):
        vector = gradient_of(comm.rank, step, parameters.flat.size, parameters.dtype)
        exchange.sum(vector, residuals)
        sums.append(vector)
    return np.array(sums), residuals


def in_order(arrays: Sequence[Array]) -> Array:
    total = arrays[0]
    for array in arrays[1:]:
        total = total + array
    return total


def hosts_sum_first(comm: Communicator, places: str, layout: str) -> None:
    """In full precision: ranks of a host in their order, then the hosts in theirs."""
    parameters = zeros(layout)
    topology = Topology.over(places[: comm.size])
    exchange = Exchange(parameters, comm, transport="pipelined", topology=topology)
    sums, _ = results(exchange, comm, parameters, lossy=False)
    for step, vector in enumerate(sums):
        hosts = [in_order([gradient_of(k, step, vector.size) for k in h]) for h in topology.hosts]
        assert np.array_equal(vector, in_order(hosts))


def hosts_send_one_message(comm: Communicator, places: str, codec: Codec) -> None:
    """Compressed: a host's sum is encoded once, with one residual; nothing is lost."""
    parameters, topology = zeros("long"), Topology.over(places[: comm.size])
    exchange = Exchange(parameters, comm, codec, transport="pipelined", topology=topology)
    sums, residuals = results(exchange, comm, parameters, lossy=True)
    assert residuals is not None
    blocks, n = codec.blocks(parameters), parameters.flat.size
    own, total = np.zeros((len(topology.hosts), n), np.float32), np.zeros(n, np.float32)
    payload = np.empty(blocks.bytes.stop, np.uint8)
    for step, vector in enumerate(sums):
        sent = []
        for host, ranks in enumerate(topology.hosts):
            summed = in_order([gradient_of(k, step, n) for k in ranks])
            codec.encode(blocks, summed, own[host], payload)
            codec.decode(blocks, payload, decoded := np.empty(n, np.float32), add=False)
            sent.append(decoded)
        codec.encode(blocks, in_order(sent), total, payload)
        codec.decode(blocks, payload, expected := np.empty(n, np.float32), add=False)
        assert np.array_equal(vector, expected)
    everywhere = comm.allgather_object(residuals.worker_error)
    for host, ranks in enumerate(topology.hosts):
        assert np.array_equal(sum(everywhere[k] for k in ranks), own[host])
    stripes = np.concatenate([t["0"] for t in comm.allgather_object(residuals.owner_error)])
    assert np.array_equal(stripes, total)


def sends_what_is_ready(comm: Communicator, transport: str, codec: Codec) -> None:
    """From a thread, in another order of readiness on every rank: the same bits."""
    parameters = zeros("large and small")
    buckets = cut_buckets(parameters, 64, 1)
    exchange = Exchange(parameters, comm, codec, buckets=buckets, transport=transport)
    vector = gradient_of(comm.rank, 0, parameters.flat.size)
    values, vector[:] = vector.copy(), np.nan
    ready = [threading.Event() for _ in buckets]
    asked: list[int] = []

    def is_ready(bucket: int) -> bool:
        asked.append(bucket)
        return ready[bucket].is_set()

    def fill() -> None:
        for i in np.random.default_rng(comm.rank).permutation(len(buckets)):
            vector[buckets[i].values] = values[buckets[i].values]
            ready[i].set()

    thread = threading.Thread(target=fill)
    thread.start()
    exchange.sum(vector, exchange.residuals(parameters), is_ready)
    thread.join()
    assert asked == sorted(asked) and {*asked} == {*range(len(buckets))}
    plain = Exchange(parameters, comm, codec, buckets=buckets)
    plain.sum(values, plain.residuals(parameters))
    assert np.array_equal(vector, values)


def sends_non_owned_residuals(comm: Communicator, places: str) -> None:
    """What a rank's residual holds of values that another adds up now goes with the next sum."""
    parameters, codec = zeros("long"), codec_for(1, code="sign", block_size=64)
    n, topology = parameters.flat.size, Topology.over(places[: comm.size])
    exchange = Exchange(parameters, comm, codec, transport="pipelined", topology=topology)
    residuals = exchange.residuals(parameters)
    residuals.worker_error[:] = gradient_of(comm.rank, 9, n)  # of all values, as without hosts
    residuals.has_non_owned = True
    result = gradient_of(comm.rank, 0, n)
    exchange.sum(result, residuals)
    given = sum(gradient_of(k, s, n).astype(float) for k in range(comm.size) for s in (0, 9))
    left = np.sum(comm.allgather_object(residuals.worker_error), axis=0, dtype=float)
    total = np.concatenate([t["0"] for t in comm.allgather_object(residuals.owner_error)])
    assert np.abs(result + left + total - given).max() < 1e-3
    summed = np.concatenate(comm.allgather_object(np.flatnonzero(residuals.worker_error)))
    hosts = len(topology.hosts)
    assert np.bincount(summed.astype(int)).max() <= hosts  # one residual a host
