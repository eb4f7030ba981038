"""Whatever public functions and classes are given by mistake, a UserError of one line says so.

Every argument of every call below is given what it cannot be, one at a time. The calls are on one
rank; where a mistake of one rank must be heard of by all, tests in tests/parallel see it.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import parallel_sgd as psgd
from parallel_sgd import UserError, compression, data
from parallel_sgd import torch as door
from parallel_sgd.testing import check_algorithm

COMM = psgd.Communicator.single()


class Other:
    """Of a class that has nothing to do with anything; itself, it is given in place of others."""


NEVER = {"an object": Other(), "a class": Other}
"""What no argument may be, but for those in `ANY`."""

PERHAPS = {
    "None": None,
    "a text": "x",
    "a zero byte": "a\0b",
    "a number": 3,
    "a fraction": -1.5,
    "not a number": float("nan"),
    "a large number": 2**70,
    "a list": [1],
    "nothing": [],
    "a mapping": {"a": 1},
    "an array": np.zeros(3),
    "a tensor": torch.zeros(2, 2),
    "bytes": b"x",
    "a class of ours": psgd.SGD,
}
"""What some arguments may be, and others not: whatever is no UserError is taken."""

ANY: set[tuple[str, str]] = {("as_dataset", "y"), ("as_sequences", "y"), ("Source", "y")}


def arrays() -> data.Arrays:
    return data.Arrays(np.eye(4), np.array([0, 1, 2, 0]))


def learner() -> psgd.Learner:
    model = psgd.models.SoftmaxRegression(4, 3)
    return psgd.Learner(model.parameters, psgd.SGD(lr=0.5), psgd.DataParallelSGD(), COMM)


MODEL = torch.nn.Linear(4, 3)


def torch_learner() -> Any:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return door.Learner(model, optimizer, psgd.DataParallelSGD(), COMM)


def torch_learner_of(**given: Any) -> Any:
    with door.Learner(**given) as learner:  # which gives the model back
        return learner


def stepped(samples: Any, loss: Any) -> Any:
    return learner().step(samples, loss)


def torch_stepped(samples: Any, loss: Any) -> Any:
    return torch_learner().step(samples, loss)


def scaled(loss: Any) -> Any:
    return torch_learner().scaled(loss)


def evaluated(batches: Any, score: Any, samples: Any) -> Any:
    return torch_learner().evaluate(batches, score, samples=samples)


def world(**given: Any) -> Any:
    with mock.patch.object(psgd.Communicator, "_make_world", return_value=COMM):
        return psgd.Communicator.world(**given)


def registered(bits: Any, code: Any, codec: Any) -> Any:
    compression.unregister(compression.register(bits, code=code)(codec))


class OwnCodec(compression.UniformLevels):
    """One of a user's."""


def score(model: Any, *parts: Any) -> dict[str, float]:
    return {"loss": 0.5}


def fed(learner: Any) -> Any:
    return list(data.Source(arrays(), minibatch_size=2).minibatches(learner))


def fed_epoch(number: Any, learner: Any) -> Any:
    return list(data.Source(arrays(), minibatch_size=2).epoch(number, learner))


def epochs(count: Any) -> Any:
    return list(door.sampler(arrays(), torch_learner(), 2).epochs(count))


def traced(**given: Any) -> Any:
    with psgd.traced(**given):
        pass


def saved(folder: Path, learner: Any) -> Any:
    with psgd.Checkpoints(folder / "saved") as checkpoints:
        checkpoints.save(learner, background=False)


def trained(**given: Any) -> Any:
    return psgd.TrainingSession(**given).run()


def load_state(state: Any) -> Any:
    return door.hook_state(COMM).load_state_dict(state)


def grouped(comm: Any) -> Any:
    return door.init_process_group(comm, timeout_s=-1.0)


def hooked(state: Any) -> Any:
    return door.hook(state, None)  # type: ignore[arg-type]


