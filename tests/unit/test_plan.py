"""`parallel-sgd plan`: prices, memory, what is recommended, what is refused; and its benchmark."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from parallel_sgd import (
    Communicator,
    DataParallelASGD,
    DataParallelSGD,
    DiLoCo,
    ModelAveragingSGD,
    Parameters,
    PowerSGD,
    SparseLoCo,
    UserError,
)
from parallel_sgd.__main__ import main
from parallel_sgd.algorithms import BlockPeriod, ExchangeState
from parallel_sgd.command_line import plan, read
from parallel_sgd.compression import auto_bits, registered_bits
from parallel_sgd.costs import (
    LINK_EFFICIENCY,
    KernelSpeeds,
    Link,
    closed_throughput,
    exchange_s,
)
from parallel_sgd.exchange import ExchangeOptions
from parallel_sgd.planning import (
    Blocks,
    DataParallel,
    DoubleBuffered,
    Job,
    Servers,
    candidate_of,
    candidates,
    reached,
    recommend,
    sensitivity,
)

SPEEDS = KernelSpeeds(
    {bits: math.inf if bits == 32 else 4e9 for bits in registered_bits()},
    {bits: math.inf if bits == 32 else 8e9 for bits in registered_bits()},
    dict.fromkeys(registered_bits(), 8e9),
)
JOB = Job(
    nodes=64,
    ranks_per_node=1,
    link=Link.ethernet(10e9, 30e-6),
    parameters=60_000_000,
    step_s=0.2,
    minibatch=64,
    optimizer_vectors=1,
    speeds=SPEEDS,
)
ARGUMENTS = {
    "--nodes": "64",
    "--bandwidth": "10gbit",
    "--latency": "30us",
    "--parameters": "60M",
    "--step-time": "0.2",
}


@pytest.fixture(autouse=True)
def known_speeds(monkeypatch):
    monkeypatch.setattr(plan, "measure_kernel_speeds", lambda: SPEEDS)


def told(capsys, *more, **changed):
    given = {**ARGUMENTS, **{"--" + name.replace("_", "-"): v for name, v in changed.items()}}
    code = main(["plan", *(word for pair in given.items() for word in pair), *more])
    return code, *capsys.readouterr()


def test_every_algorithm_has_a_line(capsys):
    code, shown, _ = told(capsys)
    assert code == 0
    lines = [line.split("  ")[0] for line in shown.splitlines()]
    assert lines.count("data-parallel") - 1 == len(auto_bits())  # and a quarter of a bit
    assert lines.count("data-parallel, overlap") == len(auto_bits())
    for name in ("model averaging", "block momentum", "SlowMo", "DiLoCo", "double buffering"):
        assert lines.count(name) == 2
    for name in ("parameter servers", "SparseLoCo", "DES-LOC", "DiLoCo, 4 fragments"):
        assert lines.count(name) == 1
    assert "8, on nodes of their own" in shown
    assert "encode, decode and add, decode: 16 bit 4.0, 8.0, 8.0;" in shown


@pytest.mark.parametrize("nodes", [1, 2, 7, 64, 1024])
@pytest.mark.parametrize("local", [1, 4])
def test_terms_and_totals_fit(nodes, local):
    job = replace(JOB, nodes=nodes, ranks_per_node=local)
    for candidate in candidates(job):
        cost = candidate.cost(job)
        terms = cost.compute_s, cost.kernels_s, cost.wire_s, cost.startup_s
        assert all(term >= 0 for term in terms)
        assert max(cost.compute_s, cost.wire_s) <= cost.total_s <= sum(terms) + 1e-12
        assert 0 < cost.efficiency <= 1
        assert all(size >= 0 for size in candidate.memory(job).values())


def test_a_step_without_overlap_is_compute_and_exchange():
    cost = DataParallel(4).cost(JOB)
    totals = {
        n: 0.2 + exchange_s(60_000_000, 4, 64, JOB.link, SPEEDS, buckets=n).total_s
        for n in (57, 28, 14, 7, 3, 1)
    }
    assert cost.total_s == pytest.approx(totals[cost.buckets])
    assert cost.total_s <= 1.01 * min(totals.values())
    slow = DataParallel(4).cost(replace(JOB, step_s=100.0))
    assert slow.buckets == 57  # the default, where it makes no difference


def test_overlap_hides_wire_behind_two_thirds_of_the_step():
    job = replace(JOB, link=Link(0.0, 2 * 63 / 64 * 240e6 / 0.1 / LINK_EFFICIENCY, message_s=0.0))
    assert job.exchange(32, 1).wire_s == pytest.approx(0.1)
    hidden = DataParallel(32, overlap=True).cost(job)
    assert hidden.total_s == pytest.approx(0.2, rel=0.05)
    long = replace(job, link=Link(0.0, job.link.bytes_per_s / 5, message_s=0.0))
    assert DataParallel(32, overlap=True).cost(long).total_s == pytest.approx(0.5 + 0.2 / 3, 0.01)
    assert DoubleBuffered(32).cost(long).total_s == pytest.approx(0.5)


def test_a_block_is_paid_once_in_all_its_steps():
    every = {(candidate.name, candidate.bits): candidate for candidate in candidates(JOB)}
    averaging = every["model averaging", 32]
    assert isinstance(averaging, Blocks) and averaging.steps(JOB) == 625  # 40,000 samples
    slowmo = every["SlowMo", 4]
    cost = slowmo.cost(JOB)
    extra_s = JOB.exchange(4, cost.buckets).total_s + JOB.passes_s(10)
    assert cost.total_s - 0.2 == pytest.approx(extra_s / 48)
    in_kernels_s = JOB.exchange(4, cost.buckets).kernels_s + JOB.passes_s(10)
    assert cost.kernels_s == pytest.approx(in_kernels_s / 48)
    shorter = averaging.cost(replace(JOB, minibatch=640))
    assert shorter.wire_s == pytest.approx(10 * averaging.cost(JOB).wire_s, rel=0.02)


def test_fragments_wait_for_no_exchange_that_is_short_enough():
    every = {(candidate.name, candidate.bits): candidate for candidate in candidates(JOB)}
    fragments, whole = every["DiLoCo, 4 fragments", 4], every["DiLoCo", 4]
    part = replace(JOB, parameters=15_000_000).exchange(4, 1)
    assert part.wire_s < 5 * JOB.step_s
    cost = fragments.cost_in(JOB, 4)
    extra_s = 4 * (part.kernels_s + part.startup_s) + JOB.passes_s(10)
    assert cost.total_s == pytest.approx(JOB.step_s + extra_s / 500)
    assert cost.wire_s == pytest.approx(whole.cost_in(JOB, 4).wire_s)
    slow = replace(JOB, link=Link(0.0, 1e6, message_s=0.0))
    waits_s = replace(slow, parameters=15_000_000).exchange(4, 1).wire_s - 5 * JOB.step_s
    assert fragments.cost_in(slow, 4).hidden_s == pytest.approx(5 * JOB.step_s * 4 / 500)
    assert waits_s > 0


def test_moments_of_their_own_periods_are_exchanges_of_their_own():
    adam = replace(JOB, optimizer_vectors=2)
    every = {candidate.name: candidate for candidate in candidates(adam)}
    moments = every["DES-LOC"].cost_in(adam, 1).wire_s * every["DES-LOC"].steps(adam)
    assert moments == pytest.approx((1 + 1 / 3 + 1 / 6) * adam.exchange(32, 1).wire_s)
    assert every["SparseLoCo"].bits == SparseLoCo(sync_steps=1).gradient_bits


def test_servers_are_limited_by_their_links():
    servers = Servers(32)
    assert servers.servers(JOB) == 8 and servers.servers(JOB.on(3)) == 1
    served = 56 / 8 * 240e6 / (LINK_EFFICIENCY * JOB.link.bytes_per_s) / servers.steps(JOB)
    assert served < servers.cost(JOB).total_s < 1.1 * served  # many workers keep the links busy
    unlimited = replace(JOB, link=Link(0.0, math.inf, message_s=0.0))
    assert servers.cost(unlimited).total_s == pytest.approx(0.2, rel=0.2)
    idle = replace(JOB, step_s=100.0)
    assert servers.cost(idle).efficiency == pytest.approx(56 / 64, rel=0.01)
    assert not any(isinstance(candidate, Servers) for candidate in candidates(JOB.on(1)))


def test_customers_of_a_closed_network_of_queues():
    assert closed_throughput(1, (1.0, 2.0), 3.0) == pytest.approx(1 / 6)
    assert closed_throughput(1000, (1.0, 2.0), 3.0) == pytest.approx(1 / 2, rel=1e-3)
    # Two stations alike and nothing else: n / (n + 1) of a visit's time is work (Buzen, 1973).
    assert closed_throughput(5, (1.0, 1.0), 0.0) == pytest.approx(5 / 6)
    assert closed_throughput(10**9, (1e-12, 2e-12), 3.0) == pytest.approx(1e9 / 3)
    assert closed_throughput(10**9, (1.0, 2.0), 3.0) == pytest.approx(1 / 2)


def test_memory():
    n = 60_000_000
    plain, bit = DataParallel(32).memory(JOB), DataParallel(1).memory(JOB)
    assert sum(plain.values()) == 16 * n
    assert bit["residuals"] == 4 * n * (1 + 1 / 64)
    assert DoubleBuffered(1).memory(JOB)["gradient"] == 8 * n
    averaging, momentum = (
        sum(candidate.memory(JOB).values()) for candidate in candidates(JOB)
        if candidate.name in ("model averaging", "block momentum") and candidate.bits == 32
    )  # fmt: skip
    assert momentum - averaging == 4 * n
    eight = replace(JOB, nodes=9)
    assert Servers(32).server_memory(eight) == 4 * n * (2 + 8)


@pytest.mark.parametrize("bits", [32, 16, 4, 1, 0.5])
def test_memory_is_what_training_takes(bits):
    job = replace(JOB, nodes=1, parameters=1 << 20)
    expected = DataParallel(bits).memory(job)
    parameters = Parameters({"W": np.zeros((1024, 1024), np.float32)})
    given = ExchangeOptions(gradient_bits=bits), parameters, lambda: 0, Communicator.single()
    ExchangeState.init(*given)  # loads kernels
    tracemalloc.start()
    state = ExchangeState.init(*given)
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert state.current
    assert taken == pytest.approx(expected["residuals"] + expected["buffers"], rel=0.1)


POINTS = [(100, 2.0), (200, 1.0), (300, 1.2), (400, 0.8), (500, 0.9)]


@pytest.mark.parametrize(
    ("loss", "interval"),
    [
        (2.5, (0, 100)),
        (1.5, (150, 150)),
        (1.1, (190, 325)),
        (0.95, (362.5, 362.5)),
        (0.85, (387.5, math.inf)),
        (0.7, None),
    ],
)
def test_a_curve_comes_to_a_loss(loss, interval):
    assert reached(POINTS, loss) == (None if interval is None else pytest.approx(interval))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of two ranks."""
    folder = tmp_path_factory.mktemp("run") / "run"
    words = f"--gradient-bits 4 --epochs 4 --minibatch-size 64 --no-plot --output {folder}"
    command = [sys.executable, "-m", "parallel_sgd", "simulate", "-n", "2", *words.split()]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder


