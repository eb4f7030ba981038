"""Whichever transport messages have, the sums have the same bits, and nothing is lost."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from cases import CODECS, LAYOUTS, case, gradient_of, zeros
from hosts import (
    STEPS,
    hosts_send_one_message,
    hosts_sum_first,
    in_order,
    results,
    sends_non_owned_residuals,
    sends_what_is_ready,
)
from invariants import sums_in_rank_order

from parallel_sgd import SGD, Learner, ModelAveragingSGD, Parameters
from parallel_sgd.compression import codec_for
from parallel_sgd.exchange import (
    Exchange,
    Topology,
    collective,
    cut_buckets,
    layout,
    topology_for,
)

pytestmark = [pytest.mark.messages, pytest.mark.usefixtures("small_pieces")]

#: The host of each rank, of as many as there are.
PLACES = {
    "two hosts": "aabb",
    "uneven hosts": "aaab",
    "hosts in turn": "abab",
    "one host": "aaaa",
    "a host for each": "abcd",
}

every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
every_transport = pytest.mark.parametrize("transport", ["collective", "pipelined"])
every_place = pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)


@pytest.fixture(autouse=True)
def small_messages(mpi_counts_to):
    mpi_counts_to(100)


@every_codec
def test_a_pipeline_has_the_bits_of_collectives(comm, codec):
    for shapes in LAYOUTS:
        parameters = zeros(shapes)
        with case(shapes):
            (expected, theirs), (sums, ours) = (
                results(
                    Exchange(parameters, comm, codec, transport=name), comm, parameters, lossy=True
                )
                for name in ("collective", "pipelined")
            )
            assert np.array_equal(sums, expected)
            assert np.array_equal(ours.worker_error, theirs.worker_error)
            assert np.array_equal(ours.owner_error["0"], theirs.owner_error["0"])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_pipeline_sums_in_rank_order(comm, dtype):
    for shapes in LAYOUTS:
        with case(shapes):
            sums_in_rank_order(comm, shapes, dtype, transport="pipelined")


@every_place
def test_hosts_sum_among_themselves_first(comm, places):
    for shapes in LAYOUTS:
        with case(shapes):
            hosts_sum_first(comm, places, shapes)


@every_place
def test_hosts_send_one_message(comm, places):
    for name, codec in CODECS.items():
        with case(name):
            hosts_send_one_message(comm, places, codec)


@every_transport
@pytest.mark.parametrize("bucket_values", [1, 100, 150, 10**6])
@pytest.mark.parametrize("bits", [1, 4, 32])
def test_buckets_change_nothing(comm, transport, bucket_values, bits):
    parameters, codec = zeros("large and small"), codec_for(bits, code="sign", block_size=64)
    buckets = cut_buckets(parameters, 64, bucket_values)
    assert (len(buckets) > 1) == (bucket_values < 900)
    plain = Exchange(parameters, comm, codec)
    cut = Exchange(parameters, comm, codec, buckets=buckets, transport=transport)
    expected, theirs = results(plain, comm, parameters, lossy=True)
    sums, ours = results(cut, comm, parameters, lossy=True)
    assert np.array_equal(sums, expected)
    assert np.array_equal(ours.worker_error, theirs.worker_error)
    by_rank = comm.allgather_object(ours.owner_error)
    whole = [np.concatenate([own[str(i)] for own in by_rank]) for i in range(len(buckets))]
    stripes = comm.allgather_object(theirs.owner_error["0"])
    assert np.array_equal(np.concatenate(whole[::-1]), np.concatenate(stripes))


@every_transport
@pytest.mark.parametrize("coded", [(), (0,), (1, 3)])
@pytest.mark.parametrize("block_size", [50, 128, 1000])
def test_buckets_end_where_blocks_do(comm, monkeypatch, transport, coded, block_size):
    """Whatever the block size, with codecs and without, each value is summed once."""
    monkeypatch.setattr(collective, "ONE_COLLECTIVE_BYTES", 0)
    shapes = {"a": 600, "b": 200, "c": 224, "d": 100, "e": 130, "f": 255, "g": 3}
    parameters = Parameters({name: np.zeros(n, np.float32) for name, n in shapes.items()})
    buckets = cut_buckets(parameters, block_size, 1)
    codec = codec_for(32, block_size=block_size)  # which loses nothing
    exchange = Exchange(
        parameters,
        comm,
        [codec if i in coded else None for i in range(len(buckets))],
        buckets=buckets,
        transport=transport,
        block_size=block_size,
    )
    sums, _ = results(exchange, comm, parameters, lossy=True)
    for step, vector in enumerate(sums):
        terms = [gradient_of(k, step, vector.size) for k in range(comm.size)]
        assert np.array_equal(vector, in_order(terms))


@every_transport
def test_buckets_with_codecs_of_their_own(comm, transport):
    parameters = zeros("large and small")
    buckets = cut_buckets(parameters, 64, 1)
    codecs = [
        None if i % 2 else codec_for(1, code="sign", block_size=64) for i in range(len(buckets))
    ]
    options = {"buckets": buckets, "transport": transport, "block_size": 64}
    exchange = Exchange(parameters, comm, codecs, **options)
    sums, residuals = results(exchange, comm, parameters, lossy=True)
    exact = [
        in_order([gradient_of(k, step, sums.shape[1]) for k in range(comm.size)])
        for step in range(STEPS)
    ]
    for bucket, codec in zip(buckets, codecs, strict=True):
        same = np.array_equal(sums[:, bucket.values], np.array(exact)[:, bucket.values])
        assert same == (codec is None)
        assert residuals.worker_error[bucket.values].any() == (codec is not None)


@every_transport
def test_buckets_are_sent_as_they_become_ready(on_ranks, transport):
    for bits, code in ((1, "sign"), (0.5, "entropy")):
        codec = codec_for(bits, code=code, block_size=64)
        on_ranks(lambda comm, codec=codec: sends_what_is_ready(comm, transport, codec))


@every_place
def test_residuals_from_another_topology_are_sent(on_ranks, places):
    on_ranks(lambda comm: sends_non_owned_residuals(comm, places))


def test_non_owned_residuals_outlive_a_change_of_bits(comm):
    """Between a checkpoint and the next exchange."""
    algorithm = ModelAveragingSGD(gradient_bits={0: 1, 20: 2}, sync_steps=9)
    learner = Learner(zeros("long"), SGD(lr=0.1), algorithm, comm)
    exchange = learner.state.exchange
    learner.samples = 18
    exchange.restored()
    learner.samples = 20
    assert exchange._present_exchange().codecs[0].bits == 2
    assert exchange.residuals.has_non_owned
    exchange.sum(learner.parameters.flat)
    assert not exchange.residuals.has_non_owned


def test_bytes_of_messages(comm):
    """Between hosts a hierarchical exchange sends what as many ranks as hosts would."""
    parameters, topology = zeros("long"), Topology.over("aabb"[: comm.size])
    between = 0

    def counted(array, peer, tag, then):
        nonlocal between
        between += array.nbytes * (topology.host_of[peer] != topology.host_of[comm.rank])
        sends[0](array, peer, tag, then)

    exchange = Exchange(parameters, comm, transport="pipelined", topology=topology)
    sent = exchange._transports[0].messages
    sends, sent.send = [sent.send], counted
    vector = gradient_of(comm.rank, 0, parameters.flat.size)
    exchange.sum(vector)
    hosts = len(topology.hosts)
    all_sent = sum(comm.allgather_object(between))
    assert all_sent == 2 * (hosts - 1) * vector.nbytes


def test_topology():
    topology = Topology.over("aabbb")
    assert topology.hosts == ((0, 1), (2, 3, 4))
    assert [topology.local_leader(0, owner) for owner in range(5)] == [0, 1, 0, 1, 0]
    assert [topology.local_leader(1, owner) for owner in range(5)] == [2, 3, 2, 3, 4]
    assert not Topology.flat(3).hierarchical and topology.hierarchical
    assert topology_for(["a", "a", "b"], "auto").hierarchical
    assert not topology_for(["a", "a", "b"], False).hierarchical
    assert not topology_for(["a", "a", "a"], "auto").hierarchical
    assert topology_for(["a", "a", "a"], True).hierarchical
    assert not topology_for(["a", "b"], True).hierarchical


def test_pieces_cover_the_vector_once():
    parameters = zeros("long")
    blocks = codec_for(1, code="sign", block_size=64).blocks(parameters)
    stripes = layout.cut_stripes(blocks, 3)
    cut = layout.cut_pieces(stripes, 10, 128)
    assert [piece.tag for piece in cut] == list(range(10, 10 + len(cut)))
    edges = [0, *(piece.values.stop for piece in cut)]
    assert [(a, b) for a, b in pairwise(edges)] == [(p.values.start, p.values.stop) for p in cut]
    assert edges[-1] == parameters.flat.size
    assert all(piece.size <= 192 for piece in cut)  # less than a block more