def compressed(ddp: Any) -> Any:
    return door.compress(ddp, gradient_bits=4)


def calls(folder: Path) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """By name: what is called, and with what."""
    checkpoints = folder / "checkpoints"
    with psgd.Checkpoints(checkpoints) as saving:
        saving.save(learner(), background=False)
    np.savez(folder / "a.npz", x=np.eye(4), y=np.arange(4) % 2)
    for name, array in (("x", np.eye(4)), ("y", np.arange(4) % 2)):
        np.save(folder / f"{name}.npy", array)
    (folder / "l.svm").write_text("1 1:0.5\n-1 2:1\n")
    (folder / "c.txt").write_text("|x 1 2 |y 1\n|x 1 3 |y 0\n")
    (folder / "a.csv").write_text("x,y\n1,a\n2,b\n")
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_text("hello world " * 500)
    npz, text, svm = folder / "a.npz", folder / "c.txt", folder / "l.svm"
    cntk = {"path": text, "streams": {"x": data.Dense(2), "y": data.Dense(1)}, "comm": None}
    pairs = {"x": np.eye(4), "y": np.arange(4)}
    feed = {"epochs": 1, "seed": 0, "shuffle": True, "dtype": np.float32, "start": 0}
    sizes = {"minibatch_size": 2, "classes": 4, **feed}
    lists = {"x": [np.ones(2), np.ones(3)], "y": [0, 1]}
    rate = {"lr": 0.1}
    block = {"sync_steps": 4, "distributed_after": 0, "overlap_samples": 0, "gradient_bits": 32}
    model = {"seed": 0, "dtype": np.float32, "device": "cpu"}
    streams = {"dimension": 3, "alias": None, "one_hot": False, "per_sequence": False}
    own_model = psgd.models.SoftmaxRegression(4, 3)
    own = psgd.Learner(own_model.parameters, psgd.SGD(lr=0.5), psgd.DataParallelSGD(), COMM)
    table = {"name": "t", "optimizer": psgd.SGD(lr=0.1), "seed": 0, "initial_scale": 0.0}
    columns = {"x": None, "y": None, "most_bytes": 1000}
    hook_state = door.hook_state(COMM)
    standards = data.Standardization.of(arrays())
    library = {"test": 0.1, "seed": 0, "most_bytes": 10_000}
    batches = [(torch.zeros(2, 4), torch.zeros(2))]
    learning = {
        "sync_perf_stats": 0,
        "minibatch_size": None,
        "commit_every": 10,
        "not_finite": "stop",
        "most_skipped": 10,
        "compare_every": 64,
    }
    return {
        "SGD": (psgd.SGD, rate),
        "Adagrad": (psgd.Adagrad, {**rate, "epsilon": 1e-8, "initial_accumulator": 0.0}),
        "Adam": (psgd.Adam, {**rate, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-8}),
        "MomentumSGD": (psgd.MomentumSGD, {**rate, "momentum": 0.9, "unit_gain": False}),
        "NesterovSGD": (psgd.NesterovSGD, {**rate, "momentum_time_constant": 9}),
        "DataParallelSGD": (psgd.DataParallelSGD, {"gradient_bits": 4, "bits_of": {"*.b": 8}}),
        "PowerSGD": (psgd.PowerSGD, {"rank": 2, "hierarchical": "auto"}),
        "ModelAveragingSGD": (psgd.ModelAveragingSGD, {**block, "inner_state": "keep"}),
        "BlockMomentumSGD": (psgd.BlockMomentumSGD, {**block, "block_momentum": 0.9}),
        "CNTKBlockMomentumSGD": (psgd.CNTKBlockMomentumSGD, {**block, "block_momentum": 0.9}),
        "SlowMo": (psgd.SlowMo, {**block, "slow_momentum": 0.5}),
        "DiLoCo": (psgd.DiLoCo, {**block, "outer_momentum": 0.5, "fragments": 2}),
        "SparseLoCo": (psgd.SparseLoCo, {**block, "residual_decay": 0.9}),
        "DESLOC": (psgd.DESLOC, {**block, "first_moment_every": 2, "second_moment_every": 4}),
        "DataParallelASGD": (psgd.DataParallelASGD, {"servers": 1, "tables": [], "role": "auto"}),
        "ArrayTable": (psgd.ArrayTable, {**table, "shape": (3,)}),
        "Embedding": (psgd.Embedding, {**table, "width": 3, "evict_after": None}),
        "AutoLearningRate": (psgd.AutoLearningRate, {"load_best_model": True}),
        "AutoMinibatchSize": (psgd.AutoMinibatchSize, {"trial_samples": 3}),
        "NotFinitePolicy": (psgd.NotFinitePolicy, {"not_finite": "reduce", "not_finite_most": 3}),
        "CheckpointConfig": (
            psgd.CheckpointConfig,
            {"folder": folder, "every": 1, "every_s": None, "keep": 3, "resume": None},
        ),
        "Checkpoints": (psgd.Checkpoints, {"folder": folder, "keep": 3, "facts": None}),
        "Checkpoints.save": (partial(saved, folder), {"learner": learner()}),
        "load_checkpoint": (
            psgd.load_checkpoint,
            {"learner": learner(), "path": checkpoints, "facts": None},
        ),
        "resume": (psgd.resume, {"learner": learner(), "folder": checkpoints, "facts": None}),
        "traced": (traced, {"path": folder / "t.json", "comm": COMM, "after_errors": True}),
        "simulate": (
            psgd.simulate,
            {"size": 1, "function": lambda comm: comm.rank, "timeout_s": 5.0},
        ),
        "Communicator.world": (world, {"timeout_s": 5.0, "cuda_aware": False}),
        "Communicator.raise_together": (COMM.raise_together, {"problem": None}),
        "Communicator.require_agreement": (COMM.require_agreement, {"facts": {"a": 1}}),
        "compression.register": (registered, {"bits": 5.5, "code": "own", "codec": OwnCodec}),
        "compression.codec_for": (
            compression.codec_for,
            {"gradient_bits": 1, "code": "sign", "block_size": 1024, "threshold": "zero"},
        ),
        "16 bits, compression.codec_for": (
            compression.codec_for,
            {"gradient_bits": 16, "half_format": "float16"},
        ),
        "compression.codec_from_dict": (
            compression.codec_from_dict,
            {"options": compression.codec_for(4).to_dict()},
        ),
        "Parameters": (psgd.Parameters, {"arrays": {"a": np.zeros(3, np.float32)}}),
        "Learner": (
            psgd.Learner,
            {
                "parameters": psgd.models.SoftmaxRegression(4, 3).parameters,
                "optimizer": psgd.SGD(lr=0.1),
                "algorithm": psgd.DataParallelSGD(),
                "comm": COMM,
                **learning,
            },
        ),
        "Learner.step": (stepped, {"samples": 0, "loss": 0.5}),
        "CrossValidation": (
            psgd.CrossValidation,
            {
                **{"data": arrays(), "every": None, "criterion": "loss", "patience": None},
                **{"higher_is_better": None, "min_improvement": 0.0, "restore_best": False},
                **{"name": "validation", "batch": 10},
            },
        ),
        "RunFolder": (
            psgd.RunFolder,
            {
                **{"path": folder / "run", "options": {}, "config": None, "resumed": False},
                **{"plot": False, "tensorboard": False},
            },
        ),
        "Tracker": (psgd.Tracker, {"service": "wandb", "project": "p", "name": None}),
        "TrainingSession": (
            trained,
            {
                **{"seed": 0, "epochs": 1, "minibatch_size": 2, "rate_follows": None},
                **{"microbatch_size": None, "validation": None, "test": None, "callbacks": ()},
                **{"progress_every": None, "auto_minibatch_size": None, "checkpoints": None},
                **{"auto_learning_rate": None, "not_finite": None, "folder": None, "report": None},
                **{"tracker": None, "started": None, "progress_bar": False, "train": arrays()},
                **{"learner": own, "objective": own_model},
            },
        ),
        "Arrays": (data.Arrays, {**pairs, "name": "n"}),
        "Images": (data.Images, {"x": np.zeros((4, 2), np.uint8), "y": np.arange(4), "name": ""}),
        "Items": (data.Items, {"items": [(1.0, 2)]}),
        "Joined": (data.Joined, {"datasets": [arrays()], "name": "n"}),
        "Subset": (data.Subset, {"dataset": arrays(), "indexes": np.array([0, 1])}),
        "Flattened": (data.Flattened, {"dataset": arrays()}),
        "flattened": (data.flattened, {"dataset": arrays()}),
        "as_dataset": (data.as_dataset, pairs),
        "count_classes": (data.count_classes, {"data": arrays(), "classes": None}),
        "Standardization.of": (
            data.Standardization.of,
            {"train": arrays(), "comm": None},
        ),
        "Standardized": (data.Standardized, {"dataset": arrays(), "by": standards}),
        "read_standardization": (data.read_standardization, {"path": folder}),
        "task_of": (data.task_of, {"data": arrays(), "task": None, "classes": None}),
        "fingerprint": (
            data.fingerprint,
            {"dataset": arrays(), "dtype": np.float32, "classes": None},
        ),
        "require_same_data": (
            data.require_same_data,
            {"name": "d", "dataset": arrays(), "comm": COMM, "dtype": None, "classes": None},
        ),
        "Source": (data.Source, {**pairs, **sizes}),
        "Source.minibatches": (fed, {"learner": learner()}),
        "Source.epoch": (fed_epoch, {"number": 0, "learner": learner()}),
        "RankSource": (data.RankSource, {**pairs, **sizes}),
        "SequenceSource": (
            data.SequenceSource,
            {**lists, **sizes, "minibatch_size": 20, "unit": "tokens", "y_fill": 0},
        ),
        "SequenceArrays": (data.SequenceArrays, lists),
        "as_sequences": (data.as_sequences, lists),
        "padded": (data.padded, {"sequences": [np.ones(2)], "fill": 0}),
        "ByteSequences": (data.ByteSequences, {"text": b"hello", "context": 4}),
        "ByteWindows": (data.ByteWindows, {"files": {"a": b"hello"}, "context": 4}),
        "NGrams": (data.NGrams, {"files": {"a": b"hello"}, "orders": (1, 2)}),
        "Clicks": (data.Clicks, {"samples": 9, "fields": 3, "seed": 0, "exponent": 1.2}),
        "clicks": (data.clicks, {"samples": 99, "fields": 3, "test": 9, "seed": 0}),
        "Dense": (data.Dense, streams),
        "Sparse": (data.Sparse, streams),
        "digits": (data.digits, {"test": 30, "seed": 0}),
        "fashion_mnist": (data.fashion_mnist, {"folder": folder}),
        "cifar10": (data.cifar10, {"folder": folder}),
        "cifar100": (data.cifar100, {"folder": folder, "label": "fine"}),
        "CifarFile": (data.CifarFile, {"path": folder}),
        "ImageFolder": (data.ImageFolder, {"folder": folder}),
        "image_folders": (data.image_folders, {"folder": folder}),
        "library_ngrams": (data.library_ngrams, {**library, "orders": (1, 2)}),
        "library_sequences": (data.library_sequences, {**library, "context": 8}),
        "library_source": (data.library_source, {**library, "context": 8}),
        "load": (data.load, {"path": npz, "labels": None, "format": None}),
        "load_train_test": (data.load_train_test, {"path": npz, "test": 0.3, "seed": 0}),
        "load_npy": (data.load_npy, {"path": folder / "x.npy", "labels": folder / "y.npy"}),
        "load_npz": (data.load_npz, {"path": npz}),
        "npz_parts": (data.npz_parts, {"path": npz}),
        "load_idx": (data.load_idx, {"path": folder}),
        "load_idx_pair": (data.load_idx_pair, {"path": npz, "labels": npz}),
        "load_libsvm": (
            data.load_libsvm,
            {
                **{"path": svm, "features": None, "zero_based": False, "target": "class"},
                **{"classes": None, "comm": None},
            },
        ),
        "load_cntk_text": (data.load_cntk_text, cntk),
        "load_cntk_sequences": (data.load_cntk_sequences, cntk),
        "load_csv": (
            data.load_csv,
            {
                **{"path": folder / "a.csv", "x": None, "y": None, "names": None},
                **{"delimiter": None, "header": None},
            },
        ),
        "csv_parts": (data.csv_parts, {"folder": folder, "x": None, "y": None, "header": None}),
        "load_parquet": (data.load_parquet, {"path": folder}),
        "load_arrow": (data.load_arrow, {"path": folder}),
        "arrow_parts": (data.arrow_parts, {"folder": folder, **columns}),
        "parquet_parts": (data.parquet_parts, {"folder": folder, **columns}),
        "text_sequences": (
            data.text_sequences,
            {"folder": folder / "texts", "context": 8, "test": 0.1, "suffixes": (".txt",)},
        ),
        "MLP": (psgd.models.MLP, {**model, "sizes": [4, 3], "loss": "cross-entropy"}),
        "SoftmaxRegression": (psgd.models.SoftmaxRegression, {**model, "inputs": 4, "classes": 3}),
        "ByteLanguageModel": (
            psgd.models.ByteLanguageModel,
            {**model, "context": 4, "width": 4, "hidden": (4,)},
        ),
        "EmbeddedMLP": (
            psgd.models.EmbeddedMLP,
            {**model, "fields": 4, "width": 4, "hidden": (4,), "classes": 2, "combine": "sum"},
        ),
        "torch.Learner": (
            torch_learner_of,
            {
                **{"model": MODEL, "optimizer": torch.optim.SGD(MODEL.parameters(), lr=0.1)},
                **{
                    "algorithm": psgd.DataParallelSGD(),
                    "comm": COMM,
                    "reduction": "mean",
                    "clip_norm": None,
                    "scaler": None,
                },
                **{"buffers": "mean", **learning},
            },
        ),
        "torch.Learner.step": (torch_stepped, {"samples": 0, "loss": None}),
        "torch.Learner.scaled": (scaled, {"loss": torch.zeros(())}),
        "torch.Learner.evaluate": (
            evaluated,
            {"batches": batches, "score": score, "samples": None},
        ),
        "torch.Objective": (
            door.Objective,
            {
                **{"model": torch.nn.Linear(4, 3), "loss": F.cross_entropy, "metrics": None},
                **{"reduction": "mean", "dtype": np.float32, "classes": 3, "samples": None},
            },
        ),
        "torch.sampler": (
            door.sampler,
            {
                **{"dataset": arrays(), "learner": torch_learner(), "minibatch_size": 2},
                **{"seed": 0, "shuffle": True, "drop_last": False, "start": 0},
            },
        ),
        "torch.sampler.epochs": (epochs, {"count": 1}),
        "torch.compress": (compressed, {"ddp": torch.nn.Linear(4, 3)}),
        "torch.hook_state": (
            door.hook_state,
            {
                **{"comm": COMM, "module": torch.nn.Linear(4, 3), "scaler": None},
                **{"process_group": None, "gradient_bits": 4, "transport": "auto"},
            },
        ),
        "torch.HookState.load_state_dict": (load_state, {"state": hook_state.state_dict()}),
        "torch.hook": (hooked, {"state": hook_state}),
        "torch.GatheredState": (door.GatheredState, {"handle": hook_state}),
        "torch.init_process_group": (grouped, {"comm": COMM}),
        "check_algorithm": (
            check_algorithm,
            {
                **{"algorithm": psgd.DataParallelSGD(), "optimizer": None, "ranks": (1,)},
                **{"comm": None, "only": "options", "exceptions": None, "timeout_s": 5.0},
                **{"full_precision": None, "one_rank": None},
            },
        ),
    }


