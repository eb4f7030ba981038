"""Several PyTorch optimizers, each of a part of the parameters: Muon for matrices, AdamW for the
rest. What ranks train together is what one process trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch_models import (
    MLP,
    MODELS,
    Branches,
    batch,
    counts_of,
    joined,
    made,
    train,
    values,
)

import parallel_sgd as psgd
from parallel_sgd import Communicator, UserError
from parallel_sgd.torch.module import FlatModule
from parallel_sgd.torch.optimizer.adam_correction import AdamCorrection

pytestmark = [
    pytest.mark.usefixtures("no_waiting_for_the_disk"),
    pytest.mark.threads(2),
    pytest.mark.ranks(2),
]

STEPS, STOP = 7, 4


def parts(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """Matrices, and the rest."""
    held = [*model.parameters()]
    return [p for p in held if p.dim() == 2], [p for p in held if p.dim() != 2]


def two(model: nn.Module) -> list[Any]:
    matrices, rest = parts(model)
    return [
        torch.optim.Muon(matrices, lr=0.05, momentum=0.9, weight_decay=0.1),
        torch.optim.AdamW(rest, lr=0.02, weight_decay=0.1),
    ]


def three(model: nn.Module) -> list[Any]:
    """Not in the order of the parameters; two of them have a momentum of one name."""
    matrices, (*rest, last) = parts(model)
    return [
        torch.optim.AdamW([last], lr=0.02),
        torch.optim.SGD([{"params": rest}, {"params": matrices[1:], "lr": 0.3}], 0.1, momentum=0.9),
        torch.optim.Muon(matrices[:1], lr=0.05, momentum=0.9),
    ]


LISTS: dict[str, Callable[[nn.Module], list[Any]]] = {"two": two, "three": three}


def halved(optimizers: list[Any]) -> list[Any]:
    """A scheduler of each, and each another one."""
    gammas = enumerate(optimizers, 2)
    return [torch.optim.lr_scheduler.StepLR(one, 2, gamma=1 / number) for number, one in gammas]


def alone(model: nn.Module, optimizers: list[Any], x: Any, y: Any, clip_norm: float = 0) -> None:
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    if clip_norm:
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        assert norm > clip_norm
    for one in optimizers:
        one.step()


@pytest.mark.threads(1, 3)
@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("overlap", [False, True])
def test_as_one_process(comm, name, overlap):
    """Uneven minibatches; the gradient of all parameters is clipped as one, and each optimizer has
    a scheduler of its own."""
    single, model = made(MLP), made(MLP, seed=comm.rank)
    own, ours = LISTS[name](single), LISTS[name](model)
    algorithm = psgd.DataParallelSGD(overlap=overlap, bucket_values=50)
    schedules = halved(own) + halved(ours)
    with psgd.torch.Learner(model, ours, algorithm, comm, clip_norm=0.05) as learner:
        for step in range(STEPS):
            counts = counts_of(comm.size, step)
            alone(single, own, *joined(single, step, counts), clip_norm=0.05)
            train(learner, step, counts[comm.rank])
            for schedule in schedules:
                schedule.step()
            assert np.abs(values(model) - values(single)).max() < 1e-9
        rates = [[group["lr"] for group in one.param_groups] for one in ours]
        assert rates == [[group["lr"] for group in one.param_groups] for one in own]
        assert learner.local_step.lr == rates[0][0]
        for one in ours:
            one.zero_grad()  # does no harm


@pytest.mark.parametrize("inner", ["keep", "zero", "average"])
def test_local_updates(comm, inner):
    """Every rank steps alone; then models are averaged, and the state of each optimizer."""
    assert comm.size == 2
    ranks = [made(MLP) for _ in range(comm.size)]
    own, model = [two(one) for one in ranks], made(MLP)
    algorithm = psgd.ModelAveragingSGD(sync_steps=3, inner_state=inner)
    with psgd.torch.Learner(model, two(model), algorithm, comm) as learner:
        for step in range(9):
            for rank, (one, optimizers) in enumerate(zip(ranks, own, strict=True)):
                alone(one, optimizers, *batch(one, rank, step, 2))
            train(learner, step, 2)
            if step % 3 == 2:
                average([[*one.parameters()] for one in ranks])
                if inner == "zero":
                    own = [two(one) for one in ranks]
                elif inner == "average":
                    average([tensors_of(optimizers) for optimizers in own])
            assert np.abs(values(model) - values(ranks[comm.rank])).max() < 1e-9


@torch.no_grad()
def average(lists: list[list[torch.Tensor]]) -> None:
    for same in zip(*lists, strict=True):
        mean = sum(same) / len(same)
        for tensor in same:
            tensor.copy_(mean)


def tensors_of(optimizers: list[Any]) -> list[torch.Tensor]:
    """What is a number for each of a parameter's values."""
    states = [of_p for one in optimizers for of_p in one.state.values()]
    assert len(states) == 4
    return [value for of_p in states for value in of_p.values() if value.dim()]


