"""Load a checkpoint into a learner, on the same or on another number of ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from ...array_files import reading_errors
from ...communication import Communicator
from ...errors import SharedError, UserError
from ...plain_values import from_json
from ...state import Cause
from ...validation import checked_path, line_of, mapping, with_plain_paths
from ..consistency import LOAD
from ..learner import Learner, require_learner
from ..state.reshard import reshard, stripe_sizes
from ..state.state_tree import Tree, restore, room_for, unflatten
from . import files
from .compatibility import (
    compatibility_facts,
    default_options,
    require_equal,
    require_possible,
)
from .files import Damaged, Reader
from .pending_writes import wait_for_pending_writes

FREE = {"lr", "lr_per_sample", "hyperparameters"}
"""Options of the optimizer that may change on loading. `hyperparameters` are those of PyTorch's
optimizers: the checkpoint's are restored."""

FREE_OF_ALGORITHMS = {
    "servers",
    "role",
    "placement",
    "slice_parameters",
    "min_block",
    "record",
    "replay",
    "transport",
    "hierarchical",
    "overlap",
    "code",
    "threshold",
    "half_format",
}
"""Options of the algorithm that may change on loading: placement on servers, transport and format
of messages, recording. `gradient_bits` may change between few bits, since residuals are kept."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The content of a checkpoint apart from the learner's state.

    Attributes:
        path: path of the checkpoint.
        ranks: number of ranks that wrote the checkpoint.
        samples: samples seen by all ranks.
        extra: this rank's `extra`. On another number of ranks than wrote the checkpoint: the value
            common to all writers, or None if their values differed. Tensors are on their original
            device, or on the CPU if this process has no such device.
        extras: the `extra` of every writing rank, in rank order. Tensors are on the CPU.
    """

    path: Path
    ranks: int
    samples: int
    extra: Any
    extras: list[Any]


def load_checkpoint(
    learner: Learner,
    path: str | os.PathLike[str],
    *,
    facts: Mapping[str, Any] | None = None,
) -> LoadedCheckpoint:
    """Restore a learner from a checkpoint: training continues bit for bit as if never interrupted.

    On another number of ranks than wrote the checkpoint, training continues by the rules of
    `parallel_sgd.state`: models and optimizer states become their mean weighted by samples, sums of
    residuals are kept, and the samples of the present block are divided anew.

    Background writes of this process to the folder are completed first, so that the newest
    checkpoint is found.

    Args:
        learner: must have the same model, optimizer and algorithm, with the same options. The
            learning rate and the options of server placement may differ. Arrays are written in
            place.
        path: a checkpoint, or a folder of checkpoints or of a run, whose newest checkpoint is
            loaded.
        facts: as for `Checkpoints`.
    Raises:
        UserError: on all ranks, if the checkpoint is missing, damaged or different. The error names
            the difference. Then the learner has not changed, except if servers cannot read their
            embedding tables. Also if a background write to the folder has failed.

    Collective. A rank that only serves restores nothing.
    Cost: every rank reads its own files twice (once for the checksum), and holds their arrays in
    memory. On another number of ranks it reads the files of all ranks.
    """
    comm = require_learner(learner).comm
    if not learner.serves:
        learner.access.require_open()
        learner.access.require_own("load_checkpoint")
        with learner.consistency.during(LOAD, learner.comm):
            learner.runner.arrive()
            learner.group.meet()  # raises on a failed rank, instead of waiting below
    folder, given = comm.together(lambda: (checked_path("path", path), mapping("facts", facts)))
    comm.raise_together(wait_for_pending_writes(folder))
    at, manifest, single = _from_rank_0(comm, lambda: _open(folder))
    comm.raise_together(
        _difference(at, manifest, compatibility_facts(learner, given), default_options(learner))
    )
    if learner.serves:  # the workers send its shard
        return LoadedCheckpoint(at, manifest["ranks"], manifest["samples"], None, [])
    sizes = comm.allgather_object(stripe_sizes(learner))
    read, problem, damaged = None, None, False
    try:
        reader = Reader(at, manifest)
        if comm.rank == 0:
            reader.verify_shared()
            for component in learner.runner.external:
                component.check_files(str(at.resolve()))
        read = _read(learner, reader, manifest["ranks"], sizes)
    except UserError as error:
        problem, damaged = str(error), isinstance(error, Damaged)
    if any(comm.allgather_object(damaged)) and not single:
        hint = _from_rank_0(comm, lambda: _earlier_hint(at))
        problem = problem and problem + hint
    comm.raise_together(problem)
    assert read is not None
    tree, room, sent, documents = read
    extra, extras = comm.together(lambda: _extras(comm, at, manifest["ranks"], documents))
    restore(learner, tree, room)
    folder_of_all = str(at.resolve())

    def read_external() -> None:
        for component in learner.runner.external:
            component.read(folder_of_all)

    _from_rank_0(comm, read_external)
    learner.bytes_sent = sent
    learner.state_replaced(Cause.LOADED)
    return LoadedCheckpoint(
        path=at,
        ranks=manifest["ranks"],
        samples=manifest["samples"],
        extra=extra,
        extras=extras,
    )