NOT_CALLED = {
    # what users derive from, hold, or catch; protocols; what errors and readers are made of
    *("Algorithm", "Communicator", "Objective", "Optimizer", "Preempted", "Progress", "RanksLost"),
    *(
        "Trace",
        "CSVTable",
        "UserError",
        "BaseSource",
        "CNTKSamples",
        "CNTKSequences",
        "Columns",
        "Dataset",
    ),
    *("CommunicatorView", "FeedView", "Format", "LearnerView", "LibSVM", "MinibatchSource"),
    *("Padded", "Sequences", "SparseRows", "Task", "ends", "with_next", "BinaryCrossEntropy"),
    *("Classifier", "CrossEntropy", "Loss", "Model", "Rows", "SquaredError", "use_gpu"),
    *("CSVTable", "HookState", "MinibatchSampler", "ShardedModel", "Standardization"),
}


FAIL = {
    # in a folder that has nothing for them, or without a bucket
    *("fashion_mnist", "cifar10", "cifar100", "CifarFile", "ImageFolder", "image_folders"),
    *("load_idx", "load_idx_pair", "load_parquet", "load_arrow", "arrow_parts", "parquet_parts"),
    *("csv_parts", "npz_parts"),
    *("torch.compress", "torch.hook", "torch.init_process_group"),
}
"""What is called in vain, with whatever arguments."""


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    folder = tmp_path_factory.mktemp("arguments")
    library = folder / "library"  # in place of Python's, of 2,000 files
    library.mkdir()
    for number in range(20):
        (library / f"{number}.py").write_text("print('hello world')\n" * 10)
    with pytest.MonkeyPatch.context() as patched:
        paths = types.SimpleNamespace(get_path=lambda name: library)
        patched.setattr(sys.modules[data.library_source.__module__], "sysconfig", paths)
        yield calls(folder)


