"""What training state is made of, so that every checkpoint can hold every algorithm's.

A state is a dataclass whose fields are arrays, numbers, text, dictionaries of arrays by name, None,
or dataclasses of the same, which speak for themselves. Each other field has a reshard rule by
`across`: what becomes of it on another number of ranks. `workspace` marks what is no state at all:
buffers, communicators, threads. What has such of its own, and what is kept by other ranks, is a
`Component`.
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
    """A field of a state, with its reshard rule, by which a checkpoint is redistributed where
    another number of ranks takes it up (`parallel_sgd.load_checkpoint`):

    - "same": equal on all ranks, and so on any number of them; rank 0's is taken.
    - "mean": an array of which only the mean over the ranks goes on, by the `weight` of each state
      where it has such an attribute, and alike where all weights are 0. What is equal on all ranks
      stays as it is, bit for bit. The model itself is a mean.
    - "most": a whole number of which the largest of all ranks goes on.
    - "sum": an array of which the sum over the ranks is kept: rank j of K' takes over those of
      ranks j, j + K', ...
    - "stripe": this rank's part of one vector, which is cut anew.
    - "share": a whole number that the ranks have together, divided among them.
    - "drop": what says nothing on another number of ranks, such as a random generator's state; None
      takes its place, and `Component.restored` goes on from there.

    Args:
        least: what a number in a checkpoint must be at least; then it must be finite, too.
        open: of a dictionary: whether ranks may have other entries in it than each other, and than
            this program: arrays of any dtypes and shapes. Then `Component.check` looks at them, and
            on another number of ranks an entry goes on that only some have.

    The arrays in a dictionary go by the rule of its field, the fields of a dataclass each by their
    own. A field without a rule can be taken up by the same number of ranks only.
    """
    metadata = {"across": rule, "least": least, "open": open}
    return dataclass_field(metadata=metadata, **options)


def workspace(**options: Any) -> Any:
    """A field that holds no state: a new `init` makes it, and no checkpoint has it."""
    return dataclass_field(metadata={"workspace": True}, repr=False, **options)


def weight_of(state: Any) -> int:
    """What the model of a rank with this state counts in a mean of the ranks' models. Local."""
    return int(getattr(state, "weight", 1))


class Component:
    """A part of a state with more than values: buffers, communicators, threads.

    A learner finds the components in the fields of a state and of its dataclasses, and in their
    fields, and asks each of them. The state itself may be one. A component speaks for those in its
    own workspace. Everything here is local unless it says otherwise, and does nothing unless it is
    defined.
    """

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to others for training so far (and has got from parameter
        servers, whose own are 0)."""
        return 0

    def wait(self) -> None:
        """Wait for what runs in the background, so that the state is whole; training is not
        affected."""

    def drain(self) -> None:
        """Bring to its end what ranks have begun together; its result is not used. Collective:
        where training cannot go on, or is finished, so that no rank is left waiting."""

    def abandon(self) -> None:
        """Ranks have died: what is under way fails, and is waited for, so that nothing goes on in
        the background; its result is not used, and the state is no longer. The communicators are
        revoked. Local."""

    def close(self, *, failed: bool = False) -> None:
        """Give back what was taken beside memory.

        Args:
            failed: training has ended with an error that all ranks share: only what all of them
                have begun is waited for.

        Called once; then there is nothing more but questions about what was (`report`,
        `bytes_sent`). Collective.
        """

    def check(self, saved: Mapping[str, Any], ranks: int) -> None:
        """See that a saved state means something, before anything of a learner has changed.

        Args:
            saved: its fields by name, of the types, dtypes and numbers of axes of the present ones;
                states in it are mappings too. On another number of ranks, what they make of it.
            ranks: that wrote it.
        Raises:
            UserError: naming what is not possible.
        """

    def restored(self) -> None:
        """Go on from a state that has been put back. Collective where servers must know."""

    def report(self) -> dict[str, Any] | None:
        """What it can tell of this rank's training so far, as JSON can hold it; None: nothing."""
        return None


class External(Component):
    """A component of which a part is kept by other ranks, such as parameter servers."""

    def collect(self) -> None:
        """Bring into the state what of it is elsewhere, so that a checkpoint can hold it. Training
        is not affected. Collective."""

    def write(self, folder: str) -> dict[str, Any]:
        """Have others write to a folder what they hold of the state that was collected.

        Returns:
            Size and checksum of every file, by name.

        Called by the first rank, in the background of its training.
        """
        return {}

    def check_files(self, folder: str) -> None:
        """See that what others have written can be read. Called by the first rank, before anything
        of a learner has changed.

        Raises:
            UserError: it cannot.
        """

    def read(self, folder: str) -> None:
        """Have others read what they have written. Called by the first rank."""


def components(state: Any) -> Iterator[tuple[str, Component]]:
    """Every component in a state, with its place: the names of fields with dots, the state's own
    being empty. A component comes before those within it. Local."""
    if isinstance(state, Component):
        yield "", state
    if not is_dataclass(state):
        return
    for field in fields(state):
        value = getattr(state, field.name)
        asked = isinstance(value, Component) and not isinstance(state, Component)
        if asked or not field.metadata.get("workspace"):
            for place, component in components(value):
                yield f"{field.name}.{place}".rstrip("."), component


class Cause(Enum):
    """Why the state of a learner was replaced as a whole."""

    LOADED = auto()  #: from a checkpoint, of this run or another one
    RESTORED = auto()  #: from a snapshot of this run: a trial has ended, or the best model returns
    RECOVERED = auto()  #: ranks have failed or joined; training continues on the present ones


@dataclass(frozen=True)
class StateReplaced:
    """The state is another one than before.

    Attributes:
        cause: why.
        clock: samples of all ranks in the new state.
    """

    cause: Cause
    clock: int

    @property
    def ranks_changed(self) -> bool:
        """The state belongs to other ranks than before."""
        return self.cause is Cause.RECOVERED
