"""DistributedDataParallel with our hook on ranks of MPI, beside DDP as it is.

PyTorch has one process group in a process, so ranks that are threads cannot do this.
"""

from __future__ import annotations

import copy
import io
import os
import socket
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn import BatchNorm1d, Conv2d, Flatten, Linear, ReLU, Sequential
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import parallel_sgd as psgd
from parallel_sgd import UserError
from parallel_sgd.errors import SharedError

pytestmark = [pytest.mark.usefixtures("process_group"), pytest.mark.ranks(3)]

CLASSES = 5
SMALL_MB = 0.004  #: of a bucket: of the models here every layer or two


def mlp():
    return Sequential(Linear(16, 40), ReLU(), Linear(40, 40), ReLU(), Linear(40, CLASSES))


def convolutional():
    return Sequential(
        torch.nn.Unflatten(1, (1, 4, 4)),
        Conv2d(1, 8, 3, padding=1),
        torch.nn.BatchNorm2d(8),
        ReLU(),
        Flatten(),
        Linear(128, 20),
        BatchNorm1d(20),
        Linear(20, CLASSES),
    )


class Branches(torch.nn.Module):
    """Ranks use one of two layers by their number; nobody uses the third."""

    def __init__(self):
        super().__init__()
        self.first, self.last = Linear(16, 30), Linear(30, CLASSES)
        self.branches = torch.nn.ModuleList(Linear(30, 30) for _ in range(3))

    def forward(self, x):
        hidden = self.first(x)
        return self.last(self.branches[dist.get_rank() % 2](hidden).relu())


def minibatch(rank, step):
    """Of this rank alone."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(12, 16, generator=generator)
    return x, torch.randint(0, CLASSES, (12,), generator=generator)


def made(model, state=None, hook=psgd.torch.hook, **options):
    """The same model on all ranks, in DDP."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(model(), bucket_cap_mb=SMALL_MB, **options)
    if state is not None:
        ddp.register_comm_hook(state, hook)
    return ddp


