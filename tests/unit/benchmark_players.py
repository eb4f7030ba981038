"""Contenders of the benchmark of training, played, and what was timed of them."""

from __future__ import annotations

import inspect
import json
import shlex
from contextlib import contextmanager
from importlib import import_module

from benchmarks.__main__ import argument_parser
from benchmarks.training.step_times import StepTime


class Players:
    """Ranks that train at once, and are a turn themselves: `seconds` a step, losses as told."""

    def __init__(self, seconds, falls=True, same=True, test_loss=None):
        self.seconds, self.falls, self.same, self.loss = seconds, falls, same, test_loss
        self.counts, self.begun = [], []

    @contextmanager
    def training(self, name, task, lr, seed=None):
        self.name, self.lr, self.taken = name, lr, 0
        self.begun.append((name, task, lr, seed))
        yield self

    def steps(self, count):
        self.counts.append(count)
        losses = [3 / (1 + self.falls * t) for t in range(self.taken, self.taken + count)]
        self.taken += count
        return self.seconds[self.name] * count, losses

    def same_model(self):
        return self.same

    def test_loss(self):
        return self.loss(self.lr, self.taken)


def step_time(name, seconds, model="bytes", rate="1gbit"):
    """Of a contender, measured once."""
    return StepTime(model, rate, name, seconds, [seconds])


def require_fit(function, options):
    """Fail where a function on ranks does not take these options, as JSON."""
    module, _, name = function.partition(":")
    called = getattr(import_module(f"benchmarks.{module}"), name or "measure")
    inspect.signature(called).bind(None, **json.loads(json.dumps(options)))


def options_of(line):
    """Return the options of a command line after `python -m benchmarks`."""
    return argument_parser().parse_args(shlex.split(line))
