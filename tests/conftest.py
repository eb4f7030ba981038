"""Modules that tests share lie beside them: `kernel_cases`, `invariants`, `jobs`, and others."""

import sys
from pathlib import Path

import pytest

for layer in ("unit", "parallel", "integration"):
    sys.path.insert(0, str(Path(__file__).parent / layer))

pytest.register_assert_rewrite("cases", "invariants", "learners", "local_updates")
