"""Count the samples of a nested batch, and cut a batch into pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from typing import Any

from ...data import Padded
from ...errors import UserError
from ...validation import integer, kind_of, shown

Batch = Sequence[Any]
"""The parts of a minibatch, of equally many samples each: the inputs, and last the targets.

A part is an array or a tensor, or tuples, lists and mappings of such."""

Samples = Callable[[Any], int]
"""A function from a batch to the number of its samples."""

GIVE = "give samples=, a function from a batch to the number of its samples"


def samples_in(batch: Any, samples: Samples | None = None, *, instead: str = GIVE) -> int:
    """Count the samples of a batch: the length of the first axis common to all its arrays.

    Of `Padded` sequences the tokens are counted. A PackedSequence counts its sequences or its
    tokens, whichever matches the rest of the batch. Leaves without axes (numbers, strings, objects
    of unknown kinds) are ignored, and so is a list of a single text beside arrays. Lists with a
    tensor for each sample, such as images of different sizes, are not counted: give `samples`.

    Args:
        batch: an array or a tensor, or tuples, lists and mappings of such, in any depth.
        samples: a function that counts the samples instead.
        instead: the advice at the end of an error text.
    Raises:
        UserError: first axes have different lengths, or there is no axis at all; of two lists of
            equal length, the first holds arrays and the second values without axes; or `samples`
            returns no whole number.

    Local.
    """
    if samples is not None:
        return integer("samples(batch)", samples(batch), 0)
    _require_no_lists_of_samples(batch, instead)
    first, common = "", frozenset[int]()
    texts = False
    for place, part in _leaves(batch, ""):
        counts = _counts(part)
        texts = texts or _is_one_text(part)
        if counts and common and not common & counts:
            raise UserError(
                f"a batch must have one number of samples: {_said(first, common)}, and "
                f"{_said(place, counts)}; {instead}"
            )
        if counts and not common:
            first, common = place, counts
        elif counts:
            common &= counts
    if texts and not common:
        return 1
    if len(common) != 1:
        found = _said(first, common) if common else f"nothing in {kind_of(batch)} has an axis"
        raise UserError(f"a batch must have one number of samples: {found}; {instead}")
    return min(common)


def pieces_of(batch: Batch, size: int | None, samples: int) -> list[Batch]:
    """Cut a minibatch into pieces along the first axis of all its arrays.

    An empty batch is a single piece.

    Args:
        size: most samples in a piece. None: do not cut.
        samples: the number of samples in the batch.
    Raises:
        UserError: an array has a different first axis, or the batch has sequences.

    Local.
    """
    if size is None or samples <= size:
        return [batch]
    for place, part in _leaves(batch, ""):
        counts = _counts(part)
        sequences = isinstance(part, Padded) or _is_packed(part)
        if counts and (counts != {samples} or sequences):
            raise UserError(
                f"microbatch_size={size} must be None for this minibatch of {samples} samples, "
                f"which cannot be cut along its first axis: {_said(place, counts)}"
            )

    def cut(start: int) -> Batch:
        where = slice(start, start + size)
        return mapped(lambda part: part[where] if _counts(part) else part, batch)  # type: ignore[no-any-return]

    return [cut(start) for start in range(0, samples, size)]


def mapped(function: Callable[[Any], Any], part: Any) -> Any:
    """Apply a function to every leaf of a part: arrays, sequences, lists of plain values, objects.

    Local.
    """
    if is_leaf(part):
        return function(part)
    if isinstance(part, Mapping):
        made = copy(part) if isinstance(part, MutableMapping) else dict(part)
        made.update({key: mapped(function, value) for key, value in part.items()})
        return made
    values = [mapped(function, value) for value in part]
    return type(part)(*values) if hasattr(part, "_fields") else type(part)(values)


def is_leaf(part: Any) -> bool:
    """Return whether a part of a batch has no inner parts. Local."""
    if isinstance(part, Padded) or _is_packed(part) or _is_column(part):
        return True
    return not isinstance(part, tuple | list | Mapping)


def _is_packed(part: Any) -> bool:
    """Return whether a part is PyTorch's PackedSequence."""
    return isinstance(part, tuple) and hasattr(part, "batch_sizes")


def _is_column(part: Any) -> bool:
    """Return whether a part has a plain value for each sample, as a DataLoader returns strings."""
    if not isinstance(part, tuple | list) or not part:
        return False
    return all(isinstance(value, str | bytes | int | float) for value in part)


def _is_one_text(part: Any) -> bool:
    """Return whether a part is a list of a single text: of one sample, or common to all samples."""
    return _is_column(part) and len(part) == 1 and isinstance(part[0], str | bytes)


def _require_no_lists_of_samples(batch: Any, instead: str) -> None:
    """Refuse a list of arrays next to a list of equal length without axes.

    Such lists hold an entry for each sample. The first axis of an entry is then not the samples: of
    an image it is the channels, say.
    """
    if is_leaf(batch):
        return
    inner = [*batch.values()] if isinstance(batch, Mapping) else [*batch]
    lists = [part for part in inner if isinstance(part, tuple | list) and not is_leaf(part)]
    for part in inner:
        _require_no_lists_of_samples(part, instead)
    for arrays in lists:
        if len(arrays) > 1 and all(map(_counts, arrays)):
            for part in lists:
                if len(part) == len(arrays) and not all(
                    _counts(leaf) for entry in part for _, leaf in _leaves(entry, "")
                ):
                    raise UserError(
                        "a batch must have one number of samples: it holds two lists of "
                        f"{len(arrays)} entries, of arrays and of values without an axis, perhaps "
                        f"an entry for each sample; {instead}"
                    )


def _leaves(part: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Yield every leaf of a batch, and its place."""
    if is_leaf(part):
        yield place, part
        return
    inner = part.items() if isinstance(part, Mapping) else enumerate(part)
    for key, value in inner:
        yield from _leaves(value, f"{place}[{shown(key)}]")


def _counts(part: Any) -> frozenset[int]:
    """Return the possible sample counts of a leaf; empty for a leaf without an axis."""
    if isinstance(part, Padded):
        return frozenset([part.tokens])
    if _is_packed(part):
        return frozenset([int(part.batch_sizes[0]), len(part.data)])
    if _is_column(part):
        return frozenset([] if _is_one_text(part) else [len(part)])
    try:
        shape = getattr(part, "shape", None)
    except RuntimeError:  # PyTorch's nested tensors have no shape
        shape = None
    return frozenset([int(shape[0])] if isinstance(shape, tuple) and shape else [])


def _said(place: str, counts: frozenset[int]) -> str:
    return f"batch{place} has {' or '.join(map(str, sorted(counts)))}"
