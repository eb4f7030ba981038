"""PyTorch's values in what a program adds to a checkpoint: they come back bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

import parallel_sgd as psgd
from parallel_sgd import UserError
from parallel_sgd.plain_values import from_json, to_json

assert psgd.torch.Learner  # it adds the types of PyTorch
schedulers = torch.optim.lr_scheduler


def back(value: Any) -> Any:
    return from_json(json.loads(json.dumps(to_json("extra", value), allow_nan=False)))


DTYPES = "float32 float64 float16 bfloat16 float8_e4m3fn complex64 complex128 bool uint8 int8 int16"
DTYPES += " int32 int64 uint16 uint64"


@pytest.mark.parametrize("name", DTYPES.split())
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4)])
def test_a_tensor_comes_back(name, shape):
    dtype = getattr(torch, name)
    tensor = torch.randint(0, 2, shape).to(dtype)
    again = back({"a": [tensor]})["a"][0]
    assert (type(again), again.dtype, again.shape) == (torch.Tensor, dtype, tensor.shape)
    assert again.numel() == 0 or torch.equal(
        again.flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)
    )
    if tensor.numel() and dtype.is_floating_point:
        assert again.fill_(0.5).float().max() == 0.5  # it can be written to


def test_views_and_odd_numbers_come_back():
    tensor = torch.tensor([[1.0, float("nan")], [-0.0, float("inf")]])
    assert back(tensor.T).numpy().tobytes() == tensor.T.contiguous().numpy().tobytes()
    conjugate = torch.tensor([1 + 2j]).conj()
    assert torch.equal(back(conjugate), conjugate)
    for value in (torch.Size([2, 3]), torch.bfloat16, torch.device("cpu"), torch.get_rng_state()):
        assert type(back(value)) is type(value)
        assert str(back(value)) == str(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.zeros(2, requires_grad=True), "needs a gradient, which a checkpoint cannot restore"),
        (torch.nn.Parameter(torch.zeros(2)), "Parameter, which checkpoints cannot keep"),
        (torch.zeros(2).to_sparse(), "is not a plain dense tensor"),
        (torch.zeros(2, device="meta"), "is not a plain dense tensor"),
        (torch.nn.Linear(1, 1), "Linear, which checkpoints cannot keep"),
        (torch.Generator(), "Generator, which checkpoints cannot keep"),
    ],
)
def test_what_cannot_come_back_is_refused(value, text):
    with pytest.raises(UserError, match=text) as refused:
        to_json("extra", {"a": value})
    assert str(refused.value).startswith("extra['a']=") and "\n" not in str(refused.value)


def test_a_tensor_of_a_missing_device_is_on_the_cpu():
    for device in ("cuda:77", "xpu", "hpu:1"):
        document = {"$torch.Tensor": ["float32", [2], device, {"$bytes": "AACAPwAAAEA="}]}
        tensor = from_json({"a": document})["a"]
        assert (tensor.device.type, tensor.tolist()) == ("cpu", [1, 2])


def test_other_ranks_tensors_take_no_memory_of_a_device():
    """(PyTorch's device without memory stands for one here.)"""
    document = {"$torch.Tensor": ["float32", [1], "meta", {"$bytes": "AACAPw=="}]}
    assert from_json([document])[0].device.type == "meta"
    assert from_json([document], host=True)[0].tolist() == [1]


@pytest.mark.parametrize(
    "parts",
    [
        ["float32", [3], "cpu", {"$bytes": "AAAA"}],
        ["float32", [-1, -1], "cpu", {"$bytes": "AAAAAA=="}],
        ["float32", [0, 10**30], "cpu", {"$bytes": ""}],
        ["float32", [1.0], "cpu", {"$bytes": "AAAAAA=="}],
        ["float32", [1], "cpu", "AAAA"],
        ["float32", [1], "nowhere", {"$bytes": "AAAAAA=="}],
        ["float32", [1], 3.5, {"$bytes": "AAAAAA=="}],
        ["bool", [1], "cpu", {"$bytes": "Ag=="}],
        ["load", [1], "cpu", {"$bytes": "AAAAAA=="}],
        ["nothing", [1], "cpu", {"$bytes": "AAAAAA=="}],
        [None, [1], "cpu", {"$bytes": "AAAAAA=="}],
        3,
    ],
    ids=repr,
)
def test_a_document_of_no_tensor_is_a_user_error(parts):
    with pytest.raises(UserError):
        from_json({"$torch.Tensor": parts})


def rates_of(optimizer: Any) -> Any:
    return [(group["lr"], group.get("momentum")) for group in optimizer.param_groups]


def chained(optimizer: Any) -> Any:
    steps = schedulers.MultiStepLR(optimizer, [2, 6, 8], gamma=0.1)
    return schedulers.ChainedScheduler([steps, schedulers.ExponentialLR(optimizer, 0.9)])


def sequential(optimizer: Any) -> Any:
    first = schedulers.ConstantLR(optimizer, 0.5, total_iters=2)
    return schedulers.SequentialLR(
        optimizer, [first, schedulers.MultiStepLR(optimizer, [1, 3, 5])], milestones=[2]
    )


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "multi-step": lambda o: schedulers.MultiStepLR(o, [3, 6, 8], gamma=0.1),
    "chained": chained,
    "sequential": sequential,
    "step": lambda o: schedulers.StepLR(o, 2),
    "lambda": lambda o: schedulers.LambdaLR(o, lambda t: 0.9**t),
    "multiplicative": lambda o: schedulers.MultiplicativeLR(o, lambda t: 0.9),
    "constant": lambda o: schedulers.ConstantLR(o, 0.5, total_iters=6),
    "linear": lambda o: schedulers.LinearLR(o, total_iters=8),
    "polynomial": lambda o: schedulers.PolynomialLR(o, 8, power=2.0),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 8),
    "warm restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3, T_mult=2),
    "cyclic": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "one cycle": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=12),
    "plateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1),
    "averaged": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, anneal_epochs=7),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_goes_on_as_if_it_had_never_stopped(name):
    """From what a checkpoint keeps of its state_dict; a plateau's rate depends on its losses."""

    def made() -> tuple[Any, Any]:
        p = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)
        return optimizer, SCHEDULERS[name](optimizer)

    def run(optimizer: Any, scheduler: Any, first: int, last: int) -> list[Any]:
        rates = []
        for t in range(first, last):
            optimizer.step()
            scheduler.step(*([1.0 + (t > 2)] if name == "plateau" else []))
            rates.append(rates_of(optimizer))
        return rates

    optimizer, scheduler = made()
    run(optimizer, scheduler, 0, 4)
    kept, groups = back(scheduler.state_dict()), back(optimizer.state_dict())
    right = run(optimizer, scheduler, 4, 11)
    assert name == "constant" or len(set(map(repr, right))) > 1  # it changes after the stop
    again, resumed = made()
    again.load_state_dict(groups)
    resumed.load_state_dict(kept)
    assert run(again, resumed, 4, 11) == right
