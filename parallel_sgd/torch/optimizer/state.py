"""The state of PyTorch optimizers as vectors and documents, for checkpoints."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, chain, compress, islice
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
from ..module import FlatModule
from .document import Reader, Writer, joined, parsed_text, parts_of
from .entries import Entries
from .state_dict import StateDict, is_tensor, refill
from .tags import ATOMIC, PartOfVector, mapped
from .vectors import OptimizerVectors, groups_of

Array = Any  #: a NumPy or CuPy array


@dataclass
class TorchOptimizerState(OptimizerState):
    """The state of PyTorch optimizers: the contents of their ``state_dict()``.

    Tensors of a parameter's shape and dtype are concatenated in vectors [n] of the parameters'
    layout, so a momentum can be averaged, or saved, like any vector. The rest is read from
    ``state_dict()`` on demand, and restored through ``load_state_dict()``.

    Attributes:
        values: further floating-point tensors.
        contents: the bytes of the remaining tensors.
        entries: by parameter, the document of its state: see `torch.optimizer.document`.
        document: of the rest of each ``state_dict()``, including the parameter groups.
        optimizers, module: the live objects behind this state.
        vectors: keeps tensors of the state in `buffers`.
        state_dicts: of each optimizer.
        known: the latest documents of the parameters' states.
        initial: the state before the first step, as returned by `copied`.
        changed: for each parameter group, the keys that the optimizer itself changes in a step,
            such as a counter. Changes of the remaining keys are due to a scheduler or the program.

    Made by `of`. Memory: for each key with tensors of a parameter's shape, a vector with a value
    for every value of every parameter; further state as in PyTorch. Twice that while a first step
    is adopted.
    """

    buffers: dict[str, Array] = across("mean", open=True, default_factory=dict)
    values: dict[str, Array] = across("mean", open=True, default_factory=dict)
    contents: dict[str, Array] = across("same", open=True, default_factory=dict)
    entries: dict[str, str] = across("same", open=True, default_factory=dict)
    document: str = across("same", default="{}")
    optimizers: Sequence[Any] = workspace(default=())
    module: FlatModule = workspace(default=None)
    vectors: OptimizerVectors = workspace(default=None)
    state_dicts: Sequence[StateDict] = workspace(default=())
    known: Entries = workspace(default=None)
    initial: Any = workspace(default=None)
    changed: list[set[Any]] = workspace(default_factory=list)

    @classmethod
    def of(cls, optimizers: Sequence[Any], module: FlatModule) -> TorchOptimizerState:
        """Return the present state of optimizers, possibly from earlier training. Local."""
        state = cls(optimizers=optimizers, module=module)
        state.vectors = OptimizerVectors(optimizers, module, state.buffers)
        sizes = [sum(len(group["params"]) for group in one.param_groups) for one in optimizers]
        state.state_dicts = [
            StateDict(one, module.names, first)
            for one, first in zip(optimizers, accumulate(sizes, initial=0), strict=False)
        ]
        trained = {p: name for name, p in module.tensors.items()}
        state.known = Entries(lambda: Writer(state.vectors.part_of, trained))
        state.vectors.move()
        state.initial = state._before_steps()
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
        """Copy each missing state of a parameter from the first rank with that state. If an
        optimizer has no state at all here, also copy the rest of its state. Collective.

        Args:
            comm: the ranks.
            begun: bool [ranks, parameters]: whether the rank has a state for the parameter.
        Raises:
            UserError: on all ranks: a state has a type that no checkpoint can hold, or an
                optimizer rejects the state.
        """
        begun = begun.copy()
        for one in self.state_dicts:
            if one.has_own_form:  # all its state in one object
                held = [name in one.parameters for name in self.module.tensors]
                begun[:, held] = begun[:, held].any(axis=1, keepdims=True)
        if (begun == begun[0]).all():
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
        """Add another rank's states of these parameters. An optimizer of some of them that has no
        state here gets its whole state.
        """
        entries = {name: text for name, text in saved["entries"].items() if name in names}
        read = self._read({**saved, "entries": entries}, self.vectors.part)
        begun = {*compress(self.module.tensors, self._begun())}
        for one, state_dict in zip(self.state_dicts, read, strict=True):
            if not one.parameters.isdisjoint(names):
                some = not one.parameters.isdisjoint(begun)
                one.load(one.extended(state_dict, names) if some else state_dict, keep_dtypes=True)
        self.vectors.move()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Record changes of parameter groups by the optimizer's step in a `with` block."""
        groups = self._groups()
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

    def _groups(self) -> list[dict[str, Any]]:
        """Return the dictionaries of all parameter groups, including those of nested optimizers."""
        return groups_of(self.vectors.optimizers)

    def reset(self) -> None:
        """Restore the state before the first step, except for the clock. Local."""
        kept = {name: vector for name, vector in self.buffers.items() if name not in self._first}
        self.restore(self.initial)
        for vector in kept.values():
            vector.fill(0)
        self.buffers.update(kept)

    def _before_steps(self) -> dict[str, Any]:
        """Return a copy of the present state, without the results of earlier steps: an optimizer
        may have been loaded. Local.
        """
        copied = self.copied({})
        for number, one in enumerate(self.state_dicts):
            if one.has_own_form or not one.has_stepped:
                continue
            copied["state_dicts"][number] = {**copied["state_dicts"][number], "state": {}}
            for vector in copied["buffers"].values():
                views = dict(zip(self.module.tensors, self.module.views_of(vector), strict=True))
                for name in one.parameters:
                    views[name].zero_()
        return copied

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
        states, sources, rests = dict[str, Any](), dict[str, str](), list[Any]()
        for one in self.state_dicts:
            own, rest = one.parts()
            states |= own
            sources |= dict.fromkeys(own, one.source)
            rests.append(rest)
        entries, writer = self.known.written(states, sources)
        self.document = joined(
            (one.members, writer.document(one.source, rest, own=one.own))
            for one, rest in zip(self.state_dicts, rests, strict=True)
        )
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

        state_dicts = [mapped(one.state_dict(), leaf) for one in self.optimizers]
        groups = self._group_values()
        return super().copied(room) | {"state_dicts": state_dicts, "groups": groups}

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
        for one, state_dict in zip(self.state_dicts, copied["state_dicts"], strict=True):
            one.load(mapped(state_dict, leaf), keep_dtypes=True)
        self.vectors.move()  # not before: an optimizer yet to be loaded may have tensors to discard
        for number, group in enumerate(self._groups()):
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
            for group in self._groups()
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
            read = self._read(saved, part)
            for one, state_dict in zip(self.state_dicts, read, strict=True):
                one.require_equal(state_dict)
        except UserError as error:
            raise UserError(f"has a state of the optimizer that {error}") from None
        kept = self.copied({})
        try:  # only an optimizer can check its own state
            for one, state_dict in zip(self.state_dicts, read, strict=True):
                one.call_load_state_dict(state_dict)
        finally:
            self._restore(kept, lambda *_: True)

    def restored(self) -> None:
        """Load a checkpoint's state into PyTorch's optimizers."""
        fields = {name: getattr(self, name) for name in ("values", "contents", "entries")}
        saved = {"document": self.document, **fields}
        read = self._read(saved, self.vectors.part)
        for one, state_dict in zip(self.state_dicts, read, strict=True):
            one.load(state_dict, keep_dtypes=False)
        self.vectors.move()

    def _read(self, saved: Mapping[str, Any], part: Any) -> list[Any]:
        """Return the ``state_dict()`` of each optimizer from a checkpoint.

        Raises:
            UserError: the checkpoint differs from the form written by `wait`, or is for other
                optimizers.
        """
        parts, entries = parts_of(saved["document"]), dict(saved["entries"])
        if len(parts) != len(self.optimizers):
            has, is_for = (_optimizers(len(those)) for those in (self.optimizers, parts))
            raise UserError(f"is for {is_for}, but this learner has {has}")
        whole = []
        for one, (members, document) in zip(self.state_dicts, parts, strict=True):
            if members not in (None, one.members):
                raise UserError(f"is for other parameters than those of this {one.kind}")
            present = one.optimizer.state_dict()
            values, contents = saved["values"], saved["contents"]
            reader = Reader(part, values, contents, self.module.tensors, present, one.own)
            own = {*one.names_by_number(present).values()}.intersection(entries)
            rest = reader.value(document)
            states = {
                name: reader.value(parsed_text(entries.pop(name)))
                for name in saved["entries"]
                if name in own
            }
            whole.append(one.whole(rest, states))
        if entries:
            name, kinds = next(iter(entries)), " + ".join(one.kind for one in self.state_dicts)
            raise UserError(f"is of a parameter {shown(name)}, which {kinds} does not have")
        return whole


def _optimizers(count: int) -> str:
    return f"{count} optimizer" + "s" * (count != 1)


def _values_of(groups: Sequence[dict[str, Any]]) -> Iterator[Any]:
    return chain.from_iterable(map(dict.values, groups))


def _copy_of(value: Any, path: Any) -> Any:
    """Return a copy of a non-tensor in a ``state_dict()``. The program's values in a group are not
    copied; a defaultdict is already a copy.
    """
    same = "param_groups" in path or isinstance(value, defaultdict)
    return value if same else copy.deepcopy(value)