CLUSTER = {"bandwidth": "1gbit", "latency": "100us", "step_time": "0.2"}


def of_run(capsys, **given):
    words = {"--" + name.replace("_", "-"): str(v) for name, v in (CLUSTER | given).items()}
    assert main(["plan", *(word for pair in words.items() for word in pair)]) == 0
    return capsys.readouterr().out


def test_seconds_to_a_loss_by_an_earlier_run(capsys, run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    points = [(row["samples"], row["test_loss"]) for row in rows]
    assert all(before > after for (_, before), (_, after) in pairwise(points)), "not steady"
    loss = (points[1][1] + points[2][1]) / 2
    shown = of_run(capsys, curve=run, target_loss=loss)
    assert shown.startswith("2 nodes, ") and "9,610 parameters, 200 ms a step of 32" in shown
    middle = (points[1][0] + points[2][0]) / 2
    assert f"minibatches of 64): {middle:,.0f} to {middle:,.0f} samples" in shown
    seconds = middle / 64 * 0.2
    found = re.search(r"  data-parallel, 4 bit +([\d.]+) to ([\d.]+) s \(200 ms a step\)", shown)
    assert [float(bound) for bound in found.groups()] == pytest.approx(
        [0.75 * seconds, 1.25 * seconds], rel=0.02
    )
    after = shown.partition("to a test loss of")[2]
    assert "data-parallel, overlap, 1 bit" in after
    assert not any(name in after for name in ("0.25 bit", "momentum", "DiLoCo", "double"))


def test_a_plan_is_compared_with_a_run(capsys, run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = (rows[-1]["samples"] - rows[0]["samples"]) / 64
    took = (rows[-1]["seconds"] - rows[0]["seconds"]) / steps
    line = of_run(capsys, compare=run).splitlines()[-1]
    assert line.startswith(
        f"{run}: data-parallel, 4 bit on 2 ranks took {1e3 * took:.3g} ms a step"
    )
    error = re.search(r"predicted 200 ms \(\+(\d+)%\)$", line)
    assert float(error[1]) / 100 == pytest.approx(0.2 / took - 1, rel=0.01)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"curve": "run"}, "--curve='run' has no effect without --target-loss L"),
        ({"target_loss": 1}, "--target-loss=1.0 has no effect without --curve RUN"),
        ({}, "--nodes N is required without --curve RUN or --compare RUN"),
        (
            {"compare": "."},
            "--compare='.' must be the folder of a finished run of train.py: it has",
        ),
        ({"curve": None, "target_loss": 0.001}, "--target-loss=0.001 must be a loss that the run"),
        ({"compare": None, "nodes": 4, "minibatch": 64}, "has minibatches of 64 samples of all"),
    ],
)
def test_runs_that_no_plan_can_use(run, given, message):
    words = {"--" + name.replace("_", "-"): str(v or run) for name, v in (CLUSTER | given).items()}
    with pytest.raises(UserError, match=re.escape(message)):
        plan.main([word for pair in words.items() for word in pair])