def test_every_public_name_is_in_the_table(table):
    """What is added to the library must be added here."""
    known = {name.rpartition(".")[2] for name in table} | NOT_CALLED
    for module in (psgd, data, psgd.models, door):
        for name in module.__all__:
            value = getattr(module, name)
            called = callable(value) and not isinstance(value, types.ModuleType)
            assert not called or name in known, f"{module.__name__}.{name}"


def outcome(call: Callable[..., Any], arguments: Mapping[str, Any]) -> str | None:
    """What a call's UserError says; None where it succeeds."""
    try:
        call(**arguments)
    except UserError as error:
        return str(error)
    return None


def test_wrong_arguments(table, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # "x" is a folder that some make
    wrong = []
    for name, (call, arguments) in table.items():
        assert (outcome(call, arguments) is not None) == (name in FAIL), name
        for key in arguments:
            for what, value in {**NEVER, **PERHAPS}.items():
                given = f"{name}({key}=<{what}>)"
                try:
                    text = outcome(call, {**arguments, key: value})
                except Exception as error:
                    wrong.append(f"{given}: {type(error).__name__}: {error}")
                    continue
                if text is None and what in NEVER and (name, key) not in ANY:
                    wrong.append(f"{given} is taken")
                if text is not None and ("\n" in text or len(text) > 600):
                    wrong.append(f"{given}: not one line: {text}")
    assert not wrong, "\n".join(wrong)


def test_misspelt_arguments(table):
    for name, (call, arguments) in table.items():
        if isinstance(call, types.FunctionType) and call.__module__ == __name__:
            continue  # which passes on what it knows
        with pytest.raises((UserError, TypeError), match="misspelt") as raised:
            call(**arguments, misspelt=3)
        assert "\n" not in str(raised.value), name
