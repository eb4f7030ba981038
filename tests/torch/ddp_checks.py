"""Checks of `psgd.torch.compress` on ranks of torchrun; see `rank_checks`."""

from __future__ import annotations

import copy
import sys
from functools import partial
from pathlib import Path
from typing import Any

import ddp_models as models
import numpy as np
import pytest
import torch
import torch.distributed as dist
from ddp_models import Branches, Mixed, equal_on_all, gathered, minibatch, mlp, trained, wrapped
from rank_checks import perform
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from parallel_sgd import Communicator, UserError
from parallel_sgd.errors import SharedError
from parallel_sgd.torch import compress, hook_state

FOLDER = Path(sys.argv[-1])
FILE, RECORD = "hook_{}.pt", "recorded_{}_{}.pt"

CASES: dict[str, tuple[Any, dict[str, Any], int]] = {
    "plain": (mlp, {}, 1),
    "gradients are views": (mlp, {"gradient_as_bucket_view": True}, 1),
    "static": (mlp, {"static_graph": True}, 1),
    "accumulated": (mlp, {}, 3),
    "accumulated views": (mlp, {"gradient_as_bucket_view": True}, 2),
    "unused": (Branches, {"find_unused_parameters": True}, 1),
    "float64": (partial(Mixed, torch.float64), {}, 1),
}


def full_precision(case: str) -> None:
    """The same as DDP alone."""
    model, options, accumulated = CASES[case]
    plain, ours = wrapped(model, **options), wrapped(model, **options)
    start = models.values_of(plain)
    with compress(ours) as handle:
        losses = trained(ours, accumulated=accumulated)
        report = handle.report()
    np.testing.assert_allclose(losses, trained(plain, accumulated=accumulated), atol=1e-6)
    assert np.abs(models.values_of(ours) - models.values_of(plain)).max() < 1e-6
    assert np.abs(models.values_of(ours) - start).max() > 1e-3
    assert len({*gathered(losses[-1])}) == dist.get_world_size(), "ranks have the same data"
    assert report["steps"] == 4 and report["bytes_sent"] > 0


class Recorded:
    """Records the buckets of each step: the names of their parameters, their values before the
    hook, and the means after it."""

    def __init__(self, ddp: DistributedDataParallel, handle: Any) -> None:
        self.names = {id(p): name for name, p in ddp.module.named_parameters()}
        self.steps: list[list[tuple[list[str], np.ndarray]]] = []
        self.means: list[np.ndarray] = []
        self._begin, self._buffers = handle.begin, []
        handle.begin = self.begin

    def begin(self, bucket: Any) -> Any:
        if bucket.index() == 0:
            self.steps.append([])
            self._buffers = []
        names = [self.names[id(p)] for p in bucket.parameters()]
        self.steps[-1].append((names, bucket.buffer().numpy().copy()))
        self._buffers.append(bucket.buffer().numpy())
        future = self._begin(bucket)
        if bucket.is_last():
            self.means.append(np.concatenate(self._buffers))
        return future


def recorded_training(bits: float) -> None:
    """For the same hook elsewhere: what it is given, and what it gives."""
    ddp = wrapped(mlp)
    with compress(ddp, gradient_bits=bits) as handle:
        recorded = Recorded(ddp, handle)
        losses = trained(ddp, range(6))
        sent = handle.bytes_sent
    steps = recorded.steps
    assert len(steps) == 6 and len(steps[0]) == 1 and len(steps[-1]) > 1
    kept = {"steps": steps, "means": recorded.means, "sent": sent, "losses": losses}
    torch.save(kept, FOLDER / RECORD.format(bits, dist.get_rank()))


def nothing_is_lost() -> None:
    """Gradients and residuals, as DDP builds its buckets anew."""
    ddp = wrapped(mlp, gradient_as_bucket_view=True)
    module, optimizer = ddp.module, torch.optim.SGD(ddp.parameters(), lr=0.1)
    given, got = np.zeros(()), np.zeros(())
    with compress(ddp, gradient_bits=1, block_size=64) as handle:
        for step in range(4):
            x, y = minibatch(step)
            alone = copy.deepcopy(module)
            alone.zero_grad()
            cross_entropy(alone(x), y).backward()
            given = given + models.summed(models.gradients_of(alone), module)
            optimizer.zero_grad()
            cross_entropy(ddp(x), y).backward()
            got = got + models.summed(models.gradients_of(module), module)
            lost = models.summed(models.residuals_of(handle.state_dict()), module)
            assert np.abs(got + lost - given).max() < 1e-5 < 1e-3 < np.abs(lost).max()
            optimizer.step()
        report = handle.report()
        assert report["ratio_to_32_bits"] > 8
        assert 0 < report["bytes_per_value"] < 1
    assert equal_on_all(ddp)


