"""Ranks that read a Parquet file larger than their memory: each its part, and all fail as one."""

from __future__ import annotations

import re
import uuid
from itertools import chain

import numpy as np
import pytest
from few_weights import disagreement, errors_of, last, learner_of, put

from parallel_sgd import data
from parallel_sgd.communication import Communicator

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

ROWS, GROUP = 384, 8
BYTES = 16 * GROUP  #: of a decoded group


def written(folder, missing=None):
    """A file of its own for each rank: threads share the folder."""
    x = np.arange(2 * ROWS, dtype=np.float32).reshape(ROWS, 2)
    y = [None if row == missing else row for row in range(ROWS)]
    path = folder / f"{uuid.uuid4().hex}.parquet"
    parquet.write_table(pa.table({"a": x[:, 0], "b": x[:, 1], "y": y}), path, row_group_size=GROUP)
    return path


def trained(comm, columns, minibatch_size=48):
    learner = learner_of(comm)
    source = data.Source(columns, None, minibatch_size)
    labels = []
    for x, y in source.minibatches(learner):
        learner.step(put(learner, (x, y)))
        labels.append(y.tolist())
    return labels


def test_each_rank_decodes_its_part(on_ranks, tmp_path):
    def body(comm):
        columns = data.load_parquet(written(tmp_path), most_bytes=12 * BYTES)
        file, groups = columns.files[0], []
        read = file.read
        file.read = lambda group, names: (groups.append(group), read(group, names))[1]
        alone = data.load_parquet(written(tmp_path), most_bytes=12 * BYTES)
        serial = trained(Communicator.single(), alone)
        own = trained(comm, columns)
        return own, serial, len(groups)

    results = on_ranks(body)
    size = len(results)
    steps = zip(*(own for own, _, _ in results), strict=True)
    minibatches = [list(chain(*parts)) for parts in steps]
    assert minibatches == results[0][1] and sorted(chain(*minibatches)) == list(range(ROWS))
    all_groups, compared = ROWS // GROUP, 16
    for _, _, groups in results:
        assert groups <= compared + 2 * all_groups // size + 8


def test_ranks_must_keep_as_many_groups(on_ranks, tmp_path):
    def body(comm):
        most = 6 if last(comm) else 12
        trained(comm, data.load_parquet(written(tmp_path), most_bytes=most * BYTES))

    message, size = errors_of(on_ranks, body)
    assert message == disagreement("groups of samples in use at a time", size, 12, 6)


def test_a_missing_value_ends_the_step_of_all_ranks(on_ranks, tmp_path):
    """The rank that reads it, in the middle of the epoch, tells the others."""

    def body(comm):
        trained(comm, data.load_parquet(written(tmp_path, missing=100), most_bytes=12 * BYTES))

    message, size = errors_of(on_ranks, body)
    line = r".*parquet: column 'y' is null in row 100: must be a number \(on rank (\d)\)"
    assert 0 <= int(re.fullmatch(line, message)[1]) < size
