"""What a PyTorch optimizer remembers, as vectors and documents that every checkpoint can hold."""

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
from ...optimizers import OptimizerState
from ...second_moment import require_correction
from ...state import across, workspace
from ...validation import line_of, shown
from ..arrays import checksum_of
from ..module import FlatModule, plain_name
from .comparable import comparable
from .document import ATOMIC, PartOfVector, Reader, Writer, mapped, program_values
from .entries import Entries
from .vectors import OptimizerVectors

Array = Any  #: a NumPy or CuPy array

SCHEDULED = ("initial_lr", "base_momentum", "max_momentum", "max_lr", "min_lr")
"""Among a group's hyperparameters: what PyTorch's schedulers put there."""


@dataclass
class TorchOptimizerState(OptimizerState):
    """The state of a PyTorch optimizer: what its ``state_dict()`` has.

    Tensors of a parameter's shape and dtype lie one behind the other in vectors [n] of the
    parameters' layout, so a momentum can be averaged, or written, like every other vector. All else
    is asked of ``state_dict()`` when somebody wants to know it, and given back to
    ``load_state_dict()``.

    Attributes:
        values: other tensors of numbers with a point.
        contents: the bytes of the other tensors.
        entries: by parameter, the document of its state: see `optimizer_document`.
        document: of all else in the ``state_dict()``, with the parameter groups.
        optimizer, module: at work.
        vectors: keeps tensors of the state in `buffers`.
        known: documents of parameters' states, as they were written last.
        initial: what the state was at first, as `copied` gives it.
        own: what the program has put into parameter groups, and no checkpoint can hold.
        changed: of each parameter group, the keys that the optimizer itself has changed in a step,
            such as a counter; others are a scheduler's, or the program's.

    Made by `of`. Memory: what the optimizer has anyway; while its first step is adopted, once more.
    """

    buffers: dict[str, Array] = across("mean", open=True, default_factory=dict)
    values: dict[str, Array] = across("mean", open=True, default_factory=dict)
    contents: dict[str, Array] = across("same", open=True, default_factory=dict)
    entries: dict[str, str] = across("same", open=True, default_factory=dict)
    document: str = across("same", default="{}")
    optimizer: Any = workspace(default=None)
    module: FlatModule = workspace(default=None)
    vectors: OptimizerVectors = workspace(default=None)
    known: Entries = workspace(default=None)
    initial: Any = workspace(default=None)
    own: dict[Any, str] = workspace(default_factory=dict)
    changed: list[set[Any]] = workspace(default_factory=list)

    @classmethod
    def of(cls, optimizer: Any, module: FlatModule) -> TorchOptimizerState:
        """The state as it is, which may be that of earlier training. Local."""
        state = cls(optimizer=optimizer, module=module)
        state.vectors = OptimizerVectors(optimizer, module, state.buffers)
        state.own = program_values(optimizer.state_dict())
        names = {p: name for name, p in module.tensors.items()}
        state.known = Entries(lambda: Writer(state.vectors.part_of, names, state.own))
        state.vectors.move()
        state.initial = state.copied({})
        return state

    def adopt(self) -> None:
        """Put tensors of the state into the vectors, where a step has made new ones. Local."""
        self.vectors.update()

    def align(self, comm: Communicator) -> None:
        """As of every optimizer. PyTorch makes the state of a parameter in its first step: a rank
        that has none yet takes over another rank's, with zeros in the vectors."""
        self.vectors.move()
        everywhere = comm.allgather_object(([*self.buffers], self._begun()))
        names = sorted({name for names, _ in everywhere for name in names})
        self.vectors.require(names)
        begun = np.array([theirs for _, theirs in everywhere])
        if (begun != begun[0]).any():
            self._complete(comm, begun)
        ordered = {name: self.buffers[name] for name in names}
        self.buffers.clear()
        self.buffers.update(ordered)

    def _begun(self) -> list[bool]:
        """Of each parameter, whether it has a state."""
        states = [owner.state.items() for owner in self.vectors.owners]
        begun = {id(p) for p, of_p in chain(*states) if isinstance(of_p, dict) and of_p}
        return [id(p) in begun for p in self.module.tensors.values()]

    def _complete(self, comm: Communicator, begun: Array) -> None:
        """Have the state of each parameter without one from the first rank that has one; where no
        parameter has one, all else of that rank's optimizer, too. Collective.

        Args:
            begun: bool [ranks, parameters]: which have a state.
        Raises:
            UserError: on all ranks: a state is of a type that no checkpoint can hold, or the
                optimizer does not take it.
        """
        if not self._names_by_number(self.optimizer.state_dict()):  # which has all in one
            begun = begun | begun.any(axis=1, keepdims=True)
            if begun.all():
                return
        comm.together(self.wait)
        first, some = begun.argmax(axis=0), begun.any(axis=0)
        gives = comm.rank in first[some & ~begun.all(axis=0)]
        own = {name: getattr(self, name) for name in ("values", "contents", "entries", "document")}
        told = comm.allgather_object(own if gives else None)
        lacking = some & ~begun[comm.rank]

        def add() -> None:
            for giver in np.unique(first[lacking]).tolist():
                names = {*compress(self.module.tensors, lacking & (first == giver))}
                try:
                    self._add(told[giver], names)
                except UserError as error:
                    raise UserError(f"rank {comm.world_ranks[giver]} {error}") from error

        comm.together(add)

    def _add(self, saved: Mapping[str, Any], names: Collection[str]) -> None:
        """Have the states of these parameters as another rank has them; where this rank has none of
        any, all that the other one has."""
        entries = {name: text for name, text in saved["entries"].items() if name in names}
        state_dict = self._read({**saved, "entries": entries}, self.vectors.part)
        if any(self._begun()):
            present, state = self.optimizer.state_dict(), state_dict["state"]
            numbers = self._names_by_number(present)
            state = {n: state[n] for n, name in numbers.items() if name in entries}
            state_dict = {**present, "state": {**present["state"], **state}}
        self._load(state_dict, as_they_are=True)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """For a `with` block the optimizer takes a step: what it changes in its groups is noted."""
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

    def forget(self) -> None:
        """As before the first step, but for the clock. Local."""
        kept = {name: vector for name, vector in self.buffers.items() if name not in self._first}
        self.put_back(self.initial)
        for vector in kept.values():
            vector.fill(0)
        self.buffers.update(kept)

    @property
    def _first(self) -> Mapping[str, Array]:
        vectors: Mapping[str, Array] = self.initial["buffers"]
        return vectors

    def wait(self) -> None:
        """Bring what is no vector up to date with PyTorch's own.

        Raises:
            UserError: a part of the state is of a type that no checkpoint can hold.
        """
        self.vectors.update()
        packed, what = self.optimizer.state_dict(), f"{type(self.optimizer).__name__}.state_dict()"
        names, states = self._names_by_number(packed), dict[str, Any]()
        if names:
            state = packed["state"]
            states = {names[number]: of_p for number, of_p in state.items() if number in names}
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

    def put_back(self, copied: Mapping[str, Any]) -> None:
        self._restore(copied, self._changed_by_steps)

    def _restore(self, copied: Mapping[str, Any], goes_back: Any) -> None:
        """See `put_back`.

        Args:
            goes_back: given a group's number, a key and its value: whether it goes back, too. Rates
                stay as schedulers have made them.
        """
        for name in self.buffers.keys() - copied["buffers"].keys():
            del self.buffers[name]
        self.vectors.require(copied["buffers"])
        super().put_back(copied)
        ids = {*map(id, self.module.module.parameters())}

        def leaf(value: Any, path: Any) -> Any:
            if isinstance(value, PartOfVector):
                return self.vectors.part(value.vector, value.parameter)
            if isinstance(value, torch.Tensor):
                return value if id(value) in ids else value.clone()
            return _copy_of(value, path)

        present = self._group_values()
        self._load(mapped(copied["state_dict"], leaf), as_they_are=True)
        for number, group in enumerate(self._groups()):
            back = copied["groups"][number]
            values = {k: v for k, v in present[number].items() if not goes_back(number, k, v)}
            values |= {k: v for k, v in back.items() if goes_back(number, k, v)}
            _refill(group, {k: v.clone() if _is_tensor(v) else v for k, v in values.items()})

    def _changed_by_steps(self, number: int, key: Any, value: Any) -> bool:
        changed = number < len(self.changed) and key in self.changed[number]
        return changed or (_is_tensor(value) and key != "lr")

    def _group_values(self) -> list[dict[str, Any]]:
        """Of each parameter group the values, copies where they are tensors."""
        return [
            {k: v.detach().clone() if _is_tensor(v) else v for k, v in group.items()}
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
                    raise UserError(f"has something else for optimizer.{field}.{key}")
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
            return torch.zeros_like(p, requires_grad=False)  # the optimizer may change it

        try:
            packed = self._read(saved, part)
            self._require_equal(packed)
        except UserError as error:
            raise UserError(f"has a state of the optimizer that {error}") from None
        kept = self.copied({})
        try:  # who knows what an optimizer requires of its own state
            self._call_load_state_dict(packed)
        finally:
            self._restore(kept, lambda *_: True)

    def restored(self) -> None:
        """Give PyTorch's own state what a checkpoint has brought."""
        fields = {name: getattr(self, name) for name in ("values", "contents", "entries")}
        saved = {"document": self.document, **fields}
        self._load(self._read(saved, self.vectors.part), as_they_are=False)

    def _read(self, saved: Mapping[str, Any], part: Any) -> Any:
        """The ``state_dict()`` of a checkpoint.

        Raises:
            UserError: it is not as `wait` writes it, or not of this optimizer.
        """
        present = self.optimizer.state_dict()
        values, contents = saved["values"], saved["contents"]
        reader = Reader(part, values, contents, self.module.tensors, present, self.own)
        packed = reader.value(saved["document"])
        if not saved["entries"]:
            return packed
        own = self._names_by_number(present)
        fits = own and isinstance(packed, dict) and isinstance(packed.get("state"), dict)
        numbers = {name: number for number, name in self._names_by_number(packed).items()}
        if not fits or not numbers:
            raise UserError("has other parameter groups than this optimizer")
        state = {}
        for name, document in saved["entries"].items():
            if name not in numbers:
                raise UserError(f"is of a parameter {shown(name)}, which this optimizer has not")
            state[numbers[name]] = reader.value(document)
        return {**packed, "state": state | packed["state"]}

    def _names_by_number(self, packed: Any) -> dict[int, str]:
        """Names of the parameters, by their numbers in a ``state_dict()`` of PyTorch's form;
        nothing if it is of another form, or its groups are of other lengths than the optimizer's.
        """
        if not isinstance(packed, dict) or not isinstance(packed.get("state"), dict):
            return {}
        groups = packed.get("param_groups")
        held = [group["params"] for group in self.optimizer.param_groups]
        if not isinstance(groups, list) or len(groups) != len(held):
            return {}
        names = {p: plain_name(name) for name, p in self.module.module.named_parameters()}
        numbered: dict[int, str] = {}
        for group, parameters in zip(groups, held, strict=True):
            numbers = group.get("params") if isinstance(group, dict) else None
            if not isinstance(numbers, list) or len(numbers) != len(parameters):
                return {}
            for number, p in zip(numbers, parameters, strict=True):
                if type(number) is not int:
                    return {}
                numbered[number] = names.get(p, f"parameter {number} of the optimizer")
        return numbered

    def _require_equal(self, packed: Any) -> None:
        """See that a checkpoint's ``state_dict()`` is one of this optimizer: its parameter groups
        may have other hyperparameters, as ``load_state_dict()`` takes them."""
        present = self.optimizer.state_dict()
        if type(packed) is not type(present):
            raise UserError(f"is {shown(packed)}")
        if not self._names_by_number(present):
            return
        if not self._names_by_number(packed):
            raise UserError("has other parameter groups than this optimizer")
        for i, (saved, own) in enumerate(
            zip(packed["param_groups"], present["param_groups"], strict=True)
        ):
            for odd in sorted(key for key in SCHEDULED if (key in saved) != (key in own)):
                has = "has" if odd in saved else "lacks"
                raise UserError(
                    f"{has} the hyperparameter {i}.{odd}, unlike this optimizer (schedulers add "
                    "it: make them before load_checkpoint)"
                )
            for key, value in own.items():
                if key in saved and _is_number(value) and not _may_replace(saved[key]):
                    raise UserError(
                        f"has {shown(saved[key])} for {i}.{key}, which this optimizer has as "
                        f"{shown(value)}"
                    )

    def _load(self, state_dict: Any, *, as_they_are: bool) -> None:
        """Put a ``state_dict()`` into the optimizer.

        Args:
            as_they_are: whether the tensors keep their dtypes, too, which PyTorch would change to
                their parameters'.
        """
        for p, of_p in self._call_load_state_dict(state_dict).items():
            states = [o.state[p] for o in self.vectors.owners if p in o.state]
            for key, value in of_p.items() if states else ():
                now = states[0].get(key)
                cast = _is_tensor(value) and _is_tensor(now) and value.dtype != now.dtype
                if (as_they_are and cast) or not _has_tensors(value):
                    states[0][key] = value
        self.vectors.move()

    def _call_load_state_dict(self, state_dict: Any) -> dict[Any, dict[Any, Any]]:
        """Call ``load_state_dict()``. Dictionaries of parameter groups stay the same objects, since
        schedulers hold them.

        Returns:
            The states in `state_dict`, by parameter.
        Raises:
            UserError: ``load_state_dict()`` fails.
        """
        held = [
            (o, groups, [*groups])
            for o in self.vectors.optimizers
            if isinstance(groups := vars(o).get("param_groups"), list)
        ]
        given, state_dict = self._split_states(state_dict)
        try:
            self.optimizer.load_state_dict(state_dict)
        except Exception as error:
            raise UserError(
                f"has a state of the optimizer that {type(self.optimizer).__name__}"
                f".load_state_dict() does not take: {type(error).__name__}: {line_of(error)}"
            ) from error
        finally:
            for one, groups, dictionaries in held:
                _restore_group_dicts(one, groups, dictionaries)
        return given

    def _split_states(self, state_dict: Any) -> tuple[dict[Any, dict[Any, Any]], Any]:
        """The states in a ``state_dict()`` of PyTorch's form, by parameter; and it without arrays
        of NumPy's in them, which ``load_state_dict()`` takes for containers of tensors."""
        numbers = self._names_by_number(state_dict)
        if not numbers:
            return {}, state_dict
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        given = {
            p: state_dict["state"][number]
            for number, p in zip(numbers, held, strict=True)
            if isinstance(state_dict["state"].get(number), dict)
        }
        without = {
            number: {k: v for k, v in of_p.items() if not isinstance(v, np.ndarray)}
            if isinstance(of_p, dict)
            else of_p
            for number, of_p in state_dict["state"].items()
        }
        return given, {**state_dict, "state": without}

    def _groups(self) -> list[dict[str, Any]]:
        """The dictionaries of all parameter groups, also of optimizers within this one."""
        lists = [vars(one).get("param_groups", []) for one in self.vectors.optimizers]
        if len(lists) == 1:
            return [*lists[0]]
        return [*{id(group): group for groups in lists for group in groups}.values()]


def _values_of(groups: Sequence[dict[str, Any]]) -> Iterator[Any]:
    return chain.from_iterable(map(dict.values, groups))


def _restore_group_dicts(
    optimizer: Any, groups: list[dict[str, Any]], dictionaries: Sequence[dict[str, Any]]
) -> None:
    """Have the parameter groups that ``load_state_dict()`` has made in the dictionaries that there
    were before, and in their list."""
    made = vars(optimizer)["param_groups"]
    if len(made) != len(dictionaries):
        return
    for old, new in zip(dictionaries, made, strict=True):
        if old is not new:
            _refill(old, dict(new))
    groups[:] = dictionaries
    optimizer.param_groups = groups


def _refill(group: dict[str, Any], values: dict[str, Any]) -> None:
    """Give a group these values instead. A tensor stays the same object, if it can: a program may
    hold a rate."""
    for key, value in values.items():
        had: Any = group.get(key)
        tensors = _is_tensor(value) and _is_tensor(had)
        if tensors and (had.shape, had.dtype) == (value.shape, value.dtype):
            values[key] = had.copy_(value)
    group.clear()
    group.update(values)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _copy_of(value: Any, path: Any) -> Any:
    """A copy of what is no tensor in a ``state_dict()``; but what the program has put into a group
    is not copied, and a defaultdict is a new one already."""
    same = "param_groups" in path or isinstance(value, defaultdict)
    return value if same else copy.deepcopy(value)


def _has_tensors(value: Any) -> bool:
    """Whether there are tensors in a value, or in what it contains."""
    if isinstance(value, dict):
        return any(map(_has_tensors, value.values()))
    if isinstance(value, list | tuple | set):
        return any(map(_has_tensors, value))
    return _is_tensor(value)


def _is_number(value: Any) -> bool:
    plain = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    return plain or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _may_replace(value: Any) -> bool:
    """Whether an optimizer can have a value in place of a number."""
    return value is None or isinstance(value, bool) or _is_number(value)


def state_fingerprint(optimizer: Any) -> dict[str, str]:
    """What an optimizer of PyTorch's has kept of earlier training, for the ranks to compare; one of
    ours begins anew. Local."""
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
