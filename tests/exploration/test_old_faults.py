"""Exploration finds faults of recovery that were mended, once they are put back."""

from __future__ import annotations

import time

import numpy as np
import pytest
from explored import CONFIGURATIONS
from old_faults import OLD_FAULTS

from parallel_sgd.testing import ScheduleFailed

SECONDS = 60.0  #: of a core, in which each must be found
AT_A_TIME = 50


@pytest.mark.filterwarnings("ignore:servers=0")
@pytest.mark.parametrize("fault", OLD_FAULTS)
def test_an_old_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old = OLD_FAULTS[fault]
    configuration = CONFIGURATIONS[old.configuration]
    old.put_back(monkeypatch)

    def explored() -> None:
        until, seed = time.process_time() + SECONDS, old.seed
        while time.process_time() < until:
            configuration.explore(schedules=AT_A_TIME, seed=seed)
            seed += AT_A_TIME

    with np.errstate(all="ignore"), pytest.raises(ScheduleFailed) as found:
        explored()
    print(f"{fault}: {found.value}")
