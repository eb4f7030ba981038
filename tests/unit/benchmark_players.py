"""Both sides of the benchmark of training, played, and what was timed of them."""

from __future__ import annotations

import shlex

from benchmarks.__main__ import argument_parser
from benchmarks.training.step_times import StepTime

GBIT = 1e9


class Players:
    """A conductor whose ranks answer at once: `seconds` a step, and losses and digests as told."""

    def __init__(self, seconds, falls=True, digests=(7, 7), test_loss=None):
        self.connections = {"ours": [0, 1], "peer": [0, 1]}
        self.seconds, self.falls, self.digests = seconds, falls, digests
        self.test_loss, self.taken, self.counts, self.begun = test_loss, 0, [], []
        self.tasks = []

    def all(self, side, command, **options):
        if command == "begin":
            self.name, self.taken = options["contender"], 0
            self.lr = options["lr"]
            self.tasks.append(options["task"])
            self.begun.append((self.name, self.lr, options.get("seed")))
        if command != "steps":
            return [{}, {}]
        count = options["count"]
        self.counts.append(count)
        losses = [3 / (1 + self.falls * t) for t in range(self.taken, self.taken + count)]
        self.taken += count
        seconds = self.seconds[self.name] * count
        return [
            {"seconds": s, "losses": losses, "digest": d}
            for s, d in zip((0.5 * seconds, seconds), self.digests, strict=True)
        ]

    def first(self, side, command, **options):
        assert command == "evaluate"
        return {"loss": self.test_loss(self.lr, self.taken)}


def step_time(name, seconds):
    """Of a contender on the language model, measured once."""
    return StepTime("bytes", GBIT, name, seconds, [seconds], 8, 256 / seconds, (2.7, 1.0))


def options_of(line):
    """Return the options of a command line after `python -m benchmarks`."""
    return argument_parser().parse_args(shlex.split(line))
