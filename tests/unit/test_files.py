"""Files that are there whole or not at all, and programs that end in one line."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from disks import files_of_at_most

import parallel_sgd as psgd
from parallel_sgd import Parameters, UserError, data
from parallel_sgd.__main__ import main
from parallel_sgd.command_line import info
from parallel_sgd.communication import user_message
from parallel_sgd.files import content_of, opened, write_whole
from parallel_sgd.training import RunFolder, read_model

FULL = r"cannot be written: (File too large|No space left on device)$"


def test_a_full_disk_leaves_no_part_of_a_run_folders_file(tmp_path):
    pytest.importorskip("matplotlib")
    folder = RunFolder(tmp_path / "run", {"seed": 0})
    folder.create()
    folder.append_metrics({"epoch": 1})
    parameters = Parameters({"W": np.zeros((100, 100), np.float32)})
    for name, write in {
        "model.npz": lambda: folder.write_model(parameters),
        "summary.json": lambda: folder.write_json("summary.json", {"a": "b" * 1000}),
        "loss.png": lambda: folder.write_loss_curves({"test": [(0, 1.0), (9, 0.1)]}),
        "metrics.jsonl": lambda: folder.append_metrics({"epoch": 2, "more": "b" * 100}),
    }.items():
        with files_of_at_most(100), pytest.raises(UserError, match=f"^output='.*{name}' {FULL}"):
            write()
    folder.close()
    assert sorted(os.listdir(folder.path)) == ["metrics.jsonl", "options.json"]
    assert (folder.path / "metrics.jsonl").read_text() == '{"epoch": 1}\n'
    with files_of_at_most(10), pytest.raises(UserError, match=f"options.json' {FULL}"):
        RunFolder(tmp_path / "other", {"seed": 0}).create()
    assert os.listdir(tmp_path / "other") == []


def test_what_was_there_stays_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")

    def write(aside: Path) -> None:
        aside.write_text("ne")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole("--json", path, write)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a.json"]
    with pytest.raises(UserError, match=r"^--json='/dev/full' cannot be written: No space left"):
        write_whole("--json", "/dev/full", lambda path: path.write_text("new"))
    for bad, why in {
        "a\0b": r"^--json='a\\x00b' must be the path of a file: it has a zero byte",
        str(path / "in a file"): "Not a directory",
        "": "^--json='' must be the path of a file",
        ".": "^--json='.' cannot be written: Is a directory",
        "/": "^--json='/' cannot be written: Is a directory",
    }.items():
        with pytest.raises(UserError, match=why):
            write_whole("--json", bad, lambda path: path.write_text("new"))


def test_a_link_stays_one(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link.json").symlink_to(Path("there", "a.json"))
    for text in ("first", "second"):
        write_whole("--json", tmp_path / "link.json", lambda path, text=text: path.write_text(text))
        assert (tmp_path / "link.json").is_symlink()
        assert (tmp_path / "there" / "a.json").read_text() == text
    assert os.listdir(tmp_path / "there") == ["a.json"]


def test_devices_and_pipes_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, why in (
        (tmp_path / "pipe", "must be a regular file: it is a pipe"),
        ("/dev/zero", "must be a regular file: it is a device"),
        (tmp_path, "cannot be read: Is a directory"),
        (tmp_path / ("n" * 300), "cannot be read: File name too long"),
        (tmp_path / "none", "there is no such file"),
    ):
        with pytest.raises(UserError, match=rf"^data.* {why}$"):
            opened("data", path)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("n" * 300, "must be the path of a .*: File name too long"),
        ("a/\ud800", "must be the path of a .*: it has characters that no name of a file has"),
        ("loop", "must be the path of a .*: Too many levels of symbolic links"),
    ],
)
def test_paths_that_no_system_call_takes(path, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    for use in (data.load, psgd.Checkpoints, RunFolder, read_model, psgd.data.text_sequences):
        with pytest.raises(UserError, match=why) as caught:
            use(path)
        assert "\n" not in str(caught.value)


def test_a_disk_that_fails_while_it_is_read():
    """As the memory of a process does where nothing is."""
    with pytest.raises(UserError, match=r"^data cannot be read: Input/output error$"):
        content_of("data", "/proc/self/mem")


def test_errors_that_are_the_users_to_mend():
    full = OSError(errno.ENOSPC, "No space left on device")
    assert user_message(full) == (
        "parallel-sgd: error: writing has failed: [Errno 28] No space left on device"
    )
    assert user_message(MemoryError("Unable to\nallocate")) == (
        "parallel-sgd: error: there is not enough memory: Unable to allocate"
    )
    assert user_message(OSError(errno.ECONNRESET, "reset")) is None
    assert user_message(BrokenPipeError(errno.EPIPE, "of a socket")) is None
    assert user_message(ZeroDivisionError()) is None


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyboardInterrupt(), 130, "parallel-sgd: interrupted\n"),
        (MemoryError(), 2, "parallel-sgd: error: there is not enough memory: MemoryError\n"),
    ],
)
def test_a_command_that_is_stopped_says_so_in_one_line(monkeypatch, capfd, error, code, line):
    def stopped(argv):
        raise error

    monkeypatch.setattr(info, "main", stopped)
    monkeypatch.setattr("parallel_sgd.command_line.main.discard_stdout", lambda: None)
    assert main(["info"]) == code
    assert capfd.readouterr().err == line
