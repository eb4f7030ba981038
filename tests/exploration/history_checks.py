"""Checks of histories: the state after each operation is that of its lineage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from histories import Seen, Step, run
from learner_history import Fail, Job, Lineage, Load, Saved

import parallel_sgd as psgd
from parallel_sgd.communication import Communicator
from parallel_sgd.training.checkpoint.files import checkpoints_in, require_whole, sort_key


class Expectations:
    """The states of lineages, each by a program that does nothing but its steps.

    Args:
        references: folder of copies of checkpoints that have been loaded.
    """

    def __init__(self, references: Path) -> None:
        self._references = references
        self._known: dict[Any, list[Seen]] = {}

    def of(self, lineage: Lineage) -> list[Seen]:
        """Return what each rank sees in a state."""
        key = lineage.loaded, lineage.ranks, lineage.setting, lineage.steps
        if key not in self._known:
            self._run(lineage)
        return self._known[key]

    def _run(self, lineage: Lineage) -> None:
        def program(comm: Communicator) -> list[Seen]:
            with lineage.setting.learner(comm) as learner:
                if lineage.loaded is not None:
                    psgd.load_checkpoint(learner, self._references / str(lineage.loaded))
                seen = [Seen.of(learner)]
                for step in lineage.steps:
                    if isinstance(step, Step):
                        step.take(learner)
                    else:
                        learner.finish()
                    seen.append(Seen.of(learner))
                return seen

        results, _ = run(lineage.ranks, program)
        for number, states in enumerate(zip(*results, strict=True)):
            self._known[lineage.loaded, lineage.ranks, lineage.setting, lineage.steps[:number]] = [
                *states
            ]


def check_job(job: Job, results: list[list[Any]], expected: Expectations) -> None:
    """Check what the ranks of a job have seen.

    Args:
        results: of each rank, at the start and after each operation. After `Fail`: the error, and
            the own model.
    """
    before: list[Seen] = []
    for number, states in enumerate(zip(*results, strict=True)):
        operation = job.operations[number - 1] if number else "the start"
        if isinstance(operation, Fail):
            check_failure(job, operation, before, states)
            return
        where = f"{job.setting}, {job.ranks} ranks, after {operation}"
        assert len({state.shared for state in states}) == 1, f"{where}: common models differ"
        if isinstance(operation, Load) and not operation.refused:
            check_loaded(expected.of(operation.saved.lineage), states, where)
        if isinstance(operation, Step) and operation.is_bad and job.setting.replicated:
            same = [b.own == state.own for b, state in zip(before, states, strict=True)]
            assert all(same), f"{where}: a skipped minibatch has changed the model"
        for rank, (state, right) in enumerate(
            zip(states, expected.of(job.lineages[number]), strict=True)
        ):
            difference = state.difference(right, job.setting.dtype)
            assert not difference, f"{where}: rank {rank}'s {difference}"
        before = [*states]


def check_loaded(saved: list[Seen], states: Sequence[Seen], where: str) -> None:
    """Check what the ranks see after a checkpoint was loaded, beside what was seen at its save."""
    assert saved[0].shared == states[0].shared, f"{where}: the common model is another"
    assert {state.clock for state in states} == {saved[0].clock}, f"{where}: another clock"
    sent = [sum(state.sent for state in those) for those in (saved, states)]
    assert sent[0] == sent[1], f"{where}: {sent[1]} bytes are sent, not {sent[0]}"


def check_failure(job: Job, fail: Fail, before: Sequence[Seen], ends: Sequence[Any]) -> None:
    """Check what the ranks have after the failure of one: the same error, and whole models."""
    where = f"{job.setting}, after {fail}"
    texts = [text for text, _ in ends]
    assert len(set(texts)) == 1, f"{where}: the ranks raise different errors: {texts}"
    part = "label 12" if fail.step is None else "not finite"
    assert part in texts[0] and "\n" not in texts[0], f"{where}: {texts[0]}"
    assert job.ranks == 1 or str(fail.rank) in texts[0], f"{where}: no rank in {texts[0]}"
    if "overlap_samples" in job.setting.options:  # a merge may come first
        return
    for rank, ((_, own), state) in enumerate(zip(ends, before, strict=True)):
        assert own in (state.own, state.shared), f"{where}: rank {rank}'s model is another"


def check_folder(folder: Path, saved: dict[int, Saved]) -> None:
    """Check that a folder holds these checkpoints, whole, and nothing else."""
    found = Counter(sort_key(path.name)[0] for path in checkpoints_in(folder))
    assert found == Counter(saved.keys()), f"checkpoints of {sorted(found)}, not {sorted(saved)}"
    for path in checkpoints_in(folder):
        require_whole(path)
    rest = {path.name for path in folder.glob("*")} - {p.name for p in checkpoints_in(folder)}
    assert not rest, f"{rest} are left in the folder"