ALGORITHMS = {
    "4 bit, overlap": psgd.DataParallelSGD(gradient_bits=4, overlap=True),
    "1 bit, warm start": psgd.DataParallelSGD(gradient_bits=1, distributed_after=12),
    "DiLoCo": psgd.DiLoCo(sync_steps=3, inner_state="average"),
    "block momentum": psgd.BlockMomentumSGD(sync_steps=3),
    "servers": psgd.DataParallelASGD(mode="sync", currency="deltas", sync_steps=2),
}


def run(learner: Any, first: int, last: int) -> None:
    for step in range(first, last) if not learner.serves else ():
        train(learner, step, 3)


def folder_of_all(comm: Communicator, path: Path) -> Path:
    return Path(comm.allgather_object(str(path))[0])


def save(learner: Any, folder: Path) -> None:
    with psgd.Checkpoints(folder) as checkpoints:
        checkpoints.save(learner)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_resumes_bit_for_bit(comm, tmp_path, name):
    folder = folder_of_all(comm, tmp_path)
    one, another = (made(MODELS["attention"], dtype=torch.float32, seed=seed) for seed in (0, 1))
    with psgd.torch.Learner(one, three(one), ALGORITHMS[name], comm) as learner:
        run(learner, 0, STOP)
        save(learner, folder)
        before = values(one)
        run(learner, STOP, STEPS)
        learner.finish()
    with psgd.torch.Learner(another, three(another), ALGORITHMS[name], comm) as learner:
        psgd.load_checkpoint(learner, folder)
        run(learner, STOP, STEPS)
        learner.finish()
        trains = not learner.serves
    assert np.array_equal(values(one), values(another))
    assert not trains or not np.array_equal(values(one), before)


def test_resumes_on_another_number_of_ranks(comm, tmp_path):
    """One rank goes on with the minibatches of all."""
    assert comm.size > 1
    model, algorithm = made(MLP), psgd.DataParallelSGD()
    folder = folder_of_all(comm, tmp_path)
    with psgd.torch.Learner(model, two(model), algorithm, comm) as learner:
        run(learner, 0, STOP)
        save(learner, folder)
        run(learner, STOP, STEPS)
    single = made(MLP, seed=1)
    world = Communicator.single()
    with psgd.torch.Learner(single, two(single), algorithm, world) as learner:
        psgd.load_checkpoint(learner, folder)
        for step in range(STOP, STEPS):
            x, y = joined(single, step, [3] * comm.size)
            F.cross_entropy(single(x), y).backward()
            learner.step(samples=len(x))
    assert np.abs(values(single) - values(model)).max() < 1e-9


@pytest.mark.parametrize("idle", [True, False])
def test_a_rank_takes_over_what_its_optimizers_lack(comm, idle):
    """In the block rank 0 has no samples, or each rank has used another branch of the model."""
    assert comm.size == 2
    model = made(Branches, dtype=torch.float32)
    model.which = comm.rank
    algorithm = psgd.ModelAveragingSGD(sync_steps=2, inner_state="average")
    with psgd.torch.Learner(model, two(model), algorithm, comm) as learner:
        for number in (0, 1):
            train(learner, number, 3 * (comm.rank > 0 or not idle))
        states = [one.state for one in learner.local_step.torch_optimizers]
        assert [len(state) for state in states] == [1 if idle else 2] * 2
        assert all(of_p["momentum_buffer"].any() for of_p in states[0].values())
        assert all(of_p["step"] == 2 and of_p["exp_avg"].any() for of_p in states[1].values())
        of_all = [s[p] for p in model.parameters() for s in states if p in s]
        own = [tensor.tolist() for of_p in of_all for tensor in of_p.values()]
        assert comm.allgather_object(own) == [own] * 2
        train(learner, 2, 3)


