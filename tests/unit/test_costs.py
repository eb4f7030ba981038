"""The cost model of an exchange: what follows by hand, and the bytes that are really sent."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from parallel_sgd import SGD, DataParallelSGD, Learner, Parameters, UserError, simulate
from parallel_sgd.communication import PIECE_VALUES, messages
from parallel_sgd.compression import auto_bits, codec_for, registered_bits, sampled_values
from parallel_sgd.costs import (
    LINK_EFFICIENCY,
    KernelSpeeds,
    Link,
    StepSearch,
    best_bits,
    bytes_sent,
    exchange_s,
    measure_kernel_speeds,
)

FREE = KernelSpeeds(*(dict.fromkeys(registered_bits(), math.inf) for _ in range(3)))
EVEN = KernelSpeeds(
    {bits: math.inf if bits == 32 else 4e9 for bits in registered_bits()},
    {bits: math.inf if bits == 32 else 8e9 for bits in registered_bits()},
    dict.fromkeys(registered_bits(), 8e9),
)
SLOW, FAST = Link(0.0, 1e8, message_s=0.0), Link(0.0, 1e12, message_s=0.0)


@pytest.mark.parametrize("bits", registered_bits())
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_bytes_are_those_that_an_exchange_sends(bits, ranks):
    """Within 10 % where the values decide how long a message is: as in a model, some rows are
    larger than others."""
    steps, rows = 4, 400
    scales = np.exp(2 * np.random.default_rng(5).standard_normal((rows, 1)))

    def sent(comm):
        parameters = Parameters({"W": np.zeros((rows, 512), np.float32)})
        algorithm = DataParallelSGD(gradient_bits=bits, transport="collective")
        learner = Learner(parameters, SGD(lr=0.1), algorithm, comm)
        for step in range(steps):
            random = np.random.default_rng([comm.rank, step])
            learner.gradient["W"][...] = random.standard_normal((rows, 512)) * scales
            learner.step(samples=1)
        return learner.bytes_sent / steps

    close = 1e-6 if codec_for(bits).has_fixed_length else 0.1
    expected = pytest.approx(bytes_sent(512 * rows, bits, ranks), rel=close)
    assert np.mean(simulate(ranks, sent)) == expected


def test_a_slow_link_takes_all_the_time():
    cost = exchange_s(10**8, 32, 4, SLOW, FREE)
    assert cost.total_s == cost.wire_s == pytest.approx(2 * 3 / 4 * 4e8 / 1e8 / LINK_EFFICIENCY)
    assert cost.kernels_s == cost.startup_s == 0


def test_kernels_are_an_encode_an_add_an_encode_of_the_sum_and_a_decode():
    cost = exchange_s(8 * 10**9, 1, 4, FAST, EVEN, pipelined=False)
    assert cost.kernels_s == pytest.approx(2 * (1 + 1 / 4) + 1 + 1)
    halved = exchange_s(8 * 10**9, 1, 4, FAST, EVEN, cores_per_rank=0.5)
    assert halved.kernels_s == pytest.approx(2 * cost.kernels_s)
    alone = exchange_s(8 * 10**9, 1, 4, FAST, EVEN, cores_per_rank=4)
    assert alone.kernels_s == cost.kernels_s


def test_bits_that_were_not_measured_take_the_kernels_of_the_nearest():
    """By ratio: 0.7 bits are nearer to 1 than to 0.25, and the bytes are those of 0.7."""
    speeds = KernelSpeeds(*({32: math.inf, 1: 1e9, 0.25: 2e9} for _ in range(3)))
    cost, of_one = (exchange_s(10**9, bits, 4, SLOW, speeds) for bits in (0.7, 1))
    assert cost.kernels_s == of_one.kernels_s > exchange_s(10**9, 0.3, 4, SLOW, speeds).kernels_s
    assert cost.wire_s == pytest.approx(0.7 * of_one.wire_s)


def test_each_rank_finds_a_step_size_for_its_messages_and_one_for_its_sums():
    """From samples of 131,072 and 524,288 values; other codes have no step to find. Nothing is sent
    during the first search."""
    search = StepSearch(1e-3, 1e-7)
    speeds = replace(FREE, searches={1: search, 0.25: StepSearch(5.0, 0.0)})
    whole, stripe = 1 << 24, 1 << 22
    both_s = search.seconds(whole) + search.seconds(stripe)
    assert both_s == pytest.approx(2e-3 + 1e-7 * (sampled_values(whole) + sampled_values(stripe)))
    assert (sampled_values(stripe), sampled_values(whole)) == (1 << 17, 1 << 19)
    assert exchange_s(whole, 1, 4, FAST, speeds).kernels_s == pytest.approx(both_s)
    assert exchange_s(whole, 1, 4, FAST, speeds.times(2)).kernels_s == pytest.approx(both_s / 2)
    assert exchange_s(whole, 4, 4, FAST, speeds).kernels_s == 0
    of_buckets = exchange_s(whole, 1, 4, FAST, speeds, buckets=4, searches=4).kernels_s
    parts_s = search.seconds(whole // 4) + search.seconds(stripe // 4)
    assert of_buckets == pytest.approx(4 * parts_s)
    of_part = exchange_s(whole // 4, 1, 4, FAST, speeds, searches=1 / 4).kernels_s
    assert of_part == pytest.approx(both_s / 4)
    for bits, waits_s in ((1, both_s), (4, 0)):
        slow_s = (exchange_s(whole, bits, 4, SLOW, s).total_s for s in (speeds, FREE))
        assert next(slow_s) - next(slow_s) == pytest.approx(waits_s)


def test_latencies_are_shared_and_messages_are_not():
    link = Link(1e-3, math.inf, message_s=1e-5)
    assert exchange_s(1000, 1, 1, link, FREE).startup_s == 0
    assert exchange_s(1000, 1, 11, link, FREE).startup_s == pytest.approx(2 * (1e-3 + 10e-5))
    apart = exchange_s(1000, 1, 11, link, FREE, pipelined=False, buckets=3)
    assert apart.startup_s == pytest.approx(3 * 2 * (1e-3 + 10e-5))
    together = exchange_s(1000, 1, 11, link, FREE, buckets=3)
    assert together.startup_s == pytest.approx(2 * (1e-3 + 3 * 10e-5))


@pytest.mark.parametrize("bits", registered_bits())
def test_the_pipeline_hides_the_lesser_of_wire_and_kernels_but_not_all_of_it(bits):
    values, ranks = 64 * PIECE_VALUES, 4
    link = Link(0.0, 1e7, message_s=0.0)  # on which the wire takes longer with the fewest bits, too
    apart = exchange_s(values, bits, ranks, link, EVEN, pipelined=False)
    assert apart.total_s == pytest.approx(apart.wire_s + apart.kernels_s)
    cost = exchange_s(values, bits, ranks, link, EVEN)
    hidden = apart.total_s - cost.total_s
    assert 0.9 * cost.kernels_s < hidden < cost.kernels_s < cost.wire_s
    short = exchange_s(PIECE_VALUES, 32, ranks, link, EVEN)  # an owner waits for the one piece
    assert short.total_s == pytest.approx(short.wire_s + short.kernels_s)


def test_ranks_of_a_host_share_its_link_and_send_once():
    on_two = exchange_s(10**8, 4, 2, SLOW, EVEN)
    cost = exchange_s(10**8, 4, 8, SLOW, EVEN, ranks_per_host=4)
    assert cost.wire_s == pytest.approx(on_two.wire_s)
    own = 10**8 / 4
    shared = own * 1.5 / 4e9 + own / 8e9 + 10**8 / 8e9 + (10**8 + 3 * own) / 8e9
    assert cost.kernels_s == pytest.approx(shared)
    assert exchange_s(10**8, 4, 4, SLOW, EVEN, ranks_per_host=4).wire_s == 0


def test_the_time_of_a_core_for_tcp():
    sent = bytes_sent(10**6, 32, 2)
    tcp = replace(FAST, core_s_per_byte=1e-9)
    assert exchange_s(10**6, 32, 2, tcp, FREE).total_s == pytest.approx(sent * 1e-9)
    cost = exchange_s(64 * PIECE_VALUES, 1, 2, tcp, EVEN)  # the core has both to do
    assert cost.total_s == pytest.approx(cost.wire_s + cost.kernels_s, rel=1e-4)


def test_slow_links_want_few_bits_and_fast_ones_lose_no_precision_for_nothing():
    assert best_bits(10**7, 4, SLOW, EVEN) == auto_bits()[0] == 1  # fewer learn less well
    assert best_bits(10**7, 4, SLOW, EVEN, allowed=(32, 0.25)) == 0.25
    assert best_bits(10**7, 4, FAST, EVEN) == 32
    assert best_bits(10**7, 4, SLOW, EVEN, allowed=(32, 8, 4)) == 4
    assert best_bits(10**7, 1, SLOW, EVEN) == 32
    bits = [best_bits(10**7, 4, Link(0.0, rate), EVEN) for rate in np.geomspace(1e7, 1e12, 60)]
    assert bits == sorted(bits) and len(set(bits)) > 2


def test_more_bits_are_taken_up_to_five_percent():
    def chosen(latency_s):  # a term that does not depend on the bits
        link = replace(SLOW, latency_s=latency_s)
        return best_bits(10**6, 2, link, FREE, allowed=(32, 16))

    rate = 1e8 * LINK_EFFICIENCY
    saved = (bytes_sent(10**6, 32, 2) - bytes_sent(10**6, 16, 2)) / rate
    even = (saved / 0.05 - bytes_sent(10**6, 16, 2) / rate) / 2
    assert chosen(1.01 * even) == 32
    assert chosen(0.99 * even) == 16


def test_what_cannot_be_asked():
    with pytest.raises(UserError, match="ranks=6 must be a multiple of ranks_per_host=4"):
        exchange_s(1, 1, 6, SLOW, EVEN, ranks_per_host=4)
    with pytest.raises(UserError, match=r"bits=9 must be a number from 0\.05 to 8, 16 or 32"):
        exchange_s(1, 9, 2, SLOW, EVEN)
    with pytest.raises(UserError, match="latency_s=-1"):
        Link(-1.0, 1.0)
    with pytest.raises(UserError, match="bytes_per_s=0"):
        Link(0.0, 0.0)


def test_pieces_are_of_so_many_values_and_bytes():
    pieces = [messages.piece_values(bits / 8) for bits in (1, 8, 16, 32)]
    assert pieces == [PIECE_VALUES, PIECE_VALUES, PIECE_VALUES // 2, PIECE_VALUES // 4]


def test_speeds_are_measured_for_all_bits():
    kernels = measure_kernel_speeds(block_size=256, values=1 << 17)
    for speeds in (kernels.encode, kernels.decode, kernels.decode_add):
        assert set(speeds) == set(registered_bits())
        assert all(speed > 1e7 for speed in speeds.values())
    assert kernels.encode[32] == kernels.decode[32] == math.inf
    assert math.isfinite(kernels.decode_add[32])
    codecs = {bits for bits in registered_bits() if not codec_for(bits).has_fixed_length}
    assert set(kernels.searches) == codecs
    assert all(0 < kernels.search_s(bits, 1 << 17) < 0.1 for bits in codecs)
    assert set(measure_kernel_speeds(bits=(4,), values=1 << 17).encode) == {32, 4}
