"""Accelerate with compressed gradients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

accelerate = pytest.importorskip("accelerate")

import torch  # noqa: E402
from two_ranks import RANKS, total, values_of  # noqa: E402

import parallel_sgd as psgd  # noqa: E402
from parallel_sgd.errors import UserError  # noqa: E402


@pytest.fixture(autouse=True)
def accelerator_of_its_own() -> Iterator[None]:
    """Accelerate has one state for all Accelerators of a process."""
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    yield
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


class Run:
    """A program with Accelerate: as its own examples are, with one line more."""

    def __init__(self, *, bits: float | None = 2, accumulate: int = 1, **options: Any) -> None:
        self.accelerator = accelerate.Accelerator(
            cpu=True,
            gradient_accumulation_steps=accumulate,
            kwargs_handlers=[
                accelerate.utils.DistributedDataParallelKwargs(find_unused_parameters=True)
            ],
            **options,
        )
        assert self.accelerator.num_processes == RANKS
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(x, x[:, :3].argmax(1)), batch_size=4
        )
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        if bits is not None:
            self.handle = psgd.torch.compress(
                self.model, gradient_bits=bits, scaler=self.accelerator.scaler
            )
            self.accelerator.register_for_checkpointing(psgd.torch.GatheredState(self.handle))

    def train(self, begin: int = 0, end: int = 8) -> torch.Tensor:
        for number, (x, y) in enumerate(self.loader):
            if begin <= number < end:
                with self.accelerator.accumulate(self.model):
                    self.accelerator.backward(torch.nn.functional.cross_entropy(self.model(x), y))
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
        return values_of(self.model)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_gradients_are_compressed(precision: str) -> None:
    run = Run(mixed_precision=precision)
    start = values_of(run.model)
    values = run.train()
    report = run.handle.report()
    assert report["steps"] == 8 and report["bytes_sent"] < report["bytes_in_32_bit"] / 2
    plain = Run(bits=None, mixed_precision=precision).train()
    assert not torch.equal(values, plain)
    assert (values - plain).norm() < (plain - start).norm()


def test_accumulated_minibatches_are_exchanged_once() -> None:
    run = Run(accumulate=4)
    run.train()
    assert run.handle.steps == 2


def test_a_saved_state_has_the_residuals_of_all_ranks(folder: Path) -> None:
    whole = Run()
    whole.train(end=4)
    whole.accelerator.save_state(folder / "state")
    values = whole.train(begin=4)
    again = Run()
    again.accelerator.load_state(folder / "state")
    assert torch.equal(again.train(begin=4), values)

    with_zeros = Run()
    with_zeros.accelerator.load_state(folder / "state")
    with_zeros.handle.load_state_dict({**with_zeros.handle.state_dict(), "residuals": {}})
    assert not torch.equal(with_zeros.train(begin=4), values)


def test_a_saved_state_of_another_number_of_ranks(folder: Path) -> None:
    """The sum of all residuals stays the same."""
    run = Run()
    run.train(end=4)
    state = psgd.torch.GatheredState(run.handle)
    (states,) = [found for found in shared(state.state_dict()["states"]) if found]
    assert [one["rank"] for one in states] == [*range(RANKS)]
    three = [{**states[min(k, 1)], "rank": k, "ranks": 3} for k in range(3)]
    other = Run()
    loaded = psgd.torch.GatheredState(other.handle)
    loaded.load_state_dict({"states": three})
    found, expected = total(shared(other.handle.state_dict())), total(three)
    assert expected.keys() == found.keys()
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)
    with pytest.raises(UserError, match="must be rank 0's result"):
        loaded.load_state_dict({"states": []})


def shared(value: Any) -> list[Any]:
    return accelerate.utils.gather_object([value])


def test_what_is_refused() -> None:
    with pytest.raises(UserError, match=r"must be what psgd.torch.compress\(...\) returns"):
        psgd.torch.GatheredState("handle")  # type: ignore[arg-type]
