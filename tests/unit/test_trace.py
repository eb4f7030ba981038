"""What one rank keeps of where its time goes, and the line on synchronizations made of it."""

from __future__ import annotations

import threading
import time

import pytest

from parallel_sgd import Communicator, UserError
from parallel_sgd.communication import ClockReading, rank_0_time, simulate_recovery
from parallel_sgd.trace import NO_TRACE, Trace
from parallel_sgd.training import traced
from parallel_sgd.training.sync_stats import SyncPerformance


def test_spans_are_kept_as_they_end_also_after_an_error():
    trace, before = Trace(), time.perf_counter()
    with pytest.raises(ZeroDivisionError), trace.span("outer"), trace.span("inner"):
        raise ZeroDivisionError
    inner, outer = trace.events
    assert (inner.name, outer.name) == ("inner", "outer")
    times = [before, outer.begin_s, inner.begin_s, inner.end_s, outer.end_s, time.perf_counter()]
    assert times == sorted(times)


def test_events_know_their_thread():
    trace = Trace()
    thread = threading.Thread(target=lambda: trace.record("wire", 1.0, 2.0, bytes=3), name="aside")
    thread.start()
    thread.join()
    with trace.span("compute"):
        pass
    assert [event.thread for event in trace.events] == ["aside", "main"]
    assert trace.events[0][:3] + trace.events[0][4:] == ("wire", 1.0, 2.0, {"bytes": 3})


def test_memory_is_bounded():
    trace = Trace(most_events=3)
    for number in range(5):
        trace.record(str(number), 0.0, 1.0)
    assert ([event.name for event in trace.events], trace.skipped) == (["0", "1", "2"], 2)


def test_by_default_nothing_is_kept_and_next_to_no_time_taken():
    comm = Communicator.single()
    assert comm.trace is NO_TRACE
    comm.trace.record("wire", 0.0, 1.0)
    fastest = min(time_of_spans(1000) for _ in range(20))
    assert NO_TRACE.events == []
    assert fastest < 1000 * 1e-6


def time_of_spans(count: int) -> float:
    trace, begin = Communicator.single().trace, time.perf_counter()
    for _ in range(count):
        with trace.span("encode"):
            pass
    return time.perf_counter() - begin


def test_clocks_drift_evenly_between_two_comparisons():
    begin, end = ClockReading(100.0, 10.0, 0.0), ClockReading(200.0, 12.0, 0.0)
    times = [rank_0_time(time_s, begin, end) for time_s in (100.0, 150.0, 200.0)]
    assert times == pytest.approx([90.0, 139.0, 188.0])


@pytest.mark.parametrize("path", ["", 7, None])
def test_what_is_no_path(path):
    with pytest.raises(UserError, match=f"^trace={path!r} must be the path of a file"):
        traced(path, Communicator.single()).__enter__()


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_traced(tmp_path):
    comm = Communicator.single()
    (tmp_path / "file").touch()
    too_long = "x" * 252  # for the name that it is written under
    for path in (tmp_path, tmp_path / "file" / "trace.json", tmp_path / too_long):
        with pytest.raises(UserError, match=r"^trace="), traced(path, comm):
            pytest.fail("it was not refused")
    assert comm.trace is NO_TRACE
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_ranks_that_may_fail_are_not_waited_for(tmp_path):
    def body(comm):
        with traced(tmp_path / "trace.json", comm):
            pytest.fail("it was not refused")

    message = "needs all ranks until the end, and must not be given with --survive"
    with pytest.raises(UserError, match=message):
        simulate_recovery(2, body, timeout_s=30)


def step_of(stats: SyncPerformance, begin_s: float, parts: list[tuple[str, float, float]]) -> None:
    """Two seconds of computing, and a step of ten."""
    stats.record("compute", begin_s - 2, begin_s)
    for name, first_s, last_s in parts:
        stats.record(name, begin_s + first_s, begin_s + last_s)
    stats.record("step", begin_s, begin_s + 10)


def test_the_means_of_synchronizations():
    inner = Trace()
    stats = SyncPerformance(2, inner, rank=0, ranks=3)
    stats.record("step", 0.0, 100.0)
    assert not stats.stepped(1000, 1000, lambda: 0)
    stats.record("exchange", 100.0, 105.0)
    stats.record("step", 100.0, 105.0)  # the first synchronization, which does not count
    assert not stats.stepped(1000, 1000, lambda: 5_000_000)
    parts = [("wait", 0, 1), ("wire", 2, 3), ("wait", 3, 4), ("exchange", 2, 6)]
    step_of(stats, 110, [])
    assert not stats.stepped(10, 30, lambda: 0)
    step_of(stats, 130, parts)
    assert not stats.stepped(10, 30, lambda: 0)
    step_of(stats, 150, parts)
    assert stats.stepped(16, 48, lambda: 41_000_000) == (
        "synchronizations 2 to 3: 3 samples/s by 3 ranks, 1 by rank 0; 18000.000 ms each: "
        "compute 3000.000, aggregation 5000.000, update 10000.000; 1.00 MB/s sent by rank 0"
    )
    assert len(inner.events) == 3 + 2 + 2 * 6
    step_of(stats, 170, parts)
    assert not stats.stepped(10, 20, lambda: 0)
    step_of(stats, 190, parts)
    line = stats.stepped(10, 20, lambda: 41_000_000)
    assert line.startswith("synchronizations 4 to 5: 2 samples/s")


def test_an_exchange_in_the_background_counts_only_while_it_is_waited_for():
    stats = SyncPerformance(1, NO_TRACE, rank=0, ranks=1)
    stats.record("exchange", 0.0, 1.0)
    assert not stats.stepped(1, 1, lambda: 0)
    step_of(stats, 10, [])
    thread = threading.Thread(target=lambda: stats.record("exchange", 0.0, 15.0))
    thread.start()
    thread.join()
    stats.record("wait", 14.0, 15.0)
    line = stats.stepped(1, 1, lambda: 0)
    assert "compute 2000.000, aggregation 1000.000, update 9000.000" in line
