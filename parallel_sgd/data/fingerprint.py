"""Fingerprints of data sets, made from a few samples."""

from __future__ import annotations

import hashlib

import numpy as np

from ..errors import UserError
from ..validation import integer, text
from .dataset import Dataset, require_dataset
from .validation import DType, float_dtype
from .view import CommunicatorView, require_ranks

FEW = 256  #: samples in a fingerprint, at most
FEW_BYTES = 1 << 22  #: limit on the bytes of their x
FEW_LABELS = 8  #: samples where reading may be slow, and x differs each time
READINGS = 3  #: repeated readings that must agree before ranks' labels are called different
UNLIKE = "otherwise at each reading"
"""The fingerprint of data whose labels change at each reading, such as random windows of a text."""


def require_same_data(
    name: str,
    dataset: Dataset,
    comm: CommunicatorView,
    *,
    dtype: DType = np.float32,
    classes: int | None = None,
) -> str:
    """Check that all ranks read the same data, by the fingerprints of a few samples.

    Args:
        name: name of the data in the error.
        dataset: this rank's data set.
        dtype, classes: as for `Dataset.read`.
    Returns:
        The fingerprint, or the reason for having none; the same on all ranks.
    Raises:
        UserError: an argument is not as required.
        SharedError: the data differ, or some of the ranks cannot read a compared sample. (A sample
            unreadable on all ranks is reported when training reaches this sample.)

    Labels that change from each reading to the next cannot be compared. Collective.
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
    """Return a digest of a few samples, to distinguish data sets of the same length.

    If x may differ at the next reading (`Dataset.repeatable` is False), only labels are hashed. If
    the labels differ too when read again, the fingerprint is `UNLIKE`.

    Args:
        dataset: the data set; of 0 samples the fingerprint is "".
        dtype, classes: as for `Dataset.read`.
    Returns:
        16 hexadecimal digits of a SHA-256 digest, `UNLIKE`, or "".
    Raises:
        UserError: an argument or one of the samples is not as required.

    Local. Cost: reads 256 samples, or fewer so that their x takes at most 4 MiB, but at least 2. If
    not repeatable, reads 8 samples twice.
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
