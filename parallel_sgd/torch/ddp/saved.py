"""The saved state of DDP's hook: of a rank, of all ranks, and for another number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from ...communication import Communicator
from ...communication.phrases import in_words
from ...errors import UserError
from ...kernels import array_module
from ...validation import shown
from ..arrays import as_array, as_tensor
from .bucket_sum import ParameterResidual

Array = Any  #: a NumPy or CuPy array
HostArray = np.ndarray[Any, Any]


@dataclass(frozen=True)
class SavedState:
    """The training state of the hook on one rank.

    Attributes:
        rank, ranks: the rank, and the number of ranks.
        steps: taken so far.
        scale: of the loss; also the unit of residuals.
        residuals: of this rank's parameters, by name.
    """

    rank: int
    ranks: int
    steps: int
    scale: float
    residuals: Mapping[str, ParameterResidual]

    def as_dict(self) -> dict[str, Any]:
        """Return numbers, and copies of the residuals as tensors on the CPU. Local."""
        residuals = {
            name: {
                "worker_error": as_tensor(_copied(residual.worker_error)),
                "owner_error": as_tensor(_copied(residual.owner_error)),
                "owner_begin": residual.owner_begin,
            }
            for name, residual in self.residuals.items()
        }
        return {
            "rank": self.rank,
            "ranks": self.ranks,
            "steps": self.steps,
            "scale": self.scale,
            "residuals": residuals,
        }

    @classmethod
    def of(cls, state: Any) -> Self:
        """Return the state in a result of `as_dict`, without copying its tensors. Local.

        Raises:
            UserError: the value is something else.
        """
        try:
            residuals = {
                str(name): ParameterResidual(
                    as_array(residual["worker_error"].cpu()),
                    as_array(residual["owner_error"].cpu()),
                    int(residual["owner_begin"]),
                )
                for name, residual in state["residuals"].items()
            }
            rank, ranks, steps = int(state["rank"]), int(state["ranks"]), int(state["steps"])
            found = cls(rank, ranks, steps, float(state["scale"]), residuals)
            found._require_places()
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"state={shown(state)} must be what state_dict() returned") from error
        return found

    def copied(self) -> SavedState:
        """Return a copy with residuals of its own. Local."""
        residuals = {
            name: ParameterResidual(
                _copied(residual.worker_error), _copied(residual.owner_error), residual.owner_begin
            )
            for name, residual in self.residuals.items()
        }
        return SavedState(self.rank, self.ranks, self.steps, self.scale, residuals)

    def _require_places(self) -> None:
        for residual in self.residuals.values():
            worker, owner, begin = (
                residual.worker_error,
                residual.owner_error,
                residual.owner_begin,
            )
            is_vector = worker.ndim == owner.ndim == 1 and {worker.dtype, owner.dtype} == {
                np.dtype(np.float32)
            }
            if not (is_vector and 0 <= begin <= begin + owner.size <= worker.size):
                raise ValueError("a residual has no place in its parameter")


def state_for(states: Any, rank: int, ranks: int) -> SavedState:
    """Return a rank's state, from its own saved state or from those of all saved ranks.

    Args:
        states: a result of `state_dict` of this rank, on as many ranks; or an iterable with the
            results of all ranks, in any order.
        rank, ranks: of the present job.
    Returns:
        On as many ranks as saved, the rank's own state. Otherwise rank k's residuals are the sums
        of those of the saved ranks k, k + ranks, ..., as in checkpoints of a learner. So the sum
        over all ranks stays the same.
    Raises:
        UserError: the states are not those of all ranks at one step.

    Local. Memory: of an iterator a state at a time, and the result.
    """
    if isinstance(states, Mapping):
        own = SavedState.of(states)
        if (own.rank, own.ranks) != (rank, ranks):
            raise UserError(
                f"state is of rank {own.rank} of {own.ranks}, but this is rank {rank} of {ranks}: "
                "give the rank its own saved state, or on another number of ranks a list with the "
                "saved states of all ranks (psgd.torch.GatheredState saves these on rank 0)"
            )
        return own.copied()
    if not isinstance(states, Iterable) or isinstance(states, str | bytes | torch.Tensor):
        raise UserError(
            f"state={shown(states)} must be what state_dict() returned, or a list with the saved "
            "states of all ranks"
        )
    first, seen = None, set()
    mine: SavedState | None = None
    sums: dict[str, _Sum] = {}
    for number, given in enumerate(states):
        saved = SavedState.of(given)
        first = first or (saved.ranks, saved.steps, saved.scale)
        if (saved.ranks, saved.steps, saved.scale) != first:
            raise UserError(
                f"state {number} is of step {saved.steps} on {saved.ranks} ranks with a scale of "
                f"{saved.scale:g}, but state 0 is of step {first[1]} on {first[0]} with "
                f"{first[2]:g}: all must be saved at the same step"
            )
        if saved.rank in seen:
            raise UserError(f"state {number} is of rank {saved.rank}, as an earlier state is")
        seen.add(saved.rank)
        if saved.ranks == ranks:
            mine = saved.copied() if saved.rank == rank else mine
        elif saved.rank % ranks == rank:
            for name, residual in saved.residuals.items():
                sums.setdefault(name, _Sum()).add(name, residual)
    if first is None:
        raise UserError("state is an empty list: it must have the saved states of all ranks")
    if missing := sorted({*range(first[0])} - seen):
        raise UserError(
            f"state lacks the saved state of {in_words(missing)}: it must have those of all "
            f"{first[0]} ranks"
        )
    residuals = {name: total.residual() for name, total in sums.items()}
    return mine or SavedState(rank, ranks, first[1], first[2], residuals)


class _Sum:
    """The sum of a parameter's residuals over some saved ranks, accumulated in float64."""

    def __init__(self) -> None:
        self._worker: HostArray | None = None
        self._owned: list[tuple[int, HostArray]] = []

    def add(self, name: str, residual: ParameterResidual) -> None:
        worker = residual.worker_error
        if self._worker is None:
            self._worker = np.zeros(worker.size)
        if worker.size != self._worker.size:
            raise UserError(
                f"the residual of parameter {name!r} has {self._worker.size} values on one rank, "
                f"and {worker.size} on another"
            )
        self._worker += worker
        if residual.owner_error.size:
            self._owned.append((residual.owner_begin, residual.owner_error.copy()))

    def residual(self) -> ParameterResidual:
        assert self._worker is not None
        begin = min((begin for begin, _ in self._owned), default=0)
        end = max((begin + error.size for begin, error in self._owned), default=0)
        owner = np.zeros(end - begin)
        for start, error in self._owned:
            owner[start - begin : start - begin + error.size] += error
        return ParameterResidual(self._worker.astype(np.float32), owner.astype(np.float32), begin)


