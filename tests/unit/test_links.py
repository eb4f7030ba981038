"""What a run writes stays in its folder, whatever links somebody has placed there; and modes."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import parallel_sgd as psgd
from parallel_sgd import Parameters, RunFolder, UserError
from parallel_sgd.array_files import write_arrays
from parallel_sgd.command_line.cluster import namespaces
from parallel_sgd.files import make_new, require_writable, write_whole
from parallel_sgd.launcher import Supervisor
from parallel_sgd.parameter_server import RecordedOrder
from parallel_sgd.training.checkpoint import files
from parallel_sgd.training.session.run_output import RankLog

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")

KEPT = "somebody's own"


@pytest.fixture
def victim(tmp_path):
    """A folder elsewhere with a file, both of which must stay as they are."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "file").write_text(KEPT)
    yield folder
    assert os.listdir(folder) == ["file"] and (folder / "file").read_text() == KEPT


@pytest.fixture
def run(tmp_path, victim):
    """A run's folder that somebody else may write to, with a link in the place of each file."""
    path = tmp_path / "run"
    path.mkdir()
    for name in ("options.json", "config.toml", "model.npz", "loss.png", "summary.json"):
        (path / name).symlink_to(victim / "file")
        (path / f".{name}.part").symlink_to(victim / "file")
    return path


def test_links_in_a_run_folder_are_replaced(run):
    folder = RunFolder(run, {"seed": 0}, config="seed = 0\n", resumed=True)
    folder.create()
    folder.write_json("summary.json", {"loss": 1.0})
    folder.write_model(Parameters({"W": np.zeros(3, np.float32)}))
    for name in ("options.json", "config.toml", "model.npz", "summary.json", "metrics.jsonl"):
        assert (run / name).is_file() and not (run / name).is_symlink()
    assert not [name for name in os.listdir(run) if name == ".model.npz.part"]


@pytest.mark.parametrize("leads", ["to a file", "nowhere"])
def test_nothing_is_added_to_what_a_link_leads_to(tmp_path, victim, leads):
    to = victim / ("file" if leads == "to a file" else "new")
    folder = RunFolder(tmp_path / "run")
    folder.create()
    (folder.path / "metrics.jsonl").symlink_to(to)
    with pytest.raises(UserError, match=r"metrics\.jsonl' cannot be written: it is a link"):
        folder.append_metrics({"loss": 1.0})
    (folder.path / "logs").mkdir()
    (folder.path / "logs" / "rank-00000.log").symlink_to(to)
    with pytest.raises(UserError, match=r"rank-00000\.log' cannot be written: it is a link"):
        RankLog(folder.path, 0).create()


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard", "logs"])
def test_a_folder_of_the_run_that_is_a_link(tmp_path, victim, name):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(victim)
    writes = RankLog(tmp_path / "run", 0) if name == "logs" else RunFolder(tmp_path / "run")
    writes.resumed = True
    with pytest.raises(UserError, match=rf"^output='.*{name}' must be a folder: it is a link"):
        writes.create()


def test_the_folder_that_the_user_names_may_be_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    RunFolder(tmp_path / "run", {"seed": 0}).create()
    assert os.listdir(tmp_path / "disk") == ["options.json"]


