"""What cannot be trained of PyTorch's is refused on all ranks, in one line that says what it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch_models import MLP, MODELS, OPTIMIZERS, batch, made, values

import parallel_sgd as psgd
from parallel_sgd import Communicator, UserError

pytestmark = [pytest.mark.few_ranks, pytest.mark.threads(2), pytest.mark.ranks(2)]


def learner_of(model: Any, comm: Communicator, optimizer: Any = None, **options: Any) -> Any:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    algorithm = options.pop("algorithm", psgd.DataParallelSGD())
    return psgd.torch.Learner(model, optimizer, algorithm, comm, **options)


class FSDPModule(nn.Linear):
    """What PyTorch calls a sharded module, wherever it may come from."""


def mixed(part: Callable[[nn.Module], Any]) -> nn.Module:
    model = made(MLP, dtype=torch.float32)
    part(model)
    return model


def lbfgs(model: nn.Module) -> Any:
    return torch.optim.LBFGS(model.parameters())


def of_others(model: nn.Module) -> Any:
    return torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(9))], lr=0.1)


def of_some(model: nn.Module) -> Any:
    return torch.optim.SGD(model[0].parameters(), lr=0.1)


def with_buffer(buffer: torch.Tensor) -> nn.Module:
    return mixed(lambda m: m[0].register_buffer("b", buffer))


def tied_in_memory(model: nn.Module) -> None:
    model.append(nn.Linear(16, 5))
    model[3].weight.data = model[2].weight.data


MODELS_REFUSED = {
    "no module": (lambda: "model", r"model must be a torch\.nn\.Module: it is"),
    "nothing to train": (
        lambda: made(MLP).requires_grad_(False),
        r"model has no trainable parameter",
    ),
    "on meta": (
        lambda: nn.Linear(2, 2, device="meta"),
        r"parameter 'weight' is on the device meta",
    ),
    "lazy": (lambda: nn.LazyLinear(2), r"parameter 'weight' has no shape yet"),
    "mixed dtypes": (
        lambda: mixed(lambda m: m[2].double()),
        r"parameter '2.weight' is float64: all must be of one dtype.*'0.weight' is float32",
    ),
    "16 bits": (
        lambda: made(MLP).bfloat16(),
        r"parameter '0.weight' is bfloat16: .* under torch.autocast",
    ),
    "complex": (
        lambda: mixed(
            lambda m: m[0].register_parameter("weight", nn.Parameter(torch.ones(2, 6) + 0j))
        ),
        r"parameter '0.weight' is complex64, and its gradient too: .*torch.view_as_real",
    ),
    "DataParallel": (lambda: nn.DataParallel(made(MLP)), r"has a DataParallel.*model\.module"),
    "FSDP": (lambda: FSDPModule(2, 2), r"sharded by FSDP"),
    "scripted": (lambda: mixed(lambda m: m.append(torch.jit.ScriptModule())), r"made by torch.jit"),
    "tied in memory": (
        lambda: mixed(tied_in_memory),
        r"parameters '2.weight' and '3.weight' share memory",
    ),
    "expanded": (
        lambda: with_buffer(torch.arange(5).expand(3, 5)),
        r"buffer '0.b' is expanded, .*persistent=False",
    ),
    "sparse": (lambda: with_buffer(torch.eye(3).to_sparse()), r"buffer '0.b' is sparse"),
}

OPTIMIZERS_REFUSED = {
    "none": (lambda model: "adam", r"optimizer must be a torch\.optim\.Optimizer or one of"),
    "closures": (lbfgs, r"optimizer LBFGS computes gradients itself.*closure"),
    "sparse only": (
        lambda model: torch.optim.SparseAdam(model.parameters()),
        r"SparseAdam takes sparse gradients only",
    ),
    "of others": (of_others, r"SGD has a parameter of shape \[9\] that is not in the model"),
    "of some": (of_some, r"SGD lacks the model's parameter '2.weight'"),
}

OPTIONS_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "reduction": ({"reduction": "max"}, r"reduction='max' must be"),
    "buffers": ({"buffers": "max"}, r"buffers='max' must be"),
    "scaler": ({"scaler": "x"}, r"scaler='x' must be a torch.amp.GradScaler, or None"),
    "minibatch_size": ({"minibatch_size": "x"}, r"minibatch_size='x' must be a whole number"),
    "clip_norm": ({"clip_norm": -1}, r"clip_norm=-1 must be"),
    "scaler and overlap": (
        {"scaler": torch.amp.GradScaler("cpu"), "algorithm": psgd.DataParallelSGD(overlap=True)},
        r"overlap=True must not be given with a scaler",
    ),
    "servers' optimizer": (
        {"algorithm": psgd.DataParallelASGD()},
        r"optimizer SGD cannot step on servers.*currency='deltas'",
    ),
}


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
@pytest.mark.parametrize("name", MODELS_REFUSED)
def test_models(comm, name):
    build, text = MODELS_REFUSED[name]
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(UserError, match=text) as raised:
        learner_of(build(), comm, optimizer)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", OPTIMIZERS_REFUSED)
def test_optimizers(comm, name):
    build, text = OPTIMIZERS_REFUSED[name]
    model = made(MLP)
    with pytest.raises(UserError, match=text):
        learner_of(model, comm, build(model))
    learner_of(model, comm).step(samples=0)  # the model is free for another learner


@pytest.mark.parametrize("name", OPTIONS_REFUSED)
def test_options(comm, name):
    options, text = OPTIONS_REFUSED[name]
    with pytest.raises(UserError, match=text):
        learner_of(made(MLP), comm, **options)


def test_one_rank_alone_is_wrong(comm):
    """All ranks hear of it, by its name."""
    last = comm.size - 1
    model = made(MLP, dtype=torch.float64)
    if comm.rank == last:
        model[2].float()
    with pytest.raises(UserError, match=rf"'2.weight' is float32.*on rank {last}"):
        learner_of(model, comm)
    with pytest.raises(UserError, match=rf"reduction='max' must be .*on rank {last}"):
        learner_of(made(MLP), comm, reduction="max" if comm.rank == last else "mean")
    learner_of(model.double(), comm).close()  # nothing is left of the attempt


def test_hyperparameters_differ(comm):
    if comm.size == 1:
        return
    model = made(MLP)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + 0.1 * comm.rank)
    with pytest.raises(UserError, match=r"hyperparameters of the optimizer must be the same"):
        learner_of(model, comm, optimizer)


def test_optimizers_remember_different_things(comm):
    """One rank has gone on from earlier training, the others have not."""
    model = made(MLP)
    optimizer = OPTIMIZERS["momentum"](model)
    if comm.rank == 0:
        x, y = batch(model, 0, 0, 2)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    with pytest.raises(UserError, match=r"state of the optimizer must .* rank 0: 'of 4 .* 'none'"):
        learner_of(model, comm, optimizer)
    learner_of(model, comm, optimizer, algorithm=psgd.ModelAveragingSGD()).close()  # each its own


@pytest.mark.parametrize("end", ["finish", "evaluate"])
def test_buffers_have_become_different(comm, end):
    learner = learner_of(with_buffer(torch.zeros(3)), comm)
    if comm.rank:
        learner.model[0].b = torch.zeros(4)
    with pytest.raises(UserError, match=r"buffer '0.b' of the model must .* rank 0: .*\[3\]"):
        learner.finish() if end == "finish" else learner.evaluate([], lambda *_: {})


def going_on(learner: Any, folder: Any) -> dict[str, Callable[[], Any]]:
    """What goes on with training, by name."""
    return {
        "step": lambda: learner.step(samples=0),
        "finish": learner.finish,
        "save": lambda: psgd.Checkpoints(folder).save(learner),
        "load_checkpoint": lambda: psgd.load_checkpoint(learner, folder),
    }


@pytest.mark.parametrize("block", ["evaluation", "shared_model"])
def test_training_does_not_go_on_with_the_model_that_ranks_have_in_common(comm, tmp_path, block):
    learner = learner_of(made(MLP), comm, algorithm=psgd.ModelAveragingSGD(sync_steps=4))
    with learner.evaluation(), getattr(learner, block)():
        for name, call in going_on(learner, tmp_path).items():
            with pytest.raises(UserError, match=rf"{name} must come after the `with` block of"):
                call()
    learner.step(samples=0)
    learner.finish()


def test_a_minibatch_that_is_under_way_has_samples(comm):
    learner = learner_of(made(MLP), comm, algorithm=psgd.DataParallelSGD(overlap=True))
    x, y = batch(learner.model, comm.rank, 0, 2)
    for samples in (2, 0):
        F.cross_entropy(learner.model(x), y).backward()
        if samples:
            learner.step(samples)
    with pytest.raises(UserError, match=r"samples=0, but backward has been called, and with over"):
        learner.step(samples=0)


def replaced(model: nn.Module) -> None:
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())


def added(model: nn.Module) -> None:
    model[2].extra = nn.Parameter(torch.zeros(2))


def new_layer(model: nn.Module) -> None:
    model.append(nn.Linear(5, 5))


def new_head(model: nn.Module) -> None:
    model[2] = nn.Linear(16, 5)


def resized(model: nn.Module) -> None:
    model[2].weight.data = torch.zeros(7, 16)


def converted(model: nn.Module) -> None:
    model.float()


def frozen(model: nn.Module) -> None:
    model[0].bias.requires_grad_(False)


CHANGES = {
    "replaced": (replaced, r"parameter '2.weight' was replaced after the learner was made"),
    "added": (added, r"parameter '2.extra' was added after"),
    "a layer": (new_layer, r"parameter '3.weight' was added after"),
    "a layer replaced": (new_head, r"parameter '2.weight' was added after"),
    "resized": (resized, r"parameter '2.weight' was resized, moved or converted"),
    "converted": (converted, r"parameter '0.weight' was resized, moved or converted"),
    "frozen": (frozen, r"parameter '0.bias' was frozen after"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_the_model(comm, name):
    """On one rank alone; all hear of it in the step."""
    change, text = CHANGES[name]
    learner = learner_of(made(MLP), comm)
    last = comm.size - 1
    if comm.rank == last:
        change(learner.model)
    with pytest.raises(UserError, match=rf"{text}.*on rank {last}"):
        learner.step(samples=0)


def test_the_optimizers_own_step(comm):
    model = made(MLP)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learner = learner_of(model, comm, optimizer)
    before = values(model)
    with pytest.raises(UserError, match=r"SGD\.step\(\) was called, but learner\.step"):
        optimizer.step()
    assert (values(model) == before).all()
    learner.close()
    optimizer.step()


def test_two_learners_of_one_model(comm):
    model = made(MLP)
    learner = learner_of(model, comm)
    with pytest.raises(UserError, match=r"'0.weight' belongs to another learner already"):
        learner_of(model, comm)
    learner.close()
    learner_of(model, comm)


def test_a_gradient_that_is_not_finite(comm):
    """Without a scaler that is an error, of all ranks; the model is as it was."""
    model = made(MODELS["attention"])
    learner = learner_of(model, comm, OPTIMIZERS["adamw"](model))
    before, last = values(model), comm.size - 1
    x, y = batch(model, comm.rank, 0, 2)
    (F.cross_entropy(model(x), y) * (float("nan") if comm.rank == last else 1)).backward()
    with pytest.raises(UserError, match=rf"not finite.*on rank {last}"):
        learner.step(samples=2)
    assert (values(model) == before).all()
    F.cross_entropy(model(x), y).backward()
    learner.step(samples=2)  # and training can go on
    assert (values(model) != before).any()


@pytest.mark.parametrize("samples", [-1, 2.5, "2"])
def test_samples(comm, samples):
    with pytest.raises(UserError, match="samples="):
        learner_of(made(MLP), comm).step(samples=samples)


SCORES: dict[str, tuple[Any, Any, str]] = {
    "no batch": (
        5,
        {"loss": 0.0},
        r"a batch must have one number of samples: nothing in an int.*samples=",
    ),
    "no mapping": (None, torch.tensor(0.5), "score must return a mapping .* it returned"),
    "no number": (None, {"loss": torch.zeros(2)}, "for 'loss', which must be one number"),
}


@pytest.mark.parametrize("name", SCORES)
def test_scores_that_are_none(comm, name):
    """On one rank alone."""
    bad_batch, bad_score, text = SCORES[name]
    learner = learner_of(made(MLP), comm)
    x, y = batch(learner.model, comm.rank, 0, 2)
    last, good = comm.size - 1, {"loss": 0.0}
    batches = [bad_batch] if bad_batch and comm.rank == last else [(x, y)]
    with pytest.raises(UserError, match=rf"{text}.*on rank {last}"):
        learner.evaluate(batches, lambda *parts: bad_score if comm.rank == last else good)
    assert learner.model.training


def test_gradients_that_are_not_there(comm):
    learner = learner_of(made(MLP), comm)
    x, y = batch(learner.model, comm.rank, 0, 2)
    loss = F.cross_entropy(learner.model(x), y)
    if comm.rank:
        loss.backward()
    with pytest.raises(UserError, match=r"samples=2, but no parameter has a gradient.*on rank 0"):
        learner.step(samples=2)


def test_gradients_that_were_unscaled(comm):
    model, scaler = made(MLP), torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learner = learner_of(model, comm, optimizer, scaler=scaler)
    x, y = batch(model, comm.rank, 0, 2)
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    learner.step(samples=2)
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(UserError, match=r"unscale_\(optimizer\) was called.*clip_norm="):
        learner.step(samples=2)


def test_an_optimizer_that_gets_more_parameters(comm):
    model = made(MLP)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learner = learner_of(model, comm, optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(UserError, match=r"SGD had 4 parameters when .* and has 5 now"):
        learner.step(samples=0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.threads(2)
def test_compiled_models(comm):
    """The learner trains a compiled module as the module itself."""
    plain, model = made(MLP), made(MLP)
    compiled = torch.compile(model, backend="eager")
    pair = learner_of(plain, comm), learner_of(compiled, comm)
    for step in range(3):
        x, y = batch(plain, comm.rank, step, 3)
        for learner in pair:
            F.cross_entropy(learner.model(x), y).backward()
            learner.step(samples=3)
    assert abs(values(plain) - values(model)).max() < 1e-12
    assert pair[0].parameters.shapes == pair[1].parameters.shapes  # so checkpoints go with both
