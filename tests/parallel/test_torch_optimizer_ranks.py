"""What PyTorch optimizers keep, where ranks differ in it: some have not begun, some cannot save."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch_models import MODELS, OPTIMIZERS, Branches, batch, made, values

import parallel_sgd as psgd
from parallel_sgd import Communicator, UserError
from parallel_sgd.torch.optimizer.document import mapped
from parallel_sgd.training import SharedSnapshot, Snapshot

pytestmark = [
    pytest.mark.usefixtures("no_waiting_for_the_disk"),
    pytest.mark.threads(2),
    pytest.mark.ranks(2),
]

BLOCK = psgd.DiLoCo(sync_steps=2, inner_state="average")


class Filtered(torch.optim.SGD):
    """Whose groups have what is another object in every process."""

    def __init__(self, params: Any, **own: Any) -> None:
        super().__init__([{"params": [*params], **own}], lr=0.1)


class WithObject(torch.optim.SGD):
    """Whose state has an object on the last rank."""

    rank = size = 0

    def step(self, closure: Any = None) -> Any:
        super().step()
        if self.rank == self.size - 1:
            self.state[self.param_groups[0]["params"][0]]["own"] = object()


def step(learner: Any, number: int, samples: int = 3) -> None:
    if samples:
        x, y = batch(learner.model, learner.comm.rank, number, samples)
        F.cross_entropy(learner.model(x), y).backward()
    learner.step(samples=samples)


def learner_of(comm: Communicator, optimizer: Any, algorithm: Any, **options: Any) -> Any:
    model: nn.Module = made(MODELS["mlp"], dtype=torch.float32, **options)
    return psgd.torch.Learner(model, optimizer(model), algorithm, comm)


def test_what_groups_have_of_the_program_is_compared(comm):
    """Functions and objects are others on every rank; what they are is the same."""
    assert comm.size > 1

    def narrow(p: torch.Tensor) -> bool:
        return p.dim() < 2

    class Settings:
        def __init__(self, value: int) -> None:
            self.value = value

    def optimizer(model: nn.Module, value: int = 1) -> Any:
        names = ["bias", "norm", "scale"]
        several = {names[(i + comm.rank) % 3] for i in range(3)}
        own = {"one": narrow, "two": lambda p: p, "three": partial(narrow, 3)}
        return Filtered(model.parameters(), **own, four=Settings(value), five=several)

    with learner_of(comm, optimizer, psgd.DataParallelSGD()) as learner:
        step(learner, 0)
    with pytest.raises(UserError, match=r"hyperparameters of the optimizer must be the same.*'va"):
        learner_of(comm, lambda model: optimizer(model, comm.rank), psgd.DataParallelSGD())


def test_what_cannot_be_held_is_said_on_all_ranks_as_it_is_saved(comm, tmp_path):
    def optimizer(model: nn.Module) -> Any:
        made = WithObject(model.parameters(), lr=0.1)
        made.rank, made.size = comm.rank, comm.size
        return made

    with learner_of(comm, optimizer, psgd.DataParallelSGD()) as learner:
        step(learner, 0)
        checkpoints = psgd.Checkpoints(comm.allgather_object(str(tmp_path))[0])
        with pytest.raises(
            UserError, match=rf"WithObject\.state_dict\(\).*'own'\].*\(on rank {comm.size - 1}\)"
        ):
            checkpoints.save(learner)
        step(learner, 1)
        checkpoints.close()


def test_ranks_that_have_not_begun_take_part_in_averages(comm, tmp_path):
    """Rank 0 has no samples in the first block: it takes part by zeros. A checkpoint for another
    number of ranks has the state of those that have one."""
    folder = comm.allgather_object(str(tmp_path))[0]
    with learner_of(comm, OPTIMIZERS["adamw"], BLOCK) as learner:
        for number in (0, 1):
            step(learner, number, samples=3 * (comm.rank > 0))
        vectors = learner.local_step.state.buffers
        assert [*vectors] == ["exp_avg", "exp_avg_sq"]
        sums = [v.copy() for v in vectors.values()]
        everywhere = comm.allgather_object(sums)
        for theirs in everywhere:
            assert all(np.array_equal(a, b) and a.any() for a, b in zip(theirs, sums, strict=True))
        with psgd.Checkpoints(folder) as checkpoints:
            checkpoints.save(learner)
        step(learner, 2)
        step(learner, 3)
        assert len({v.tobytes() for v in comm.allgather_object(values(learner.model))}) == 1
    if comm.rank == 0:
        alone = learner_of(Communicator.single(), OPTIMIZERS["adamw"], BLOCK, seed=1)
        psgd.load_checkpoint(alone, folder)
        for of_p in alone.local_step.torch_optimizers[0].state.values():
            assert of_p["step"] == 2 and of_p["exp_avg"].any()
        assert len(alone.local_step.torch_optimizers[0].state) == 4
        step(alone, 0)
        alone.close()
    comm.barrier()


class Counted(torch.optim.RMSprop):
    """Whose groups count its steps, and whose states have more than vectors."""

    def step(self, closure: Any = None) -> Any:
        super().step()
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for p in group["params"]:
                self.state[p].setdefault("begun with", p.detach().double().sum())
                self.state[p].setdefault("signs", p.detach() > 0)


class Wrapped(torch.optim.Optimizer):
    """Has another optimizer within it, and a ``state_dict()`` of its own form."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.inner = torch.optim.Adam(self.param_groups, lr=0.01)

    def step(self, closure: Any = None) -> Any:
        self.inner.step()

    def state_dict(self) -> Any:
        return {"inner": self.inner.state_dict()}

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict["inner"])
        self.param_groups = self.inner.param_groups


