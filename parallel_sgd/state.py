"""Building blocks of training state: every checkpoint can hold every algorithm's state.

A state is a dataclass with fields of arrays, numbers, text, dictionaries of arrays by name, None,
or nested dataclasses of the same kind, also several in a dictionary by name. Every field except a
nested dataclass has a reshard rule, given by `across`: its meaning on a different number of ranks.
`workspace` marks fields without state: buffers, communicators, threads. A part with such a
workspace, or kept by other ranks, is a `Component`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from dataclasses import field as dataclass_field
from enum import Enum, auto
from typing import Any, Literal

__all__ = [
    "Cause",
    "Component",
    "External",
    "StateReplaced",
    "across",
    "components",
    "components_of",
    "parts_of",
    "wait_for",
    "weight_of",
    "workspace",
]

ReshardRule = Literal["same", "mean", "most", "sum", "stripe", "share", "drop"]


def across(
    rule: ReshardRule,
    *,
    least: float | None = None,
    open: bool = False,
    **options: Any,
) -> Any:
    """Declare a field of a state, with its reshard rule. The rule redistributes a checkpoint loaded
    on a different number of ranks (`parallel_sgd.load_checkpoint`):

    - "same": equal on all ranks, and so on any number of ranks; rank 0's value is taken.
    - "mean": an array with only its mean over the ranks kept, weighted by the `weight` attribute of
      each state, if any, and evenly if all weights are 0. Values equal on all ranks stay the same,
      bit for bit. The model itself is a mean. A weight is a whole number; or, where parts of the
      model have weights of their own, a dictionary from the end of each part in the flat vector,
      as text, to its weight.
    - "most": a whole number with only the largest of all ranks kept.
    - "sum": an array or a whole number with its sum over the ranks kept: rank j of K' takes the
      parts of ranks j, j + K', ...
    - "stripe": this rank's part of one vector, cut anew.
    - "share": a whole number with its sum over the ranks kept, divided among the ranks.
    - "drop": meaningless on a different number of ranks, such as a random generator's state; None
      takes its place, and `Component.restored` continues from there.

    Args:
        least: least valid number in a checkpoint; the number must then be finite, too.
        open: for a dictionary: its entries may differ between ranks, and from this program's:
            arrays of any dtypes and shapes. `Component.check` must then check the entries. On a
            different number of ranks, an entry present on only some ranks is kept, too.

    The arrays in a dictionary follow the rule of its field, the fields of a nested dataclass each
    their own. A state with a field without a rule can be loaded only on the same number of ranks.
    """
    metadata = {"across": rule, "least": least, "open": open}
    return dataclass_field(metadata=metadata, **options)


def workspace(**options: Any) -> Any:
    """Declare a field without state: made by a new `init`, and absent from checkpoints."""
    return dataclass_field(metadata={"workspace": True}, repr=False, **options)


Weight = int | dict[str, int]


def weight_of(state: Any) -> Weight:
    """Return the weight of a state's model in a mean of the ranks' models: see `across`. Local."""
    weight: Weight = getattr(state, "weight", 1)
    return weight


def parts_of(weight: Weight, size: int) -> dict[int, int]:
    """Return the weight of each part of a vector, by its end. Local.

    Args:
        weight: of a state.
        size: values in the vector. A vector without the model's layout has a single weight.
    """
    if not isinstance(weight, dict):
        return {size: weight}
    parts = dict(sorted((int(end), number) for end, number in weight.items()))
    return parts if max(parts) == size else {size: max(parts.values())}


class Component:
    """A part of a state with more than values: buffers, communicators, threads.

    A learner finds the components in the fields of a state, and recursively in the fields of its
    dataclasses, and calls each of them. The state itself may be a component. A component is
    responsible for components in its own workspace. Everything here is local unless stated
    otherwise, and does nothing by default.
    """

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to other ranks for training so far. Bytes received from
        parameter servers are included; a server's own count is 0."""
        return 0

    def wait(self) -> None:
        """Wait for background work, so that the state is complete; training is not affected."""

    def drain(self) -> None:
        """Complete pending work begun by all ranks, without using the result. Collective: at the
        end of training, or after a failure of training, so that no rank is left waiting."""

    def abandon(self) -> None:
        """Wait for the failure of pending work after a rank failure, so that no background work
        remains. Neither its result nor the state is used afterwards. The communicators have been
        revoked. Local."""

    def close(self, *, failed: bool = False) -> None:
        """Release communicators, threads and buffers.

        Args:
            failed: training has ended with an error shared by all ranks: only work begun by all
                ranks is waited for.

        Called once; afterwards only `report` and `bytes_sent` are called. Collective.
        """

    def check(self, saved: Mapping[str, Any], ranks: int) -> None:
        """Check that a saved state is valid, before anything of a learner changes.

        Args:
            saved: its fields by name, of the same types, dtypes and numbers of axes as the present
                ones; nested states are mappings too. On a different number of ranks, the resharded
                fields.
            ranks: number of ranks of the checkpoint.
        Raises:
            UserError: names the invalid field.
        """

    def restored(self) -> None:
        """Continue from a restored state. Collective if servers must be told."""

    def report(self) -> dict[str, Any] | None:
        """Return statistics of this rank's training so far, in a form that JSON can hold; None if
        there are none."""
        return None


