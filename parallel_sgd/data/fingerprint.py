"""How data are told from others without reading all of them."""

from __future__ import annotations

import hashlib

import numpy as np

from ..errors import UserError
from ..validation import integer, text
from .dataset import Dataset, require_dataset
from .validation import DType, float_dtype
from .view import CommunicatorView, require_ranks

FEW = 256  #: samples that are compared
FEW_BYTES = 1 << 22  #: fewer, where they are large
FEW_LABELS = 8  #: where reading one may be slow, and give another x each time
READINGS = 3  #: further ones that labels must be alike in before they are called different
UNLIKE = "otherwise at each reading"
"""The fingerprint of data whose labels are: random windows of a text, say."""


def require_same_data(
    name: str,
    dataset: Dataset,
    comm: CommunicatorView,
    *,
    dtype: DType = np.float32,
    classes: int | None = None,
) -> str:
    """See that the ranks read the same data, by a few samples.

    Args:
        name: what the data are called in the error.
        dtype, classes: as for `Dataset.read`.
    Returns:
        Their fingerprint, or why there is none; the same on all ranks.
    Raises:
        UserError: an argument is not as required.
        SharedError: they differ, or one of those samples cannot be read on some of the ranks (what
            is alike on all is found where it is trained on).

    Labels that a rank reads otherwise each time cannot be compared. Collective.
    """
    require_ranks(comm)
    text("name", name)
    require_dataset("dataset", dataset)
    float_dtype(dtype)
    classes = None if classes is None else integer("classes", classes, 1)
    own, problem = "", None
    try:
        own = fingerprint(dataset, dtype=dtype, classes=classes)
    except UserError as error:
        problem = str(error)
    if len(set(comm.allgather_object(problem or own))) > 1:
        comm.raise_together(problem)
        try:
            again = [fingerprint(dataset, dtype=dtype, classes=classes) for _ in range(READINGS)]
        except UserError as error:
            again, problem = [], str(error)
        comm.raise_together(problem)
        if all(comm.allgather_object({own, *again} == {own} - {UNLIKE})):
            comm.require_agreement({name: own})
        return UNLIKE
    return problem or own


def fingerprint(dataset: Dataset, *, dtype: DType = np.float32, classes: int | None = None) -> str:
    """What tells a data set from others of the same length: a digest of a few samples.

    Where it is not known to give the same x again (`Dataset.repeatable`), only labels count; where
    these are others, too, when they are read again, it is `UNLIKE`.

    Args:
        dtype, classes: as for `Dataset.read`.
    Raises:
        UserError: an argument or one of the samples is not as required.

    Local. Cost: reads 256 samples, or as many as 4 MiB hold, at least 2; or 8 for their labels,
    twice.
    """
    require_dataset("dataset", dataset)
    classes = None if classes is None else integer("classes", classes, 1)
    if len(dataset) == 0:
        return ""
    few = FEW_LABELS
    if dataset.repeatable:
        x, _ = dataset.read(np.zeros(1, np.int64), dtype=dtype, classes=classes)
        few = min(max(FEW_BYTES // max(x.nbytes, 1), 2), FEW)
    spread = np.unique(np.linspace(0, len(dataset) - 1, few).astype(np.int64))
    x, y = dataset.read(spread, dtype=dtype, classes=classes)
    digest = hashlib.sha256(repr((x.shape, y.shape)).encode())
    digest.update(y.tobytes())
    if dataset.repeatable:
        digest.update(x.tobytes())
    else:
        _, again = dataset.read(spread, dtype=dtype, classes=classes)
        if again.shape != y.shape or again.tobytes() != y.tobytes():
            return UNLIKE
    return digest.hexdigest()[:16]
