"""What asynchronous SGD holds of `parallel_sgd.testing`, beside rounds: see `test_conformance`."""

from __future__ import annotations

import pytest
from cases import few_ranks_but

from parallel_sgd import Adam, DataParallelASGD, MomentumSGD
from parallel_sgd.testing import CHECKS, check_algorithm

pytestmark = pytest.mark.filterwarnings("ignore:servers=0")

LATE = "a gradient is one of the model before"
HALF = "the period under way is not kept where another number of ranks takes up a checkpoint"
ON_THE_WAY = "some ranks have the answer to a push already, and others have not"

#: In pipelines every rank has a model of its own between two rounds; by the ranks that it takes.
GRADIENTS = {
    "serial": (1, LATE),
    "resharded": (1, HALF),
    "merged": (2, HALF),
    "errors": (2, ON_THE_WAY),
}
DELTAS = {
    "resharded": (1, HALF),
    "errors": (2, ON_THE_WAY),
    "agreement": (2, ON_THE_WAY),
}

#: What does not need the same run twice, nor ranks that know of each other in every step.
ALWAYS = ("options", "state", "arrays", "bytes_sent", "communication")


ROUNDS = {
    "gradients": ({}, {"optimizer": Adam(lr=0.05)}),
    "deltas": ({"currency": "deltas"}, {"optimizer": MomentumSGD(lr=0.1)}),
    "several minibatches, deltas": ({"sync_steps": 3, "currency": "deltas"}, {}),
    "several minibatches": (
        {"sync_steps": 3},
        {"exceptions": {"serial": "the gradients of three minibatches are one step"}},
    ),
    "warm start": (
        {"distributed_after": 50},
        {"optimizer": Adam(lr=0.05), "only": ["dry_ranks", "observed", "resharded", "errors"]},
    ),
}


@pytest.mark.parametrize("name", ROUNDS)
def test_rounds_conform_on_threads(name):
    """With `test_conformance`, where they push 1 bit, on MPI too."""
    options, more = ROUNDS[name]
    algorithm = DataParallelASGD(**{"mode": "sync", "servers": 0, "sync_steps": 1, **options})
    check_algorithm(algorithm, ranks=(3,), schedules=10, **more)


@pytest.mark.few_ranks
@pytest.mark.threads(1, 3)
@pytest.mark.parametrize(("currency", "by_nature"), [("gradients", GRADIENTS), ("deltas", DELTAS)])
def test_a_pipeline_in_rounds_conforms(comm, currency, by_nature):
    algorithm = DataParallelASGD(
        mode="sync", servers=0, sync_steps=1, pipeline=True, currency=currency
    )
    exceptions = {name: why for name, (least, why) in by_nature.items() if comm.size >= least}
    outcomes = check_algorithm(algorithm, comm=comm, exceptions=exceptions, schedules=10)
    excepted = {name for name, outcome in outcomes.items() if outcome.startswith("exception")}
    assert excepted == set(exceptions)
    assert list(outcomes) == list(CHECKS)


WITHOUT_AN_ORDER = {
    "async": ({}, ["serial", "same_state"]),
    "bounded, 1 bit": (
        {"mode": "bounded", "staleness": 1, "gradient_bits": 1, "block_size": 64},
        ["serial"],
    ),
    "deltas": ({"currency": "deltas"}, ["serial"]),
    "geo": ({"mode": "geo", "sync_steps": 3}, ["serial"]),
    "pipeline": ({"pipeline": True, "delay_compensation": 0.1}, []),
}


@pytest.mark.parametrize("name", few_ranks_but(["bounded, 1 bit"], WITHOUT_AN_ORDER))
def test_what_holds_without_an_order(on_ranks, name):
    options, more = WITHOUT_AN_ORDER[name]
    algorithm = DataParallelASGD(servers=0, **{"sync_steps": 1, **options})
    on_ranks(lambda comm: check_algorithm(algorithm, comm=comm, only=[*ALWAYS, *more]))


@pytest.mark.parametrize("currency", ["gradients", "deltas"])
def test_one_worker_alone_conforms_in_any_mode(currency):
    """There is an order then: all that is checked on one rank."""
    for mode in ("async", "bounded"):
        algorithm = DataParallelASGD(mode=mode, sync_steps=1, currency=currency)
        outcomes = check_algorithm(
            algorithm, ranks=(1,), optimizer=MomentumSGD(lr=0.1), only=ON_ONE_RANK
        )
        assert "exception" not in " ".join(outcomes.values())


#: "resharded" asks for two ranks, whose order is another one every time.
ON_ONE_RANK = [name for name in CHECKS if name != "resharded"]
