"""The conformance suite holds algorithms to their identities through a PyTorch model, too."""

from __future__ import annotations

import pytest
from cases import few_ranks_but
from torch_door import ThroughTorch

import parallel_sgd as psgd
from parallel_sgd.testing import CHECKS, cases, check_algorithm

GUESSED = {"announced": "what a wrong guess of a minibatch's samples leaves is sent by itself"}

ROUNDED = {"errors"}
"""It compares with a local step of its own, bit for bit; here means were multiplied and divided."""

CONFORMING = {
    "32 bit, overlap": (
        psgd.DataParallelSGD(overlap=True, bucket_values=100),
        {"exceptions": GUESSED},
    ),
    "1 bit": (psgd.DataParallelSGD(gradient_bits=1, block_size=64), {}),
    "1 bit, overlap": (
        psgd.DataParallelSGD(gradient_bits=1, block_size=64, overlap=True),
        {"exceptions": GUESSED},
    ),
    "PowerSGD": (psgd.PowerSGD(rank=2), {"full_precision": psgd.PowerSGD(rank=18)}),
    "model averaging": (psgd.ModelAveragingSGD(sync_period=6), {}),
    "DiLoCo": (
        psgd.DiLoCo(sync_steps=3),
        {"exceptions": {"serial": "the outer momentum is at work on one rank, too"}},
    ),
    "servers, in rounds": (
        psgd.DataParallelASGD(mode="sync", servers=0, sync_steps=1, currency="deltas"),
        {"only": [check for check in CHECKS if check not in ROUNDED]},
    ),
}


@pytest.mark.filterwarnings("ignore:servers=0")
@pytest.mark.threads(2)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", few_ranks_but(("1 bit, overlap",), CONFORMING))
def test_identities(comm, name, monkeypatch):
    algorithm, options = CONFORMING[name]
    monkeypatch.setattr(cases, "Learner", ThroughTorch)
    outcomes = check_algorithm(algorithm, comm=comm, schedules=5, **options)
    excused = options.get("exceptions", {}).keys()
    passed = {check for check, outcome in outcomes.items() if "passed" in outcome}
    several = {check for check in CHECKS if CHECKS[check].least_ranks > comm.size}
    assert passed == outcomes.keys() - excused - several and len(passed) > 15