class External(Component):
    """A component with a part on other ranks, such as parameter servers."""

    def collect(self) -> None:
        """Fetch the remote part into the state, for a checkpoint. Training is not affected.
        Collective."""

    def write(self, folder: str) -> dict[str, Any]:
        """Let the remote ranks write their part of the collected state to a folder.

        Returns:
            Size and checksum of every file, by name.

        Called by the first rank, in the background of its training.
        """
        return {}

    def check_files(self, folder: str) -> None:
        """Check that the remote ranks' files can be read. Called by the first rank, before anything
        of a learner changes.

        Raises:
            UserError: a file cannot be read.
        """

    def read(self, folder: str) -> None:
        """Let the remote ranks read their files. Called by the first rank."""


def components(state: Any) -> Iterator[tuple[str, Component]]:
    """Yield every component in a state, with its place: the names of fields, joined by dots; empty
    for the state itself. A component comes before its nested components. Local."""
    if isinstance(state, Component):
        yield "", state
    if not is_dataclass(state):
        return
    for field in fields(state):
        value = getattr(state, field.name)
        asked = isinstance(value, Component) and not isinstance(state, Component)
        if asked or not field.metadata.get("workspace"):
            several = value.items() if isinstance(value, dict) else [("", value)]
            for name, part in several:
                for place, component in components(part):
                    yield ".".join(filter(None, (field.name, name, place))), component


def components_of(states: Mapping[str, Any]) -> list[Component]:
    """Return all components of all states, such as a learner's `states`. Local."""
    return [component for state in states.values() for _, component in components(state)]


def wait_for(states: Mapping[str, Any]) -> None:
    """Wait for background work, so that all states are complete; training is not affected.
    Local."""
    for component in components_of(states):
        component.wait()


class Cause(Enum):
    """Cause of a replacement of a learner's whole state."""

    LOADED = auto()  #: from a checkpoint, of this run or of a different run
    RESTORED = auto()  #: from a snapshot of this run: after a trial, or to return to the best model
    RECOVERED = (
        auto()
    )  #: after ranks have failed or joined; training continues on the present ranks


@dataclass(frozen=True)
class StateReplaced:
    """Event: a learner's whole state has been replaced.

    Attributes:
        cause: of the replacement.
        clock: samples of all ranks in the new state.
    """

    cause: Cause
    clock: int

    @property
    def ranks_changed(self) -> bool:
        """True if the set of ranks has changed, too."""
        return self.cause is Cause.RECOVERED
