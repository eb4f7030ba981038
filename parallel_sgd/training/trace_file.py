"""The trace of all ranks in one file, for Perfetto (https://ui.perfetto.dev) and Chrome."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ..communication import Communicator
from ..communication.clocks import ClockReading, compare_clocks, rank_0_time
from ..errors import SharedError, UserError
from ..files import require_writable, write_whole, writing
from ..trace import Trace
from ..validation import BOTH, checked_path, choice, instance
from ..version import __version__


@contextmanager
def traced(
    path: str | os.PathLike[str], comm: Communicator, *, after_errors: bool = True
) -> Iterator[Trace]:
    """Trace these ranks' work in a `with` block; at the end rank 0 writes one file for all ranks.

    The file is JSON in Chrome's trace event format: a process for each rank and a row for each
    thread, with rank 0's clock, in µs since the start of the block. Its ``otherData`` give for each
    rank the uncertainty and drift of the clock, and the number of intervals beyond the limit
    (`Trace.most_events` are kept). The file is written whole or not at all, and replaces an
    existing file.

    Args:
        path: of the file, on rank 0's machine; its folder is made.
        comm: make the learner with this communicator inside the block: duplicates and parts made
            before are not traced.
        after_errors: write the file also after an error that all ranks share. Not for runs with
            ranks that only serve: the file would wait for these. After any other error no file is
            written.
    Raises:
        UserError: on all ranks, before the block: the file cannot be written, or ranks may fail and
            be replaced (`--survive`), so that the file would wait for a failed rank; after the
            block: writing has failed.

    Collective. Cost: two comparisons of clocks; at the end a transfer of about 100 bytes an
    interval to rank 0, rank by rank; for the block itself, see `Trace`.
    """
    instance("comm", comm, Communicator, "Communicator.world()")
    choice("after_errors", after_errors, BOTH)
    file = comm.together(lambda: _writable(path, comm))
    begin = compare_clocks(comm)
    trace, before = Trace(), comm.trace
    comm.trace = trace
    try:
        yield trace
    except SharedError as error:
        if after_errors:
            try:
                _write(file, comm, trace, begin)
            except UserError as other:
                raise SharedError(f"{error}; {other}") from error
        raise
    else:
        _write(file, comm, trace, begin)
    finally:
        comm.trace = before


def _writable(path: str | os.PathLike[str], comm: Communicator) -> Path:
    """Return the path, after the first rank has tried to create the file."""
    file = checked_path("trace", path, "file")
    comm.require_fixed_ranks(
        f"trace={str(file)!r} needs all ranks until the end, and must not be given with --survive"
    )
    if comm.rank == 0:
        with writing("trace", file):
            if file.exists() and not file.is_file():  # never replace a folder or a device
                raise UserError(
                    f"trace={str(file)!r} must be a new file, or an existing file to replace"
                )
            file.parent.mkdir(parents=True, exist_ok=True)
        require_writable("trace", file)
    return file


def _write(file: Path, comm: Communicator, trace: Trace, begin: ClockReading) -> None:
    """Gather the events of all ranks on rank 0, and write the file there. Collective.

    Raises:
        SharedError: on all ranks, if writing fails.
    """
    end = compare_clocks(comm)
    origin = np.array([begin.at_s])  # rank 0's begin is 0
    comm.broadcast(origin)
    events = _events(trace, comm, begin, end, float(origin[0]))
    facts = {
        "clock_uncertain_us": round(1e6 * max(begin.uncertain_s, end.uncertain_s), 3),
        "clock_drift_us": round(1e6 * (end.ahead_s - begin.ahead_s), 3),
        "skipped": trace.skipped,
    }
    everywhere = comm.allgather_object(facts)
    head: dict[str, Any] = {"parallel_sgd": __version__, "ranks": comm.size}
    head |= {name: [theirs[name] for theirs in everywhere] for name in facts}
    problem = None
    pieces = _gathered(",\n".join(map(_json, events)).encode(), comm)
    if comm.rank:
        for _ in pieces:
            pass
    else:
        problem = _write_pieces(file, head, pieces)
    comm.raise_together(problem)
    skipped = sum(head["skipped"])
    if skipped and comm.rank == 0:
        print(
            f"parallel_sgd: trace {str(file)!r} holds the first {trace.most_events:,} intervals of "
            f"each rank; {skipped:,} more are skipped",
            file=sys.stderr,
            flush=True,
        )


def _write_pieces(file: Path, head: dict[str, Any], pieces: Iterator[bytes]) -> str | None:
    """Write the file. Return a failure in one line, or None. Consume all pieces in either case."""

    def write(path: Path) -> None:
        with path.open("wb") as out:
            out.write(f'{{"otherData": {_json(head)},\n"traceEvents": [\n'.encode())
            for number, piece in enumerate(pieces):
                out.write((b",\n" if number else b"") + piece)
            out.write(b"\n]}\n")

    try:
        write_whole("trace", file, write)
    except UserError as error:
        for _ in pieces:  # the other ranks send all pieces
            pass
        return str(error)
    return None


def _events(
    trace: Trace, comm: Communicator, begin: ClockReading, end: ClockReading, origin_s: float
) -> Iterator[dict[str, Any]]:
    """Yield this rank's part of the file: the names of its rows, and its intervals, in the file's
    time."""
    rank = comm.rank
    rows: dict[str, int] = {"main": 0}
    for event in trace.events:
        rows.setdefault(event.thread, len(rows))
    yield _name("process_name", rank, 0, name=f"rank {rank} ({comm.host})")
    yield _name("process_sort_index", rank, 0, sort_index=rank)
    for name, row in rows.items():
        yield _name("thread_name", rank, row, name=name)
        yield _name("thread_sort_index", rank, row, sort_index=row)

    def nanoseconds(time_s: float) -> int:
        return round(1e9 * (rank_0_time(time_s, begin, end) - origin_s))

    for event in trace.events:
        first, last = nanoseconds(event.begin_s), nanoseconds(event.end_s)
        interval = {
            "name": event.name,
            "ph": "X",
            "ts": first / 1000,
            "dur": (last - first) / 1000,
            "pid": rank,
            "tid": rows[event.thread],
        }
        yield interval | ({"args": event.facts} if event.facts else {})


def _name(kind: str, rank: int, row: int, **what: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": row, "args": what}


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), default=str)  # facts may be NumPy's numbers


def _gathered(own: bytes, comm: Communicator) -> Iterator[bytes]:
    """Yield every rank's bytes on rank 0, rank by rank; empty bytes on all others.

    Collective, as far as the iteration goes.
    """
    sizes, nothing = comm.allgather_object(len(own)), [0] * comm.size
    for rank, size in enumerate(sizes):
        send = np.frombuffer(own if rank == comm.rank else b"", np.uint8)
        receive = np.empty(0 if comm.rank else size, np.uint8)
        counts = nothing.copy()
        counts[rank] = receive.size
        comm.alltoall(send, [send.size, *nothing[1:]], receive, counts)
        yield receive.tobytes()
