"""Catch preemption signals, and keep them until the ranks have agreed to stop.

A batch system sends a notice before it takes a job's hosts away. `parallel-sgd run --preempt-on`
names the signals of such a notice; otherwise the program sets the environment variable itself.
Local.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType
from typing import Any

from ... import runtime
from ...errors import UserError
from ...validation import line_of, shown
from ..job_environment import PREEMPT_ON, REQUEUE
from .abort import print_labelled
from .rank_status import Status, report_status

SIGNALS = {name: getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2", "SIGTERM")}
"""Signals available for preemption, by name."""

#: Longest wait for Slurm's controller, in seconds.
_SLURM_S = 60.0

Handler = Callable[[int, FrameType | None], object]

_receivers: set[object] = set()
"""Handlers set by `listen`. Each calls the previous handler, so handlers may be chained."""

_received: list[signal.Signals] = []


def chosen_signals(text: str) -> list[signal.Signals]:
    """Parse the signals of an option or variable, such as "SIGUSR2" or "USR1,TERM".

    Raises:
        UserError: a name is not in `SIGNALS`.
    """
    names = [name.strip().upper() for name in text.split(",")]
    full = [name if name.startswith("SIG") else f"SIG{name}" for name in names]
    if not set(full) <= SIGNALS.keys():
        raise UserError(f"preempt_on={shown(text)} must be of {', '.join(SIGNALS)}")
    return list(dict.fromkeys(SIGNALS[name] for name in full))


def preempt_on(environ: Mapping[str, str] | None = None) -> list[signal.Signals]:
    """Return the preemption signals of this job.

    Raises:
        UserError: the environment names an invalid signal.
    """
    text = (os.environ if environ is None else environ).get(PREEMPT_ON)
    return chosen_signals(text) if text else []


def requeues(environ: Mapping[str, str] | None = None) -> bool:
    """Return True if the batch system shall start this job again after preemption."""
    return (os.environ if environ is None else environ).get(REQUEUE) == "1"


def listen() -> None:
    """Catch the preemption signals of this job from now on. Local.

    Previous handlers of the program are called, too. Does nothing outside the main thread. May be
    called again.

    Raises:
        UserError: the environment names an invalid signal.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in preempt_on():
        handler = signal.getsignal(number)
        if handler not in _receivers:
            signal.signal(number, _receiver(handler if callable(handler) else None))
            if number is signal.SIGTERM:  # multiprocessing ends its children by SIGTERM
                os.register_at_fork(after_in_child=partial(_restore_in_child, number, handler))


def _restore_in_child(number: signal.Signals, previous: Any) -> None:
    """Restore the previous handler in a forked child, which is no rank, unless replaced since."""
    if signal.getsignal(number) in _receivers:
        signal.signal(number, signal.SIG_DFL if previous is None else previous)


def preemption_requested() -> bool:
    """Return True if a preemption signal has arrived."""
    scheduler = runtime.scheduler()
    return bool(_received) if scheduler is None else scheduler.preempted()


def _receiver(previous: Handler | None) -> Handler:
    def receive(number: int, frame: FrameType | None) -> None:
        _received.append(signal.Signals(number))
        report_status(Status.PREEMPTION_REQUESTED)
        if previous is not None:
            previous(number, frame)

    _receivers.add(receive)
    return receive


def requeue() -> None:
    """Ask Slurm to start this batch job again after its ranks have ended."""
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        print_labelled("parallel-sgd: this is not a Slurm job, so it cannot be requeued")
        return
    try:
        answer = subprocess.run(
            ["scontrol", "requeue", job],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SLURM_S,
        )
        problem = None if answer.returncode == 0 else line_of(Exception(answer.stderr.strip()))
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = line_of(error)
    said = "is requeued" if problem is None else f"could not be requeued: {problem}"
    print_labelled(f"parallel-sgd: Slurm job {job} {said}")
