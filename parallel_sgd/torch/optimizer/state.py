"""The state of a PyTorch optimizer as vectors and documents, for checkpoints."""

from __future__ import annotations

import copy
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, compress, islice
from operator import is_
from typing import Any

import numpy as np
import torch

from ...communication import Communicator
from ...errors import UserError
from ...local_step import OptimizerState
from ...second_moment import require_correction
from ...state import across, workspace
from ...validation import shown
from ..arrays import checksum_of
from ..module import FlatModule
from .comparable import comparable
from .document import Reader, Writer, program_values
from .entries import Entries
from .state_dict import StateDicts, is_tensor, refill
from .tags import ATOMIC, PartOfVector, mapped
from .vectors import OptimizerVectors

Array = Any  #: a NumPy or CuPy array


@dataclass
class TorchOptimizerState(OptimizerState):
    """The state of a PyTorch optimizer: the contents of its ``state_dict()``.

    Tensors of a parameter's shape and dtype are concatenated in vectors [n] of the parameters'
    layout, so a momentum can be averaged, or saved, like any vector. The rest is read from
    ``state_dict()`` on demand, and restored through ``load_state_dict()``.

    Attributes:
        values: further floating-point tensors.
        contents: the bytes of the remaining tensors.
        entries: by parameter, the document of its state: see `torch.optimizer.document`.
        document: of the rest of the ``state_dict()``, including the parameter groups.
        optimizer, module: the live objects behind this state.
        vectors: keeps tensors of the state in `buffers`.
        state_dicts: reads and loads the optimizer's ``state_dict()``.
        known: the latest documents of the parameters' states.
        initial: the initial state, as returned by `copied`.
        own: values set by the program in parameter groups that no checkpoint can hold.
        changed: for each parameter group, the keys that the optimizer itself changes in a step,
            such as a counter. Changes of the remaining keys are due to a scheduler or the program.

    Made by `of`. Memory: the optimizer's own state; twice that while its first step is adopted.
    """

    buffers: dict[str, Array] = across("mean", open=True, default_factory=dict)
    values: dict[str, Array] = across("mean", open=True, default_factory=dict)
    contents: dict[str, Array] = across("same", open=True, default_factory=dict)
    entries: dict[str, str] = across("same", open=True, default_factory=dict)
    document: str = across("same", default="{}")
    optimizer: Any = workspace(default=None)
    module: FlatModule = workspace(default=None)
    vectors: OptimizerVectors = workspace(default=None)
    state_dicts: StateDicts = workspace(default=None)
    known: Entries = workspace(default=None)
    initial: Any = workspace(default=None)
    own: dict[Any, str] = workspace(default_factory=dict)
    changed: list[set[Any]] = workspace(default_factory=list)

    @classmethod
    def of(cls, optimizer: Any, module: FlatModule) -> TorchOptimizerState:
        """Return the present state of an optimizer, possibly from earlier training. Local."""
        state = cls(optimizer=optimizer, module=module)
        state.vectors = OptimizerVectors(optimizer, module, state.buffers)
        state.state_dicts = StateDicts(optimizer, module, state.vectors)
        state.own = program_values(optimizer.state_dict())
        names = {p: name for name, p in module.tensors.items()}
        state.known = Entries(lambda: Writer(state.vectors.part_of, names, state.own))
        state.vectors.move()
        state.initial = state.copied({})
        return state

    def adopt(self) -> None:
        """Move tensors into the vectors if a step has made new tensors. Local."""
        self.vectors.update()

    def align(self, comm: Communicator) -> None:
        """Make the state complete on all ranks: see `OptimizerState.align`. Collective.

        PyTorch creates a parameter's state in its first step. A rank without a parameter's state
        takes over another rank's state, with zeros in the vectors.
        """
        self.vectors.move()
        gathered = comm.allgather_object(([*self.buffers], self._begun()))
        names = sorted({name for names, _ in gathered for name in names})
        self.vectors.require(names)
        begun = np.array([has_state for _, has_state in gathered])
        if (begun != begun[0]).any():
            self._complete(comm, begun)
        ordered = {name: self.buffers[name] for name in names}
        self.buffers.clear()
        self.buffers.update(ordered)

    def _begun(self) -> list[bool]:
        """Return, for each parameter, whether it has a state."""
        states = [owner.state.items() for owner in self.vectors.owners]
        begun = {id(p) for p, p_state in chain(*states) if isinstance(p_state, dict) and p_state}
        return [id(p) in begun for p in self.module.tensors.values()]

    def _complete(self, comm: Communicator, begun: Array) -> None:
        """Copy each missing state of a parameter from the first rank with that state. If this rank
        has no state at all, also copy the rest of that rank's optimizer state. Collective.

        Args:
            comm: the ranks.
            begun: bool [ranks, parameters]: whether the rank has a state for the parameter.
        Raises:
            UserError: on all ranks: a state has a type that no checkpoint can hold, or the
                optimizer rejects the state.
        """
        if not self.state_dicts.names_by_number(
            self.optimizer.state_dict()
        ):  # all state in one object
            begun = begun | begun.any(axis=1, keepdims=True)
            if begun.all():
                return
        comm.together(self.wait)
        first, some = begun.argmax(axis=0), begun.any(axis=0)
        gives = comm.rank in first[some & ~begun.all(axis=0)]
        own = {name: getattr(self, name) for name in ("values", "contents", "entries", "document")}
        gathered = comm.allgather_object(own if gives else None)
        lacking = some & ~begun[comm.rank]

        def add() -> None:
            for giver in np.unique(first[lacking]).tolist():
                names = {*compress(self.module.tensors, lacking & (first == giver))}
                try:
                    self._add(gathered[giver], names)
                except UserError as error:
                    raise UserError(f"rank {comm.world_ranks[giver]} {error}") from error

        comm.together(add)

    def _add(self, saved: Mapping[str, Any], names: Collection[str]) -> None:
        """Add another rank's states of these parameters; its whole state if this rank has none."""
        entries = {name: text for name, text in saved["entries"].items() if name in names}
        state_dict = self._read({**saved, "entries": entries}, self.vectors.part)
        if any(self._begun()):
            present, state = self.optimizer.state_dict(), state_dict["state"]
            numbers = self.state_dicts.names_by_number(present)
            state = {n: state[n] for n, name in numbers.items() if name in entries}
            state_dict = {**present, "state": {**present["state"], **state}}
        self.state_dicts.load(state_dict, keep_dtypes=True)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Record changes of parameter groups by the optimizer's step in a `with` block."""
        groups = self.state_dicts.groups()
        sizes, before = [*map(len, groups)], [*_values_of(groups)]
        yield
        if sizes == [*map(len, groups)] and all(map(is_, before, _values_of(groups))):
            return
        values = iter(before)
        self.changed += [set() for _ in groups[len(self.changed) :]]
        for group, size, changed in zip(groups, sizes, self.changed, strict=False):
            had = [*islice(values, size)]
            changed.update(
                key
                for number, (key, value) in enumerate(group.items())
                if number >= size or value is not had[number]
            )

    def reset(self) -> None:
        """Restore the state before the first step, except for the clock. Local."""
        kept = {name: vector for name, vector in self.buffers.items() if name not in self._first}
        self.restore(self.initial)
        for vector in kept.values():
            vector.fill(0)
        self.buffers.update(kept)

    @property
    def _first(self) -> Mapping[str, Array]:
        vectors: Mapping[str, Array] = self.initial["buffers"]
        return vectors

    def wait(self) -> None:
        """Update everything but the vectors from PyTorch's state.

        Raises:
            UserError: part of the state has a type that no checkpoint can hold.
        """
        self.vectors.update()
        packed, what = self.optimizer.state_dict(), f"{type(self.optimizer).__name__}.state_dict()"
        names, states = self.state_dicts.names_by_number(packed), dict[str, Any]()
        if names:
            state = packed["state"]
            states = {
                names[number]: p_state for number, p_state in state.items() if number in names
            }
            rest = {key: part for key, part in state.items() if key not in names}
            packed = {**packed, "state": rest}
        entries, writer = self.known.written(what, states)
        self.document = writer.document(what, packed)
        self.entries, self.values, self.contents = entries, writer.values, writer.contents

    def copied(self, room: Mapping[str, Any]) -> dict[str, Any]:
        self.vectors.update()
        ids = {*map(id, self.module.module.parameters())}

        def leaf(value: Any, path: Any) -> Any:
            if type(value) in ATOMIC:
                return value
            if isinstance(value, torch.Tensor):
                if id(value) in ids:
                    return value
                part = self.vectors.part_of(value)
                return PartOfVector(*part) if part else value.detach().clone()
            return _copy_of(value, path)

        state_dict = mapped(self.optimizer.state_dict(), leaf)
        groups = self._group_values()
        return super().copied(room) | {"state_dict": state_dict, "groups": groups}

    def restore(self, copied: Mapping[str, Any]) -> None:
        self._restore(copied, self._changed_by_steps)

    def _restore(self, copied: Mapping[str, Any], restores: Any) -> None:
        """Restore a copy made by `copied`.

        Args:
            copied: the copy.
            restores: maps a group's number, a key and its value to whether the value is restored,
                too. Rates set by schedulers stay.
        """
        for name in self.buffers.keys() - copied["buffers"].keys():
            del self.buffers[name]
        self.vectors.require(copied["buffers"])
        super().restore(copied)
        ids = {*map(id, self.module.module.parameters())}

        def leaf(value: Any, path: Any) -> Any:
            if isinstance(value, PartOfVector):
                return self.vectors.part(value.vector, value.parameter)
            if isinstance(value, torch.Tensor):
                return value if id(value) in ids else value.clone()
            return _copy_of(value, path)

        present = self._group_values()
        self.state_dicts.load(mapped(copied["state_dict"], leaf), keep_dtypes=True)
        for number, group in enumerate(self.state_dicts.groups()):
            back = copied["groups"][number]
            values = {k: v for k, v in present[number].items() if not restores(number, k, v)}
            values |= {k: v for k, v in back.items() if restores(number, k, v)}
            refill(group, {k: v.clone() if is_tensor(v) else v for k, v in values.items()})

    def _changed_by_steps(self, number: int, key: Any, value: Any) -> bool:
        changed = number < len(self.changed) and key in self.changed[number]
        return changed or (is_tensor(value) and key != "lr")

    def _group_values(self) -> list[dict[str, Any]]:
        """Return the values of each parameter group, with copies of tensors."""
        return [
            {k: v.detach().clone() if is_tensor(v) else v for k, v in group.items()}
            for group in self.state_dicts.groups()
        ]

    def check(self, saved: Mapping[str, Any], ranks: int) -> None:
        x, names = self.module.parameters.flat, self.module.tensors
        kinds = {
            "buffers": np.ndarray,
            "values": np.ndarray,
            "contents": np.ndarray,
            "entries": str,
        }
        for field, kind in kinds.items():
            for key, value in saved[field].items():
                if not isinstance(value, kind):
                    raise UserError(f"has another kind of value for optimizer.{field}.{key}")
        for key, vector in saved["buffers"].items():
            if vector.shape != x.shape or vector.dtype != x.dtype:
                raise UserError(
                    f"has optimizer.buffers.{key} of {vector.dtype} {list(vector.shape)}, not "
                    f"{x.dtype} {list(x.shape)}"
                )

        require_correction(saved["correction"], x)

        def part(vector: str, parameter: str) -> torch.Tensor:
            if vector not in saved["buffers"]:
                raise KeyError(vector)
            p = names[parameter]
            return torch.zeros_like(p, requires_grad=False)  # the optimizer may change this tensor

        try:
            packed = self._read(saved, part)
            self.state_dicts.require_equal(packed)
        except UserError as error:
            raise UserError(f"has a state of the optimizer that {error}") from None
        kept = self.copied({})
        try:  # only the optimizer can check its own state
            self.state_dicts.call_load_state_dict(packed)
        finally:
            self._restore(kept, lambda *_: True)

    def restored(self) -> None:
        """Load a checkpoint's state into PyTorch's optimizer."""
        fields = {name: getattr(self, name) for name in ("values", "contents", "entries")}
        saved = {"document": self.document, **fields}
        self.state_dicts.load(self._read(saved, self.vectors.part), keep_dtypes=False)

    def _read(self, saved: Mapping[str, Any], part: Any) -> Any:
        """Return the ``state_dict()`` of a checkpoint.

        Raises:
            UserError: the checkpoint differs from the form written by `wait`, or is for another
                optimizer.
        """
        present = self.optimizer.state_dict()
        values, contents = saved["values"], saved["contents"]
        reader = Reader(part, values, contents, self.module.tensors, present, self.own)
        packed = reader.value(saved["document"])
        if not saved["entries"]:
            return packed
        own = self.state_dicts.names_by_number(present)
        fits = own and isinstance(packed, dict) and isinstance(packed.get("state"), dict)
        numbers = {
            name: number for number, name in self.state_dicts.names_by_number(packed).items()
        }
        if not fits or not numbers:
            raise UserError("has other parameter groups than this optimizer")
        state = {}
        for name, document in saved["entries"].items():
            if name not in numbers:
                raise UserError(
                    f"is of a parameter {shown(name)}, which this optimizer does not have"
                )
            state[numbers[name]] = reader.value(document)
        return {**packed, "state": state | packed["state"]}