def trained(comm, ddp, steps=4, accumulated=1):
    """The parameters after some steps, of which the last is at another number of minibatches."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(accumulated):
            x, y = minibatch(comm.rank, accumulated * step + part)
            with nullcontext() if part == accumulated - 1 else ddp.no_sync():
                cross_entropy(ddp(x), y).backward()
        optimizer.step()
    return values_of(ddp)


def values_of(ddp):
    return np.concatenate([p.detach().numpy().ravel() for p in ddp.parameters()])


CASES = {
    "mlp": (mlp, {}, 1),
    "gradients are views": (mlp, {"gradient_as_bucket_view": True}, 1),
    "convolutions": (convolutional, {}, 1),
    "convolutions, static": (convolutional, {"static_graph": True}, 1),
    "accumulated": (mlp, {}, 3),
    "accumulated views": (mlp, {"gradient_as_bucket_view": True}, 2),
    "unused": (Branches, {"find_unused_parameters": True}, 1),
    "unused, views": (
        Branches,
        {"find_unused_parameters": True, "gradient_as_bucket_view": True},
        1,
    ),
}


@pytest.mark.parametrize(("model", "options", "accumulated"), CASES.values(), ids=CASES)
def test_full_precision_is_plain_ddp(comm, model, options, accumulated):
    plain = trained(comm, made(model, **options), accumulated=accumulated)
    with psgd.torch.hook_state(comm) as state:
        ours = trained(comm, made(model, state, **options), accumulated=accumulated)
        assert state.steps == 4
        assert (state.bytes_sent > 0) == (comm.size > 1)
    assert np.abs(ours - plain).max() < 1e-6
    start = values_of(made(model, **options))
    assert np.abs(ours - start).max() > 1e-3


def gradient_of(model, x, y):
    """Of this rank alone, by parameter."""
    alone = copy.deepcopy(model)
    alone.zero_grad()
    cross_entropy(alone(x), y).backward()
    return {name: p.grad.numpy().astype(float) for name, p in alone.named_parameters()}


def residuals_of(state):
    """Of this rank, by parameter."""
    found = {}
    for name, one in state.state_dict()["residuals"].items():
        found[name] = one["worker_error"].numpy().astype(float)
        begin, owner = one["owner_begin"], one["owner_error"].numpy()
        found[name][begin : begin + owner.size] += owner
    return found


def flat(arrays, names):
    return np.concatenate([np.asarray(arrays[name], float).ravel() for name in names])


def everywhere(comm, vector):
    return np.sum(comm.allgather_object(vector), axis=0)


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_nothing_is_lost_as_ddp_builds_its_buckets_anew(comm, views):
    buckets = []

    def counted(state, bucket):
        buckets.append(bucket.index())
        return psgd.torch.hook(state, bucket)

    torch.manual_seed(0)
    module = mlp()
    names = [name for name, _ in module.named_parameters()]
    with psgd.torch.hook_state(comm, gradient_bits=1, block_size=64, module=module) as state:
        ddp = made(lambda: module, state, counted, gradient_as_bucket_view=views)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        given, got = np.zeros(()), np.zeros(())
        for step in range(5):
            x, y = minibatch(comm.rank, step)
            given = given + everywhere(comm, flat(gradient_of(module, x, y), names))
            optimizer.zero_grad()
            cross_entropy(ddp(x), y).backward()
            mean = {name: p.grad.numpy() for name, p in module.named_parameters()}
            got = got + comm.size * flat(mean, names)
            lost = everywhere(comm, flat(residuals_of(state), names))
            assert np.abs(got + lost - given).max() < 1e-5
            assert np.abs(lost).max() > 1e-3
            optimizer.step()
    after = max(buckets) + 1
    assert buckets == [0] + [*range(after)] * 4 and after >= 2
    models = comm.allgather_object(values_of(ddp).tobytes())
    assert len({*models}) == 1


def test_accumulated_gradients_of_one_bit(comm):
    with psgd.torch.hook_state(comm, gradient_bits=1) as state:
        ddp = made(mlp, state, gradient_as_bucket_view=True)
        trained(comm, ddp, accumulated=2)
        assert state.steps == 4
        models = comm.allgather_object(values_of(ddp).tobytes())
    assert len({*models}) == 1


def test_an_overflow_skips_the_step_on_all_ranks(comm):
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    torch.manual_seed(0)
    module = mlp()
    names = [name for name, _ in module.named_parameters()]
    given, got = np.zeros(()), np.zeros(())
    with psgd.torch.hook_state(comm, gradient_bits=1, module=module, scaler=scaler) as state:
        ddp = made(lambda: module, state)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(6):
            x, y = minibatch(comm.rank, step)
            overflows = step in (2, 3)
            if overflows and comm.rank == comm.size - 1:
                x[0, 0] = np.inf
            before, kept = values_of(ddp), residuals_of(state) if step else {}
            own = gradient_of(module, x, y)
            optimizer.zero_grad()
            scaler.scale(cross_entropy(ddp(x), y)).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == (256 if step < 2 else 128 if step < 3 else 64)
            if overflows:
                assert np.array_equal(values_of(ddp), before)
                assert np.array_equal(flat(kept, names), flat(residuals_of(state), names))
                continue
            given = given + everywhere(comm, flat(own, names))
            mean = {name: p.grad.numpy() for name, p in module.named_parameters()}
            got = got + comm.size * flat(mean, names)
            lost = everywhere(comm, flat(residuals_of(state), names)) / (256 if step < 2 else 64)
            assert np.abs(got + lost - given).max() < 1e-5
    models = comm.allgather_object(values_of(ddp).tobytes())
    assert len({*models}) == 1


def test_what_is_not_finite_raises_on_all_ranks(comm):
    rank = comm.size // 2
    with psgd.torch.hook_state(comm, gradient_bits=1) as state:
        ddp = made(mlp, state)
        trained(comm, ddp, steps=2)  # now there are several buckets
        x, y = minibatch(comm.rank, 2)
        if comm.rank == rank:
            x[0, 0] = np.nan
        with pytest.raises(SharedError, match=rf"gradient is not finite.*\(on rank {rank}\)"):
            cross_entropy(ddp(x), y).backward()
    # The process group, and another DDP, go on.
    with psgd.torch.hook_state(comm) as state:
        trained(comm, made(mlp, state))


class Mixed(torch.nn.Module):
    """Float32 within, but for one layer."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype, self.one, self.other = dtype, Linear(16, 8), Linear(8, CLASSES).to(dtype)

    def forward(self, x):
        return self.other(self.one(x).to(self.dtype)).float()


