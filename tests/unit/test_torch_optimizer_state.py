"""What PyTorch optimizers keep goes on bit for bit, as PyTorch's own save and load has it, or is
refused as it is saved."""

from __future__ import annotations

import copy
import io
import json
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch_optimizers as small
from test_checkpoint_fuzz import mutated
from torch import nn

import parallel_sgd as psgd
from parallel_sgd import UserError
from parallel_sgd.torch.optimizer.comparable import comparable
from parallel_sgd.torch.optimizer.document import Writer
from parallel_sgd.torch.optimizer.entries import Entries
from parallel_sgd.training import capture, flatten, restore_state

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")

STEPS, STOP = 9, 5
COMM = psgd.Communicator.single()


class Scaled(nn.Module):
    """With a parameter of no dimension, which is the first."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x))) * self.scale


def made(seed: int = 0) -> nn.Module:
    model, go = Scaled(), np.random.default_rng(seed)
    with torch.no_grad():
        for p in [*model.parameters()][1:]:
            p.copy_(torch.from_numpy(go.uniform(-0.5, 0.5, p.shape)))
    return model


def train(model: nn.Module, step: Callable[[], Any], first: int, last: int) -> None:
    for number in range(first, last):
        x = torch.from_numpy(np.random.default_rng(number).standard_normal((8, 4))).float()
        model.zero_grad()
        model(x).square().mean().backward()
        step()


def values(model: nn.Module) -> bytes:
    return b"".join(p.detach().numpy().tobytes() for p in model.parameters())


def learner_of(model: nn.Module, optimizer: Any, algorithm: Any = None, **options: Any) -> Any:
    algorithm = algorithm or psgd.DataParallelSGD(gradient_bits=32)
    return psgd.torch.Learner(model, optimizer, algorithm, COMM, **options)


def touched(optimizer: Any) -> Any:
    for group in optimizer.param_groups:
        for p in group["params"]:
            optimizer.state[p]
    return optimizer


def groups(model: nn.Module) -> list[dict[str, Any]]:
    flat = [p for p in model.parameters() if p.dim() < 2]
    rest = [p for p in model.parameters() if p.dim() >= 2]
    return [{"params": flat}, {"params": rest, "weight_decay": 0.1}]


def two(matrices: Any, rest: Any) -> Callable[[nn.Module], Any]:
    """An optimizer of the matrices, and one of the other parameters."""

    def make(model: nn.Module) -> Any:
        flat, square = (group["params"] for group in groups(model))
        return [matrices(square), rest(flat)]

    return make


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "Muon and AdamW": two(torch.optim.Muon, partial(torch.optim.AdamW, lr=0.1)),
    "around Adam, and a counter": two(
        lambda p: small.Around(torch.optim.Adam(p, lr=0.1)), small.OwnCounter
    ),
    "counting groups, and a state in one object": two(small.GroupKeys, small.OneMemory),
    "touched before": lambda m: touched(torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)),
    "Adam, rate in a tensor": lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.1)),
    "AdamW, groups": lambda m: torch.optim.AdamW(groups(m), lr=0.1, amsgrad=True),
    "Adagrad, groups": lambda m: torch.optim.Adagrad(groups(m), lr=0.1),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.1),
    "ASGD": lambda m: torch.optim.ASGD(m.parameters(), lr=0.1, t0=2),
    "around Adam": lambda m: small.Around(torch.optim.Adam(m.parameters(), lr=0.1)),
    "delegating to Adam": lambda m: small.Delegating(torch.optim.Adam(m.parameters(), lr=0.1)),
    **{
        kind.__name__: lambda m, kind=kind: kind(m.parameters())  # type: ignore[misc]
        for kind in (
            *(small.Replacing, small.Late, small.Swapping, small.Passing, small.KeepingGradients),
            *(small.Shared, small.OneMemory, small.GroupKeys, small.PlainValues, small.OwnCounter),
            *(small.Matrices, small.Narrow, small.OfSome, small.ByParameter),
        )
    },
}


def by_pytorch(make: Callable[[nn.Module], Any], *, loads: bool) -> bytes:
    """The parameters that PyTorch's own program comes to."""
    model = made()
    optimizers = several(make(model))
    train(model, steps_of(optimizers), 0, STOP)
    saved = io.BytesIO()
    torch.save((model.state_dict(), [one.state_dict() for one in optimizers]), saved)
    if loads:
        saved.seek(0)
        of_model, of_optimizers = torch.load(saved, weights_only=False)
        model = made(1)
        optimizers = several(make(model))
        model.load_state_dict(of_model)
        for one, state_dict in zip(optimizers, of_optimizers, strict=True):
            one.load_state_dict(state_dict)
    train(model, steps_of(optimizers), STOP, STEPS)
    return values(model)