def overflow() -> None:
    """Of one rank: all ranks skip the step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    ddp = wrapped(mlp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with compress(ddp, gradient_bits=1, scaler=scaler) as handle:
        for step in range(4):
            x, y = minibatch(step)
            if step == 2 and dist.get_rank() == 1:
                x[0, 0] = np.inf
            before = models.values_of(ddp)
            optimizer.zero_grad()
            scaler.scale(cross_entropy(ddp(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == (256 if step < 2 else 128)
            assert np.array_equal(models.values_of(ddp), before) == (step == 2)
        assert handle.report()["skipped"]["minibatches"] == 1
    assert equal_on_all(ddp)


def not_finite() -> None:
    """Without a scaler: an error on all ranks, and the process group goes on."""
    ddp = wrapped(mlp)
    with compress(ddp, gradient_bits=1):
        trained(ddp, range(2))
        x, y = minibatch(2)
        if dist.get_rank() == 1:
            x[0, 0] = np.nan
        with pytest.raises(SharedError, match=r"gradient is not finite.*\(on rank 1\)"):
            cross_entropy(ddp(x), y).backward()
    full_precision("plain")


def uneven_inputs() -> None:
    """Rank 1 has more minibatches than rank 0: DDP's join."""
    ddp = wrapped(mlp)
    with compress(ddp, gradient_bits=1) as handle:
        with ddp.join():
            trained(ddp, range(3 + 2 * dist.get_rank()))
        assert handle.steps == 5
    assert equal_on_all(ddp)


def compiled() -> None:
    """DDP within torch.compile, and the other way round."""
    expected, curves = None, []
    for order in ("neither", "DDP is compiled", "the model is compiled"):
        model = mlp()
        if order == "the model is compiled":
            model = torch.compile(model, backend="eager")
        ddp: Any = DistributedDataParallel(model)
        if order == "DDP is compiled":
            ddp = torch.compile(ddp, backend="eager")
        with compress(ddp, gradient_bits=4, bits_of={"0.bias": 32}) as handle:
            curves.append(trained(ddp))
            assert handle.steps == 4
            names = {*handle.state_dict()["residuals"]}
        expected = expected or names
        assert names == expected and "0.weight" in names
    for curve in curves[1:]:
        np.testing.assert_allclose(curve, curves[0], atol=0.05)


def saved() -> None:
    """A run resumed on the same ranks goes on bit for bit; other jobs use the files."""
    options = {"find_unused_parameters": True}  # so that DDP keeps its buckets
    one, other = wrapped(Branches, **options), wrapped(Branches, **options)
    first, second = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (one, other))
    with compress(one, gradient_bits=1) as before, compress(other, gradient_bits=1) as after:
        trained(one, range(3), optimizer=first)
        own = FOLDER / FILE.format(dist.get_rank())
        torch.save(before.state_dict(), own)
        states = before.gathered_state_dicts()
        if dist.get_rank() == 0:
            torch.save({"hook": states, "ddp": one.state_dict()}, FOLDER / "all.pt")
        other.load_state_dict(one.state_dict())
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        after.load_state_dict(torch.load(own, weights_only=True))
        expected = trained(one, range(3, 6), optimizer=first)
        assert trained(other, range(3, 6), optimizer=second) == expected
        assert np.array_equal(models.values_of(other), models.values_of(one))
        dist.barrier()
        after.load_state_dict(torch.load(FOLDER / "all.pt", weights_only=True)["hook"])
        assert after.steps == 3
    other_ranks = gathered(expected)
    assert other_ranks[0] != other_ranks[1]


def refused(error: str, do: Any, kind: type[UserError] = SharedError) -> None:
    with pytest.raises(kind, match=error) as raised:
        do()
    assert "\n" not in str(raised.value)


