"""A signal that asks this rank to leave: caught, and kept until the ranks have agreed to.

A batch system gives notice before it takes a job's hosts away. `parallel-sgd run --preempt-on`
names the signals of such a notice; a program that is started otherwise sets the variable itself.
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

from ...errors import UserError
from ...validation import line_of, shown
from ..job_environment import PREEMPT_ON, REQUEUE
from .abort import print_labelled
from .rank_status import report_preemption_request

SIGNALS = {name: getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2", "SIGTERM")}
"""Those that may be chosen."""

#: How long Slurm's controller may take to answer.
_SLURM_S = 60.0

Handler = Callable[[int, FrameType | None], object]

_receivers: set[object] = set()
"""The handlers that `listen` has set: each calls the one that was there, so they may follow one
another."""

_received: list[signal.Signals] = []


def chosen_signals(text: str) -> list[signal.Signals]:
    """The signals of an option's or a variable's value, such as "SIGUSR2" or "USR1,TERM".

    Raises:
        UserError: one is none of `SIGNALS`.
    """
    names = [name.strip().upper() for name in text.split(",")]
    full = [name if name.startswith("SIG") else f"SIG{name}" for name in names]
    if not set(full) <= SIGNALS.keys():
        raise UserError(f"preempt_on={shown(text)} must be of {', '.join(SIGNALS)}")
    return list(dict.fromkeys(SIGNALS[name] for name in full))


def preempt_on(environ: Mapping[str, str] | None = None) -> list[signal.Signals]:
    """The signals on which this job is to leave; raises a UserError where they are none."""
    text = (os.environ if environ is None else environ).get(PREEMPT_ON)
    return chosen_signals(text) if text else []


def requeues(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the batch system shall start this job again when it has left."""
    return (os.environ if environ is None else environ).get(REQUEUE) == "1"


def listen() -> None:
    """Catch, from now on, the signals on which this job is to leave. What the program has set for
    them is called, too. For the main thread; elsewhere it does nothing. To call it again does no
    harm.

    Raises:
        UserError: the environment names no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in preempt_on():
        handler = signal.getsignal(number)
        if handler not in _receivers:
            signal.signal(number, _receiver(handler if callable(handler) else None))
            if number is signal.SIGTERM:  # by which multiprocessing ends its children
                os.register_at_fork(after_in_child=partial(_hear_no_more, number, handler))


def _hear_no_more(number: signal.Signals, before: Any) -> None:
    """A child is no rank: the signal does there what it did before, unless it has a new handler."""
    if signal.getsignal(number) in _receivers:
        signal.signal(number, signal.SIG_DFL if before is None else before)


def preemption_requested() -> bool:
    """Whether one has come."""
    return bool(_received)


def _receiver(before: Handler | None) -> Handler:
    def receive(number: int, frame: FrameType | None) -> None:
        _received.append(signal.Signals(number))
        report_preemption_request()
        if before is not None:
            before(number, frame)

    _receivers.add(receive)
    return receive


def requeue() -> None:
    """Have Slurm start this batch job again, once its ranks have left."""
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        print_labelled("parallel-sgd: this is no job of Slurm's: nobody is asked to requeue it")
        return
    try:
        asked = subprocess.run(
            ["scontrol", "requeue", job],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SLURM_S,
        )
        problem = None if asked.returncode == 0 else line_of(Exception(asked.stderr.strip()))
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = line_of(error)
    said = "is requeued" if problem is None else f"could not be requeued: {problem}"
    print_labelled(f"parallel-sgd: job {job} of Slurm {said}")
