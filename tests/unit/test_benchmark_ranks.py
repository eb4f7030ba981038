"""The benchmarks that ranks and hosts measure, from their options to their reports."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from benchmark_players import options_of, require_fit

from benchmarks import plan, unequal
from benchmarks.exchange import command as exchange
from benchmarks.exchange import links, one_machine, sums
from benchmarks.parameter_server import bare, dense, sparse
from benchmarks.parameter_server import command as parameter_server
from parallel_sgd import Communicator, Parameters, UserError, simulate
from parallel_sgd.command_line.cluster import BURST, payload_rate
from parallel_sgd.compression import codec_for, registered_bits
from parallel_sgd.costs import KernelSpeeds, Link, exchange_s


def test_a_push_in_1_bit_has_the_bytes_that_the_benchmark_expects():
    """Within 10 %, as the values decide."""
    codec, values = codec_for(1), 1 << 17
    blocks = codec.blocks(Parameters({"W": np.zeros((values // 1024, 1024), np.float32)}))
    gradient = np.random.default_rng(0).standard_normal(values, np.float32)
    payload = np.empty(blocks.bytes.stop, np.uint8)
    pushed = codec.encode(blocks, gradient, np.zeros_like(gradient), payload)
    assert pushed == pytest.approx(dense.pushed_bytes(values, 1), rel=0.1)


def test_the_benchmark_of_rows_asks_for_rows_of_the_table_in_another_order():
    ids = sparse.all_ids(1000)
    assert len(set(ids.tolist())) == len(ids)
    batches = sparse.random_batches(ids, 100, seed=1)
    first, second = next(batches), next(batches)
    assert len(first) == 100 and set(first) <= set(ids) and not set(first) & set(second)
    assert first.tolist() != ids[:100].tolist()


def test_rates_of_ranks_are_the_medians_of_rounds():
    """In turn, and a first round does not count."""

    def rank(comm):
        turns = []

        def case(name):
            turns.append(name)
            return (100, 1, 9, 2)[turns.count(name) - 1] + comm.rank

        return bare.medians(comm, {n: lambda n=n: case(n) for n in "ab"}, 3, comm.barrier), turns

    assert simulate(2, rank)[0] == ({"a": [2, 3], "b": [2, 3]}, 4 * ["a", "b"])


def test_the_limit_of_the_links_for_a_model_on_a_server():
    pulled = 4 << 20
    one, rate = dense.limit(1, pulled, pulled, 1e9), payload_rate(1e9)
    assert one == pytest.approx(rate / (2 * (pulled - BURST)))
    assert dense.limit(3, pulled, pulled, 1e9) == pytest.approx(rate / pulled)  # both ways
    assert dense.limit(1, 1000, pulled, 1e9) == pytest.approx(2 * one)
    assert dense.limit(1, 1000, 1000, 1e9) == math.inf
    assert dense.limit(3, pulled, pulled, math.inf) == math.inf
    assert dense.numbers(4) == [1, 3] and dense.numbers(2) == [1]


SPEEDS = KernelSpeeds(*(dict.fromkeys(registered_bits(), 8e9) for _ in range(3)))
LINK = {"latency_s": 1e-5, "message_s": 1e-5, "core_s_per_byte": 1e-9}
PREDICTED_S = exchange_s(
    *(250_000, 32, 2, Link(bytes_per_s=payload_rate(1e9), **LINK), SPEEDS),
    cores_per_rank=1.0,
    pipelined=False,
).total_s
SUMS = {f"{bits}, collective": 0.001 * bits for bits in registered_bits()}
PIPELINED = {f"{bits}, pipelined": 0.0005 * bits for bits in registered_bits()}
OF_SIZE = {
    "values": 25_000_000,
    "seconds": {
        **dict.fromkeys(("MPI_Allreduce", *links.CASES), 1.0),
        **{"1 bit, pipelined": 0.25, "32 bit, pipelined": 4.0, "auto": 0.5, "gloo": 8.0},
    },
    "plans": {"auto": {"gradient_bits": {"4": 1}, "transport": "pipelined"}},
}
#: What the ranks answer, by function.
MEASURED = {
    "parameter_server.dense": {
        **{"bare": 1000.0, "bare, step": 800.0, "bare, 1 bit": 2000.0, "client": 760.0},
        **{"learner, 1": 720.0, "learner, 2": 900.0, "learner, 1 bit": 1000.0},
        **{f"bare, {n}, {bits}": 10.0 for n in (1, 3) for bits in (32, 1)},
        **{f"learner, {n}, {bits}": 9.0 for n in (1, 3) for bits in (32, 1)},
    },
    "parameter_server.slow_worker": {"async": {"alike": 40.0, "slow": 30.0, "slowest": 10.0}},
    "parameter_server.sparse": {
        "bytes": 160.0,
        "bare": dict.fromkeys(sparse.KINDS, 4e6),
        "served": dict.fromkeys(sparse.KINDS, 2e6),
    },
    "exchange.one_machine": {
        "seconds": {"MPI_Allreduce": 0.064, **SUMS, **PIPELINED},
        "bytes": {**SUMS, "1, collective": 2000 / 8},
        "memory_per_parameter": {"1000000": 7.0},
        "tiny": {"1 bit": 2e-5, "32 bit": 3e-5, "allreduce": 1e-5, "alone": 1e-5},
    },
    "plan:measure_link": LINK,
}
OF_PLAN = {
    "values": 250_000,
    "seconds": {"32": 2 * PREDICTED_S},
    "plans": {"32": {"transport": "collective"}},
}
LIMIT_S = 25e6 / payload_rate(1e9)  #: of a byte a value: each of two hosts sends that much


@pytest.mark.parametrize(
    ("line", "expected", "ratios"),
    [
        (
            "parameter-server --servers 2",
            [
                (5, "parameter_server.dense"),
                (4, "parameter_server.slow_worker"),
                (3, "parameter_server.sparse"),
            ],
            {
                "learner.step, 32 bit, beside bare": 0.72,
                "learner.step, 32 bit, 2 servers": 1.25,
                "rows pulled, 1 server, 2 workers": 0.5,
                "memory of the server's table, a row": 1.25,
                "a worker's steps beside one that is 3 times as slow, async": 0.75,
            },
        ),
        (
            "parameter-server --rate 1gbit",
            [((4, 1e9), "parameter_server.dense")],
            {"learner.step, 32 bit, 3 workers": 0.9, "learner.step, 1 bit, 1 worker": 0.9},
        ),
        (
            "exchange --values 2k --rounds 3",
            [(2, "exchange.one_machine")],
            {
                "32 bit, time": 0.5,
                "1 bit, transport pipelined, time": 0.5,
                "1 bit, bytes sent by a rank": 1,
                "step of 650 parameters, 1 bit": 2,
            },
        ),
        (
            "exchange --hosts 2 --values 25M --rate 1gbit",
            [((2, 1e9), "exchange.sums")],
            {
                "100 MB, 32 bit, pipelined": 4 / (4 * LIMIT_S),
                "100 MB, gloo": 8 / (4 * LIMIT_S),
                "100 MB, 1 bit, pipelined": 0.25 / (LIMIT_S / 8),
                "100 MB, 1 bit as signs, pipelined": 1 / (LIMIT_S * (1 / 8 + 8 / 1024)),
                "100 MB, auto: 4 bit, pipelined": 0.5 / (LIMIT_S * (4 / 8 + 4 / 1024)),
                "100 MB, gloo over ours in 1 bit": 32 / 20,
            },
        ),
        (
            "plan --hosts 2 --megabytes 1 --bits 32",
            [((2, math.inf), "plan:measure_link"), ((2, 1e9), "exchange.sums")],
            {"2 hosts, 1 MB, 32 bit": 2, "largest error": 0.5 / 0.15},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_reports_compare_what_was_measured(monkeypatch, line, expected, ratios):
    """On ranks and hosts that know the answers."""
    asked = []

    def answer(where, function, options, **_):
        asked.append((where, function))
        require_fit(function, options)
        if function == "exchange.sums":
            return [OF_SIZE if options.get("gloo") else OF_PLAN]
        return MEASURED[function]

    def on_hosts(count, rate, function, options, **_):
        return answer((count, rate), function, options)

    fakes = {"on_ranks": answer, "on_hosts": on_hosts}
    fakes |= {"measure_kernel_speeds": lambda: SPEEDS, "usable_cores": lambda: 2}
    for module, name in product((parameter_server, one_machine, links, plan), fakes):
        monkeypatch.setattr(module, name, fakes[name], raising=False)
    modules = {"parameter-server": parameter_server, "exchange": exchange, "plan": plan}
    report = modules[line.split()[0]].main(options_of(line))
    assert asked == expected
    by_name = {row.name: row.ratio for row in report.rows}
    assert len(by_name) == len(report.rows)
    assert {name: by_name[name] for name in ratios} == pytest.approx(ratios)


def test_sums_have_their_turns_one_after_the_other(monkeypatch):
    """The first round does not count, nor does the first sum of a turn."""
    turns, seconds = [], iter(range(1, 1000))
    peers = {name: lambda name=name: turns.append(name) for name in "ab"}
    monkeypatch.setattr(sums, "_peers", lambda total, gloo: peers)
    monkeypatch.setattr(sums, "_vector_of", lambda rank, values: np.ones(values, np.float32))
    monkeypatch.setattr(sums, "seconds_of", lambda call, comm: call() or next(seconds))
    measured = sums.measure_size(Communicator.single(), 2_500_000, 2, {})
    assert turns == 3 * [name for name in "ab" for _ in range(5)]
    assert measured["seconds"] == {"a": 18.5, "b": 23.5}
    assert [sums.times(values) for values in (1000, 250_000, 25_000_000)] == [8, 8, 1]


def test_links_have_nothing_left_to_accept_at_once_before_each_sum(monkeypatch):
    turns = []
    monkeypatch.setattr(sums, "_send_to_all", lambda comm, nbytes: turns.append(nbytes))
    given = sums._vector_of(0, 2_500_000)

    def add():
        turns.append("sum")

    sums.turn(Communicator.single(), "a sum", add, given, given.copy(), burst=512)
    assert turns == 5 * [512, "sum"]


@pytest.mark.parametrize(
    ("bits", "wrong", "message"),
    [
        (32, 0.0, None),
        (32, 0.1, "a sum has not summed up: relative error 0.0"),
        (None, 0.1, "a sum has not summed up"),
        (1, 0.1, "a sum has left other sums on some ranks than on others"),
    ],
)
def test_a_sum_that_is_wrong_ends_the_benchmark(bits, wrong, message):
    def body(comm):
        given, total = sums._vector_of(comm.rank, 5000), np.empty(5000, np.float32)

        def call():
            total[:] = sum(sums._vector_of(k, 5000) for k in range(comm.size))
            total[7] += wrong
            total[-8:] += wrong * comm.rank

        try:
            return len(sums.turn(comm, "a sum", call, given, total, bits))
        except UserError as error:
            return str(error)

    for outcome in simulate(3, body):
        assert message in outcome if message else outcome == 8


@pytest.mark.parametrize(
    ("benchmark", "line", "wrong"),
    [
        (exchange, "exchange --rate 1gbit", r"rate=1e\+09 bit/s needs --hosts"),
        (exchange, "exchange --values 1 2", "must be one number without --hosts"),
        (exchange, "exchange --hosts 1", "hosts=1 must be at least 2"),
        (exchange, "exchange --hosts 2 -n 3", "ranks=3 must not be given with --hosts"),
        (parameter_server, "parameter-server --rate 1gbit --hosts 1", "hosts=1 must be at least 2"),
    ],
)
def test_what_benchmarks_refuse(benchmark, line, wrong):
    with pytest.raises(UserError, match=wrong):
        benchmark.main(options_of(line))


def test_machines_that_differ_in_speed(monkeypatch):
    """The limit is the sum of the speeds: 500 samples a second, and a third of it twice."""
    monkeypatch.setattr(unequal, "SAMPLE_S", 1e-5)
    monkeypatch.setattr(unequal, "HANG_S", 0.1)
    measured = simulate(3, lambda comm: unequal.measure(comm, values=65_536, blocks=1))[0]
    for of_shares in measured["samples_per_s"].values():
        assert list(of_shares) == ["equal", "measured"] and min(of_shares.values()) > 0
        of_shares["equal"] = 500
    assert list(measured["longest_step_s"]) == [
        f"{quorum} of 3 ranks in an outer step" for quorum in ("all", 2)
    ]
    monkeypatch.undo()
    monkeypatch.setattr(unequal, "on_hosts", lambda *asked: measured)
    rows = {row.name: row.ratio for row in unequal.main(options_of("unequal")).rows}
    assert rows["block momentum, 4 bits, equal shares"] == pytest.approx(0.6)
    assert len(rows) == 2 * len(unequal.CASES) + 2
