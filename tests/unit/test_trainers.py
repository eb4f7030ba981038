"""The trainers of other packages, where these are not installed or not wanted."""

from __future__ import annotations

import subprocess
import sys

import pytest

import parallel_sgd as psgd
from parallel_sgd import UserError

PACKAGES = ("accelerate", "lightning", "pytorch_lightning", "transformers")


@pytest.mark.parametrize(
    ("name", "extra", "module"),
    [
        ("TrainerCallback", "transformers", "huggingface"),
        ("LightningStrategy", "lightning", "of_lightning"),
    ],
)
def test_a_missing_package_is_named(
    name: str, extra: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in PACKAGES:
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"parallel_sgd.torch.trainers.{module}", raising=False)
    monkeypatch.delitem(vars(psgd.torch), name, raising=False)
    with pytest.raises(
        UserError, match=rf"torch\.{name} needs {extra} .*pip install '.\[{extra}\]'"
    ):
        getattr(psgd.torch, name)(**({"package": "lightning"} if extra == "lightning" else {}))


def test_parallel_sgd_torch_imports_no_trainer() -> None:
    code = f"import sys, parallel_sgd.torch; assert not {{*sys.modules}} & {{*{PACKAGES}}}"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