def _extras(
    comm: Communicator, path: Path, ranks: int, documents: list[str]
) -> tuple[Any, list[Any]]:
    """Return this rank's `extra`, and those of all ranks that wrote the checkpoint.

    Args:
        ranks: number of ranks that wrote the checkpoint.
        documents: JSON documents of the ranks read here: this rank alone, or all ranks.

    Collective.
    """
    local = documents[0] if len(set(documents)) == 1 else "null"
    if ranks == comm.size:
        documents = comm.allgather_object(local)
    try:
        gathered = [from_json(json.loads(text), host=True) for text in documents]
        return from_json(json.loads(local)), gathered
    except UserError as error:
        raise Damaged(f"checkpoint {str(path)!r}: its extra {error}") from None


def folder_of(path: Path) -> Path:
    """Return the folder of checkpoints in a run's folder, or `path` itself. Local."""
    inside = path / files.CHECKPOINTS
    return inside if inside.is_dir() else path


def _open(path: Path) -> tuple[Path, dict[str, Any], bool]:
    """Find the checkpoint for `path`.

    Returns:
        The checkpoint, its manifest, and whether `path` named the checkpoint itself.
    """
    if not path.is_dir():
        raise UserError(f"checkpoint {str(path)!r} must be a folder: it does not exist")
    named = files.NAME.fullmatch(path.name) or path.name.endswith(".part")
    if named or (path / files.MANIFEST).exists():
        return path, files.read_manifest(path), True
    checkpoints = files.checkpoints_in(folder_of(path))
    if not checkpoints:
        raise UserError(f"{str(path)!r} contains no checkpoint")
    try:
        return checkpoints[-1], files.read_manifest(checkpoints[-1]), False
    except Damaged as error:
        raise UserError(f"{error}{_earlier_hint(checkpoints[-1])}") from error


def _earlier_hint(damaged: Path) -> str:
    """Name the newest whole checkpoint before a damaged one, as the end of an error text."""
    checkpoints = files.checkpoints_in(damaged.parent)
    for path in reversed(checkpoints[: checkpoints.index(damaged)]):
        try:
            files.require_whole(path)
        except UserError:
            continue
        return f"; an earlier checkpoint is whole and can be given instead: {str(path)!r}"
    return "; there is no whole checkpoint before it"