@pytest.mark.parametrize(
    ("algorithm", "candidate"),
    [
        (DataParallelSGD(gradient_bits=4, overlap=True), DataParallel(4, overlap=True)),
        (DataParallelSGD(double_buffering=True), DoubleBuffered(32)),
        (DataParallelASGD(), Servers(32)),
        (SparseLoCo(), Blocks(0.25, SparseLoCo, BlockPeriod(sync_steps=30))),
        (DataParallelSGD(gradient_bits={0: 8, 100: 4}), None),
        (PowerSGD(rank=1), None),
    ],
)
def test_the_candidate_of_an_algorithm(algorithm, candidate):
    assert candidate_of(algorithm, JOB) == candidate


def test_a_block_of_any_length_is_planned():
    job = replace(JOB, nodes=4, minibatch=8)
    for options in ({"sync_steps": 20}, {"sync_period": 160}, {"block_samples": 640}):
        blocks = candidate_of(ModelAveragingSGD(**options), job)
        assert blocks.steps(job) == 20
    overlapped = candidate_of(DiLoCo(sync_steps=20, fragments=2, overlap_samples=96), job)
    assert (overlapped.name, overlapped.overlap_steps) == ("DiLoCo, 2 fragments", 3)


@pytest.mark.parametrize("candidate", candidates(JOB), ids=lambda c: f"{c.name} {c.bits}")
def test_the_options_are_those_of_train(candidate):
    words = f"{candidate.options} --gradient-bits {candidate.bits}".split()
    _, algorithm, _ = read(words)
    kind = DataParallelASGD if isinstance(candidate, Servers) else DataParallelSGD
    assert type(algorithm) is (candidate.algorithm if isinstance(candidate, Blocks) else kind)
    assert algorithm.gradient_bits == candidate.bits
    if kind is type(algorithm) is DataParallelSGD:
        assert algorithm.overlap == getattr(candidate, "overlap", False)
        assert algorithm.double_buffering == isinstance(candidate, DoubleBuffered)


