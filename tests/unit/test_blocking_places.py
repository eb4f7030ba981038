"""No wait without an end: every place in the package that may block, and what ends it there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import parallel_sgd

PACKAGE = Path(parallel_sgd.__file__).parent

#: What blocks until other ranks do something, by the names of MPI's calls.
OF_MPI = {
    *("Wait", "Waitall", "Waitany", "Waitsome", "Recv", "Send", "Ssend", "Sendrecv", "Probe"),
    *("Barrier", "Bcast", "Reduce", "Allreduce", "Gather", "Gatherv", "Allgather", "Allgatherv"),
    *("Scatter", "Scatterv", "Alltoall", "Alltoallv", "Alltoallw", "Reduce_scatter", "Scan"),
    *("Reduce_scatter_block", "Dup", "Split", "Split_type", "Create", "Create_group", "Spawn"),
    *("Disconnect", "Init", "Init_thread", "Finalize", "Shrink", "Agree"),
}
#: The same of pickled objects, on mpi4py's own communicators.
OF_OBJECTS = {"bcast", "gather", "allgather", "scatter", "alltoall", "barrier", "recv", "sendrecv"}
MPI_COMMS = {"comm", "_comm", "world", "COMM_WORLD", "COMM_SELF", "near"}
#: What blocks until threads, processes, files, sockets or the GPU do something.
OF_OTHERS = {
    *("wait", "wait_for", "join", "result", "acquire", "select", "poll", "communicate", "accept"),
    *("synchronize", "flock", "lockf", "waitpid", "recv", "create_connection", "urlopen"),
    *("all_gather", "rendezvous"),
}
PROCESSES = {"run", "call", "check_call", "check_output"}
QUEUES = {"jobs", "_jobs", "queue"}

#: In a loop these mean: not yet.
NOT_YET = {
    "sleep",
    "pause",
    "idle",
    "sched_yield",
    "Test",
    "Testsome",
    "Testany",
    "iprobe",
    "Iprobe",
}
NOT_YET |= {"progress", "done", "is_done", "wait"}

#: A `with` of one of these ends what is in it.
WATCHED = {"watched", "_watched", "_waits", "_waiting", "kill_if_longer_than"}

#: A clock in a loop's test ends it.
CLOCKS = {"monotonic", "perf_counter"}

#: `x.wait()`, `x.result()`, `x.join()` of these are this package's own, whose places are here too.
OURS = {
    *("learner", "state", "self", "component", "checkpoints", "exchange", "_saver", "_tables"),
    *("background", "_background", "one", "work", "task", "writing", "_writing", "sending"),
    *("_thread", "flushing", "coming", "comm", "_world"),
}

#: A comment that says why a call without a limit of its own ends, above its statement.
BOUNDED = re.compile(r"\s*# bounded: \S+")
COMMENT = re.compile(r"\s*#")


def places(tree: ast.Module, *, mpi: bool) -> Iterator[tuple[str, ast.AST, ast.stmt]]:
    """Yield what may block in a module and nothing in sight ends: the name of its function, the
    call or loop, and its statement."""

    def walk(
        node: ast.AST, function: str, ended: bool, statement: ast.stmt | None
    ) -> Iterator[tuple[str, ast.AST, ast.stmt]]:
        statement = node if isinstance(node, ast.stmt) else statement
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            function, ended = f"{function}.{node.name}".lstrip("."), False
        if isinstance(node, ast.With):
            ended = ended or any(names(item.context_expr) & WATCHED for item in node.items)
        if isinstance(node, ast.While) and not ended:
            ended = bool(names(node.test) & CLOCKS)
            if not ended and names(node) & NOT_YET:
                yield function, node, node
        if isinstance(node, ast.Call) and not ended and blocks(node, mpi=mpi) and not limited(node):
            assert statement is not None
            yield function, node, statement
        for child in ast.iter_child_nodes(node):
            yield from walk(child, function, ended, statement)

    return walk(tree, "", False, None)


def names(node: ast.AST) -> set[str]:
    """What a piece of code calls, by the last word."""
    calls = [one.func for one in ast.walk(node) if isinstance(one, ast.Call)]
    return {word(call) for call in calls}


def word(node: ast.AST) -> str:
    """`c` of ``a.b.c``, ``a[0].c()``, ``c``."""
    if isinstance(node, ast.Subscript):
        return word(node.value)
    if isinstance(node, ast.Call):
        return word(node.func)
    return getattr(node, "attr", getattr(node, "id", ""))


def blocks(call: ast.Call, *, mpi: bool) -> bool:
    """Whether it may. `mpi`: whether communicators may be mpi4py's; ours are looked at here."""
    name = word(call.func)
    if not isinstance(call.func, ast.Attribute):
        return name in {"create_connection", "urlopen", "input"}
    receiver = word(call.func.value)
    if isinstance(call.func.value, ast.Constant):  # ", ".join
        return False
    if name == "join" and receiver in {"path", "shlex", "pathsep"}:
        return False
    if name in PROCESSES:
        return receiver == "subprocess"
    if name == "get":
        return receiver in QUEUES
    if name in {"wait", "result", "join"} and receiver in OURS:
        return False
    if name == "poll" and receiver in {"select", "job"}:  # which makes one; which is a process
        return False
    objects = mpi and name in OF_OBJECTS and receiver in MPI_COMMS
    return objects or name in OF_MPI or name in OF_OTHERS


