"""Runs tests on ranks: those of mpiexec, those of torchrun, or threads of this process.

    def test_something(comm): ...     # what every rank does, with its assertions

    def test_something(on_ranks):
        def body(comm): ...
        results = on_ranks(body)      # what `body` returned, in rank order

Under ``mpiexec -n N python -m pytest --with-mpi`` that is once, on N ranks of MPI; a failure on any
of them fails the test on all, and rank 0 alone reports. The same under
``torchrun --nproc-per-node N -m pytest --with-torch``, on N ranks without MPI. Without either it is
on 1, 3 and 4 threads: what two ranks do differently, `make test` sees on MPI.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from launched import own_rank, ranks_started

from parallel_sgd import Communicator, simulate

TIMEOUT_S = 100.0  # longest wait for the other ranks: shorter than a test may take
THREADS = (1, 3, 4)

WORLDS = pytest.StashKey[tuple[Communicator, Communicator]]()
REPORTED = ("reported by rank 0", True)

Body = Callable[[Communicator], Any]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--with-torch", action="store_true", help="run on the ranks of torchrun")


def launcher_of(config: pytest.Config) -> str | None:
    """What has started the ranks that the tests run on; None: they are threads."""
    if config.getoption("with_mpi", False):
        return "mpi"
    return "torch" if config.getoption("with_torch") else None


def world() -> Communicator:
    if ranks_started() != 1 or "RANK" not in os.environ:
        return Communicator.world(timeout_s=TIMEOUT_S)
    from torch import distributed

    distributed.is_initialized() or distributed.init_process_group("gloo")
    return Communicator.of_process_group(timeout_s=TIMEOUT_S)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name in {"comm", "on_ranks"} & set(metafunc.fixturenames):
        launcher = launcher_of(metafunc.config)
        marked = metafunc.definition.get_closest_marker("threads")
        threads = marked.args if marked else THREADS
        sizes = [None] if launcher else threads
        ids = [launcher] if launcher else [f"{size}-threads" for size in threads]
        metafunc.parametrize(name, sizes, indirect=True, ids=ids)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that asks for `comm` is what every rank does."""
    if "comm" not in pyfuncitem.fixturenames:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    arguments.pop("comm")(lambda comm: pyfuncitem.obj(comm=comm, **arguments))
    return True


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Under a launcher there are no mutations: a patch must reach all ranks, as it does on threads.
    And without it there is nothing that takes a process for each rank."""
    left_out = "mutations.py" if launcher_of(config) else "processes.py"
    return True if collection_path.name.endswith(left_out) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Nor what is not about ranks: it would be the same on each of them, and without a launcher."""
    if launcher_of(config) is None:
        return
    ranks = {"comm", "on_ranks"}
    skipped = [item for item in items if ranks.isdisjoint(getattr(item, "fixturenames", ()))]
    for item in items:
        marked = item.get_closest_marker("ranks")
        if marked and ranks_started() not in marked.args:
            skipped.append(item)
    config.hook.pytest_deselected(items=skipped)
    items[:] = [item for item in items if item not in skipped]


@pytest.fixture
def on_ranks(request: pytest.FixtureRequest) -> Callable[[Body], list[Any]]:
    """Runs a body on all ranks and returns what it returned on each."""
    launched = ranks_started()
    if request.param is None:
        if launched is None:
            pytest.fail("--with-mpi needs mpiexec, --with-torch torchrun", pytrace=False)
        comm, _ = request.config.stash[WORLDS]
        assert comm.size == launched
        return OnRanks(request)
    if launched is not None:
        pytest.fail(f"{launched} ranks were launched: add --with-mpi or -torch", pytrace=False)
    return partial(on_threads, request.param)


comm = on_ranks