def test_precision_is_not_given_away_where_links_are_fast():
    advice = recommend(replace(JOB, link=Link(1e-6, math.inf, message_s=0.0), nodes=4))
    assert advice.choice == DataParallel(32)
    assert "as serial SGD does" in advice.reason and advice.reason.count(". ") == 1
    assert "block momentum" not in advice.reason


def test_many_nodes_want_large_buckets():
    advice = recommend(replace(JOB, nodes=1024, step_s=2.0))
    assert isinstance(advice.choice, DataParallel) and advice.choice.cost(JOB).buckets < 57
    values = int(advice.options.rpartition("--bucket-values ")[2])
    assert 60_000_000 // 57 < values <= 60_000_000
    assert "--bucket-values" not in recommend(replace(JOB, parameters=10**6)).options


def test_few_bits_where_they_are_enough():
    advice = recommend(replace(JOB, nodes=8))
    assert isinstance(advice.choice, DataParallel) and advice.choice.bits < 32
    assert "With error feedback" in advice.reason
    assert "; block momentum would keep 100%." in advice.reason


ONE_BIT = replace(JOB, nodes=8, link=Link.ethernet(1e9, 1e-4), parameters=10_000_000, step_s=0.5)


@pytest.mark.parametrize("vectors", [0, 1])
def test_one_bit_is_recommended_from_the_first_step_on(vectors):
    advice = recommend(replace(ONE_BIT, optimizer_vectors=vectors))
    assert advice.choice == DataParallel(1) and advice.options == "--gradient-bits 1"
    assert "on by default, 1 bit trained as well as 32 (docs" in advice.reason


