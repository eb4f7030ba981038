"""A checkpoint that has residuals where there are none is refused before anything changes."""

from __future__ import annotations

import numpy as np
import pytest

import parallel_sgd as psgd


def test_residuals_where_there_are_none_are_refused() -> None:
    parameters = psgd.Parameters({"w": np.zeros(3, np.float32)})
    comm = psgd.Communicator.single()
    with psgd.Learner(parameters, psgd.SGD(lr=0.1), psgd.DataParallelSGD(), comm) as learner:
        exchange = learner.state.exchange
        saved = {"residuals": None, "bits": None}
        exchange.check(saved, 1)
        with pytest.raises(psgd.UserError, match="has residuals, but full precision has none"):
            exchange.check(saved | {"residuals": -1}, 1)