@pytest.fixture
def mpi_counts_to(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how many values, or bytes, an MPI takes in one call: some count only to 2^31."""

    def give(most: int) -> None:
        if "mpi4py" not in sys.modules:
            return
        from parallel_sgd.communication.mpi import communicator, endpoint, messages

        for owner, name in (
            (communicator.MpiCommunicator, "most_values"),
            (messages.MpiMessages, "most_values"),
            (endpoint, "PIECE"),
        ):
            monkeypatch.setattr(owner, name, most)

    return give


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """PyTorch's own, over the launched ranks."""
    from torch.distributed import destroy_process_group

    from parallel_sgd.torch import init_process_group

    with Communicator.world() as comm:
        init_process_group(comm)
        yield
        destroy_process_group()


def on_threads(size: int, body: Body) -> list[Any]:
    def sized(comm: Communicator) -> Any:
        assert comm.size == size
        return body(comm)

    results = simulate(size, sized, timeout_s=TIMEOUT_S)
    assert len(results) == size
    return results


class OnRanks:
    """Runs a body on the launched ranks, and tells all of them how it ended on each."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self.request = request
        self.comm, self.control = request.config.stash[WORLDS]

    def __call__(self, body: Body) -> list[Any]:
        capture = self.request.config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():  # what a rank says as it ends the job is seen
            result, text = self._run(body)
            # Should the others hang, because this rank left them, its error is seen all the same.
            alarm = threading.Timer(3.0, say, (self.request.node.nodeid, text))
            if text:
                alarm.start()
            ends = self.control.allgather_object((text, result))
            alarm.cancel()
        failures = [f"on rank {k}:\n{text}" for k, (text, _) in enumerate(ends) if text]
        if failures:
            self.request.node.user_properties.append(REPORTED)
            pytest.fail("\n".join(failures), pytrace=False)
        assert len(ends) == ranks_started() == self.comm.size
        return [result for _, result in ends]

    def _run(self, body: Body) -> tuple[Any, str]:
        """What the body returned, and its error in words."""
        try:
            return body(self.comm), ""
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # pytest's own outcomes are no Exceptions
            return None, str(pytest.ExceptionInfo.from_exception(error).getrepr(style="short"))


def say(where: str, text: str) -> None:
    lines = [f"[rank {own_rank()}] {line}\n" for line in (where, *text.splitlines())]
    print("".join(lines), file=sys.__stderr__, flush=True, end="")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Only rank 0 prints pytest's report; the others speak where it would miss something."""
    config.addinivalue_line(
        "markers",
        "few_ranks: a long one, on Open MPI with three ranks, on MPICH with two, or on one of them "
        "alone where its ranks are marked; `make test` has four on threads alone",
    )
    config.addinivalue_line(
        "markers",
        "messages: about what ranks send each other, so also on MPICH with one rank, on Open MPI "
        "with four, and without MPI on one and three; `make test` runs algorithms there in "
        "test_golden alone, on three ranks, and all of them on MPICH with two",
    )
    config.addinivalue_line(
        "markers",
        "threads(size, ...): a long one, on worlds of just so many threads; MPI has all sizes",
    )
    config.addinivalue_line(
        "markers", "ranks(size, ...): a long one, on worlds of just so many launched ranks"
    )
    if launcher_of(config) is None:
        return
    # Ranks that clean up one folder of old `tmp_path`s at the same time stumble over each other.
    root = Path(tempfile.gettempdir(), f"pytest-rank-{own_rank()}")
    root.mkdir(exist_ok=True)
    os.environ["PYTEST_DEBUG_TEMPROOT"] = str(root)
    if not own_rank():
        return
    manager = config.pluginmanager
    manager.unregister(name="terminalreporter")
    silent = pytest.TerminalReporter(config, open(os.devnull, "w"))  # noqa: SIM115
    manager.register(silent, "terminalreporter")
    manager.register(Others())


class Others:
    """Hooks of the ranks whose report nobody sees."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and REPORTED not in map(tuple, report.user_properties):
            say(f"{report.nodeid} ({report.when})", report.longreprtext)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            say(f"collecting {report.nodeid}", report.longreprtext)

    def pytest_internalerror(self, excrepr: Any) -> None:
        say("pytest", str(excrepr))


def pytest_collection_finish(session: pytest.Session) -> None:
    """All ranks run the same tests, or none: a rank that misses one would be waited for."""
    if launcher_of(session.config) is None or ranks_started() is None:
        return
    comm, control = world(), world()
    session.config.stash[WORLDS] = comm, control  # the second, for what tests say to each other
    collected = session.testsfailed, [item.nodeid for item in session.items]
    if any(theirs != collected for theirs in control.allgather_object(collected)):
        pytest.exit("the ranks have not collected the same tests", returncode=1)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """All ranks end together, with the worst exit code of any, whatever other plugins do."""
    problem = None
    try:
        yield
    except Exception as error:
        problem = error
        say("the end of the session", "".join(traceback.format_exception(error)))
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
    if WORLDS in session.config.stash:
        _, control = session.config.stash[WORLDS]
        session.exitstatus = max(control.allgather_object(int(session.exitstatus)))
    if problem:
        raise problem


def pytest_unconfigure(config: pytest.Config) -> None:
    """No rank leaves before rank 0 has written its report: it could end the job."""
    if WORLDS in config.stash:
        config.stash[WORLDS][1].barrier()