BEGIN_LATER = {
    **{name: OPTIMIZERS[name] for name in ("momentum", "adamw", "groups")},
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
    "counted": lambda model: Counted(model.parameters(), lr=0.005),
    "wrapped": lambda model: Wrapped(model.parameters()),
}


def entries_of(optimizer: Any) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """The parameters that have a state, and that."""
    rule = getattr(optimizer, "inner", optimizer)
    held = [p for group in rule.param_groups for p in group["params"]]
    return [(p, rule.state[p]) for p in held if rule.state.get(p)]


def states_of(learner: Any) -> list[str]:
    """What the optimizer of each rank keeps, to the bit."""

    def leaf(value: Any, _: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.dtype, value.shape, value.detach().numpy().tobytes()

    optimizer = learner.local_step.torch_optimizers[0]
    own = [[of_p for _, of_p in entries_of(optimizer)], optimizer.state_dict().get("param_groups")]
    return learner.comm.allgather_object(repr(mapped(own, leaf)))


def like(learner: Any, rule: Any) -> tuple[nn.Module, Any]:
    """A model, and its optimizer, as the learner's are now."""
    model = copy.deepcopy(learner.model)
    optimizer = rule(model)
    optimizer.load_state_dict(copy.deepcopy(learner.local_step.torch_optimizers[0].state_dict()))
    return model, optimizer


@pytest.mark.parametrize("name", BEGIN_LATER)
def test_a_rank_that_begins_later_goes_on_with_the_average(comm, name, tmp_path):
    """Rank 0 has its first samples in the second block."""
    assert comm.size == 2
    rule, folder = BEGIN_LATER[name], comm.allgather_object(str(tmp_path))[0]
    algorithm = psgd.SlowMo(sync_steps=2, inner_state="average")
    own = made(MODELS["mlp"], dtype=torch.float32)
    alone = rule(own)
    with learner_of(comm, rule, algorithm) as learner:
        for number in (0, 1):
            x, y = batch(own, 1, number, 3)
            alone.zero_grad()
            F.cross_entropy(own(x), y).backward()
            alone.step()
            step(learner, number, samples=3 * comm.rank)
        assert len({*states_of(learner)}) == 1
        kept = entries_of(learner.local_step.torch_optimizers[0])
        for (p, has), (_, had) in zip(kept, entries_of(alone), strict=True):
            for key, value in had.items():
                averaged = (value.shape, value.dtype) == (p.shape, p.dtype)
                expected = (value / 2 if averaged else value).double()
                assert torch.allclose(has[key].double(), expected, rtol=1e-4, atol=1e-8), key
        with psgd.Checkpoints(folder) as checkpoints:
            checkpoints.save(learner)
        model, optimizer = like(learner, rule)
        x, y = batch(model, comm.rank, 2, 3)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        step(learner, 2)
        assert np.abs(values(model) - values(learner.model)).max() < 1e-6
        step(learner, 3)
        last = states_of(learner), values(learner.model)
    with learner_of(comm, rule, algorithm) as learner:
        psgd.load_checkpoint(learner, folder)
        for number in (2, 3):
            step(learner, number)
        if name != "counted":  # of which PyTorch changes dtypes as it loads
            assert states_of(learner) == last[0]
        assert np.array_equal(values(learner.model), last[1])


def test_a_rank_takes_over_what_it_lacks_of_single_parameters(comm):
    """Each rank has used another branch of the model in the block."""
    assert comm.size == 2
    model = made(Branches, dtype=torch.float32)
    model.which = comm.rank
    optimizer = torch.optim.AdamW(model.parameters())
    algorithm = psgd.ModelAveragingSGD(sync_steps=2, inner_state="average")
    with psgd.torch.Learner(model, optimizer, algorithm, comm) as learner:
        for number in (0, 1):
            step(learner, number)
        assert len({*states_of(learner)}) == 1
        kept = [of_p for _, of_p in entries_of(learner.local_step.torch_optimizers[0])]
        assert len(kept) == 4 and all(of_p["exp_avg"].any() for of_p in kept)
        assert all(of_p["step"] == 2 for of_p in kept)


class TakesNothing(torch.optim.Adam):
    def load_state_dict(self, state_dict: Any) -> None:
        raise KeyError("no such state")


@pytest.mark.parametrize("kind", [WithObject, TakesNothing])
def test_what_a_rank_cannot_take_over_is_said_on_all_ranks(comm, kind):
    def optimizer(model: nn.Module) -> Any:
        made = kind(model.parameters(), lr=0.1)
        made.rank, made.size = comm.rank, comm.size
        return made

    assert comm.size == 2
    said = {
        WithObject: r"WithObject\.state_dict\(\).*'own'\].*\(on rank 1\)",
        TakesNothing: "^rank 1 has a state .* TakesNothing.*no such state.*\\(on rank 0\\)",
    }
    with learner_of(comm, optimizer, BLOCK) as learner:
        step(learner, 0, samples=3 * comm.rank)
        with pytest.raises(UserError, match=said[kind]):
            step(learner, 1, samples=3 * comm.rank)


def test_a_rank_that_has_not_begun_keeps_what_it_has_in_common(comm):
    """Copies of ranks may have other parts: each goes back to its own; one that has none gets
    those of another."""
    with learner_of(comm, OPTIMIZERS["adamw"], psgd.ModelAveragingSGD(sync_steps=4)) as learner:
        for number in (0, 1):
            step(learner, number, samples=3 * (comm.rank > 0))
        learner.stripe_sizes = [{}] * comm.size
        snapshot = Snapshot()
        snapshot.take(learner)
        before = [len(learner.local_step.torch_optimizers[0].state), values(learner.model)]
        step(learner, 2)
        assert before[0] == 4 * (comm.rank > 0)
        SharedSnapshot(learner, snapshot).restore(learner)
        assert len(learner.local_step.torch_optimizers[0].state) == before[0]
        assert np.array_equal(values(learner.model), before[1])
        SharedSnapshot(learner, snapshot if comm.rank else None).restore(learner)
        assert len(learner.local_step.torch_optimizers[0].state) == 4
        moments = comm.allgather_object(learner.local_step.state.buffers["exp_avg"])
        assert all(np.array_equal(m, moments[0]) and m.any() for m in moments)
        SharedSnapshot(learner, None if comm.rank else snapshot).restore(learner)
