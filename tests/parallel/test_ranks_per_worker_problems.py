"""Workers of several ranks: what is refused, and problems of one rank that all ranks learn."""

from __future__ import annotations

import re
import time
from functools import partial

import numpy as np
import pytest
from limits import patience
from served_training import (
    asynchronous,
    finished,
    starting_point,
)
from shared_workers import (
    PLAIN,
    RANKS,
    learner_of,
    same_within,
    train,
)

import parallel_sgd as psgd
from parallel_sgd import (
    SGD,
    Communicator,
    DataParallelASGD,
    Learner,
    UserError,
    simulate,
)
from parallel_sgd.algorithms.asynchronous_state import NO_NUMBER
from parallel_sgd.communication import simulate_recovery
from parallel_sgd.training.checkpoint.schema import converted


def raises(ranks, body, text):
    def checked(comm):
        with pytest.raises(UserError, match=re.escape(text)):
            body(comm)

    simulate(ranks, checked)


@pytest.mark.parametrize(
    ("ranks", "options", "text"),
    [
        (RANKS, {"ranks_per_worker": 3}, "ranks_per_worker=3 must divide the number of ranks that"),
        (4, {"ranks_per_worker": 2, "servers": 0}, "ranks_per_worker=2 needs servers on ranks of"),
    ],
)
@pytest.mark.filterwarnings("ignore:servers=0")
def test_what_is_refused(ranks, options, text):
    options = {"servers": 1, **options}
    raises(ranks, lambda comm: learner_of(comm, **options), text)


def test_ranks_that_may_fail_are_refused():
    def body(comm):
        with pytest.raises(
            UserError, match="ranks_per_worker=2 needs ranks that stay: run without"
        ):
            learner_of(comm, 2)
        return True

    assert simulate_recovery(3, body, timeout_s=10) == [True] * 3


def test_tables_are_refused():
    table = psgd.Embedding(name="ids", width=2)
    with pytest.raises(UserError, match="ranks_per_worker=2 must be 1 with tables"):
        DataParallelASGD(ranks_per_worker=2, tables=(table,))
    with pytest.raises(
        UserError, match="ranks_per_worker=0 must be a whole number, at least 1, or"
    ):
        DataParallelASGD(ranks_per_worker=0)
    assert DataParallelASGD(ranks_per_worker="host").ranks_per_worker == "host"


@pytest.mark.parametrize("rank", range(4))
def test_a_problem_of_any_rank_ends_all(rank):
    """A bad gradient, and a call of `fail`, on the first and on another rank of a worker."""

    def trained(comm, learner, fails):
        for step in range(0 if learner.serves else 4):
            bad = step == 2 and comm.rank == rank
            learner.announce(1, 4)
            learner.gradient.flat[:] = np.nan if bad else 1.0
            if fails and bad:
                learner.fail("no such file")
            learner.step(samples=1)
        learner.finish()

    def body(comm, fails):
        learner = learner_of(comm, 2, mode="sync")
        with pytest.raises(UserError, match="no such file" if fails else "not finite") as raised:
            trained(comm, learner, fails)
        assert re.findall(r"\(on (.*?)\)", str(raised.value)) == [f"rank {rank}"]

    for fails in (True, False):
        simulate(RANKS, partial(body, fails=fails))


def test_every_rank_with_the_problem_is_named_once():
    """Also if the skips in a row are too many. A model of all ranks names all of them."""

    def trained(comm, learner, ranks):
        for _ in range(0 if learner.serves else 12):
            learner.announce(1, 4)
            learner.gradient.flat[:] = np.inf if comm.rank in ranks else 1.0
            learner.step(samples=1)
        learner.finish()

    def body(comm, not_finite, ranks, **options):
        algorithm = asynchronous(ranks_per_worker=4, servers=1, **options)
        learner = Learner(starting_point(), PLAIN, algorithm, comm, not_finite=not_finite)
        with pytest.raises(UserError, match="not finite") as raised:
            trained(comm, learner, ranks)
        return re.findall(r"\(on (.*?)\)", str(raised.value))

    for not_finite in ("stop", "skip"):
        for ranks, named in (((2,), "rank 2"), ((1, 3), "ranks 1, 3")):
            found = simulate(RANKS, partial(body, not_finite=not_finite, ranks=ranks))
            assert found == [[named]] * RANKS
        found = simulate(RANKS, partial(body, not_finite=not_finite, ranks=(2,), currency="deltas"))
        assert found == [["ranks 0, 1, 2, 3"]] * RANKS


