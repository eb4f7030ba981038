"""Make the model of train.py: a built-in model, or a model from a file of the user's."""

from __future__ import annotations

import argparse
import importlib.util
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from ...algorithms import Algorithm
from ...communication import Communicator
from ...data import Dataset, flattened
from ...data.sources.minibatches import MinibatchSize
from ...errors import UserError
from ...models import MLP, TASK_LOSSES, ByteLanguageModel, Model, SoftmaxRegression
from ...optimizers import Optimizer
from ...training import Learner, ModelObjective, Objective
from ...training.session.initial_model import read_model, set_parameters
from ...validation import checked_path, kind_of, line_of, require_use, shown
from .data import TrainingData

MODELS = ("mlp", "linear", "softmax", "bytes")

_generator_lock = threading.Lock()  #: ranks that are threads share the random generators


class TrainingModel(NamedTuple):
    """A model to be trained.

    Attributes:
        objective: the model's objective.
        make_learner: makes the learner from optimizer, algorithm and communicator.
        given: converts a data set to the form that the model takes.
    """

    objective: Objective
    make_learner: Callable[..., Learner]
    given: Callable[[Dataset], Dataset]

    def learner(
        self,
        optimizer: Optimizer,
        algorithm: Algorithm[Any],
        comm: Communicator,
        options: argparse.Namespace,
    ) -> Learner:
        """Return the learner of the model. Collective."""
        return self.make_learner(
            optimizer,
            algorithm,
            comm,
            sync_perf_stats=options.sync_perf_stats,
            minibatch_size=_largest_size(options.minibatch_size),
            compare_every=options.compare_every,
        )


def _largest_size(size: MinibatchSize) -> int:
    return size if isinstance(size, int) else max(size.values())  # type: ignore[union-attr]


def kind_of_model(options: argparse.Namespace) -> str:
    """Return the option --model, or the default for the data. Local."""
    return options.model or ("bytes" if options.data == "library" else "mlp")


def require_model_options(options: argparse.Namespace) -> None:
    """Raise a UserError for options that do not fit the kind of model. Local."""
    kind = kind_of_model(options)
    if kind not in MODELS and ":" not in kind:
        raise UserError(f"model={shown(kind)} must be {', '.join(MODELS)}, or FILE.py:FUNCTION")
    if options.hidden and kind not in ("mlp", "bytes"):
        raise UserError(f"hidden={shown(options.hidden)}: a {kind} model has no hidden layers")
    needs = "a --model whose classes are not the bytes"
    require_use("classes", options.classes, None, kind != "bytes", needs)
    needs = "a --model whose inputs are not the bytes"
    require_use("standardize", options.standardize, False, kind != "bytes", needs)


def make_model(options: argparse.Namespace, data: TrainingData) -> TrainingModel:
    """Return the requested model, with its requested initial values.

    Raises:
        UserError: the model does not fit the data, or cannot be made.

    Local.
    """
    x, _ = data.train.read(np.arange(1), classes=data.task.classes)
    kind = kind_of_model(options)
    if kind in MODELS:
        made = _built_in_model(kind, options, data, x[0].size)
    else:
        with _generator_lock:
            _seed_generators(options.seed)
            made = _user_model(kind, x.shape[1:], data.task.outputs)
    values = None if options.initial_model is None else read_model(options.initial_model)
    if isinstance(made, Model):
        if values is not None:
            set_parameters(made.parameters, values, name=options.initial_model)
        return TrainingModel(
            ModelObjective(made),
            lambda *chosen, **keywords: Learner(made.parameters, *chosen, **keywords),
            flattened if x.ndim > 2 else lambda dataset: dataset,
        )
    return _torch_model(made, data, options, values)


def _built_in_model(
    kind: str, options: argparse.Namespace, data: TrainingData, inputs: int
) -> Model:
    task, common = data.task, {"seed": options.seed, "device": options.device}
    hidden = options.hidden or [128]
    if kind == "bytes":
        return ByteLanguageModel(inputs, hidden=hidden, **common)
    if kind == "softmax":
        if task.classes is None:
            raise UserError(f"model='softmax' learns classes, and the task is {task.name}")
        return SoftmaxRegression(inputs, task.outputs, **common)
    widths = [] if kind == "linear" else hidden
    return MLP([inputs, *widths, task.outputs], loss=TASK_LOSSES[task.name], **common)


def _user_model(kind: str, shape: tuple[int, ...], outputs: int) -> Any:
    """Return the result of a function in a file of the user's."""
    path, _, name = kind.rpartition(":")
    module = _import_file(Path(path))
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"model={shown(kind)}: {path} has no function {name!r}")
    try:
        return function(shape, outputs)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"model={shown(kind)}: {type(error).__name__}: {line_of(error)}") from error


def _seed_generators(seed: int) -> None:
    """Seed all random generators that a user's model may draw its initial values from.

    Local, but changes generators of the whole process.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if importlib.util.find_spec("torch") is not None:
        from ...torch.tasks import seed_initial_values

        seed_initial_values(seed)


def _import_file(path: Path) -> ModuleType:
    """Run a file of the user's like a program: modules in its folder can be imported."""
    if not checked_path("model", path, "file").is_file():
        raise UserError(f"model={str(path)!r}: there is no such file")
    spec = importlib.util.spec_from_file_location(f"model_in_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"model={str(path)!r} must be a file of Python's")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look for the module there
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{path} cannot be run: {type(error).__name__}: {line_of(error)}"
        ) from error
    return module


def _torch_model(
    made: Any, data: TrainingData, options: argparse.Namespace, values: Any
) -> TrainingModel:
    try:
        from ...torch import Learner as TorchLearner
        from ...torch.tasks import objective_for, seed_training
    except ImportError as error:
        raise UserError(
            f"model={shown(options.model)} must give a model of parallel_sgd.models: it gave "
            f"{kind_of(made)}, and PyTorch is not installed ({error})"
        ) from error
    try:
        objective = objective_for(
            made,
            data.task.name,
            data.task.classes,
            device=options.device,
            values=values,
            name=options.initial_model or "",
        )
    except UserError as error:
        raise UserError(f"model={shown(options.model)}: {error}") from error

    def make_learner(
        optimizer: Optimizer, algorithm: Algorithm[Any], comm: Communicator, **keywords: Any
    ) -> Learner:
        seed_training(options.seed, comm.rank)
        return TorchLearner(objective.model, optimizer, algorithm, comm, **keywords)

    return TrainingModel(objective, make_learner, lambda dataset: dataset)