def several(optimizer: Any) -> list[Any]:
    return optimizer if isinstance(optimizer, list) else [optimizer]


def steps_of(optimizers: list[Any]) -> Callable[[], Any]:
    return lambda: [one.step() for one in optimizers]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_goes_on_as_pytorch_does(name, tmp_path):
    """A learner trains as PyTorch alone does, and another one takes up what it has saved; so does a
    second one of the same optimizer, and one that goes back."""
    make = OPTIMIZERS[name]
    model = made()
    with learner_of(model, make(model)) as learner:
        train(model, lambda: learner.step(samples=8), 0, STOP)
        with psgd.Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(learner)
        train(model, lambda: learner.step(samples=8), STOP, STEPS)
        assert values(model) == by_pytorch(make, loads=False)
        psgd.load_checkpoint(learner, tmp_path)  # back to what it was
        train(model, lambda: learner.step(samples=8), STOP, STEPS)
        again = values(model)
    another = made(1)
    with learner_of(another, make(another)) as learner:
        psgd.load_checkpoint(learner, tmp_path)
        train(another, lambda: learner.step(samples=8), STOP, STEPS)
    if name not in ("PlainValues", "ByParameter", "KeepingGradients"):  # PyTorch changes these
        assert values(another) == by_pytorch(make, loads=True)
    assert again == values(another) == by_pytorch(make, loads=False)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_another_learner_goes_on_with_an_optimizer(name):
    make, model = OPTIMIZERS[name], made()
    optimizer = make(model)
    for first, last in ((0, 2), (2, STOP), (STOP, STEPS)):
        with learner_of(model, optimizer) as learner:
            train(model, lambda: learner.step(samples=8), first, last)
    assert values(model) == by_pytorch(make, loads=False)
    train(model, steps_of(several(optimizer)), 0, 1)  # it steps by itself again


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_left_out_leaves_no_trace(name):
    """Blocks that are not finite: vectors, other tensors, counters, and those of groups."""
    algorithm = psgd.ModelAveragingSGD(sync_steps=2, inner_state="keep")
    models = [made(), made()]
    learners = [learner_of(m, OPTIMIZERS[name](m), algorithm, not_finite="skip") for m in models]
    for block, bad in enumerate((True, False, True, False)):
        for learner, model in zip(learners, models, strict=True):
            for number in (2 * block, 2 * block + 1):
                if learner is learners[0] or not bad:
                    x = torch.full((8, 4), torch.nan if bad and number % 2 else 0.5 + number)
                    model(x).square().mean().backward()
                    learner.step(samples=8)
    assert learners[0].skipped.minibatches == 4
    assert values(models[0]) == values(models[1])
    _, arrays = flatten(capture(learners[0])["optimizer"])
    _, others = flatten(capture(learners[1])["optimizer"])
    assert {k: v.tobytes() for k, v in arrays.items()} == {
        k: v.tobytes() for k, v in others.items()
    }
    for learner in learners:
        learner.close()