def gathered(state: SavedState, comm: Communicator) -> list[dict[str, Any]]:
    """Return the states of all ranks on rank 0, each as a dict; an empty list on other ranks.

    Collective. Cost: every rank sends its residuals to rank 0. Memory: all residuals on rank 0.
    """
    places = [
        (name, one.worker_error.size, one.owner_error.size, one.owner_begin)
        for name, one in state.residuals.items()
    ]
    of_ranks = comm.allgather_object((state.steps, state.scale, places))
    lengths = [sum(n + m for _, n, m, _ in places) for _, _, places in of_ranks]
    own = np.empty(lengths[comm.rank], np.float32)
    for part, error in zip(_parts(own, places), _errors(state), strict=True):
        part[...] = error if array_module(error) is np else error.get()
    is_first, none = comm.rank == 0, [0] * comm.size
    received = np.empty(sum(lengths) if is_first else 0, np.float32)
    comm.alltoall(
        own,
        [own.size, *none[1:]],
        received,
        lengths if is_first else none,
        most=sum(lengths),
    )
    if not is_first:
        return []
    states = []
    vectors = np.split(received, np.cumsum(lengths)[:-1])
    for rank, ((steps, scale, places), vector) in enumerate(zip(of_ranks, vectors, strict=True)):
        parts = _parts(vector, places)
        residuals = {
            name: ParameterResidual(parts[2 * number], parts[2 * number + 1], begin)
            for number, (name, _, _, begin) in enumerate(places)
        }
        states.append(SavedState(rank, comm.size, steps, scale, residuals).as_dict())
    return states


def _errors(state: SavedState) -> list[Array]:
    return [e for one in state.residuals.values() for e in (one.worker_error, one.owner_error)]


def _parts(vector: HostArray, places: Iterable[tuple[str, int, int, int]]) -> list[HostArray]:
    """Return views of a vector for the errors of all parameters, two for each."""
    sizes = [size for _, worker, owner, _ in places for size in (worker, owner)]
    return np.split(vector, np.cumsum(sizes)[:-1]) if sizes else []


def _copied(array: Array) -> Array:
    return array.copy() if array_module(array) is np else array.get()
