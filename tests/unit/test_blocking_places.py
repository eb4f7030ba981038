"""No wait without an end: every place in the package that may block, and what ends it there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
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

#: Places that have no limit of their own, and what ends them.
REASONS = {
    "command_line/cluster/namespaces.py: remove: while": "it has a deadline in its body",
    "command_line/cluster/namespaces.py: _run_quietly: run": "ip and tc talk to this kernel alone",
    "command_line/doctor/command.py: _run_ranks: run": "that job is given --timeout-s",
    "command_line/links.py: measure_links: run": "that job's ranks have a timeout_s",
    "launcher/job.py: _wait_until_ended: while": "the user's job, which --timeout-s, its ranks "
    "and the supervisor (reason_to_end) end",
    "launcher/supervisor.py: Supervisor._has_other_program: while": "_EXIT_TIMEOUT_S",
    "launcher/job.py: _end_mpiexec: wait": "it has been sent SIGKILL",
    "launcher/cleanup.py: locked_folder: flock": "LOCK_NB",
    "launcher/status_pipes.py: RankReports.__init__: flock": "LOCK_NB",
    "launcher/cleanup.py: _is_abandoned: flock": "LOCK_NB",
    "communication/background.py: InBackground.wait: wait": "for work of this rank, whose own "
    "waits are looked at here",
    "communication/background.py: _wait_for_all: while": "likewise",
    "communication/liveness/heartbeat.py: OwnHeartbeat.meet: Bcast": (
        "in mpi_world's watched(Communicator.world())"
    ),
    "communication/liveness/heartbeat.py: OwnHeartbeat.meet: Barrier": "likewise",
    "communication/liveness/finish.py: finish_protocol: Dup": "likewise",
    "communication/liveness/finish.py: FinishProtocol.leave: while": ("FinishWait ends it"),
    "communication/liveness/finish.py: _Finalizer.__del__: Finalize": "limit_finalize_time",
    "communication/liveness/finish.py: FinishProtocol.leave: Waitall": (
        "short messages, which need nobody"
    ),
    "communication/liveness/mail.py: received: Recv": "it is here, and short: it came whole",
    "communication/endpoint.py: Endpoint.until: while": "Conversation calls it in watched()",
    "communication/elastic/membership.py: Rendezvous.__init__: Dup": "in ulfm_world's watched()",
    "communication/elastic/membership.py: Rendezvous._members: Allgather": (
        "reconfigure calls it in _waits()"
    ),
    "communication/elastic/membership.py: Rendezvous._split: Split": (
        "its callers are in _watched() or _waits()"
    ),
    "communication/elastic/membership.py: Rendezvous._report_finished: Send": (
        "so short that it needs nobody"
    ),
    "communication/elastic/membership.py: Rendezvous._stand_by: while": (
        "for as long as others train; PeriodicEviction ends those that are stopped"
    ),
    "communication/elastic/membership.py: Rendezvous._stand_by: Recv": ("it is here, and short"),
    "communication/elastic/membership.py: _all_agree: Agree": ("reconfigure calls it in _waits()"),
    "communication/elastic/simulated.py: SimulatedRendezvous.communicator: wait_for": (
        "for threads whose own waits have timeout_s"
    ),
    "communication/elastic/simulated.py: simulate_recovery: join": "likewise",
    "communication/mpi/communicator.py: begin: Init_thread": (
        "in kill_if_longer_than, if it is launched"
    ),
    "communication/mpi/communicator.py: MpiCommunicator._send_pieces: Waitall": (
        "its callers are in _waits()"
    ),
    "communication/mpi/communicator.py: MpiCommunicator._on_all_ranks: Barrier": (
        "its callers are in _waits()"
    ),
    "communication/mpi/communicator.py: MpiCommunicator._host: synchronize": (
        "this rank's GPU: the others wait, and end the job"
    ),
    "communication/mpi/communicator.py: MpiCommunicator._return: synchronize": "likewise",
    "communication/mpi/staging.py: _wait_for: synchronize": "likewise",
    "torch/arrays.py: finish_on_stream: synchronize": "likewise",
    "torch/ddp/buckets.py: Job.wait: synchronize": "likewise",
    "communication/mpi/staging.py: Staged._release: while": "as long as copies are done",
    "communication/liveness/exit_notifier.py: ExitNotifier.stop: communicate": (
        "it has been sent SIGKILL"
    ),
    "communication/mpi/endpoint.py: MpiEndpoint.arrivals: while": "as long as messages are here",
    "communication/mpi/endpoint.py: MpiEndpoint.close: Wait": "of a receive that was cancelled: "
    "local",
    "communication/mpi/endpoint.py: MpiTransfer.done: while": "as long as parts of it are done",
    "communication/mpi/messages.py: MpiMessages.progress: while": "as long as the GPU is ready",
    "communication/threads/communicator.py: simulate: join": (
        "threads whose own waits have timeout_s"
    ),
    "communication/liveness/watchdog.py: Wait.__exit__: while": (
        "a timer ends the process within seconds"
    ),
    "communication/liveness/watchdog.py: _watch: while": "the watchdog itself",
    "exchange/collective.py: _wait_until: while": "for this rank's own backward",
    "exchange/pipeline.py: Pipelined.sum: while": "likewise; for others it is in watched()",
    "exchange/nccl.py: WithNccl.sum: while": "likewise",
    "parameter_server/server.py: Server._serve: while": "_check_workers, in every round",
    "parameter_server/server.py: Server._serve: wait": "for this rank's writing of a file",
    "parameter_server/server.py: Server.abandon: wait": "likewise",
    "parameter_server/remote_table.py: write_tables: while": "servers answer, each in watched(); "
    "those that wait for the checkpoint do so in watched(), too",
    "torch/ddp/state.py: HookState._begin: while": (
        "for the thread in the background, whose waits are watched, or which has ended"
    ),
    "torch/ddp/state.py: HookState._sum_in_turn: get": (
        "for this rank's own backward; stop() ends it"
    ),
    "torch/ddp/state.py: HookState._vector: wait": "see Job.wait",
    "torch/process_group.py: _listening: join": "a thread that the line before ends",
    "torch/process_group.py: _answer: accept": "shutdown ends it",
    "torch/process_group.py: _probe: recv": "the connection has a timeout",
    "training/learner.py: Learner.finish: wait": "see InBackground.wait",
    "training/learner_setup.py: LearnerSetup.abandon: wait": "likewise",
    "training/checkpoint/folder_lock.py: FolderLock._acquire: while": "has a deadline in its body",
    "training/checkpoint/folder_lock.py: _is_locked: lockf": "LOCK_NB",
}


def places(tree: ast.Module, *, mpi: bool) -> Iterator[tuple[str, ast.AST]]:
    """What may block in a module and nothing in sight ends, with the name of its function."""

    def walk(node: ast.AST, function: str, ended: bool) -> Iterator[tuple[str, ast.AST]]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            function, ended = f"{function}.{node.name}".lstrip("."), False
        if isinstance(node, ast.With):
            ended = ended or any(names(item.context_expr) & WATCHED for item in node.items)
        if isinstance(node, ast.While) and not ended:
            ended = bool(names(node.test) & CLOCKS)
            if not ended and names(node) & NOT_YET:
                yield function, node
        if isinstance(node, ast.Call) and not ended and blocks(node, mpi=mpi) and not limited(node):
            yield function, node
        for child in ast.iter_child_nodes(node):
            yield from walk(child, function, ended)

    return walk(tree, "", False)


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


def found() -> dict[str, str]:
    here = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE)
        if module.parts[0] == "kernels":
            continue
        mpi = module.parts[0] == "communication"
        for function, node in places(ast.parse(path.read_text()), mpi=mpi):
            what = word(node.func) if isinstance(node, ast.Call) else "while"
            here[f"{module}: {function}: {what}"] = f"{path}:{node.lineno}"  # type: ignore[attr-defined]
    return here


def test_every_wait_has_an_end() -> None:
    here = found()
    new = {place: at for place, at in here.items() if place not in REASONS}
    gone = REASONS.keys() - here.keys()
    assert not new, "watch it, give it a limit, or say why it ends:\n" + "\n".join(
        f"{place}  ({at})" for place, at in new.items()
    )
    assert not gone


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