def test_groups_stay_the_same_dictionaries(tmp_path):
    """A scheduler may hold them. Its rate stays where steps are undone; a checkpoint brings one."""
    model = made()
    optimizer = small.GroupKeys(model.parameters())
    held, groups = optimizer.param_groups[0], optimizer.param_groups
    algorithm = psgd.ModelAveragingSGD(sync_steps=1, inner_state="keep")
    with learner_of(model, optimizer, algorithm, not_finite="skip") as learner:
        train(model, lambda: learner.step(samples=8), 0, 2)
        with psgd.Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(learner)
        held["lr"] = 0.01
        model(torch.full((8, 4), torch.nan)).sum().backward()
        learner.step(samples=8)
        assert learner.skipped.minibatches == 1
        assert (held["k"], held["lr"], learner.local_step.lr) == (2, 0.01, 0.01)
        held["lr"] = 0.02
        assert learner.local_step.lr == 0.02
        train(model, lambda: learner.step(samples=8), 2, 3)
        psgd.load_checkpoint(learner, tmp_path)
        assert (held["k"], held["lr"]) == (2, 0.1)
        assert optimizer.param_groups is groups and groups[0] is held


def test_reset_is_as_before_the_first_step():
    """Also a wrapped optimizer, counters in groups, and optimizers that begin with a state."""
    for name in ("around Adam", "GroupKeys", "Adagrad, groups", "Muon and AdamW"):
        make = OPTIMIZERS[name]
        models = [made(), made()]
        optimizers = [make(model) for model in models]
        with (
            learner_of(models[0], optimizers[0]) as learner,
            learner_of(models[1], optimizers[1]) as other,
        ):
            train(models[0], lambda learner=learner: learner.step(samples=8), 0, 3)
            step = learner.local_step
            step.optimizer.reset(step.state)
            with torch.no_grad():
                for p, q in zip(*(m.parameters() for m in models), strict=True):
                    p.copy_(q)
            for each, model in zip((learner, other), models, strict=True):
                train(model, lambda each=each: each.step(samples=8), 3, 6)
        assert values(models[0]) == values(models[1])


def test_making_a_learner_takes_no_step():
    class KnowsShapes(small.OfSome):
        def direction(self, p, state, group):
            assert tuple(p.shape) in ((), (6, 4), (6,), (2, 6), (2,))
            return super().direction(p, state, group)

    for around in (small.Around, small.Delegating):
        model = made()
        model(torch.ones(1, 4)).sum().backward()  # a gradient that is there already
        inner = KnowsShapes(model.parameters())
        before = values(model)
        with learner_of(model, around(inner)) as learner:
            assert values(model) == before
            assert not inner.state and inner.param_groups[0].get("count", 0) == 0
            train(model, lambda learner=learner: learner.step(samples=8), 0, 1)
            assert values(model) != before


