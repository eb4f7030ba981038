"""What a launcher's environment says, and how an error on a rank is told."""

import contextlib
import io
import os
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from parallel_sgd.communication import (
    PIECE_BYTES,
    Communicator,
    abort_on_error,
    default_timeout,
    install_excepthook_if_launched,
    launched_rank,
    launched_size,
    without_launcher,
)
from parallel_sgd.communication import job_environment as launched
from parallel_sgd.communication.liveness import abort, rank_process
from parallel_sgd.communication.liveness import heartbeat as board
from parallel_sgd.communication.liveness.abort import install_excepthook
from parallel_sgd.communication.world_size import require_whole, world_mismatch
from parallel_sgd.errors import UserError

OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    "PMIX_RANK": "2",
}
MPICH = {"PMI_SIZE": "4", "PMI_RANK": "2", "MPI_LOCALNRANKS": "3", "PMI_FD": "9"}
MVAPICH = {"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "1"}
ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
SRUN = ALLOCATION | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"}


@pytest.mark.parametrize(
    ("environ", "told"),  # size, rank, local size and name
    [
        ({}, [None, None, None, None]),
        (OPEN_MPI, [4, 2, 3, "Open MPI's mpiexec"]),
        (MPICH, [4, 2, 3, "MPICH's mpiexec"]),
        (MVAPICH, [2, 1, None, "MVAPICH's mpiexec"]),
        (SRUN, [4, 2, None, "srun"]),
        (SRUN | {"PMI_SIZE": "4", "PMI_RANK": "2"}, [4, 2, None, "srun"]),
        # salloc, sbatch, and Slurm's own steps: an allocation, but no ranks yet
        (ALLOCATION, [None, None, None, None]),
        (ALLOCATION | {"SLURM_STEP_ID": "4294967290"}, [None, None, None, None]),
        # mpiexec under Slurm starts its daemons through srun
        (ALLOCATION | {"SLURM_STEP_ID": "1"} | OPEN_MPI, [4, 2, 3, "Open MPI's mpiexec"]),
        (ALLOCATION | {"SLURM_STEP_ID": "1"} | MPICH, [4, 2, 3, "MPICH's mpiexec"]),
        ({"PMIX_RANK": "1"}, [None, 1, None, "a PMIx launcher"]),
        ({"PMIX_RANK": "1", "PARALLEL_SGD_RANKS": "2"}, [2, 1, None, "parallel-sgd run"]),
        ({"PMI_SIZE": "", "OMPI_COMM_WORLD_SIZE": "four"}, [None, None, None, None]),
    ],
)
def test_what_the_launcher_says(environ: dict[str, str], told: list[int | str | None]) -> None:
    ask = (launched_size, launched_rank, launched.launched_local_size, launched.launcher_name)
    assert [question(environ) for question in ask] == told


def test_without_launcher() -> None:
    own = {"PATH": "/bin", "MPI4PY_LIBMPI": "x", "OMP_NUM_THREADS": "1"}
    assert without_launcher(own | OPEN_MPI | MPICH | SRUN | {"PARALLEL_SGD_RANKS": "2"}) == own


@pytest.mark.parametrize(
    ("environ", "world", "vendor", "says"),
    [
        ({}, 1, "MPICH", None),
        (OPEN_MPI, 4, "Open MPI", None),
        (MPICH, 4, "Intel MPI", None),
        (SRUN, 4, "Open MPI", None),
        (MPICH, 1, "Open MPI", "MPICH's mpiexec started 4 ranks, but this MPI world has 1 rank: "
            "mpi4py is bound to Open MPI, whose own mpiexec is required"),
        (OPEN_MPI, 1, "MPICH", "mpi4py is bound to MPICH, whose own mpiexec is required"),
        (SRUN, 1, "Open MPI", "the two do not work together"),
        (OPEN_MPI | {"PARALLEL_SGD_RANKS": "8"}, 4, "Open MPI", "8 ranks were requested, but this "
            "MPI world has 4 ranks"),
        ({"PMIX_RANK": "1"}, 1, "MPICH", "a PMIx launcher started this process as rank 1, but"),
        ({"PMIX_RANK": "0"}, 1, "MPICH", None),
        # What starts processes that find each other without MPI
        (TORCHRUN, 1, "MPICH", "torchrun started 2 processes (WORLD_SIZE=2, RANK=0), but this MPI "
            "world has 1 rank: each would train a separate model. Start the ranks by"),
        (ALLOCATION | TORCHRUN, 1, "MPICH", "torchrun started 2 processes"),
        (OPEN_MPI | TORCHRUN | {"WORLD_SIZE": "8"}, 4, "Open MPI", "torchrun started 8 processes"),
        (TORCHRUN | {"PARALLEL_SGD_RANKS": "1"}, 1, "MPICH", "torchrun started 2 processes"),
        ({"RANK": "3", "WORLD_SIZE": "4"}, 1, "MPICH", "WORLD_SIZE=4 says that 4 processes "
            "were started (RANK=3), but this MPI world has 1 rank: each would train"),
        ({"LOCAL_RANK": "3", "WORLD_SIZE": "4"}, 1, "MPICH", "started (LOCAL_RANK=3), but"),
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "4"}, 1, "MPICH", "horovodrun started 4 processes"),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "1", "RANK": "0", "WORLD_SIZE": "4"}, 1, "MPICH",
            "processes were started (RANK=0)"),  # as DeepSpeed does
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1", "RANK": "0", "WORLD_SIZE": "4"}, 1, "Open MPI",
            "the only one: unset WORLD_SIZE, or `parallel-sgd run -n 1`"),
        # No more than the world has, or not said of this process
        (TORCHRUN | {"WORLD_SIZE": "1"}, 1, "MPICH", None),
        (OPEN_MPI | {"RANK": "2", "WORLD_SIZE": "4"}, 4, "Open MPI", None),
        (MPICH | {"RANK": "0", "WORLD_SIZE": "8"}, 4, "MPICH", None),  # a shell's, before mpiexec
        ({"PARALLEL_SGD_RANKS": "1", "RANK": "0", "WORLD_SIZE": "8"}, 1, "MPICH", None),
        ({"WORLD_SIZE": "4"}, 1, "MPICH", None),
        ({"WORLD_SIZE": "x", "RANK": "0"}, 1, "MPICH", None),
        ({"RANK": "3"}, 1, "MPICH", None),
        (ALLOCATION, 1, "MPICH", None),  # `python` in a batch script
        (SRUN | {"SLURM_STEP_NUM_TASKS": "1"}, 1, "MPICH", None),
    ],
)  # fmt: skip
def test_world_mismatch(environ: dict[str, str], world: int, vendor: str, says: str | None) -> None:
    line = world_mismatch(world, vendor, environ)
    if line is None or says is None:
        assert line == says
    else:
        assert says in line and "\n" not in line


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_process_group_of_more_than_the_world(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """PyTorch's, which is not imported here."""
    for name in set(os.environ) - set(without_launcher(os.environ)):
        monkeypatch.delenv(name)
    yes = lambda: True  # noqa: E731
    group = SimpleNamespace(is_available=yes, is_initialized=yes, get_world_size=lambda: size)
    monkeypatch.setitem(sys.modules, "torch.distributed", group)
    require_whole(3, "MPICH", trains=True)
    if size > 2:
        with pytest.raises(UserError, match=r"a process group of 3 processes, but this MPI world "):
            require_whole(2, "MPICH")
    else:
        require_whole(2, "MPICH", trains=True)


@pytest.fixture
def set_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Set the process that has made the world, or None before there is a world."""
    return partial(monkeypatch.setattr, rank_process, "_process")


@pytest.fixture
def set_abort(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Any], None]:
    """Set by its name what a rank uses as it ends the job."""
    return partial(monkeypatch.setattr, abort)


@pytest.fixture
def without_mpi(
    monkeypatch: pytest.MonkeyPatch,
    set_process: Callable[[int | None], None],
    set_abort: Callable[[str, Any], None],
) -> None:
    """The process of a rank in which MPI is not up, and which ends the job at once."""
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    set_abort("GRACE_S", 0.0)
    set_process(os.getpid())


@pytest.fixture
def on_a_rank(monkeypatch: pytest.MonkeyPatch, without_mpi: None) -> None:
    """As rank 2 of 4, in a process in which MPI is not up."""
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PMI_SIZE", raising=False)


@pytest.mark.usefixtures("on_a_rank")
@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (UserError("bits must be 1: 3"), 1, "error: bits must be 1: 3 (test_launched.py:"),
        (KeyboardInterrupt(), 130, "interrupted in test_errors_are_told"),
        (SystemExit(3), 3, ""),
        (SystemExit("no data"), 1, "[rank 2] no data\n"),
        (SystemExit(256), 1, ""),
        (RuntimeError("two\nlines"), 1, "[rank 2] RuntimeError: two\n[rank 2] lines\n"),
        (ValueError("not by us"), 1, "[rank 2] Traceback (most recent call last):\n"),
    ],
)
def test_errors_are_told(
    capsys: pytest.CaptureFixture[str], error: BaseException, code: int, says: str
) -> None:
    with pytest.raises(SystemExit) as caught, abort_on_error():
        raise error
    assert caught.value.code == code
    err = capsys.readouterr().err
    assert says in err
    assert all(line.startswith("[rank 2] ") for line in err.splitlines())
    if isinstance(error, UserError):
        assert err.count("\n") == 1


NO_PROCESS = 9999999  #: a process number that Linux gives to no process


class MpiError(RuntimeError):
    """As MPICH raises it where it reads from the memory of a process that is gone."""

    def Get_error_class(self) -> int:
        return 15


@pytest.mark.usefixtures("on_a_rank")
@pytest.mark.parametrize("gone", [True, False])
def test_an_error_of_mpi_beside_a_rank_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
    set_abort: Callable[[str, Any], None],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Any,
    gone: bool,
) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", SimpleNamespace(Exception=MpiError))
    own, now = board.OwnHeartbeat(), time.monotonic()
    set_abort("own", own)
    own.join(board.make_heartbeat_table(tmp_path / "board", 4), 2)
    pid = NO_PROCESS if gone else os.getpid()
    own.heartbeat_table.write(
        board.Heartbeat(3, pid, board._birth(os.getpid()), now, now, 0.0, 60.0, "")
    )
    with pytest.raises(SystemExit) as caught, abort_on_error():
        raise MpiError("Other MPI error, error stack:\ninternal_Recv: process_vm_readv failed")
    err = capsys.readouterr().err
    assert caught.value.code == 1
    assert ("Traceback" in err) == (not gone)
    if gone:
        said = f"rank 3 (pid {pid}) has failed, and the remaining ranks cannot continue"
        assert err == f"[rank 2] parallel-sgd: error: {said}\n"


@pytest.mark.usefixtures("on_a_rank")
def test_the_users_own_line_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Not the standard library's."""

    def calls_the_library() -> None:
        raise_ours = "import json; json.loads('{}', object_hook=hook)"
        exec(compile(raise_ours, abort._PACKAGE + "module.py", "exec"), {"hook": our_hook})

    namespace: dict[str, Any] = {"UserError": UserError}
    hook = "def our_hook(found): raise UserError('bits: 3')"
    exec(compile(hook, abort._PACKAGE + "module.py", "exec"), namespace)
    our_hook = namespace["our_hook"]
    with pytest.raises(SystemExit), abort_on_error():
        calls_the_library()
    line = calls_the_library.__code__.co_firstlineno + 2
    said = capsys.readouterr().err
    assert said == f"[rank 2] parallel-sgd: error: bits: 3 (test_launched.py:{line})\n"


@pytest.mark.usefixtures("on_a_rank")
def test_arguments_of_our_own_commands_have_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    source = "import parallel_sgd.command_line.train.command as t; t.main(['--no-such-option'])"
    with pytest.raises(SystemExit), abort_on_error():
        exec(compile(source, "/home/user/train.py", "exec"), {})
    said = capsys.readouterr().err
    assert said.startswith("[rank 2] parallel-sgd: error: ")
    assert ".py:" not in said


@pytest.mark.parametrize("code", [None, 0])
def test_success_is_left_alone(code: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    with abort_on_error():
        pass
    with pytest.raises(SystemExit) as caught, abort_on_error():
        sys.exit(code)
    assert caught.value.code == code
    assert capsys.readouterr().err == ""


@pytest.fixture
def set_excepthook(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    return partial(monkeypatch.setattr, sys, "excepthook")


@pytest.mark.usefixtures("on_a_rank")
def test_excepthook_ends_the_job_and_is_installed_once(
    monkeypatch: pytest.MonkeyPatch,
    set_excepthook: Callable[[Any], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen: list[BaseException] = []
    set_excepthook(lambda kind, error, frames: seen.append(error))
    install_excepthook()
    hook = sys.excepthook
    install_excepthook()
    assert sys.excepthook is hook
    with pytest.raises(SystemExit) as caught:
        hook(RuntimeError, RuntimeError("boom"), None)
    assert caught.value.code == 1
    assert capsys.readouterr().err == "[rank 2] RuntimeError: boom\n"
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    hook(RuntimeError, RuntimeError("typed"), None)
    assert [str(error) for error in seen] == ["typed"]


@pytest.mark.usefixtures("on_a_rank")
def test_an_error_is_printed_inside_the_hook_of_pytorch(
    set_excepthook: Callable[[Any], None], capfd: pytest.CaptureFixture[str]
) -> None:
    """PyTorch's hook prints what an earlier hook has written, once that hook returns."""
    set_excepthook(sys.__excepthook__)
    install_excepthook()
    with contextlib.redirect_stderr(io.StringIO()), pytest.raises(SystemExit):
        sys.excepthook(RuntimeError, RuntimeError("boom"), None)
    assert capfd.readouterr().err == "[rank 2] RuntimeError: boom\n"


@pytest.mark.parametrize(
    ("environ", "installed"),
    [(OPEN_MPI, True), (MPICH, True), (SRUN, True), ({}, False), ({"PMI_SIZE": "1"}, False)],
)
def test_excepthook_is_for_ranks_among_others(
    monkeypatch: pytest.MonkeyPatch,
    set_process: Callable[[int | None], None],
    set_excepthook: Callable[[Any], None],
    environ: dict[str, str],
    installed: bool,
) -> None:
    for name in set(os.environ) - set(without_launcher(os.environ)):
        monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    set_excepthook(sys.__excepthook__)
    set_process(None)
    install_excepthook_if_launched()
    assert (sys.excepthook is not sys.__excepthook__) == installed


def test_a_process_that_is_started_by_a_rank_has_no_world(
    monkeypatch: pytest.MonkeyPatch, set_process: Callable[[int | None], None]
) -> None:
    """But one that is started by a mere wrapper, and one of a job that is started in a rank."""
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    set_process(None)
    monkeypatch.setenv(launched.RANK_PROCESS, "")
    rank_process.claim_world()
    assert rank_process.is_rank()
    said = os.environ[launched.RANK_PROCESS]
    monkeypatch.setenv(launched.RANK_PROCESS, said.replace(str(os.getpid()), "17"))
    with pytest.raises(UserError, match=r"rank 2 is process 17, which has made the world and then"):
        rank_process.claim_world()
    monkeypatch.setenv("PMIX_NAMESPACE", "another")
    rank_process.claim_world()
    monkeypatch.setenv(launched.RANK_PROCESS, said.rpartition("|")[0] + "|")
    monkeypatch.delenv("PMIX_NAMESPACE")
    rank_process.claim_world()


def test_a_rank_of_an_inner_job_of_hydras_is_none_of_the_outer(
    monkeypatch: pytest.MonkeyPatch, set_process: Callable[[int | None], None]
) -> None:
    """Its variables may be the same: only its socket is another. A program that a rank starts has
    none, or the rank's own (os.system)."""
    for name, value in MPICH.items():
        monkeypatch.setenv(name, value)
    set_process(None)
    monkeypatch.setenv(launched.RANK_PROCESS, "")
    pairs = [socket.socketpair() for _ in range(2)]
    outer, inner = (str(pair[0].fileno()) for pair in pairs)
    monkeypatch.setenv("PMI_FD", outer)
    rank_process.claim_world()
    said = os.environ[launched.RANK_PROCESS].replace(str(os.getpid()), "17", 1)
    read = os.open(os.devnull, os.O_RDONLY)
    for number, is_rank in ((outer, False), (str(read), False), ("999", False), (inner, True)):
        set_process(None)
        monkeypatch.setenv(launched.RANK_PROCESS, said)
        monkeypatch.setenv("PMI_FD", number)
        rank_process.claim()
        assert rank_process.is_rank() is is_rank
        assert rank_process.parent_rank_process() == (None if is_rank else 17)
        if not is_rank:
            with pytest.raises(UserError, match="is process 17, which has made the world"):
                rank_process.claim_world()
    os.close(read)
    for one, other in pairs:
        one.close()
        other.close()


def test_open_mpi_sends_pieces_without_asking(monkeypatch):
    """Pieces of an exchange are shorter than that; what the user has set stays."""
    name = "OMPI_MCA_btl_tcp_eager_limit"
    monkeypatch.delenv(name, raising=False)
    launched.raise_eager_limit()
    assert int(os.environ[name]) == launched.EAGER_BYTES > PIECE_BYTES + 1024
    monkeypatch.setenv(name, "70000")
    launched.raise_eager_limit()
    assert os.environ[name] == "70000"


@pytest.mark.parametrize(
    ("environ", "local"),
    [
        ({}, None),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, 1),
        (MPICH | {"MPI_LOCALRANKID": "1"}, 1),
        (SRUN | {"SLURM_LOCALID": "2"}, 2),
        (SRUN | {"SLURM_LOCALID": "2", "PMI_SIZE": "4", "PMI_RANK": "2"}, 2),
        # mpiexec in a batch job: its ranks inherit the batch script's, which is 0 for all
        (ALLOCATION | MPICH | {"SLURM_LOCALID": "0", "MPI_LOCALRANKID": "1"}, 1),
        (ALLOCATION | OPEN_MPI | {"SLURM_LOCALID": "0"}, None),
    ],
)
def test_the_number_among_the_ranks_of_a_host(environ: dict[str, str], local: int | None) -> None:
    assert launched.launched_local_rank(environ) == local


def test_the_step_that_srun_has_started() -> None:
    assert launched.srun_step(SRUN) == launched.srun_step(SRUN | {"PMI_SIZE": "4"}) == "7.0"
    for environ in ({}, ALLOCATION, SRUN | OPEN_MPI, SRUN | MPICH):
        assert launched.srun_step(environ) is None


@pytest.mark.usefixtures("without_mpi")
def test_a_rank_that_fails_early_ends_its_step(
    monkeypatch: pytest.MonkeyPatch, set_abort: Callable[[str, Any], None], tmp_path: Any
) -> None:
    """srun without -K lets the others wait in MPI_Init for ever."""
    (tmp_path / "scancel").write_text(f"#!/bin/sh\necho $* > {tmp_path}/ended\n")
    (tmp_path / "scancel").chmod(0o755)
    for name in set(os.environ) - set(without_launcher(os.environ)):
        monkeypatch.delenv(name)
    for name, value in {**SRUN, "PATH": f"{tmp_path}:/bin:/usr/bin"}.items():
        monkeypatch.setenv(name, value)
    set_abort("time", SimpleNamespace(sleep=lambda seconds: None))
    with pytest.raises(SystemExit):
        abort.end_job(1)
    assert (tmp_path / "ended").read_text() == "7.0\n"
    (tmp_path / "ended").unlink()
    (tmp_path / "scancel").unlink()  # a node without it: as before
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit) as caught:
        abort.end_job(3)
    assert caught.value.code == 3


@pytest.mark.parametrize(
    ("environ", "role"),
    [
        ({}, None),
        ({"PARALLEL_SGD_ROLE": "server"}, "server"),
        ({"TRAINING_ROLE": "PSERVER"}, "server"),
        ({"TRAINING_ROLE": "TRAINER", "PARALLEL_SGD_ROLE": "worker"}, "worker"),
    ],
)
def test_a_role_by_the_environment(environ: dict[str, str], role: str | None) -> None:
    assert launched.requested_role(environ) == role


@pytest.mark.parametrize(
    ("environ", "wrong"),
    [
        ({"PARALLEL_SGD_ROLE": "Server"}, "PARALLEL_SGD_ROLE='Server' must be one of worker, serv"),
        ({"TRAINING_ROLE": "worker"}, "TRAINING_ROLE='worker' must be one of TRAINER, PSERVER"),
        ({"PARALLEL_SGD_ROLE": "worker", "TRAINING_ROLE": "PSERVER"}, "'worker' contradicts"),
    ],
)
def test_a_role_that_is_none(environ: dict[str, str], wrong: str) -> None:
    with pytest.raises(UserError, match=wrong):
        launched.requested_role(environ)


@pytest.mark.parametrize(("given", "seconds"), [(None, 600.0), ("7.5", 7.5)])
def test_how_long_ranks_wait_that_do_not_say(
    given: str | None, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given is not None:
        monkeypatch.setenv(launched.WAIT_TIMEOUT_S, given)
    waits: list[float] = []
    monkeypatch.setattr(Communicator, "_make_world", lambda timeout_s, _: waits.append(timeout_s))
    Communicator.world()
    Communicator.world(timeout_s=3)
    assert waits == [seconds, 3]


@pytest.mark.parametrize("given", ["0", "-1", "inf", "long", ""])
def test_a_wait_that_is_none(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launched.WAIT_TIMEOUT_S, given)
    with pytest.raises(
        UserError, match=r"PARALLEL_SGD_WAIT_TIMEOUT_S='.*' must be a number of sec"
    ):
        default_timeout()
