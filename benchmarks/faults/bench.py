"""The hosts, and the undisturbed runs, that all disturbed runs share."""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from parallel_sgd.command_line.cluster import EmulatedHosts, emulated_hosts

from .child import Settings
from .families import FAMILIES
from .outcome import Outcome, Reference
from .runs import RATE, Run
from .scenarios import Scenario

UNDISTURBED = 5  #: runs of a family that does not repeat, whose losses are averaged


class Bench:
    """The hosts and undisturbed runs of all disturbed runs. A `with` block.

    Args:
        folder: for all runs; `keep` leaves failed runs there.
        ranks: in training and serving, spares apart.
        seed: of all moments and victims.
        settings: of the child program, but for the settings of a run.
    """

    def __init__(
        self, folder: Path, *, ranks: int, seed: int, keep: bool, settings: Settings
    ) -> None:
        self.folder, self.ranks, self.seed, self.keep = folder, ranks, seed, keep
        self.settings = settings
        self._references: dict[tuple[object, ...], Reference] = {}
        self._hosts: EmulatedHosts | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def hosts(self) -> EmulatedHosts:
        """Return a host for each rank and a spare host; made once."""
        if self._hosts is None:
            self._hosts = self._stack.enter_context(emulated_hosts(self.ranks + 1, RATE))
        return self._hosts

    def reference(self, name: str, scenario: Scenario) -> Reference:
        """Return the result of undisturbed jobs, run once for all."""
        key = name, scenario.hosts, scenario.saves
        if key not in self._references:
            calm = replace(scenario, options=(), spares=0, timeout_s=300.0)
            times = 1 if FAMILIES[name].repeats else UNDISTURBED
            calmly = [self._undisturbed(calm, name) for _ in range(times)]
            loss = statistics.fmean(reference.loss for reference in calmly)
            self._references[key] = replace(calmly[0], loss=loss)
        return self._references[key]

    def _undisturbed(self, scenario: Scenario, name: str) -> Reference:
        run = Run(self, scenario, name, None, 0)
        try:
            return run.undisturbed()
        finally:
            run.remove()

    def disturbed(self, scenario: Scenario, key: str, name: str, number: int) -> Outcome:
        """Carry out run `number` of a scenario."""
        reference = self.reference(name, scenario)
        run = Run(self, scenario, name, reference, number, key)
        try:
            outcome = run.disturbed()
        finally:
            run.clear()
        if not (self.keep and outcome.bad):
            run.remove()
        return outcome