def test_a_gradient_that_overflows(comm):
    """On one rank, in a parameter of one optimizer: all optimizers of all ranks skip it."""
    model = made(MLP, dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with psgd.torch.Learner(
        model, two(model), psgd.DataParallelSGD(gradient_bits=4), comm, scaler=scaler
    ) as learner:
        for step in range(3):
            before = values(model)
            x, y = batch(model, comm.rank, step, 2)
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            if step == 1 and comm.rank == comm.size - 1:
                model[0].bias.grad.fill_(float("inf"))
            assert learner.step(samples=2) == 2 * comm.size
            assert np.array_equal(values(model), before) == (step == 1)
        assert scaler.get_scale() == 4
        steps = [of_p["step"] for of_p in learner.local_step.torch_optimizers[1].state.values()]
        assert steps == [2, 2]


def test_a_minibatch_that_is_not_finite_is_skipped(comm):
    plain, model = (made(MLP, dtype=torch.float32) for _ in range(2))
    learners = [
        psgd.torch.Learner(m, two(m), psgd.DataParallelSGD(), comm, not_finite="skip")
        for m in (plain, model)
    ]
    for step in range(4):
        for learner in learners:
            x, y = batch(learner.model, comm.rank, step, 2)
            bad = step == 2 and comm.rank == 0
            if learner.model is model or step != 2:
                (F.cross_entropy(learner.model(x), y) * (np.nan if bad else 1)).backward()
                learner.step(samples=2)
    assert learners[1].skipped.minibatches == 1
    assert np.array_equal(values(plain), values(model))
    for learner in learners:
        learner.close()


def test_a_factor_on_all_rates(comm):
    """As a session or an algorithm may set it."""

    def trained(factor: float, *, scheduled: bool) -> np.ndarray:
        model = made(MLP)
        optimizers = three(model)
        with psgd.torch.Learner(model, optimizers, psgd.DataParallelSGD(), comm) as learner:
            for group in (group for one in optimizers for group in one.param_groups):
                group["lr"] *= factor if scheduled else 1
            for step in range(3):
                learner.local_step.state.lr_factor = 1.0 if scheduled else factor
                train(learner, step, 2)
        return values(model)

    assert np.array_equal(trained(4.0, scheduled=True), trained(4.0, scheduled=False))
    assert not np.array_equal(trained(4.0, scheduled=True), trained(1.0, scheduled=True))


def test_adam_is_corrected_in_groups_of_64_with_another_optimizers_values():
    """All values have one mean square, which quantization has not changed: a correction of 1."""
    model = nn.Sequential(nn.Linear(10, 7), nn.Linear(7, 9))  # 70 + 7 + 63 + 9 values
    module, square, beta2 = FlatModule(model), 0.01, 0.999
    optimizers = two(model)
    for p in optimizers[1].param_groups[0]["params"]:
        moment = torch.full_like(p, (1 - beta2) * square)
        optimizers[1].state[p] |= {"step": torch.tensor(1.0), "exp_avg_sq": moment}
    correction: dict[str, Any] = {}
    projections = np.sqrt(np.array([64, 64, 21], np.float32) * np.float32(square))
    AdamCorrection(optimizers, module, correction).learn(projections, 1)
    assert correction["slopes"][0] == 2  # none of Adam's values
    np.testing.assert_allclose(correction["slopes"][1:], 1, rtol=1e-5)
    module.release()


def test_adam_beside_muon_is_corrected(comm):
    """By projections, as Adam alone is; other optimizers alone have none."""
    for make, corrects in (
        (two, True),
        (lambda m: [two(m)[0], torch.optim.SGD(parts(m)[1])], False),
    ):
        model = made(MLP, dtype=torch.float32)
        algorithm = psgd.DataParallelSGD(gradient_bits=1)
        with psgd.torch.Learner(model, make(model), algorithm, comm) as learner:
            run(learner, 0, 3)
            assert bool(learner.local_step.state.correction) == corrects


def twice(model: nn.Module) -> list[Any]:
    one = torch.optim.SGD(model.parameters(), lr=0.1)
    return [one, one]


def overlapping(model: nn.Module) -> list[Any]:
    matrices, _ = parts(model)
    return [torch.optim.Muon(matrices), torch.optim.AdamW(model.parameters())]


def overlapping_in_what_is_frozen(model: nn.Module) -> list[Any]:
    model[0].weight.requires_grad_(False)
    return overlapping(model)


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "empty": (lambda model: [], r"optimizer must be a torch\.optim\.Optimizer, or .* it is empty"),
    "none": (
        lambda model: [*two(model), "adam"],
        r"optimizer\[2\] must be a torch\.optim\.Optimizer, as all in a list: it is a str",
    ),
    "ours": (
        lambda model: [psgd.SGD(lr=0.1), two(model)[1]],
        r"optimizer\[0\] must be a torch\.optim\.Optimizer, as all in a list: it is ",
    ),
    "twice": (twice, r"optimizer\[0\] and optimizer\[1\] are the same SGD"),
    "in two": (
        overlapping,
        r"'0.weight' is in two optimizers, optimizer\[0\] \(Muon\) and optimizer\[1\] \(AdamW\)",
    ),
    "frozen, in two": (overlapping_in_what_is_frozen, "'0.weight' is in two optimizers"),
    "in none": (
        lambda model: [torch.optim.Muon(parts(model)[0]), torch.optim.AdamW([model[0].bias])],
        r"optimizer Muon \+ AdamW lacks the model's parameter '2.bias'",
    ),
    "of others": (
        lambda model: [*two(model), torch.optim.SGD([nn.Parameter(torch.zeros(9))])],
        r"optimizer SGD has a parameter of shape \[9\] that is not in the model",
    ),
    "closures": (
        lambda model: [two(model)[0], torch.optim.LBFGS(parts(model)[1])],
        r"optimizer LBFGS computes gradients itself.*closure",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(comm, name):
    """On all ranks, if one rank has them; the model is then free for another learner."""
    make, text = REFUSED[name]
    model, algorithm, last = made(MLP), psgd.DataParallelSGD(), comm.size - 1
    model[0].weight.requires_grad_("frozen" not in name)
    given = make(model) if comm.rank == last else two(model)
    with pytest.raises(UserError, match=rf"{text}.*on rank {last}") as raised:
        psgd.torch.Learner(model, given, algorithm, comm)
    assert "\n" not in str(raised.value)
    psgd.torch.Learner(model, two(model), algorithm, comm).close()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda model: torch.optim.AdamW(model.parameters()),
            r"must be the same.*AdamW of 4.*Muon of 2 \(\w+\), AdamW of 2",
        ),
        (lambda model: two(model)[::-1], r"must be the same.*AdamW of 2 .*, Muon of 2"),
        (
            lambda model: [torch.optim.Muon(parts(model)[0], lr=1.0), two(model)[1]],
            "hyperparameters of the optimizer must be the same",
        ),
    ],
    ids=["one", "order", "rate"],
)
def test_another_list_on_another_rank(comm, make, text):
    assert comm.size > 1
    model = made(MLP)
    given = two(model) if comm.rank else make(model)
    with pytest.raises(UserError, match=text):
        psgd.torch.Learner(model, given, psgd.DataParallelSGD(), comm)