def _read(
    learner: Learner, reader: Reader, ranks: int, sizes: list[dict[str, int]]
) -> tuple[Tree, Tree, int, list[str]]:
    """Read and check this rank's part of a checkpoint, without changing the learner.

    Returns:
        This rank's tree, the room for the tree, the bytes sent by this rank, and the extras of the
        ranks read here, as documents of `plain_values`.
    """
    rank, size = learner.comm.rank, learner.comm.size
    writers = [rank] if ranks == size else list(range(ranks))
    numbers = [reader.numbers(writer) for writer in writers]
    for writer in writers:
        reader.verify(writer)
    arrays = {writer: reader.arrays(writer) for writer in writers}
    states, extras = [n["state"] for n in numbers], [json.dumps(n["extra"]) for n in numbers]
    sent = sum(n["bytes_sent"] for n in numbers)
    try:
        for writer, state in zip(writers, states, strict=True):
            require_equal(learner, state, arrays[writer])
        if ranks == size:
            whole = {name: array.whole() for name, array in arrays[rank].items()}
            tree = unflatten(states[0], whole)
        else:
            weights = [n["weight"] for n in numbers]
            tree = reshard(learner, states, weights, sizes, lambda k, name: arrays[k][name])
            sent = sent // size + (rank < sent % size)
        require_possible(learner, tree, ranks)
        room = room_for(learner, tree)
    except Damaged:
        raise
    except UserError as error:
        raise UserError(f"checkpoint {str(reader.path)!r}: {error}") from error
    except reading_errors() as error:
        raise UserError(
            f"checkpoint {str(reader.path)!r} cannot be read: {line_of(error)}"
        ) from error
    return tree, room, sent, extras


def _difference(
    path: Path,
    manifest: Mapping[str, Any],
    wanted: Mapping[str, Any],
    defaults: Mapping[str, Mapping[str, str]],
) -> str | None:
    """Describe the first difference between a checkpoint and this learner in one line, or return
    None.

    Args:
        defaults: of options that the checkpoint may lack.
    """
    start = f"checkpoint {str(path)!r} is of another"
    for what in ("layout", "dtype"):
        if list(_items(manifest[what])) != list(_items(wanted[what])):
            return f"{start} model: {_first_difference(manifest[what], wanted[what])}"
    for what in ("algorithm", "optimizer"):
        saved, local = manifest[what], wanted[what]
        if saved["name"] != local["name"]:
            return f"{start} {what}: {saved['name']}, not {local['name']}"
        free = FREE if what == "optimizer" else FREE_OF_ALGORITHMS
        for name in dict.fromkeys([*saved["options"], *local["options"]]):
            unknown = defaults[what].get(name, "nothing")
            values = [chosen["options"].get(name, unknown) for chosen in (saved, local)]
            if name == "gradient_bits" and {"nothing", "32", "'auto'"}.isdisjoint(values):
                continue
            if name not in free and values[0] != values[1]:
                return f"{start} {what}: it was {name}={values[0]}, and is {values[1]}"
    for name in wanted["facts"]:
        values = [known["facts"].get(name, "nothing") for known in (manifest, wanted)]
        if values[0] != values[1]:
            was, is_now = map(with_plain_paths, values)
            return f"{start} run: its {name} was {was}, and is {is_now}"
    return None


def _items(value: Any) -> Any:
    return value.items() if isinstance(value, dict) else [value]


def _first_difference(saved: Any, local: Any) -> str:
    if not isinstance(saved, dict):
        return f"its parameters were {saved}, and are {local}"
    for name in [*saved, *local]:
        if saved.get(name) != local.get(name):
            shapes = [layout.get(name, "missing") for layout in (saved, local)]
            return f"its parameter {name} was {shapes[0]}, and is {shapes[1]}"
    return "its parameters were in another order"


def _from_rank_0(comm: Communicator, work: Callable[[], Result]) -> Result:
    """Run `work` on rank 0, and return its result on all ranks. An error is raised on all ranks."""
    result, problem = None, None
    if comm.rank == 0:
        try:
            result = work()
        except UserError as error:
            problem = str(error)
    result, problem = comm.allgather_object((result, problem))[0]
    if problem:
        raise SharedError(problem)
    return cast(Result, result)
