"""The benchmark of speed-ups: what is asked of hosts, what follows from the answers, the figure."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from benchmark_players import options_of

from benchmarks.report import load
from benchmarks.speedup import command as speedup
from benchmarks.speedup import contenders, figures, learning, step_times
from benchmarks.speedup.command import Summary
from benchmarks.speedup.contenders import BATCH, CONTENDERS, PERIOD, SERIAL
from benchmarks.speedup.learning import Learned, Run
from benchmarks.speedup.results import Predicted, Results, Spread, predict
from benchmarks.speedup.step_times import Alone, Timed
from parallel_sgd import UserError, simulate
from parallel_sgd.compression import registered_bits
from parallel_sgd.costs import LINK_EFFICIENCY, KernelSpeeds, Link
from parallel_sgd.data import Arrays
from parallel_sgd.models import ByteLanguageModel

SAMPLES = 64 * BATCH
ALONE = Alone(gradient_s=0.01, evaluation_s=0.4, axpy_gb_per_s=20.0)
OPTIONS = {
    "rate": 1e9,
    "rounds": 2,
    "seeds": 2,
    "samples": SAMPLES,
    "evaluations": 8,
    "task": contenders.TITLE,
}


def timed(name, workers, step_s, evaluation_s):
    n = len(step_s)
    return Timed(
        name, workers, workers, 1.0, 16, step_s, n * [evaluation_s], n * [0.06], n * [0.02]
    )


@pytest.fixture
def results():
    return Results(
        OPTIONS,
        ALONE,
        [
            timed(SERIAL, 1, [0.01, 0.0125, 0.02], 0.1),
            timed(SERIAL, 4, [0.02, 0.04, 0.05], 0.03),
            timed("1 bit", 4, [0.0125, 0.0125, 0.01], 0.03),
        ],
        [
            Learned(SERIAL, 1, SAMPLES, 0.1, [2.0, 2.2, 2.1], [50.0, 48.0, 49.5]),
            Learned("1 bit", 4, SAMPLES, 0.2, [2.1, 2.4, 2.2], [47.0, 45.0, 46.0]),
        ],
        [Predicted("1 bit", 4, 24_000.0), Predicted("1 bit", 8, 40_000.0)],
        {"cores": 2, "processor": "of the test"},
    )


def test_speed_ups_are_those_over_serial_sgd(results):
    points = {(p.contender, p.workers): p for p in results.points()}
    assert list(points) == [(SERIAL, 1), (SERIAL, 4), ("1 bit", 4)]
    point = points["1 bit", 4]
    rate = 4 * BATCH / 0.0125
    assert point.samples_per_s == pytest.approx(Spread(rate, rate, 1.25 * rate))
    assert point.peak == pytest.approx(4)  # 0.01 s of 4 workers against 0.01 s of one
    serial_s = 0.06 + 64 * 0.0125 + 8 * 0.1 + 0.02  # the median of the rounds
    whole_s = [0.06 + 16 * step_s + 8 * 0.03 + 0.02 for step_s in (0.0125, 0.01)]
    slow, fast = (serial_s / seconds for seconds in whole_s)
    assert point.average == pytest.approx(Spread(slow, slow, fast))
    assert point.accuracy == Spread(46.0, 45.0, 47.0)
    assert point.predicted == 24_000
    assert points[SERIAL, 1].average.middle == points[SERIAL, 1].peak == 1
    assert points[SERIAL, 4].peak == pytest.approx(2) and points[SERIAL, 4].accuracy is None


def test_json_and_table_hold_hardware_options_and_spreads(results, tmp_path, capsys):
    path = tmp_path / "speedup.json"
    Summary(results).write(path)
    content = json.loads(path.read_text(), parse_constant=pytest.fail)  # no Infinity
    assert content["machine"] == {"cores": 2, "processor": "of the test"}
    assert content["options"] == OPTIONS and content["alone"]["axpy_gb_per_s"] == 20
    assert load(path, Results) == results
    speedup.read(options_of(f"speedup --table {path}")).print()
    out = capsys.readouterr().out
    (line,) = (line for line in out.splitlines() if line.startswith("| 1 bit"))
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    assert cells[2:5] == ["81,920 (81,920 to 102,400)", "24,000", "4.00"]
    assert cells[6] == "2.200 (2.100 to 2.400)" and cells[8] == "0.2"
    assert "20.0 GB/s" in out and "10.00 ms a minibatch of 256" in out
    path.write_text(json.dumps({"title": "another"}))
    with pytest.raises(UserError, match="not the results of this benchmark"):
        load(path, Results)


def test_the_figure(results, tmp_path, monkeypatch):
    kind = pytest.importorskip("matplotlib.figure").Figure
    drawn, save = [], kind.savefig
    monkeypatch.setattr(kind, "savefig", lambda f, *a, **k: (drawn.append(f), save(f, *a, **k)))
    Summary(results).draw(tmp_path / "speedup.png")
    assert (tmp_path / "speedup.png").read_bytes().startswith(b"\x89PNG")
    learned, scaled = drawn[0].axes
    assert "speed-up" in learned.get_xlabel() and "%" in learned.get_ylabel()
    assert {text.get_text() for text in learned.texts} == {"4", "1 bit", "serial SGD"}
    ideal = scaled.lines[0]
    assert [*ideal.get_ydata()] == pytest.approx([k * BATCH / 0.0125 for k in (1, 4, 8)])
    (planned,) = (line for line in scaled.lines if [*line.get_xdata()] == [4, 8])
    assert [*planned.get_ydata()] == [24_000, 40_000]
    assert len({contender.color for contender in CONTENDERS.values()}) == len(CONTENDERS)


def test_who_has_learned_too_little_is_named(results):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    results.learned.append(Learned(SERIAL, 4, SAMPLES, 0.4, [5.5], [0.4]))
    _, axes = pyplot.subplots()
    figures._learning(axes, results.points())
    assert "below 30 %:\n32 bit, 4 workers" in {text.get_text() for text in axes.texts}
    assert axes.get_ylim()[0] > 40
    pyplot.close()


def test_equal_plans_are_drawn_in_each_others_gaps():
    line = [(2, 100.0), (4, 200.0)]
    planned = [Predicted(name, *at) for name in ("a", "b", "c") for at in line]
    dashed = figures._dashed([*planned, Predicted("d", 2, 50.0)])
    assert [dashed[name][1] for name in "abc"] == [(at, (4.0, 8.0)) for at in (0, 4, 8)]
    assert dashed["d"] == (((2, 50.0),), (0.0, (4.0, 4.0)))


TURN = {"step_s": 0.04, "evaluation_s": 0.2, "start_s": 0.02, "finish_s": 0.01}


@pytest.fixture
def asked(monkeypatch):
    """What is asked of hosts that know the answer."""
    asked = []

    def answer(count, rate, function, options, environ):
        assert function == "speedup.step_times" and environ["OMP_NUM_THREADS"] == "1"
        asked.append((count, rate, options))
        return {name: [TURN] * options["rounds"] for name in options["names"]}

    monkeypatch.setattr(step_times, "on_hosts", answer)
    return asked


def test_time_is_dilated_so_that_each_host_has_a_core(asked):
    effort = {"rounds": 2, "steps": 16}
    of = step_times.time_all(["asynchronous", SERIAL], 8, 1e9, ALONE, 2, **effort)
    (hosts, rate, options), (fewer, faster, _) = asked
    assert (hosts, rate) == (9, pytest.approx(1e9 / 4.5)) and (fewer, faster) == (8, 2.5e8)
    assert options["gradient_s"] == pytest.approx(4.5 * 0.01)
    assert options["evaluation_s"] == pytest.approx(4.5 * 0.4)
    first, last = of
    assert (first.contender, first.hosts, first.dilation) == (SERIAL, 8, 4)
    assert first.step_s == [0.01, 0.01] and first.evaluation_s == [0.05, 0.05]
    assert (last.contender, last.workers, last.hosts) == ("asynchronous", 8, 9)
    assert step_times.dilation_of(1, 2) == 1


def test_whole_blocks_are_timed():
    assert [step_times.part_steps(163_840, 8, k) for k in (1, 2, 4, 8)] == [80, 40, 24, 16]


def tiny(seed=0):
    return ByteLanguageModel(contenders.CONTEXT, 4, [8], seed=seed)


def test_turns_take_the_wait_and_what_the_algorithm_does(monkeypatch):
    monkeypatch.setattr(step_times, "model", tiny)
    evaluations, wait = [], step_times._wait
    monkeypatch.setattr(step_times, "_wait", lambda until: (evaluations.append(until), wait(until)))
    names = ["1 bit", "SlowMo", "asynchronous"]

    def rank(comm):
        return step_times.measure(comm, names=names, rounds=1, steps=PERIOD, **waits)

    waits = {"gradient_s": 0.002, "evaluation_s": 0.03}
    turns = simulate(3, rank)[0]
    assert list(turns) == names and all(len(rounds) == 1 for rounds in turns.values())
    for rounds in turns.values():
        for turn in rounds:
            assert 0.002 <= turn["step_s"] < 1
            assert turn["evaluation_s"] >= 0.01
            assert turn["start_s"] > 0 and turn["finish_s"] > 0
    waited = 2 * (2 * 3 + 2) * (2 * PERIOD + 1)  # one of three async ranks serves
    assert len(evaluations) == waited


def test_the_slowest_worker_counts_and_the_first_round_does_not(monkeypatch):
    def turn(comm, name, steps, *waits):
        return None if comm.rank == 2 else {"step_s": steps + comm.rank}

    monkeypatch.setattr(step_times, "_turn", turn)
    asked = {"names": ["a", "b"], "rounds": 2, "steps": 40, "gradient_s": 0.0, "evaluation_s": 0.0}
    turns = simulate(3, lambda comm: step_times.measure(comm, **asked))[0]
    assert turns == dict.fromkeys("ab", 2 * [{"step_s": 41}])


@pytest.fixture
def small_task(monkeypatch):
    """Bytes that repeat: the next one is known."""

    def data(seed, samples):
        x = np.random.default_rng(seed).integers(8, size=(samples, contenders.CONTEXT))
        held = Arrays(x.astype(np.uint8), x[:, 0].copy())
        return held, held

    monkeypatch.setattr(learning, "TASK", replace(contenders.TASK, data=data, model=tiny))


@pytest.mark.usefixtures("small_task")
@pytest.mark.parametrize("name", CONTENDERS)
def test_all_contenders_learn(name):
    loss, error = learning.train(Run(name, 2, 2 * PERIOD * BATCH, 0.1, seed=0))
    assert loss < 0.99 * math.log(256) and 0 <= error <= 100


@pytest.mark.usefixtures("small_task")
def test_who_diverges_knows_nothing():
    worst = math.log(256), 100 * (1 - 1 / 256)
    assert learning.train(Run(SERIAL, 1, PERIOD * BATCH, 1e9, 0)) == worst


def test_the_best_rate_is_looked_for_on_a_seed_of_its_own(monkeypatch):
    taken = []

    def train(run):
        taken.append((run.contender, run.workers, round(run.lr, 6), run.seed))
        return abs(math.log(run.lr / 0.1)), 50.0 + run.seed

    monkeypatch.setattr(learning, "train", train)
    learned, serial = learning.learn_all(["4 bit"], [1, 8], 4096, seeds=2, jobs=1)
    assert (serial.contender, serial.workers) == (SERIAL, 1)
    assert learned.lr == pytest.approx(0.1) and learned.accuracies == [50, 49]
    tuned = [(lr, 1000) for lr in (0.4, 0.8, 0.2, 0.1, 0.05)]
    assert [run[2:] for run in taken if run[:2] == ("4 bit", 8)] == [*tuned, (0.1, 0), (0.1, 1)]


def test_a_training_that_fails_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(learning, "train", lambda run: 1 / 0)
    with pytest.raises(UserError, match="2 contenders could not be trained"):
        learning.learn_all(["4 bit"], [8], 4096, seeds=1, jobs=1)
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_plans_go_on_beyond_the_hosts_that_are_there():
    bits = registered_bits()
    speeds = KernelSpeeds(*(dict.fromkeys(bits, 1e12) for _ in range(3)))
    link = Link(latency_s=0.0, bytes_per_s=1e8)
    at = {(p.contender, p.workers): p for p in predict((1, 3), 0.01, link, speeds)}
    assert len(at) == 7 * (len(CONTENDERS) - 1)  # the planner knows no PowerSGD
    model_s = 4 * contenders.model().parameters.flat.size / 1e8
    assert at["asynchronous", 64].samples_per_s == pytest.approx(
        contenders.PUSHES * BATCH / model_s * LINK_EFFICIENCY, rel=0.02
    )  # one server's link
    block_s = 0.01 + 2 * 7 / 8 * model_s / PERIOD
    assert at["SlowMo", 8].samples_per_s == pytest.approx(8 * BATCH / block_s, rel=0.02)
    one_bit, full = at["1 bit", 64].samples_per_s, at[SERIAL, 64].samples_per_s
    assert full < one_bit < 64 * BATCH / 0.01


def test_everybody_is_measured_on_every_number_of_workers(monkeypatch, asked):
    def learn_all(names, workers, samples, seeds, jobs):
        return [Learned(name, k, samples, 0.1, [2.0], [50.0]) for name in names for k in workers]

    speeds = KernelSpeeds(*(dict.fromkeys(registered_bits(), 1e9) for _ in range(3)))
    monkeypatch.setattr(speedup, "alone", lambda: ALONE)
    monkeypatch.setattr(speedup, "measured_link", lambda rate: Link(1e-5, rate / 8))
    monkeypatch.setattr(speedup, "measure_kernel_speeds", lambda: speeds)
    monkeypatch.setattr(speedup, "usable_cores", lambda: 2)
    monkeypatch.setattr(speedup, "learn_all", learn_all)
    report = speedup.main(options_of("speedup --hosts 4 2 --rate 100mbit"))
    assert [hosts for hosts, *_ in asked] == [1, 2, 2, 3, 4, 5]
    assert [rate * max(1, hosts / 2) for hosts, rate, _ in asked] == pytest.approx([1e8] * 6)
    assert [options["steps"] for *_, options in asked[::2]] == [80, 40, 24]
    results = report.results
    assert len(results.timed) == len(results.learned) == 3 * len(CONTENDERS)
    assert {p.workers for p in results.predicted} == {2, 4, 8, 16, 32, 64}
    assert results.options["rate"] == 1e8 and results.options["samples"] == 163_840
    with pytest.raises(UserError, match="hosts=128 must be at most 80: a block each"):
        speedup.main(options_of("speedup --hosts 128"))
