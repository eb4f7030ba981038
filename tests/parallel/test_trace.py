"""The trace of all ranks in one file, on one clock; and the line on synchronizations."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections import defaultdict
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from parallel_sgd import (
    SGD,
    BlockMomentumSGD,
    Communicator,
    DataParallelASGD,
    DataParallelSGD,
    Learner,
    ModelAveragingSGD,
    UserError,
)
from parallel_sgd.algorithms import Algorithm
from parallel_sgd.communication import compare_clocks
from parallel_sgd.errors import SharedError
from parallel_sgd.models import MLP
from parallel_sgd.options import option, options
from parallel_sgd.trace import NO_TRACE, Trace
from parallel_sgd.training import step_timer, trace_file, traced

AHEAD_S = 1000.0  #: by which the clock of every rank is ahead of that of the rank before


def contents(path, comm):
    """What is in the file that rank 0 has written, on all ranks."""
    return json.loads(comm.allgather_object(path.read_text() if comm.rank == 0 else "")[0])


def intervals(file, name):
    """Begin and end of the intervals of a name in ns, by rank."""
    by_rank = defaultdict(list)
    for event in file["traceEvents"]:
        if event["name"] == name:
            by_rank[event["pid"]].append(ends(event))
    return by_rank


def ends(event):
    return round(1000 * event["ts"]), round(1000 * event["ts"]) + round(1000 * event["dur"])


def learner_of(comm, algorithm, every=0):
    parameters = MLP([6, 5, 4], seed=0).parameters
    return Learner(parameters, SGD(lr=0.1), algorithm, comm, sync_perf_stats=every)


def take(trained, steps, pause_s=0.0):
    """So many steps, with five samples a rank in each."""
    for _ in range(steps):
        time.sleep(pause_s)
        trained.gradient.flat.fill(1 + trained.comm.rank)
        trained.announce(5, 5 * trained.comm.size)
        trained.step(samples=5)


def test_clocks_are_compared(comm):
    reading = compare_clocks(comm, lambda: time.perf_counter() + AHEAD_S * comm.rank)
    assert abs(reading.ahead_s - AHEAD_S * comm.rank) <= reading.uncertain_s + 1e-9
    assert reading.uncertain_s < 0.05
    assert abs(reading.at_s - AHEAD_S * comm.rank - time.perf_counter()) < 10


@pytest.mark.parametrize("algorithm", [DataParallelSGD(gradient_bits=1), BlockMomentumSGD()])
def test_a_valid_file_of_all_ranks_and_threads(on_ranks, tmp_path, algorithm):
    path = tmp_path / "new folder" / "trace.json"

    def body(comm):
        with traced(path, comm) as trace:
            apart = comm.duplicate()
            assert apart.trace is comm.trace is trace

            def work():
                with apart.trace.span("encode"):
                    pass

            thread = threading.Thread(target=work, name="aside")
            thread.start()
            thread.join()
            assert comm.split(comm.rank % 2).trace is trace
            trace.record("wire", time.perf_counter(), time.perf_counter(), bytes=7)
            trained = learner_of(comm, algorithm)
            take(trained, 8)
            trained.finish()
        assert comm.trace is NO_TRACE
        return comm.rank, comm.host, contents(path, comm)

    results = on_ranks(body)
    file = results[0][2]
    events = [event for event in file["traceEvents"] if event["ph"] == "X"]
    named = [event for event in file["traceEvents"] if event["ph"] == "M"]
    assert len(events) + len(named) == len(file["traceEvents"])
    ranks = range(len(results))
    processes = {e["pid"]: e["args"]["name"] for e in named if e["name"] == "process_name"}
    assert processes == {rank: f"rank {rank} ({host})" for rank, host, _ in results}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in named if e["name"] == "thread_name"}
    assert sorted(threads.items()) == [
        ((rank, row), name) for rank in ranks for row, name in enumerate(["main", "aside"])
    ]
    for event in events:
        assert type(event["name"]) is str
        assert event["ts"] >= 0 and event["dur"] >= 0
        assert (event["pid"], event["tid"]) in threads
    for rank in ranks:
        own = [event for event in events if event["pid"] == rank]
        assert next(threads[rank, e["tid"]] for e in own if e["name"] == "encode") == "aside"
        assert next(e["args"] for e in own if e["name"] == "wire") == {"bytes": 7}
        names = [event["name"] for event in own]
        assert (names.count("compute"), names.count("step"), names.count("finish")) == (7, 8, 1)
    require_nesting(events)
    facts = file["otherData"]
    assert facts["skipped"] == [0] * len(ranks)
    assert facts["clock_uncertain_us"][0] == 0
    assert all(0 <= uncertain < 5e4 for uncertain in facts["clock_uncertain_us"])


def require_nesting(events):
    """In a thread an interval lies within another, or beside it."""
    by_thread = defaultdict(list)
    for event in events:
        by_thread[event["pid"], event["tid"]].append(ends(event))
    for own in by_thread.values():
        open_until = []
        for begin, end in sorted(own, key=lambda ends: (ends[0], -ends[1])):
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1]
            open_until.append(end)


def test_ranks_that_wait_for_each_other_are_seen_to_at_the_same_time(
    on_ranks, tmp_path, monkeypatch
):
    """On hosts whose clocks are far apart; nobody leaves a barrier before all are in it."""
    path, rounds = tmp_path / "trace.json", 5

    def now(comm):
        return time.perf_counter() + AHEAD_S * comm.rank

    monkeypatch.setattr(
        trace_file, "compare_clocks", lambda comm: compare_clocks(comm, lambda: now(comm))
    )

    def body(comm):
        with traced(path, comm):
            for number in range(rounds):
                time.sleep(0.002 * ((comm.rank + number) % 3))
                begin_s = now(comm)
                comm.barrier()
                comm.trace.record("wait", begin_s, now(comm))
        return contents(path, comm)

    file = on_ranks(body)[0]
    uncertain = 2 * max(file["otherData"]["clock_uncertain_us"]) * 1000 + 2
    waits = list(intervals(file, "wait").values())
    assert [len(own) for own in waits] == [rounds] * len(waits)
    for ranks in zip(*waits, strict=True):
        assert max(begin for begin, _ in ranks) <= min(end for _, end in ranks) + uncertain


def test_no_more_events_than_are_promised(on_ranks, tmp_path):
    path = tmp_path / "trace.json"

    def body(comm):
        with traced(path, comm) as trace:
            trace.most_events = 4
            for number in range(4 + comm.rank):
                trace.record(f"event {number}", time.perf_counter(), time.perf_counter())
        return contents(path, comm)

    results = on_ranks(body)
    ranks, file = range(len(results)), results[0]
    assert file["otherData"]["skipped"] == list(ranks)
    assert len([e for e in file["traceEvents"] if e["ph"] == "X"]) == 4 * len(ranks)


def test_an_unwritable_path_is_refused_on_all_ranks(comm, tmp_path):
    (tmp_path / "file").touch()
    refused = pytest.raises(SharedError, match=r"^trace=.* cannot be written: .*\(on rank 0\)")
    with refused, traced(tmp_path / "file" / "trace.json", comm):
        pytest.fail("it was not refused")
    assert comm.trace is NO_TRACE


def test_the_file_is_whole_or_not_there(on_ranks, tmp_path, monkeypatch):
    """Where writing fails at the end, all ranks say so, and what was there before stays."""
    path = tmp_path / "trace.json"
    path.write_text("before")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)

    def body(comm):
        with pytest.raises(SharedError, match="No space left on device"), traced(path, comm):
            pass
        assert os.listdir(tmp_path) == ["trace.json"]
        assert path.read_text() == "before"
        comm.barrier()
        both = pytest.raises(SharedError, match=r"diverged; trace=.*No space left")
        with both, traced(path, comm):
            raise SharedError("diverged")

    on_ranks(body)


@pytest.mark.parametrize(
    ("error", "after_errors", "written"),
    [
        (SharedError, True, True),
        (SharedError, False, False),
        (UserError, True, False),  # of a rank alone: others would be waited for
    ],
)
def test_after_an_error(on_ranks, tmp_path, error, after_errors, written):
    path = tmp_path / "trace.json"

    def body(comm):
        ended = pytest.raises(error, match=r"^diverged$")
        with ended, traced(path, comm, after_errors=after_errors), comm.trace.span("step"):
            raise error("diverged")
        assert comm.trace is NO_TRACE
        comm.barrier()
        assert written or not path.exists()
        return sorted(intervals(contents(path, comm), "step")) if written else []

    results = on_ranks(body)
    assert results[0] == (list(range(len(results))) if written else [])


@pytest.fixture
def printed(monkeypatch):
    """The lines of statistics, each with the time at which it was said, in s."""
    lines = []

    def say(line, flush):
        lines.append((line, time.perf_counter()))

    monkeypatch.setattr(step_timer, "print", say, raising=False)
    return lines


@options
class Meeting(Algorithm):
    """All ranks meet after every so many steps: they say that it was an exchange, or broadcast."""

    synchronizes_every_step = False
    period: int = option(1)
    says: bool = option(True)

    def init(self, work):
        return SimpleNamespace(steps=0, met_ms=[])

    def step(self, state, work, minibatch):
        state.steps += 1
        comm = work.comm
        if state.steps % self.period == 0 and self.says:
            with comm.trace.span("exchange"):
                comm.barrier()
                time.sleep(0.01)
        elif state.steps % self.period == 0:
            time.sleep(0.01 * (comm.rank > 0))  # for which the first rank waits
            begin_s = time.perf_counter()
            comm.broadcast(np.zeros(3), root=comm.size - 1)
            state.met_ms.append(1e3 * (time.perf_counter() - begin_s))


@pytest.mark.parametrize(("period", "every", "expected"), [(1, 4, 3), (2, 2, 2), (1, 0, 0)])
def test_a_line_after_every_so_many_synchronizations(on_ranks, printed, period, every, expected):
    """On the first rank alone; a step in which nobody meets belongs to the next meeting. The times
    of a line are parts of the time since the line before, of which none is counted twice."""

    def body(comm):
        trained = learner_of(comm, Meeting(period=period), every)
        assert (comm.trace is NO_TRACE) == (every == 0 or comm.rank > 0)
        take(trained, period - 1, pause_s=0.005)
        first_s = time.perf_counter()  # the first synchronization, of which no line is
        take(trained, 14 - period, pause_s=0.005)
        trained.finish()
        assert comm.trace is NO_TRACE
        comm.barrier()
        return [("", first_s), *printed]

    results = on_ranks(body)
    lines = list(pairwise(results[0]))
    assert len(lines) == expected
    for number, ((_, begin_s), (line, end_s)) in enumerate(lines):
        first = number * every + 2
        assert line.startswith(f"synchronizations {first} to {first + every - 1}: ")
        assert f"by {len(results)} ranks" in line
        words = re.sub("[,;]", "", line).split()
        compute, aggregation, update = (
            float(words[words.index(name) + 1]) for name in ("compute", "aggregation", "update")
        )
        assert compute >= 5 * period
        assert aggregation >= 10
        assert update >= 0
        told_ms = every * (compute + aggregation + update - 0.01)  # of which a part is rounding
        assert told_ms <= 1e3 * (end_s - begin_s)


@pytest.mark.parametrize("period", [1, 3])
def test_an_algorithm_of_ones_own_synchronizes_where_it_exchanges_arrays(on_ranks, printed, period):
    """It need not know of traces; what a program broadcasts between the steps is its own affair."""

    def body(comm):
        trained = learner_of(comm, Meeting(period=period, says=False), every=2)
        for _ in range(5 * period):
            comm.broadcast(np.zeros(3))
            take(trained, 1)
        trained.finish()
        comm.barrier()
        return [line for line, _ in printed], trained.state.met_ms

    results = on_ranks(body)
    lines, met_ms = results[0]
    assert [line.split(":")[0] for line in lines] == [
        "synchronizations 2 to 3",
        "synchronizations 4 to 5",
    ]
    if len(results) > 1:
        told = sum(2 * float(re.search(r"aggregation ([\d.]+)", line)[1]) for line in lines)
        assert told == pytest.approx(sum(met_ms[1:]), rel=0.3)


def test_exchanges_in_the_background_are_synchronizations(on_ranks, printed):
    """Over communicators that an algorithm has made for them."""

    def body(comm):
        trained = learner_of(comm, BlockMomentumSGD(sync_steps=2, overlap_samples=1), every=2)
        take(trained, 12)
        trained.finish()
        comm.barrier()
        return [line.split(":")[0] for line, _ in printed]

    lines = on_ranks(body)[0]
    assert lines == ["synchronizations 2 to 3", "synchronizations 4 to 5"]


def test_where_nothing_is_exchanged_the_end_says_so(capsys):
    trained = learner_of(Communicator.single(), Meeting(period=9), every=50)
    take(trained, 3)
    trained.finish()
    assert capsys.readouterr().out.startswith(
        "sync_perf_stats=50: the ranks exchanged no arrays in 3 steps; an algorithm marks"
    )


def test_blocks_that_end_before_the_first_is_full_have_exchanged(on_ranks, capsys):
    def body(comm):
        trained = learner_of(comm, ModelAveragingSGD(sync_steps=10), every=1)
        take(trained, 3)
        trained.finish()

    on_ranks(body)
    assert "exchanged no arrays" not in capsys.readouterr().out


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_of_workers_at_their_own_paces_each_speaks_for_itself(on_ranks, printed, mode):
    """What the others do is not known to it."""

    def body(comm):
        trained = learner_of(comm, DataParallelASGD(sync_steps=1, mode=mode), every=2)
        take(trained, 0 if trained.serves else 3)
        trained.finish()
        comm.barrier()
        return [line for line, _ in printed], trained.comm.size

    (lines, workers), *_ = on_ranks(body)
    (line,) = lines
    rates = rf"by {workers} ranks, [\d,]+ by rank 0"
    if mode == "async":
        rates = rf"by rank 0, one of {workers} ranks of asynchronous workers"
    assert re.match(rf"synchronizations 2 to 3: [\d,]+ samples/s {rates}; [\d.]+ ms each", line)


@pytest.mark.parametrize("gradient_bits", [1, 32])
def test_what_exchanges_tell(comm, gradient_bits):
    """By which synchronizations are counted: an exchange in every step that has samples."""
    trace = comm.trace = Trace()
    try:
        take(learner_of(comm, DataParallelSGD(gradient_bits=gradient_bits)), 8)
    finally:
        comm.trace = NO_TRACE
    assert [event.name for event in trace.events].count("step") == 8
    for step in (event for event in trace.events if event.name == "step"):
        assert any(
            step.begin_s <= event.begin_s and event.end_s <= step.end_s
            for event in trace.events
            if event.name == "exchange"
        )