def test_a_pipe_is_not_waited_for(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create()
    os.mkfifo(folder.path / "metrics.jsonl")
    with pytest.raises(UserError, match=r"metrics\.jsonl' cannot be written"):
        folder.append_metrics({"loss": 1.0})


def test_a_file_that_the_user_names_is_written_aside_safely(tmp_path, victim):
    (tmp_path / ".a.json.part").symlink_to(victim / "file")
    require_writable("--json", tmp_path / "a.json")
    (tmp_path / ".a.json.part").symlink_to(victim / "file")
    write_whole("--json", tmp_path / "a.json", lambda path: path.write_text("new"))
    assert (tmp_path / "a.json").read_text() == "new"


def save(folder, **options):
    parameters = Parameters({"w": np.ones(3, np.float32)})
    comm = psgd.Communicator.single()
    learner = psgd.Learner(parameters, psgd.SGD(lr=0.1), psgd.DataParallelSGD(), comm)
    with psgd.Checkpoints(folder, **options) as checkpoints:
        for _ in range(3):
            learner.step(samples=2)
            checkpoints.save(learner)


def test_old_checkpoints_are_removed_and_links_not_followed(tmp_path, victim):
    """Also such as have the name of a checkpoint, or of one that is being written."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for name in ("000000000001", "000000000002.part", "000000000003.0.part"):
        (folder / name).symlink_to(victim)
    (folder / "000000000004.part").symlink_to(victim / "none")
    (folder / "000000000005.part").write_text("a file")
    save(folder, keep=1)
    assert sorted(os.listdir(folder)) == ["000000000001", "000000000006"]
    files.remove(folder / "000000000001")  # the link
    assert os.listdir(folder) == ["000000000006"]
    inside = folder / "000000000006" / "link"
    inside.symlink_to(victim)
    files.remove(folder / "000000000006")
    assert os.listdir(folder) == []


def test_links_in_a_checkpoint_that_is_being_written(tmp_path, victim):
    """Whoever was quick enough has placed them in the place of its files."""
    part = tmp_path / "000000000001.part"
    part.mkdir()
    for name in ("rank-00000.safetensors", "rank-00000.json", ".manifest.json.part"):
        (part / name).symlink_to(victim / "file")
    (part / "manifest.json").symlink_to(victim / "file")
    facts = files.write_rank(part, 0, {"w": np.ones(3)}, {"state": {}})
    files.publish(part, tmp_path / "000000000001", {"files": facts})
    assert not any(path.is_symlink() for path in (tmp_path / "000000000001").iterdir())


def test_set_aside_keeps_off_links(tmp_path, victim):
    for name in ("000000000001", "000000000002"):
        (tmp_path / name).mkdir()
    (tmp_path / "000000000002.aside").symlink_to(victim / "none")
    files.set_aside_after(tmp_path / "000000000001")
    assert (tmp_path / "000000000002.aside1").is_dir()


def test_tables_and_orders(tmp_path, victim):
    for name in ("tables-00000.safetensors", "order-of-server-0.json"):
        (tmp_path / name).symlink_to(victim / "file")
    write_arrays(tmp_path / "tables-00000.safetensors", {"w": np.ones(3)})
    RecordedOrder(str(tmp_path), 0, {"workers": "1"}).close()
    assert not (tmp_path / "order-of-server-0.json").is_symlink()
    (tmp_path / "order-of-server-1.i4").symlink_to(victim / "none")
    with pytest.raises(UserError, match="has a recording already"):
        RecordedOrder(str(tmp_path), 1, {"workers": "1"})


def test_logs_of_ranks(tmp_path, victim):
    """In a process of its own, whose output they become."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.out").symlink_to(victim / "file")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from parallel_sgd.launcher.rank_logs import redirect_output\n"
            "try: redirect_output(sys.argv[1], 0)\nexcept ValueError as error: print(error)",
            str(tmp_path / "logs"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(psgd.__file__).parents[1])},
    )
    assert done.stdout.startswith("log_dir=") and "it is a link" in done.stdout


@pytest.mark.parametrize(
    ("umask", "folders", "plain"), [(0o077, 0o700, 0o600), (0o002, 0o775, 0o664)]
)
def test_modes_are_those_of_the_users_umask(tmp_path, umask, folders, plain):
    before = os.umask(umask)
    try:
        run = RunFolder(tmp_path / "run", {"seed": 0}, config="seed = 0\n")
        run.create()
        run.append_metrics({"loss": 1.0})
        run.write_model(Parameters({"W": np.zeros(3, np.float32)}))
        RankLog(run.path, 0).create()
        save(run.path / "checkpoints")
        RecordedOrder(str(run.path / "orders"), 0, {"workers": "1"}).close()
    finally:
        os.umask(before)
    modes = {
        str(path.relative_to(tmp_path)): (stat.S_IMODE(path.stat().st_mode), path.is_dir())
        for path in (tmp_path / "run").rglob("*")
    }
    assert len(modes) > 12
    assert {
        name: mode for name, mode in modes.items() if mode[0] != (plain, folders)[mode[1]]
    } == {}


def test_temporary_folders_are_private(temporary_folder):
    before = os.umask(0)
    try:
        with Supervisor(2) as one, Supervisor(2) as other:
            folders = [Path(*supervisor.environ.values()) for supervisor in (one, other)]
            assert len({*folders}) == 2 and {*folders} == {*temporary_folder.iterdir()}
            assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}
    finally:
        os.umask(before)


def test_the_launcher_removes_shared_memory_of_mpi_and_nothing_else(victim):
    with Supervisor(1) as supervisor:
        folder = Path(*supervisor.environ.values())
        (folder / "0.memory").write_text(f"{victim / 'file'}\n/dev/shm/mpich_shm/../x\n")


@pytest.mark.usefixtures("temporary_folder")
def test_what_others_have_made_is_not_left_over(tmp_path, victim, monkeypatch):
    """Root reads what a folder says and removes it: not one of another user's."""
    monkeypatch.setattr(namespaces, "_output", lambda command: "")
    (tmp_path / "psgd-hosts-99999999-a").symlink_to(victim)
    (tmp_path / "psgd-hosts-99999999-b").write_text("")
    (tmp_path / "psgd-hosts-99999999-c").mkdir()
    assert namespaces.remove_leftovers() == [str(tmp_path / "psgd-hosts-99999999-c")]
    (tmp_path / "psgd-hosts-99999999-d").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert namespaces.remove_leftovers() == []


def test_make_new_does_not_follow(tmp_path, victim):
    for to in (victim / "file", victim / "none"):
        (tmp_path / "link").symlink_to(to)
        make_new(tmp_path / "link")
        assert (tmp_path / "link").read_bytes() == b"" and not (tmp_path / "link").is_symlink()
        (tmp_path / "link").unlink()