def test_what_hangs_on_the_kernels_speed_is_said(capsys):
    """Near a limit a machine under load gives another answer; far from it none does."""
    assert sensitivity(ONE_BIT, recommend(ONE_BIT).choice) == []
    slow = replace(ONE_BIT, speeds=SPEEDS.times(0.1))
    chosen = recommend(slow).choice
    ((how, other),) = sensitivity(slow, chosen)
    assert how == "twice as fast"
    assert other == recommend(replace(slow, speeds=SPEEDS.times(0.2))).choice != chosen


def test_blocks_only_where_gradients_are_much_slower_and_with_what_they_cost():
    advice = recommend(replace(JOB, link=Link.ethernet(1e8, 1e-3)))
    assert isinstance(advice.choice, Blocks)
    assert "The result differs" in advice.reason and "0.45 nats" in advice.reason


def test_json_and_figure(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    json_file, figure = tmp_path / "plan.json", tmp_path / "plan.png"
    code, _, _ = told(capsys, json=str(json_file), figure=str(figure), bandwidth="unlimited")
    assert code == 0
    content = json.loads(json_file.read_text(), parse_constant=pytest.fail)
    assert content["job"]["bandwidth"] is None
    assert [row["nodes"] for row in content["plan"]] == [2**i for i in range(11)]
    here = next(row for row in content["plan"] if row["nodes"] == 64)["algorithms"]
    assert len(here) == 15 + 2 * len(auto_bits())
    assert all(row["seconds"]["wire"] == 0 for row in here)
    chosen = content["recommended"]
    assert (chosen["algorithm"], chosen["bits"]) in {(e["algorithm"], e["bits"]) for e in here}
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"nodes": "0"}, "--nodes: must be a number"),
        ({"nodes": "2.5"}, "--nodes: must be a whole number: '2.5'"),
        ({"nodes": "1g"}, "--nodes=1000000000 must be at most"),
        ({"bandwidth": "10"}, "--bandwidth: must be a rate"),
        ({"latency": "-1us"}, "--latency"),
        ({"parameters": "many"}, "--parameters: must be a number"),
        ({"step_time": "0"}, "--step-time: must be a time"),
        ({"step_time": "1e400"}, "--step-time: must be from 1e-09 to 1e+06 s: '1e400'"),
        ({"step_time": "1e-300"}, "--step-time: must be from 1e-09 to 1e+06 s: '1e-300'"),
        ({"step_time": "nan"}, "--step-time: must be a time"),
        ({"latency": "1e300us"}, "--latency: must be from 1e-09 to 1e+06 s: '1e300us'"),
        ({"bandwidth": "1e-9kbit"}, "--bandwidth: must be from 1000 to 1e+15 bit/s: '1e-9kbit'"),
        ({"bandwidth": "1e400gbit"}, "--bandwidth: must be from 1000 to 1e+15 bit/s"),
        ({"nodes": "9" * 400}, "--nodes: must be from 1 to 1e+15"),
        ({"parameters": "1e400"}, "--parameters: must be from 1 to 1e+15: '1e400'"),
        ({"figure": "plan.xyz"}, "--figure=plan.xyz must end in one of "),
        ({"optimizer": "magic"}, "--optimizer: invalid choice"),
        ({"minibatch": "0"}, "--minibatch: must be a number"),
        ({"json": "/no/such/folder/a.json"}, "--json=/no/such/folder/a.json must be a file in"),
        ({"figure": "/no/such/a.png"}, "--figure=/no/such/a.png must be a file in"),
        ({"json": "."}, "--json=. must be a file in a folder that exists"),
        ({"json": ""}, "--json='' must be the path of a file"),
        ({"figure": ""}, "--figure='' must be the path of a file"),
        ({"json": "a\0b"}, "--json='a\\x00b' must be the path of a file: it has a zero byte"),
    ],
)
def test_what_is_refused_is_named(capsys, changed, said):
    code, shown, error = told(capsys, **changed)
    assert code == 2 and not shown
    assert said in error and error.count("\n") == 1


def test_a_plan_at_every_limit_has_only_numbers(capsys):
    """Each number is as large, or as small, as it may be: any three of them together."""
    limits = [("nodes", 1, 1 << 20), ("parameters", 1, "10000G"), ("step_time", "1ns", "1000000")]
    limits += [("latency", "1ns", "1000000"), ("bandwidth", "1kbit", "1000000gbit")]
    limits += [("ranks_per_node", 1, 1024), ("minibatch", 1, "1G")]
    for number in range(2 ** len(limits)):
        if number.bit_count() in (0, 1, len(limits) - 1, len(limits)):
            chosen = {name: str(ends[number >> i & 1]) for i, (name, *ends) in enumerate(limits)}
            code, shown, error = told(capsys, **chosen)
            assert code == 0, error
            assert "nan" not in shown and "inf" not in shown, shown


def test_a_full_disk_is_one_line(capsys):
    code, _, error = told(capsys, json="/dev/full")
    assert code == 2
    assert error == (
        "parallel-sgd: error: --json='/dev/full' cannot be written: No space left on device\n"
    )


def test_what_is_missing_is_named(capsys):
    assert main(["plan", "--nodes", "4"]) == 2
    error = capsys.readouterr().err
    assert "--bandwidth" in error and "--step-time" in error
