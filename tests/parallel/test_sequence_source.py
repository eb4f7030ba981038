"""Sequences on ranks, with learners: files of which one rank has another, or a corrupt record."""

from __future__ import annotations

from itertools import chain, islice

import numpy as np
import pytest
from few_weights import disagreement, errors_of, last, learner_of

from parallel_sgd.data import (
    Dense,
    SequenceSource,
    Source,
    Sparse,
    load_cntk_sequences,
    load_cntk_text,
    load_libsvm,
)

LENGTHS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]
STREAMS = {"x": Dense(2), "y": Sparse(15, one_hot=True, per_sequence=True)}


def text(lengths):
    lines = []
    for i, length in enumerate(lengths):
        lines += [f"{i} |x {i} {t}" for t in range(length)]
        lines[-1] += f" |y {i}:1"
    return "\n".join(lines)


def train(minibatches, learner):
    """Take a step for every minibatch; which sequences this rank has had in each."""
    taken = []
    for x, y in minibatches:
        learner.gradient.flat[:] = x.values.sum((0, 1))
        learner.step(samples=x.tokens)
        assert (x.values[:, 0, 0] == y).all() and (x.lengths == np.array(LENGTHS)[y]).all()
        taken.append(y.tolist())
    return taken


@pytest.fixture
def path(tmp_path):
    (tmp_path / "a.ctf").write_text(text(LENGTHS))
    return tmp_path / "a.ctf"


def test_all_ranks_together_take_every_sequence_once_an_epoch(on_ranks, path):
    def body(comm):
        learner = learner_of(comm)
        source = SequenceSource(load_cntk_sequences(path, STREAMS, comm=comm), None, 24, epochs=2)
        taken = train(source.minibatches(learner), learner)
        assert learner.samples == 2 * sum(LENGTHS)
        return taken, learner.parameters.flat.tobytes()

    results = on_ranks(body)
    taken = list(chain.from_iterable(chain.from_iterable(steps for steps, _ in results)))
    assert sorted(taken) == sorted([*range(len(LENGTHS))] * 2)
    assert len({weights for _, weights in results}) == 1
    assert len({len(steps) for steps, _ in results}) == 1


def test_a_new_source_goes_on_where_the_learner_stands(comm, path):
    def minibatches(learner):
        return SequenceSource(load_cntk_sequences(path, STREAMS), None, 24, epochs=2).minibatches(
            learner
        )

    learner, other = learner_of(comm), learner_of(comm)
    taken = train(minibatches(learner), learner)
    first = train(islice(minibatches(other), 3), other)
    assert first + train(minibatches(other), other) == taken
    assert learner.parameters.flat.tobytes() == other.parameters.flat.tobytes()


@pytest.mark.parametrize("option", ["unit", "data"])
def test_ranks_that_disagree(on_ranks, path, option):
    def body(comm):
        learner = learner_of(comm)
        other = last(comm) and comm.size > 1
        x = [np.ones((n + (other and option == "data"), 2)) for n in LENGTHS]
        unit = "sequences" if other and option == "unit" else "tokens"
        next(SequenceSource(x, [0] * len(x), 24, unit=unit).minibatches(learner))

    message, size = errors_of(on_ranks, body)
    if option == "unit":
        assert message == disagreement("unit", size, "'tokens'", "'sequences'")
    else:
        assert (message or "data must be the same").startswith("data must be the same")
        assert (message is None) == (size == 1)


LOADERS = {
    "cntk": (load_cntk_text, b"|x 1 2 |y 1:1\n", {"streams": STREAMS}),
    "libsvm": (load_libsvm, b"1 1:1 2:2     \n", {"features": 2}),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_corrupt_record_ends_all_ranks(on_ranks, tmp_path, kind):
    """In the second minibatch, as the last rank reads it, while the others wait in `step`."""
    load, good, options = LOADERS[kind]

    def body(comm):
        lines = [good] * 2000  # of which the ranks compare every 8th
        if last(comm):
            lines[22] = good.replace(b"2", b"?")
        path = tmp_path / f"{comm.rank}.txt"
        path.write_bytes(b"".join(lines))
        learner = learner_of(comm)
        data = load(path, **options)
        try:
            for x, _ in Source(data, minibatch_size=12, shuffle=False).minibatches(learner):
                learner.gradient.flat[:] = x.sum(0)
                learner.step(samples=len(x))
        finally:
            assert learner.samples == 12

    message, size = errors_of(on_ranks, body)
    assert message.endswith(f"(on rank {size - 1})")
    assert f"{size - 1}.txt, line 23 (byte {22 * len(good)}): " in message


def test_a_file_that_one_rank_lacks(on_ranks, tmp_path):
    def body(comm):
        if not last(comm):
            (tmp_path / f"{comm.rank}.txt").write_bytes(b"1 1:1\n")
        load_libsvm(tmp_path / f"{comm.rank}.txt", comm=comm)

    message, size = errors_of(on_ranks, body)
    assert message.endswith(f"/{size - 1}.txt: there is no such file (on rank {size - 1})")