def limited(call: ast.Call) -> bool:
    """Whether it is told when to give up."""
    if any(keyword.arg in {"timeout", "timeout_s"} for keyword in call.keywords):
        return True
    place = {"wait": 1, "join": 1, "poll": 1, "result": 1, "wait_for": 2, "select": 4}
    return len(call.args) >= place.get(word(call.func), 99)


def comment_above(lines: Sequence[str], statement: ast.stmt) -> int | None:
    """Return the line, from 0, of the comment that says why a statement ends, or None."""
    line = statement.lineno - 2
    while line >= 0 and COMMENT.match(lines[line]):
        if BOUNDED.match(lines[line]):
            return line
        line -= 1
    return None


def looked_at(source: str, *, mpi: bool) -> tuple[list[str], list[int]]:
    """Return places that may block without an end, and lines of comments about no such place."""
    lines, unbounded = source.splitlines(), []
    unused = {number for number, line in enumerate(lines) if BOUNDED.match(line)}
    for function, node, statement in places(ast.parse(source), mpi=mpi):
        comment = comment_above(lines, statement)
        unused.discard(-1 if comment is None else comment)
        if comment is None:
            what = word(node.func) if isinstance(node, ast.Call) else "while"
            unbounded.append(f"line {statement.lineno}: {function}: {what}")
    return unbounded, sorted(number + 1 for number in unused)


MODULES = sorted(
    str(path.relative_to(PACKAGE))
    for path in PACKAGE.rglob("*.py")
    if path.relative_to(PACKAGE).parts[0] != "kernels"
)


@pytest.mark.parametrize("module", MODULES)
def test_every_wait_has_an_end(module: str) -> None:
    unbounded, unused = looked_at(
        (PACKAGE / module).read_text(), mpi=module.startswith("communication/")
    )
    assert not unbounded, "watch it, give it a limit, or say why it ends (# bounded: why)"
    assert not unused


def test_a_reason_stands_above_its_wait() -> None:
    wait = "def f():\n    # bounded: the thread has ended\n    x = [1, self.jobs.get()]\n"
    assert looked_at(wait, mpi=False) == ([], [])
    assert looked_at(wait.replace("    # b", "    pass\n    # not b"), mpi=False)[0]
    assert looked_at("# bounded: why\nx = 1\n", mpi=False) == ([], [1])


@pytest.mark.parametrize(
    ("line", "may_block"),
    [
        ("comm.Barrier()", True),
        ("with watched('x'): comm.Barrier()", False),
        ("world.bcast(1)", True),
        ("thread.join()", True),
        ("thread.join(3)", False),
        ("event.wait(timeout=3)", False),
        ("subprocess.run(['ip'])", True),
        ("while not done: time.sleep(1)", True),
        ("while time.monotonic() < until: time.sleep(1)", False),
        ("', '.join(names)", False),
    ],
)
def test_what_counts(line: str, may_block: bool) -> None:
    assert bool([*places(ast.parse(f"def f():\n    {line}"), mpi=True)]) == may_block