def test_vectors_have_all_that_is_like_the_parameters():
    """Also of a parameter of no dimension; but no step counter, and nothing twice."""
    n = sum(p.numel() for p in made().parameters())
    for name, keys in (
        ("AdamW, groups", {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
        ("around Adam", {"slow", "exp_avg", "exp_avg_sq"}),
        ("delegating to Adam", {"exp_avg", "exp_avg_sq"}),
        ("Late", {"m"}),
        ("Shared", {"m"}),
        ("Swapping", {"now", "before"}),
        ("OneMemory", set()),
    ):
        model = made()
        with learner_of(model, OPTIMIZERS[name](model)) as learner:
            train(model, lambda learner=learner: learner.step(samples=8), 0, 4)
            vectors = learner.local_step.state.buffers
            assert vectors.keys() == keys, name
            for key, vector in vectors.items():
                assert vector.shape == (n,) and vector.all(), (name, key)


def by_name(p: torch.Tensor) -> bool:
    return p.dim() == 1


class Filter:
    def __init__(self, dim: int) -> None:
        self.dim = dim


@pytest.mark.parametrize(
    ("own", "others"),
    [
        (by_name, lambda p: False),
        (partial(by_name), partial(max, 1)),
        (Filter(1), Filter(2)),
        ({"bias", "norm"}, {"bias"}),
    ],
    ids=["function", "partial", "object", "set"],
)
def test_what_a_program_has_put_into_a_group_stays_there(own, others, tmp_path):
    """A set is a plain value, which the checkpoint brings."""
    model, again = made(), made(1)
    with learner_of(model, small.OfSome(model.parameters(), only=own)) as learner:
        train(model, lambda: learner.step(samples=8), 0, 2)
        with psgd.Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(learner)
    fresh = own if callable(own) else copy.deepcopy(own)
    with learner_of(again, small.OfSome(again.parameters(), only=fresh)) as learner:
        psgd.load_checkpoint(learner, tmp_path)
        assert comparable(
            learner.local_step.torch_optimizers[0].param_groups[0]["only"]
        ) == comparable(own)
    if not isinstance(own, set):
        with learner_of(again, small.OfSome(again.parameters(), only=others)) as learner:
            before = values(again)
            with pytest.raises(UserError, match=r"was saved with param_groups\.0\.only="):
                psgd.load_checkpoint(learner, tmp_path)
            assert values(again) == before


class Chooser:
    """Whose method an optimizer is given, and whose attributes change in training."""

    def __init__(self, rank: int = 0) -> None:
        self.rank, self.calls, self.loss = rank, 0, [0.5]

    def __call__(self, p: torch.Tensor) -> bool:
        self.calls += 1
        self.loss.append(1 / self.calls)
        return p.dim() == 1

    def choose(self, p: torch.Tensor) -> bool:
        return self(p)


@pytest.mark.parametrize("method", [True, False])
def test_what_an_object_in_a_group_goes_through_blocks_no_checkpoint(method, tmp_path):
    """Neither as it is saved, nor as another learner, or the same one, takes it up."""

    def started() -> Any:
        model, chooser = made(), Chooser()
        chosen = chooser.choose if method else chooser
        return model, chooser, learner_of(model, small.OfSome(model.parameters(), only=chosen))

    model, chooser, learner = started()
    with learner, psgd.Checkpoints(tmp_path) as checkpoints:
        train(model, lambda: learner.step(samples=8), 0, 2)
        chooser(model.scale)
        checkpoints.save(learner)
        psgd.load_checkpoint(learner, tmp_path)
    again, _, learner = started()
    with learner:
        psgd.load_checkpoint(learner, tmp_path)
    assert values(again) == values(model)


class Editing(torch.optim.SGD):
    """Which changes in place what it has loaded."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["momentum_buffer"].mul_(0.5)


def test_an_optimizer_may_change_what_it_loads(tmp_path):
    one, two = made(), made(1)
    with (
        learner_of(one, Editing(one.parameters(), lr=0.1, momentum=0.9)) as learner,
        psgd.Checkpoints(tmp_path) as checkpoints,
    ):
        train(one, lambda: learner.step(samples=8), 0, 2)
        momenta = learner.local_step.state.buffers["momentum_buffer"].copy()
        checkpoints.save(learner)
    with learner_of(two, Editing(two.parameters(), lr=0.1, momentum=0.9)) as learner:
        psgd.load_checkpoint(learner, tmp_path)
        assert values(one) == values(two)
        assert np.array_equal(learner.local_step.state.buffers["momentum_buffer"], momenta / 2)


def test_comparable_texts():
    assert comparable(Chooser(0).choose) == comparable(Chooser(1).choose)
    assert "Chooser.choose" in comparable(Chooser().choose)
    one, another = Filter(1), Filter(1)
    assert comparable(one) == comparable(another) != comparable(Filter(2))
    assert comparable([by_name, partial(by_name, 1)]) == comparable([by_name, partial(by_name, 1)])
    assert comparable(lambda: one) == comparable(lambda: another)
    assert comparable({"a", "b", "c"}) == comparable({"c", "b", "a"})
    assert comparable(torch.arange(99)) != comparable(torch.arange(99) + 1)
    assert "0x" not in comparable([one, by_name, one.__init__, {1: object()}, iter([])])
    one.dim = one  # type: ignore[assignment]
    assert "..." in comparable(one)


def test_what_no_checkpoint_can_hold_is_refused_as_it_is_saved(tmp_path):
    model = made()
    with (
        learner_of(model, small.Unholdable(model.parameters())) as learner,
        psgd.Checkpoints(tmp_path) as checkpoints,
    ):
        train(model, lambda: learner.step(samples=8), 0, 2)
        with pytest.raises(
            UserError,
            match=r"Unholdable\.state_dict\(\)\['state'\]\['scale'\]\['preconditioner'\]=.*"
            r"Preconditioner, which",
        ) as refused:
            checkpoints.save(learner)
        assert " at 0x" not in str(refused.value)  # another one on every rank
        train(model, lambda: learner.step(samples=8), 2, 4)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_documents_that_are_written_only_where_something_changed_say_the_same(name):
    """As those of a learner that has not written any."""
    model = made()
    optimizer = OPTIMIZERS[name](model)
    with learner_of(model, optimizer) as learner:
        state = learner.local_step.state
        for number in range(4):
            train(model, lambda: learner.step(samples=8), number, number + 1)
            if number == 2:
                state.restore(state.copied({}))
            now = everything(learner)
            names = {p: name for name, p in learner.local_step._module.tensors.items()}
            state.known = Entries(lambda names=names: Writer(state.vectors.part_of, names))
            assert everything(learner) == now


def test_a_document_is_written_again_only_where_something_changed(monkeypatch):
    written, document = list[Any](), Writer.document

    def noted(self: Any, name: str, value: Any, path: Any = (), **own: Any) -> str:
        written.append(path)
        return document(self, name, value, path, **own)

    monkeypatch.setattr(Writer, "document", noted)
    model = made()
    with learner_of(model, torch.optim.Adam(model.parameters(), lr=0.1)) as learner:
        train(model, lambda: learner.step(samples=8), 0, 1)
        state = learner.local_step.state
        state.copied({})
        assert not written  # a copy in memory needs none
        state.wait()
        assert len(written) == 6
        train(model, lambda: learner.step(samples=8), 1, 2)
        written.clear()
        state.wait()
        assert written == [()]
        assert [float(step) for step in state.values.values()] == [2.0] * 5
        of_scale = learner.local_step.torch_optimizers[0].state[model.scale]
        of_scale["seen"] = 1
        written.clear()
        state.wait()
        assert len(written) == 6
        of_scale["seen"] = 2
        written.clear()
        state.wait()
        assert written == [("state", "scale"), ()]
        assert '"seen": 2' in state.entries["scale"]
        of_scale["step"] = of_scale["step"] + 5
        state.wait()
        assert float(state.values["state.scale.step"]) == 7.0


@pytest.mark.parametrize("name", ["AdamW, groups", "Adam, rate in a tensor", "around Adam"])
def test_a_checkpoint_of_version_0_1(name):
    """Whose document is that of one optimizer."""
    source, model = made(), made(1)
    with learner_of(source, OPTIMIZERS[name](source)) as learner:
        train(source, lambda: learner.step(samples=8), 0, 3)
        saved = copy.deepcopy(capture(learner)["optimizer"])
        now = of_optimizer(learner)
    ((names, document),) = json.loads(saved["document"])["optimizers"]
    saved["document"] = json.dumps(document)
    with learner_of(model, OPTIMIZERS[name](model)) as learner:
        state = learner.local_step.state
        state.check(saved, 1)
        restore_state(learner, "optimizer", saved)
        assert of_optimizer(learner) == now
        state.wait()
        assert json.loads(state.document) == {"optimizers": [[names, document]]}


def test_frozen_parameters_of_no_model_keep_their_states():
    """Each of another optimizer; a name is all that tells them apart."""
    model, others = made(), [nn.Parameter(torch.ones(3) * i) for i in (1, 2)]
    held = zip(OPTIMIZERS["Muon and AdamW"](model), others, strict=True)
    optimizers = [
        torch.optim.Adagrad([other, *one.param_groups[0]["params"]], lr=0.1) for one, other in held
    ]
    for one, other in zip(optimizers, others, strict=True):
        other.sum().backward()
        one.step()
        other.requires_grad_(False)
        one.state[other]["sum"].mul_(float(other[0]))
    before = [
        one.state[other]["sum"].clone() for one, other in zip(optimizers, others, strict=True)
    ]
    assert not torch.equal(*before)
    with learner_of(model, optimizers) as learner:
        saved = copy.deepcopy(capture(learner)["optimizer"])
        for one, other in zip(optimizers, others, strict=True):
            one.state[other]["sum"].zero_()
        restore_state(learner, "optimizer", saved)
        for one, other, sums in zip(optimizers, others, before, strict=True):
            assert torch.equal(one.state[other]["sum"], sums)


def test_other_optimizers_than_those_of_a_checkpoint():
    """Fewer, more, or in another order."""
    source = made()
    with learner_of(source, OPTIMIZERS["Muon and AdamW"](source)) as learner:
        train(source, lambda: learner.step(samples=8), 0, 3)
        of_two = copy.deepcopy(capture(learner)["optimizer"])
    with learner_of(source, torch.optim.AdamW(source.parameters())) as learner:
        of_one = copy.deepcopy(capture(learner)["optimizer"])
    others: list[tuple[Any, Any, str]] = [
        (lambda m: torch.optim.AdamW(m.parameters()), of_two, "is for 2 optimizers, but .* has 1 "),
        (OPTIMIZERS["Muon and AdamW"], of_one, "is for 1 optimizer, but .* has 2 optimizers"),
        (
            lambda m: OPTIMIZERS["Muon and AdamW"](m)[::-1],
            of_two,
            "is for other parameters than those of this AdamW",
        ),
    ]
    for make, saved, said in others:
        model = made(1)
        with learner_of(model, make(model)) as learner:
            before = everything(learner)
            with pytest.raises(UserError, match=said):
                learner.local_step.state.check(saved, 1)
            assert everything(learner) == before


def of_optimizer(learner: Any) -> dict[str, bytes]:
    _, arrays = everything(learner)
    return {name: value for name, value in arrays.items() if name.startswith("optimizer.")}


def everything(learner: Any) -> Any:
    tree, arrays = flatten(capture(learner))
    del tree["model"]
    return tree, {k: v.tobytes() for k, v in arrays.items() if not k.startswith("model.")}


@pytest.mark.parametrize(
    "name", ["Adam, rate in a tensor", "Narrow", "around Adam", "GroupKeys", "Muon and AdamW"]
)
def test_edited_documents(name):
    """Whatever they say: taken up, or refused and then nothing has changed."""
    source, model = made(), made(1)
    pick, refused = random.Random(name), 0
    with learner_of(source, OPTIMIZERS[name](source)) as writer:
        train(source, lambda: writer.step(samples=8), 0, 3)
        right = copy.deepcopy(capture(writer)["optimizer"])
    documents = {"document": right["document"], **right["entries"]}
    with learner_of(model, OPTIMIZERS[name](model)) as learner:
        state = learner.local_step.state
        for number in range(150):
            before = everything(learner)
            saved, edited = {**right, "entries": {**right["entries"]}}, pick.choice([*documents])
            text = mutated(pick, json.loads(documents[edited]))
            if number % 5 == 0:
                text = documents[edited].replace('"float32"', '"nn"').replace("float32", "load")
            holder = saved if edited == "document" else saved["entries"]
            holder[edited] = text
            try:
                state.check(saved, 1)
            except UserError as error:
                refused += 1
                assert "\n" not in str(error)
                assert everything(learner) == before
            else:
                restore_state(learner, "optimizer", saved)
    assert refused > 10