def test_other_parts_on_another_rank(comm):
    """Each optimizer has as many parameters as on the other ranks."""
    assert comm.size > 1
    model = made(MLP)
    first, second, third, fourth = model.parameters()
    split = ([first, fourth], [second, third]) if comm.rank else ([first, second], [third, fourth])
    given = [torch.optim.SGD(part, lr=0.1 * (i + 1)) for i, part in enumerate(split)]
    with pytest.raises(UserError, match=r"parameters of the optimizer .* must be the same"):
        psgd.torch.Learner(model, given, psgd.DataParallelSGD(), comm)


def test_a_list_of_one_is_that_one(comm):
    for make in (
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.02),
        lambda model: psgd.NesterovSGD(lr=0.1),
    ):
        models = [made(MLP) for _ in range(2)]
        given = [make(models[0]), [make(models[1])]]
        for model, optimizer in zip(models, given, strict=True):
            with psgd.torch.Learner(model, optimizer, psgd.DataParallelSGD(), comm) as learner:
                run(learner, 0, 3)
        assert np.array_equal(values(models[0]), values(models[1]))


def test_what_the_program_does_with_one_of_them(comm):
    """Each optimizer's own `step`, `unscale_` and `add_param_group` are refused as with one."""
    model, scaler = made(MLP), torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizers = two(model)
    learner = psgd.torch.Learner(model, optimizers, psgd.DataParallelSGD(), comm, scaler=scaler)
    before = values(model)
    for one, kind in zip(optimizers, ("Muon", "AdamW"), strict=True):
        with pytest.raises(UserError, match=rf"{kind}\.step\(\) was called, but learner\.step"):
            one.step()
        x, y = batch(model, comm.rank, 0, 2)
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.unscale_(one)
        with pytest.raises(UserError, match=r"unscale_\(optimizer\) was called.*clip_norm="):
            learner.step(samples=2)
        scaler.update()
    assert np.array_equal(values(model), before)
    optimizers[1].add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(UserError, match=r"AdamW had 2 parameters when .* and has 3 now"):
        learner.step(samples=0)
    learner.close()
    optimizers[0].step()