def misuse() -> None:
    """One line on all ranks, and the next is possible."""
    rank = dist.get_rank()
    refused(
        "ddp must be a .*DistributedDataParallel: it is a .*Sequential",
        partial(compress, mlp()),
        SharedError,
    )
    either = [wrapped(mlp), mlp()][rank]
    refused(r"it is a .*Sequential \(on rank 1\)", partial(compress, either))
    nested = wrapped(lambda: wrapped(mlp))
    refused("wrap the model once", partial(compress, nested))
    ddp = wrapped(mlp)
    refused("gradient_bits=9.3", partial(compress, ddp, gradient_bits=9.3))
    refused("compress has no option 'bits'", partial(compress, ddp, bits=1))
    refused(
        "gradient_bits must be the same .*: rank 0: 1; rank 1: 4",
        partial(compress, ddp, gradient_bits=4 if rank else 1),
    )
    refused("whether there is a scaler", partial(compress, ddp, scaler=scaler() if rank else None))
    refused("scaler=3 must be", partial(compress, ddp, scaler=3))
    refused("'x' matches no parameter", partial(compress, ddp, bits_of={"x": 4}))
    refused(r"only on.*rank 1|\(on rank 1\)", partial(compress, ddp, gradient_bits=[4, -1][rank]))
    with compress(ddp):
        trained(ddp)
        refused("has a communication hook already", partial(compress, ddp))
        trained(ddp)
    x, y = minibatch(0)
    refused(
        r"closed: DDP cannot train after its close", cross_entropy(ddp(x), y).backward, UserError
    )
    hooked = wrapped(mlp)
    hooked.register_comm_hook(None, lambda state, bucket: bucket)
    refused("has a communication hook already", partial(compress, hooked))
    refused(
        "'other.weight' is bfloat16", partial(compress, wrapped(partial(Mixed, torch.bfloat16)))
    )
    refused(
        "'other.weight' is float64",
        partial(compress, wrapped(partial(Mixed, torch.float64)), gradient_bits=1),
    )
    ignoring = mlp()
    ignoring[0].register_parameter(
        "extra", torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    )
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignoring, ["0.extra"])
    ddp = wrapped(lambda: ignoring)
    with compress(ddp, gradient_bits=4):
        trained(ddp)


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu")


def subgroups() -> None:
    """DDP over half of the ranks each: two models at a time."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[rank % 2]
    plain, ours = wrapped(mlp, process_group=group), wrapped(mlp, process_group=group)
    with compress(ours) as handle, compress(wrapped(mlp, process_group=group)) as unused:
        trained(ours)
        trained(plain)
        assert handle.report()["bytes_sent"] > 0 == unused.bytes_sent
    assert np.abs(models.values_of(ours) - models.values_of(plain)).max() < 1e-6
    assert len({*gathered(models.values_of(ours).tobytes())}) == 2
    with Communicator.of_process_group(group) as comm:
        refused("comm has 2 ranks, and DDP's process group has 4", partial(hook_state, comm))
        hook_state(comm, process_group=group).close()
        not_mine = groups[1 - rank % 2]
        refused("process_group must be one of", partial(hook_state, comm, process_group=not_mine))


def other_ranks() -> None:
    """The residuals of two ranks, loaded on four: their sum stays."""
    files = [FOLDER / FILE.format(rank) for rank in range(2)]
    ddp = wrapped(Branches, find_unused_parameters=True)
    states = [torch.load(file, weights_only=True) for file in files]
    expected = sum(models.flat(models.residuals_of(state), ddp.module) for state in states)
    assert np.abs(expected).max() > 1e-3
    with compress(ddp, gradient_bits=1) as handle:
        refused(
            "give the rank its own saved state, or",
            partial(handle.load_state_dict, states[0]),
            UserError,
        )
        handle.load_state_dict(torch.load(file, weights_only=True) for file in files)
        assert handle.steps == 3
        loaded = models.summed(models.residuals_of(handle.state_dict()), ddp.module)
        assert np.abs(loaded - expected).max() < 1e-12
        trained(ddp)
        assert handle.steps == 7
    assert equal_on_all(ddp)


def destroyed() -> None:
    """The last: nothing is possible without a process group."""
    ddp = wrapped(mlp)
    with compress(ddp) as handle:
        dist.destroy_process_group()
        assert handle.steps == 0
    refused("there is no process group", partial(compress, ddp), UserError)


BITS = (32, 4, 1)

TWO = {
    **{f"full precision: {case}": partial(full_precision, case) for case in CASES},
    **{f"recorded: {bits} bits": partial(recorded_training, bits) for bits in BITS},
    "nothing is lost": nothing_is_lost,
    "overflow": overflow,
    "not finite": not_finite,
    "uneven inputs": uneven_inputs,
    "compiled": compiled,
    "saved": saved,
    "misuse": misuse,
    "destroyed": destroyed,
}
FOUR = {"subgroups": subgroups, "other ranks": other_ranks}

if __name__ == "__main__":
    dist.init_process_group("gloo")
    perform(TWO if dist.get_world_size() == 2 else FOUR, dist.get_rank(), FOLDER)
