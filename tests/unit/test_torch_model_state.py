"""What a PyTorch model, a loss scaler and a program have beside the parameters goes on, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import parallel_sgd as psgd
from parallel_sgd import Communicator, UserError
from parallel_sgd.training.checkpoint.schema import converted

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")

COMM = Communicator.single()


class Calibrated(torch.nn.Linear):
    """Whose `state_dict` has a key more once there was a forward pass."""

    found: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.found = x.detach().abs().max()
        return super().forward(x)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.found is not None:
            destination[prefix + "found"] = self.found

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.found = state_dict.pop(prefix + "found", None)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def learner_of(model: Any, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return psgd.torch.Learner(model, optimizer, psgd.DataParallelSGD(), COMM, **options)


def step(learner: Any) -> None:
    learner.scaled(learner.model(torch.full((2, 4), 3.0)).square().mean()).backward()
    learner.step(samples=2)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_key_that_appears_in_training_comes_back(tmp_path, compiled):
    model, again = (torch.nn.Sequential(torch.nn.ReLU(), Calibrated(4, 2)) for _ in range(2))
    with learner_of(model) as learner, psgd.Checkpoints(tmp_path) as checkpoints:
        step(learner)
        checkpoints.save(learner)
    assert again[1].found is None
    seen = torch.compile(again, backend="eager") if compiled else again
    with learner_of(seen) as learner:
        psgd.load_checkpoint(learner, tmp_path)
    assert again[1].found == 3.0
    assert torch.equal(model[1].weight, again[1].weight)


def test_a_key_that_a_checkpoint_lacks_is_named(tmp_path):
    model = Calibrated(4, 2)
    with learner_of(model) as learner, psgd.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(learner)
        step(learner)
        with pytest.raises(UserError, match=r"lacks model\.others\.found"):
            psgd.load_checkpoint(learner, tmp_path)


@pytest.mark.parametrize("interval", [3, 10**10])
def test_a_loss_scale_of_any_interval_goes_on(tmp_path, interval):
    """Who does not want the scale to grow gives a large one."""

    def made() -> Any:
        return torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=interval)

    one, two = made(), made()
    with (
        learner_of(torch.nn.Linear(4, 2), scaler=one) as learner,
        psgd.Checkpoints(tmp_path) as checkpoints,
    ):
        step(learner)
        step(learner)
        checkpoints.save(learner)
    with learner_of(torch.nn.Linear(4, 2), scaler=two) as learner:
        psgd.load_checkpoint(learner, tmp_path)
        assert two.state_dict() == one.state_dict()
        step(learner)


def test_several_losses_are_scaled():
    """As a GradScaler takes them."""
    losses = [torch.tensor(1.0), torch.tensor(2.0)]
    for scaler, factor in ((None, 1), (torch.amp.GradScaler("cpu", init_scale=4.0), 4)):
        with learner_of(torch.nn.Linear(4, 2), scaler=scaler) as learner:
            for several in (losses, tuple(losses), iter(losses)):
                assert [float(loss) for loss in learner.scaled(several)] == [factor, 2 * factor]
            with pytest.raises(UserError, match="loss must be a tensor of one value: it is a"):
                learner.scaled([1.0])


def test_numbers_of_format_2_that_lack_a_state_are_the_users_to_mend():
    with pytest.raises(UserError, match="lacks 'parameters'"):
        converted({"state": {}, "weight": 1, "bytes_sent": 0, "extra": None}, 2)
