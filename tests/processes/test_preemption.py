"""Signals that ask a rank to leave, and the requeue of its job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from parallel_sgd.communication import requeue

LISTENS = """
import os, signal, sys
from parallel_sgd.communication import listen, preemption_requested
os.environ["PARALLEL_SGD_PREEMPT_ON"] = "SIGUSR2,SIGTERM"
signal.signal(signal.SIGTERM, lambda number, frame: print("mine", flush=True))
listen()
before = signal.getsignal(signal.SIGTERM)

def calls_the_one_before(number, frame):
    print("latest", flush=True)
    before(number, frame)

signal.signal(signal.SIGTERM, calls_the_one_before)
listen()
listen()
assert not preemption_requested()
os.kill(os.getpid(), getattr(signal, sys.argv[1]))
assert preemption_requested()
"""


@pytest.mark.parametrize(("name", "said"), [("SIGTERM", "latest\nmine\n"), ("SIGUSR2", "")])
def test_a_handler_of_the_programs_own_is_called_too(name, said):
    command = [sys.executable, "-c", LISTENS, name]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout == said


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ('echo "$@" > asked', "Slurm job 5 is requeued"),
        ("echo no such job >&2; exit 1", "Slurm job 5 could not be requeued: no such job"),
        (None, "Slurm job 5 could not be requeued: [Errno 2]"),
    ],
)
def test_slurm_is_asked_to_requeue(tmp_path, monkeypatch, capsys, script, said):
    monkeypatch.chdir(tmp_path)
    if script is not None:
        Path("scontrol").write_text(f"#!/bin/sh\n{script}\n")
        Path("scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) if script is None else f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    requeue()
    assert said in capsys.readouterr().err
    assert script != 'echo "$@" > asked' or Path("asked").read_text() == "requeue 5\n"