def test_skipped_together():
    """A gradient that is not finite on one rank: its worker skips the push."""

    def body(comm):
        algorithm = asynchronous(ranks_per_worker=2, servers=1, mode="sync")
        learner = Learner(starting_point(), SGD(lr=0.1), algorithm, comm, not_finite="skip")
        for step in range(0 if learner.serves else 5):
            learner.announce(1, 4)
            learner.gradient.flat[:] = np.inf if step == 2 and comm.rank == 1 else 1.0 + comm.rank
            learner.step(samples=1)
            same_within(learner)
        finished(comm, learner)
        return None if learner.serves else [w["pushes"] for w in learner.report()["workers"]]

    assert simulate(RANKS, body)[:4] == [[4, 5]] * 4


def test_different_calls_in_a_worker_are_named():
    def body(comm):
        learner = learner_of(comm, 2)
        if learner.serves:
            learner.finish()
        learner.announce(1, 4)
        learner.gradient.flat[:] = 1
        if comm.rank == 1:
            learner.meet()
        else:
            learner.step(samples=1)
            learner.finish()

    text = "request of the worker must be the same on all ranks, but differs: rank 0: push; "
    raises(RANKS, body, f"{text}rank 1: meet")


def test_a_long_wait_for_another_worker():
    """Longer than `timeout_s`: a server's heartbeats reach all ranks of the worker that waits."""
    times = patience()

    def body(comm):
        learner = learner_of(comm, 2)
        steps = 0 if learner.serves else 1 + 8 * learner.group.worker
        for _ in range(steps):
            learner.gradient.flat[:] = 1 + comm.rank
            learner.announce(1, 4)
            time.sleep(0.4 * times)
            learner.step(samples=1)
        if not learner.serves:
            began = time.monotonic()
            learner.meet()
            assert learner.group.worker or time.monotonic() - began > 2.5 * times
        return finished(comm, learner)

    simulate(RANKS, body, timeout_s=1.2 * times)


@pytest.mark.parametrize(
    ("ranks", "ranks_per_worker", "text"),
    [
        (3, 2, "was saved by 4 ranks that train: with ranks_per_worker only as many ranks can"),
        (RANKS, 4, "ranks_per_worker"),
        (RANKS, 1, "ranks_per_worker"),
    ],
)
def test_other_ranks_cannot_continue(tmp_path, ranks, ranks_per_worker, text):
    def save(comm):
        learner = learner_of(comm, 2)
        train(learner, 3)
        if not learner.serves:
            psgd.Checkpoints(tmp_path).save(learner, background=False)
        finished(comm, learner)

    def load(comm):
        learner = learner_of(comm, ranks_per_worker)
        if not learner.serves:
            with pytest.raises(UserError, match=text):
                psgd.load_checkpoint(learner, tmp_path)
        learner.finish()

    simulate(RANKS, save)
    simulate(ranks, load)


def test_other_workers_cannot_continue(tmp_path, monkeypatch):
    """The same numbers of ranks and of workers, but other ranks in them."""
    hosts = []
    monkeypatch.setattr(Communicator, "hosts", property(lambda self: hosts))

    def save(comm):
        learner = learner_of(comm, "host")
        train(learner, 3)
        if not learner.serves:
            psgd.Checkpoints(tmp_path / hosts[0]).save(learner, background=False)
        finished(comm, learner)

    def load(comm, of, text):
        learner = learner_of(comm, "host")
        if not learner.serves:
            if text:
                with pytest.raises(UserError, match=re.escape(text)):
                    psgd.load_checkpoint(learner, tmp_path / of)
            else:
                psgd.load_checkpoint(learner, tmp_path / of)
        learner.finish()

    hosts[:] = "cdefg"  # every worker is a single rank
    simulate(RANKS, save)
    hosts[:] = "babba"
    simulate(RANKS, save)
    simulate(RANKS, partial(load, of="b", text=None))
    other = "with ranks_per_worker the same ranks must form a worker again (on "
    simulate(RANKS, partial(load, of="c", text=f"{other}ranks 0, 1, 2, 3)"))
    hosts[:] = "aaabb"
    simulate(RANKS, partial(load, of="b", text=f"{other}ranks 1, 3)"))
    hosts[:] = "cdefg"
    simulate(RANKS, partial(load, of="b", text=f"{other}ranks 0, 1, 2, 3)"))
    simulate(4, partial(load, of="b", text="was saved by 4 ranks that train"))


def test_a_checkpoint_from_before_workers_had_several_ranks():
    own = {"served": {}, "gathered_samples": 3}
    state = converted({"state": {"algorithm": dict(own)}}, 4)["state"]["algorithm"]
    assert state == own | {"worker": NO_NUMBER}
