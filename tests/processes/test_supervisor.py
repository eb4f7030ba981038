"""Which rank is gone first: named where that is certain, and only there."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from parallel_sgd.communication import FOLDER, Status
from parallel_sgd.launcher import Ending, Outcome, Supervisor, Waits, judge
from parallel_sgd.launcher import cleanup as leftovers

RANKS = 4

#: A rank: it signs on at a line from the launcher, and waits; a child of its own outlives it.
RANK = """
import os, signal, sys
from parallel_sgd.communication import report_start
signal.signal(signal.SIGUSR1, lambda *_: os.execvp("sleep", ["sleep", "60"]))
os.environ[sys.argv[1]] = sys.stdin.readline().strip()
report_start()
if not os.fork():
    print("on", flush=True)  # it has let go of the rank's pipe
    sys.stdin.read()  # until the test lets go
    os._exit(0)
sys.stdin.read()
"""


@pytest.fixture
def ranks() -> Iterator[list[subprocess.Popen[str]]]:
    """A process for each rank."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, FOLDER],
            env={**os.environ, "PMI_SIZE": str(RANKS), "PMI_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    yield started
    for process in started:
        process.kill()
        process.communicate()


def sign_on(supervisor: Supervisor, ranks: list[subprocess.Popen[str]]) -> None:
    for process in ranks:
        process.stdin.write(f"{supervisor.environ[FOLDER]}\n")
        process.stdin.flush()
    for process in ranks:
        assert process.stdout.readline() == "on\n"
    supervisor.check()


def kill(processes: list[subprocess.Popen[str]], *ranks: int) -> None:
    for rank in ranks:
        processes[rank].send_signal(signal.SIGKILL)
        processes[rank].wait()


@pytest.mark.parametrize("looks", [0, 1], ids=["all at once", "at an earlier look"])
def test_the_first_one_that_is_gone_is_named(ranks, looks):
    with Supervisor(RANKS) as supervisor:
        sign_on(supervisor, ranks)
        kill(ranks, 2)
        for _ in range(looks):
            supervisor.check()
        kill(ranks, 0, 1, 3)
        said = supervisor.silent_exit_line()
    assert said is not None and said.startswith(f"rank 2 (pid {ranks[2].pid}) ended first")


@pytest.mark.parametrize("why", [Status.FINISHED, Status.FAILED, Status.LOST])
def test_who_has_signed_off_is_not_named(ranks, why):
    with Supervisor(RANKS) as supervisor:
        sign_on(supervisor, ranks)
        for rank in range(RANKS):
            Path(supervisor.environ[FOLDER], f"{rank}.{why}").touch()
        kill(ranks, 1)
        assert supervisor.silent_exit_line() is None


FAILS_AT_LAST = """
from parallel_sgd.communication import Status, report_start, report_status
report_start()
for word in (Status.FINISHED, Status.FAILED, Status.FINISHED):
    report_status(word)
"""


def test_who_fails_behind_the_end_of_its_mpi_has_failed():
    with Supervisor(1) as supervisor:
        environ = {**os.environ, **supervisor.environ, "PMI_SIZE": "1", "PMI_RANK": "0"}
        subprocess.run([sys.executable, "-c", FAILS_AT_LAST], env=environ, check=True)
        assert supervisor.exit_reasons() == {0: Status.FAILED}


TELLS = """
import sys
from pathlib import Path
from parallel_sgd.communication import Status, report_start, report_status
report_start()
print("on", flush=True)
for line in sys.stdin:
    word = line.strip()
    report_status(*((Status.CHECKPOINT, word) if word[0] == "/" else (Status(word),)))
    print("told", flush=True)
"""


@contextmanager
def telling(supervisor: Supervisor, rank: int = 0) -> Iterator[Callable[[str], str]]:
    """A rank that tells what it is asked to, ends or is killed; what it has printed on stderr."""
    process = subprocess.Popen(
        [sys.executable, "-c", TELLS],
        env={
            **os.environ,
            **supervisor.environ,
            "PMI_SIZE": str(supervisor.ranks),
            "PMI_RANK": str(rank),
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    def told(word: str) -> str:
        if word in ("ends", "is killed"):
            if word == "is killed":
                process.kill()
            return process.communicate(timeout=50)[1]
        process.stdin.write(f"{word}\n")
        process.stdin.flush()
        assert process.stdout.readline() == "told\n"
        return ""

    assert process.stdout.readline() == "on\n"
    try:
        yield told
    finally:
        process.kill()
        process.communicate()


def without_folder(supervisor: Supervisor) -> None:
    """As what cleans temporary files leaves it."""
    shutil.rmtree(supervisor.environ[FOLDER])


@pytest.mark.parametrize("word", ["ends", Status.FAILED, "is killed"])
def test_ranks_tell_how_they_end_where_the_folder_is_gone(word):
    with Supervisor(1) as supervisor, telling(supervisor) as told:
        supervisor.check()
        without_folder(supervisor)
        told("/somewhere/a \N{SNOWMAN}")
        if word == Status.FAILED:
            told(word)
        assert told("is killed" if word == "is killed" else "ends") == ""
        ends = {"ends": Ending.COMPLETE, Status.FAILED: Ending.FAILED, "is killed": Ending.LOST}
        assert judge(supervisor.job_status(1), survive=False).end is ends[word]
        assert (supervisor.killed_rank() is not None) == (word == "is killed")
        assert (supervisor.silent_exit_line() is not None) == (word == "is killed")
        assert supervisor.newest_checkpoint() == "/somewhere/a \N{SNOWMAN}"


@pytest.fixture
def pipes_that_can_be_made(monkeypatch) -> Callable[[int], None]:
    """Sets how many pipes can be made from now on."""
    there = os.mkfifo

    def give(count: int) -> None:
        left = iter(range(count))

        def mkfifo(path):
            if next(left, None) is None:
                raise OSError(errno.EMFILE, "not to be had")
            return there(path)

        monkeypatch.setattr(os, "mkfifo", mkfifo)

    return give


@pytest.mark.parametrize(("code", "end"), [(0, Ending.COMPLETE), (1, Ending.LOST)])
def test_where_nothing_can_be_told_the_exit_code_counts(code, end, pipes_that_can_be_made):
    pipes_that_can_be_made(0)
    with Supervisor(2) as supervisor, telling(supervisor) as told:
        without_folder(supervisor)
        assert told("ends") == ""
        judged = judge(supervisor.job_status(code), survive=False)
        assert (judged.end, judged.reported) == (end, code != 0)
        folder = supervisor.environ[FOLDER]
        assert f"the folder '{folder}', in which ranks report how they end, was" in judged.why
        assert supervisor.silent_exit_line() is None


def test_a_rank_says_that_it_could_not_tell(pipes_that_can_be_made):
    pipes_that_can_be_made(0)
    with Supervisor(1) as supervisor, telling(supervisor) as told:
        Path(
            supervisor.environ[FOLDER], f"0.{Status.FINISHED}"
        ).mkdir()  # stands for a disk without an inode
        said = told("ends")
    assert said.startswith(
        "[rank 0] parallel_sgd: the status 'left' could not be reported to the launcher: [Errno "
    )


def test_a_launcher_that_does_not_look_hears_by_files_when_the_pipe_is_full():
    """It is stopped, say."""
    with Supervisor(1) as supervisor, telling(supervisor) as told:
        for number in range(1000):
            told(f"/somewhere/{number}{80 * '-'}")
        assert told("ends") == ""
        assert Path(supervisor.environ[FOLDER], "0.checkpoint").exists()
        assert supervisor.newest_checkpoint().startswith("/somewhere/999-")
        assert supervisor.exit_reasons() == {0: Status.FINISHED}


@pytest.mark.parametrize("silent", [0, 1])
def test_who_is_gone_before_it_has_signed_on(ranks, silent):
    with Supervisor(RANKS, local=True) as supervisor:
        sign_on(supervisor, ranks[:2])
        kill(ranks, *range(silent), 3)
        said = supervisor.silent_exit_line()
    also = ", and rank 0 without a report" if silent else ""
    assert said.startswith(f"ranks 2, 3 ended before signing on{also}: one of them was killed")


def test_who_runs_another_program_now_is_not_gone(ranks):
    """It says nothing any more; a job of such ranks goes on for as long as mpiexec does."""
    with Supervisor(RANKS, waits=Waits(poll_s=0.01, end_s=0.0, kill_s=0.1)) as supervisor:
        sign_on(supervisor, ranks)
        for process in ranks:
            process.send_signal(signal.SIGUSR1)
        for process in ranks:
            until = time.monotonic() + 10
            while "sleep" not in Path(f"/proc/{process.pid}/cmdline").read_text():
                assert time.monotonic() < until
        for _ in range(3):
            supervisor.check()
            time.sleep(0.02)
            assert supervisor.reason_to_end() is None
        assert judge(supervisor.job_status(0), survive=False) == Outcome(
            Ending.COMPLETE, reported=False
        )
        kill(ranks, 1)
        assert supervisor.silent_exit_line() is None


@pytest.mark.parametrize("opened", [0, 2])
def test_nobody_is_named_where_there_are_too_few_pipes(ranks, pipes_that_can_be_made, opened):
    pipes_that_can_be_made(opened)
    with Supervisor(RANKS) as supervisor:
        sign_on(supervisor, ranks)
        kill(ranks, 2)
        assert supervisor.silent_exit_line() is None


@pytest.mark.parametrize("coming", [False, True], ids=["elsewhere", "just signing on"])
def test_nobody_is_named_where_one_is_not_there(ranks, coming):
    with Supervisor(RANKS) as supervisor:
        sign_on(supervisor, ranks[:3])
        if coming:
            pipe = os.open(Path(supervisor.environ[FOLDER], f"3.{Status.PROCESS}"), os.O_WRONLY)
        kill(ranks, 1, 0)
        assert supervisor.silent_exit_line() is None
        if coming:
            os.close(pipe)


def test_more_ranks_than_descriptors_are_not_watched():
    with Supervisor(1_000_000) as supervisor:
        assert os.listdir(supervisor.environ[FOLDER]) == ["lock"]
        assert supervisor.silent_exit_line() is None


KILLED = """
import mmap, os, signal, sys
from pathlib import Path
from parallel_sgd.launcher import Supervisor
from parallel_sgd.communication import FOLDER
with Supervisor(2) as supervisor:
    folder = Path(supervisor.environ[FOLDER])
    (folder / "more").touch()
    supervisor.record_mpiexec(99_999_999)
    Path(os.environ["TMPDIR"], "ompi.99999999").mkdir(exist_ok=True)
    memories, temporary = map(Path, sys.argv[1:])
    (temporary / f"hydra_hwloc_xmlfile_{folder.name[-6:]}").touch()
    for name in ("mpich_shm_", "ucx_shm_posix_", "sm_segment."):
        memory = memories / f"{name}test_{folder.name}"
        memory.write_bytes(bytes(9))
        mapped = mmap.mmap(os.open(memory, os.O_RDWR), 9)
    print(folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def cleaning(monkeypatch) -> Callable[..., None]:
    """Changes parts of what removes leftovers, by name."""

    def change(**parts) -> None:
        for name, part in parts.items():
            monkeypatch.setattr(leftovers, name, part)

    return change


@pytest.fixture
def places(cleaning) -> Iterator[tuple[Path, Path]]:
    """Folders in the place of /dev/shm and /tmp, in shared memory. Launchers of other jobs, which
    remove such files and look at them, do not come there."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        there = {Path("/dev/shm"): Path(folder, "memories"), Path("/tmp"): Path(folder, "files")}
        for path in there.values():
            path.mkdir()
        patterns = {there[place]: names for place, names in leftovers._SHARED_PLACES.items()}
        cleaning(_SHARED_PLACES=patterns)
        yield there[Path("/dev/shm")], there[Path("/tmp")]


@pytest.mark.usefixtures("temporary_folder")
def test_what_a_killed_launcher_has_left_is_removed_by_the_next(tmp_path, places):
    """And nothing of one that lives."""
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    with Supervisor(1) as living:
        command = [sys.executable, "-c", KILLED, *map(str, places)]
        killed = subprocess.run(command, env=environ, capture_output=True)
        folder = Path(killed.stdout.decode().strip())
        names = ("mpich_shm_", "sm_segment.")
        left, used = (places[0] / f"{name}test_{folder.name}" for name in names)
        ucx = places[0] / f"ucx_shm_posix_test_{folder.name}"
        topology = places[1] / f"hydra_hwloc_xmlfile_{folder.name[-6:]}"
        assert folder.is_dir() and topology.exists(), killed.stderr
        assert left.exists() and ucx.exists()
        with used.open("r+b") as file, mmap.mmap(file.fileno(), 0), topology.open(), Supervisor(1):
            assert folder.exists() and used.exists() and topology.exists()
            assert not left.exists() and not ucx.exists()
        with Supervisor(1):
            assert not (folder.exists() or used.exists() or topology.exists())
            assert Path(living.environ[FOLDER], "board").exists()
    assert list(tmp_path.iterdir()) == []


LATE = """
import mmap, os, sys, time
mapped = mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 9)
print("mapped", flush=True)
time.sleep(0.5)
"""


def test_what_a_rank_that_has_not_signed_on_yet_uses_is_removed_when_it_has_ended(places):
    """As where mpiexec was killed at the start."""
    with Supervisor(1) as supervisor:
        memory = places[0] / "mpich_shm_late"
        memory.write_bytes(bytes(9))
        environ = {**os.environ, **supervisor.environ}
        command = [sys.executable, "-c", LATE, str(memory)]
        late = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
        assert late.stdout.readline() == "mapped\n"
    assert not memory.exists()
    late.communicate()


STARTS = """
import sys, time
from pathlib import Path
print("on", flush=True)
time.sleep(0.3)
Path(sys.argv[1]).write_bytes(bytes(9))
"""


def test_what_a_rank_makes_late_is_removed_when_it_has_ended(places):
    """It had only begun to start when mpiexec was killed."""
    with Supervisor(1) as supervisor:
        memory = places[0] / "mpich_shm_starts"
        environ = {**os.environ, **supervisor.environ}
        command = [sys.executable, "-c", STARTS, str(memory)]
        starts = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
        assert starts.stdout.readline() == "on\n"
    starts.communicate()
    assert not memory.exists()


@pytest.mark.usefixtures("temporary_folder")
def test_sockets_of_processes_that_are_gone_are_removed(tmp_path):
    """As a killed DataLoader's workers leave them. Nothing that anybody may use."""
    before = tmp_path / "pymp-before"
    before.mkdir()
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(before / "listener-1"))
    time.sleep(0.02)  # more than the steps of a file system's clock
    with socket.socket(socket.AF_UNIX) as lives, Supervisor(1):
        for name in ("pymp-lives", "pymp-dead", "pymp-empty", "pymp-file", "other"):
            (tmp_path / name).mkdir()
        lives.bind(str(tmp_path / "pymp-lives" / "listener-1"))
        for name in ("pymp-lives", "pymp-dead", "pymp-file", "other"):
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(str(tmp_path / name / "listener-2"))
        (tmp_path / "pymp-file" / "file").touch()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"pymp-before", "pymp-lives", "pymp-empty", "pymp-file", "other"}


def test_a_socket_is_not_disturbed_by_the_question_whether_it_lives(tmp_path):
    with socket.socket(socket.AF_UNIX) as lives:
        lives.bind(str(tmp_path / "listener"))
        assert not leftovers._is_unbound_socket(tmp_path / "listener")
        lives.listen()
        assert not leftovers._is_unbound_socket(tmp_path / "listener")
        lives.setblocking(False)
        with pytest.raises(BlockingIOError):
            lives.accept()
    assert leftovers._is_unbound_socket(tmp_path / "listener")


def test_what_a_rank_uses_that_ends_meanwhile_is_removed(cleaning, places):
    """It is seen to use its memory, and is gone before it is looked for among the processes."""
    with Supervisor(1):
        memory = places[0] / "mpich_shm_ends"
        memory.write_bytes(bytes(9))
        uses = iter([{memory}])
        cleaning(in_use=lambda paths: next(uses, set()))
    assert not memory.exists()


@pytest.mark.usefixtures("temporary_folder")
def test_folders_that_hosts_share_are_removed_by_a_launcher_of_the_same_host(tmp_path, places):
    """And hold no board, which is of one host."""
    others = tmp_path / ".parallel_sgd-elsewhere"
    others.mkdir()
    (others / "lock").write_text("another-host")
    code = KILLED.replace("Supervisor(2)", f"Supervisor(2, Path({str(tmp_path)!r}))")
    with Supervisor(1, tmp_path) as living:
        environ = {**os.environ, "TMPDIR": str(tmp_path)}
        command = [sys.executable, "-c", code, *map(str, places)]
        killed = subprocess.run(command, env=environ, capture_output=True)
        folder = Path(killed.stdout.decode().strip())
        assert folder.is_dir() and folder.parent == tmp_path, killed.stderr
        with Supervisor(1, tmp_path):
            assert not folder.exists()
            there = Path(living.environ[FOLDER])
            assert there.parent == tmp_path and not (there / "board").exists()
    assert list(tmp_path.iterdir()) == [others]


@pytest.mark.parametrize("seconds_ago", [0, 30], ids=["at once", "long before"])
def test_who_is_gone_before_another_can_end_the_job_was_killed(ranks, seconds_ago):
    """A rank that fails because another one is gone says so before mpiexec ends it."""
    with Supervisor(RANKS) as supervisor:
        sign_on(supervisor, ranks)
        kill(ranks, 2)
        said = Path(supervisor.environ[FOLDER], f"0.{Status.FAILED}")
        said.touch()
        now = time.time()
        os.utime(said, (now - seconds_ago, now - seconds_ago))
        supervisor.check()
        assert (supervisor.killed_rank() is not None) == (seconds_ago == 0)
        assert supervisor.silent_exit_line() is None
        if seconds_ago == 0:
            assert f"rank 2 (pid {ranks[2].pid})" in supervisor.killed_rank()


def test_signals_to_ranks_and_no_rank_outlives_its_job(ranks):
    with Supervisor(RANKS) as supervisor:
        assert not supervisor.send_signal(signal.SIGCONT)
        sign_on(supervisor, ranks[:3])
        kill(ranks, 0)
        ranks[1].send_signal(signal.SIGSTOP)
        assert supervisor.send_signal(signal.SIGCONT)
        ranks[1].send_signal(signal.SIGSTOP)
    assert [ranks[rank].wait() for rank in (1, 2)] == [-signal.SIGKILL] * 2
    assert ranks[3].poll() is None


@pytest.mark.parametrize("leases", [True, False])
def test_what_is_mapped_or_open_is_in_use(cleaning, leases):
    """Also where the file system has no leases, by what all processes have."""
    path = Path(f"/dev/shm/parallel_sgd_test_{os.getpid()}")
    path.write_bytes(bytes(4096))
    if not leases:
        cleaning(_can_be_leased=lambda path: None)
    try:
        assert leftovers.in_use({path, path.with_name("none")}) == set()
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 4096) as mapped:
            assert leftovers.in_use({path}) == {path}
            file.close()
            assert leftovers.in_use({path}) == {path} and mapped[0] == 0
        assert leftovers.in_use({path}) == set()
        if leases:
            cleaning(_paths_in_use=pytest.fail)  # nobody else is asked
            assert leftovers.in_use({path}) == set()
    finally:
        path.unlink()