def _values_of(groups: Sequence[dict[str, Any]]) -> Iterator[Any]:
    return chain.from_iterable(map(dict.values, groups))


def _copy_of(value: Any, path: Any) -> Any:
    """Return a copy of a non-tensor in a ``state_dict()``. The program's values in a group are not
    copied; a defaultdict is already a copy.
    """
    same = "param_groups" in path or isinstance(value, defaultdict)
    return value if same else copy.deepcopy(value)


def state_fingerprint(optimizer: Any) -> dict[str, str]:
    """Return a fingerprint of a PyTorch optimizer's earlier training, for comparison between ranks.
    Empty for an optimizer of `parallel_sgd`, since it starts afresh. Local.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        return {}
    state_dict, checksum = optimizer.state_dict(), 0
    rest = {key: value for key, value in state_dict.items() if key != "param_groups"}

    def add(value: Any, path: Any) -> Any:
        nonlocal checksum
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            checksum = checksum_of(value, zlib.crc32(repr(path[1:]).encode(), checksum))
        elif "param_groups" not in path:
            checksum = zlib.crc32(f"{path} {comparable(value)}".encode(), checksum)
        return value

    mapped(rest, add)
    state = state_dict.get("state")
    known = sum(map(bool, state.values())) if isinstance(state, dict) else 0
    kept = f"of {known} parameters, with checksum {checksum:08x}" if checksum else "none"
    return {"state of the optimizer": kept}