@pytest.mark.parametrize(
    ("dtype", "error"),
    [
        (torch.bfloat16, "parameter '.' is bfloat16: this hook is for float32 parameters"),
        (torch.float64, "parameter '.' is float64: gradient_bits=1 is for float32"),
    ],
    ids=str,
)
def test_other_types_are_refused(comm, dtype, error):
    with (
        psgd.torch.hook_state(comm, gradient_bits=1) as state,
        pytest.raises(SharedError, match=error),
    ):
        trained(comm, made(lambda: Mixed(dtype), state))


def test_float64_has_full_precision(comm):
    plain = trained(comm, made(lambda: Mixed(torch.float64)))
    with psgd.torch.hook_state(comm) as state:
        assert np.abs(trained(comm, made(lambda: Mixed(torch.float64), state)) - plain).max() < 1e-6


def test_sparse_gradients_are_refused(comm):
    with psgd.torch.hook_state(comm) as state:
        ddp = made(lambda: torch.nn.EmbeddingBag(50, 4, sparse=True), state)
        total = ddp(torch.arange(12).reshape(3, 4)).sum()
        with pytest.raises(SharedError, match="the gradient of 0 is sparse"):
            total.backward()


def test_another_number_of_ranks_is_refused(comm):
    with comm.split(comm.rank) as alone:
        if comm.size == 1:
            psgd.torch.hook_state(alone).close()
            return
        with pytest.raises(UserError, match=f"comm has 1 rank, and .* group has {comm.size}"):
            psgd.torch.hook_state(alone)


def test_a_learners_model_is_refused(comm):
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    learner = psgd.torch.Learner(module, optimizer, psgd.DataParallelSGD(), comm)
    with psgd.torch.hook_state(comm) as state:
        ddp = made(lambda: module, state)
        x, y = minibatch(comm.rank, 0)
        with pytest.raises(UserError, match=r"belongs to a psgd\.torch\.Learner"):
            cross_entropy(ddp(x), y).backward()
    learner.close()


def test_another_state_is_refused(comm):
    ddp = made(mlp, state=3)
    x, y = minibatch(comm.rank, 0)
    with pytest.raises(UserError, match="state=3 must be what"):
        cross_entropy(ddp(x), y).backward()


def test_a_run_goes_on_bit_for_bit(comm):
    """Where DDP does not build its buckets anew."""

    def more(ddp, optimizer, steps):
        for step in steps:
            x, y = minibatch(comm.rank, step)
            optimizer.zero_grad()
            cross_entropy(ddp(x), y).backward()
            optimizer.step()

    def training(state):
        ddp = made(Branches, state, find_unused_parameters=True)
        return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)

    with (
        psgd.torch.hook_state(comm, gradient_bits=1) as first,
        psgd.torch.hook_state(comm, gradient_bits=1) as second,
    ):
        ddp, optimizer = training(first)
        more(ddp, optimizer, range(3))
        written = io.BytesIO()
        parts = {"ddp": ddp, "optimizer": optimizer, "hook": first}
        torch.save({name: part.state_dict() for name, part in parts.items()}, written)
        more(ddp, optimizer, range(3, 6))

        resumed, optimizer = training(second)
        written.seek(0)
        saved = torch.load(written, weights_only=True)
        for name, part in {"ddp": resumed, "optimizer": optimizer, "hook": second}.items():
            part.load_state_dict(saved[name])
        more(resumed, optimizer, range(3, 6))
    assert np.array_equal(values_of(resumed), values_of(ddp))


def test_a_second_process_group_is_refused(comm):
    with pytest.raises(SharedError, match="has a process group already"):
        psgd.torch.init_process_group(comm)


def test_torchruns_variables_are_those_of_mpis_ranks(comm):
    ranks = {"RANK": comm.rank, "WORLD_SIZE": comm.size}
    ranks |= {"LOCAL_RANK": comm.local_rank, "LOCAL_WORLD_SIZE": comm.local_size}
    assert {name: os.environ[name] for name in ranks} == {n: str(v) for n, v in ranks.items()}
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with socket.create_connection((address, port), timeout=10):
        pass
    assert {*comm.allgather_object((address, port))} == {(address, port)}


def test_the_process_group_has_mpis_ranks(comm):
    assert (dist.get_rank(), dist.get_world_size()) == (comm.rank, comm.size)
    total = torch.tensor([float(comm.rank)])
    dist.all_reduce(total)
    assert total.item() == sum(range(comm.size))
