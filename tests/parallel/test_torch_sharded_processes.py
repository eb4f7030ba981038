"""Models sharded by FSDP2 over two ranks of each of two hosts, with an exchange between the hosts.

PyTorch has one process group in a process, so ranks that are threads cannot do this.
"""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy

import parallel_sgd as psgd
from parallel_sgd import UserError
from parallel_sgd.errors import SharedError

pytestmark = [pytest.mark.usefixtures("process_group"), pytest.mark.ranks(4)]

HOSTS, SHARDS = 2, 2
SAMPLES = 6  #: of each rank in a minibatch


class Net(nn.Module):
    """With sizes that two ranks cannot share evenly, and a parameter of the outermost module, which
    FSDP leaves whole after a forward."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))
        self.first, self.middle, self.last = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3)

    def forward(self, x):
        hidden = torch.tanh(self.middle(torch.tanh(self.first(x * self.scale))))
        return self.last(hidden)


def net(seed=0):
    torch.manual_seed(seed)
    return Net()


@pytest.fixture
def mesh(process_group):
    made = init_device_mesh("cpu", (HOSTS, SHARDS), mesh_dim_names=("host", "shard"))
    return made["shard"]


def sharded(plain, mesh, **options):
    for part in (plain.first, plain.middle, plain.last, plain):
        fully_shard(part, mesh=mesh, **options)
    return psgd.torch.ShardedModel(plain)


def minibatch(rank, step):
    """Of this rank alone."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(SAMPLES, 5, generator=generator)
    return x, torch.randint(0, 3, (SAMPLES,), generator=generator)


def together(ranks, step):
    xs, ys = zip(*(minibatch(rank, step) for rank in ranks), strict=True)
    return torch.cat(xs), torch.cat(ys)


def whole(model):
    """All parameters, unsharded. Collective over a host."""
    return {n: p.full_tensor().detach().clone() for n, p in model.module.named_parameters()}


def distance(model, plain):
    values, expected = whole(model), dict(plain.named_parameters())
    assert values.keys() == expected.keys()
    return max((values[n] - p).abs().max().item() for n, p in expected.items())


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def trained(comm, model, optimizer, algorithm, steps=4, **options):
    with psgd.torch.Learner(model, optimizer, algorithm, comm, **options) as learner:
        for step in range(steps):
            x, y = minibatch(comm.rank, step)
            cross_entropy(model(x), y).backward()
            assert learner.step(samples=len(x)) == comm.size * SAMPLES
        learner.finish()
    return learner


@pytest.mark.parametrize(("overlap", "clip_norm"), [(False, None), (True, 0.05)])
def test_full_precision_is_serial(comm, mesh, overlap, clip_norm):
    assert comm.size == HOSTS * SHARDS
    plain = net()
    optimizer = sgd(plain)
    for step in range(4):
        optimizer.zero_grad()
        x, y = together(range(comm.size), step)
        cross_entropy(plain(x), y).backward()
        if clip_norm:
            norm = nn.utils.clip_grad_norm_(plain.parameters(), clip_norm)
        optimizer.step()
    # Only rank 0's host has these values at first.
    model = sharded(net(comm.rank // SHARDS), mesh)
    algorithm = psgd.DataParallelSGD(overlap=overlap)
    learner = trained(comm, model, sgd(model), algorithm, clip_norm=clip_norm)
    assert distance(model, plain) < 1e-6
    assert distance(model, net()) > 1e-2
    assert learner.samples == 4 * comm.size * SAMPLES
    if clip_norm:
        assert learner.gradient_norm == pytest.approx(norm.item(), rel=1e-5)
    own = sum(p.numel() for p in model.parameters())
    assert 0 < learner.bytes_sent < 4 * 4 * own + 4 * 64 * 2 * overlap + 64  # the shards alone


def test_diloco_is_its_equations(comm, mesh):
    block, blocks = 3, 2
    start = net()
    outer = torch.optim.SGD(start.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    hosts = [copy.deepcopy(start) for _ in range(HOSTS)]
    inner = [torch.optim.AdamW(host.parameters(), lr=1e-2) for host in hosts]
    for step in range(block * blocks):
        for number, (host, optimizer) in enumerate(zip(hosts, inner, strict=True)):
            optimizer.zero_grad()
            ranks = range(number * SHARDS, (number + 1) * SHARDS)
            x, y = together(ranks, step)
            cross_entropy(host(x), y).backward()
            optimizer.step()
        if (step + 1) % block == 0:
            with torch.no_grad():
                for p, *own in zip(
                    start.parameters(), *(host.parameters() for host in hosts), strict=True
                ):
                    p.grad = p - sum(own) / HOSTS
                outer.step()
                for host in hosts:
                    host.load_state_dict(start.state_dict())
    model = sharded(net(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trained(comm, model, optimizer, psgd.DiLoCo(sync_steps=block), steps=block * blocks)
    assert distance(model, start) < 1e-5
    assert distance(model, net()) > 1e-2


def test_few_bits_lose_nothing(comm, mesh):
    """All gradients are either applied or in a residual, for each shard."""
    model = sharded(net(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    algorithm = psgd.DataParallelSGD(gradient_bits=4)
    with psgd.torch.Learner(model, optimizer, algorithm, comm) as learner:
        begin = learner.parameters.flat.copy()
        given = np.zeros_like(begin, np.float64)
        for step in range(6):
            x, y = minibatch(comm.rank, step)
            cross_entropy(model(x), y).backward()
            given += learner.gradient.flat / HOSTS  # the means of hosts with equal samples
            learner.step(samples=len(x))
        applied = begin.astype(np.float64) - learner.parameters.flat
        residuals = learner.state.exchange.residuals
        left = residuals.worker_error.astype(np.float64)
        for name, place in learner.state.exchange.current.owned.items():
            left[place] += residuals.owner_error[name]
        assert np.abs(left).max() > 1e-4
        peers = learner.comm
        assert peers.size == HOSTS
        both = np.empty(HOSTS * 2 * left.size)
        peers.allgather(np.concatenate([given, left]), both, [2 * left.size] * HOSTS)
        given, left = both.reshape(HOSTS, 2, -1).sum(axis=0)
    assert np.abs(applied + left - given).max() < 1e-5


def test_mixed_precision_and_accumulation(comm, mesh):
    """FSDP's settings stay in force."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, plain = sharded(net(), mesh, mp_policy=policy), net()
    optimizer = sgd(plain)
    seen = []
    model.module.last.register_forward_hook(lambda part, x, y: seen.append(y.dtype))
    with psgd.torch.Learner(model, sgd(model), psgd.DataParallelSGD(), comm) as learner:
        for step in range(3):
            for part in range(2):
                model.module.set_requires_gradient_sync(part == 1)
                x, y = minibatch(comm.rank, 2 * step + part)
                (cross_entropy(model(x).float(), y) / 2).backward()
            assert learner.step(samples=2 * SAMPLES) == 2 * comm.size * SAMPLES
            optimizer.zero_grad()
            x, y = (
                torch.cat(parts)
                for parts in zip(
                    *(together(range(comm.size), 2 * step + part) for part in range(2)), strict=True
                )
            )
            cross_entropy(plain(x), y).backward()
            optimizer.step()
    assert set(seen) == {torch.bfloat16}
    assert 1e-6 < distance(model, plain) < 2e-2


def test_evaluation_of_the_common_model(comm, mesh):
    """Evaluated is the model after the last block, and training continues with the host's own."""

    def run(*, evaluates):
        model = sharded(net(), mesh)
        algorithm = psgd.DiLoCo(sync_steps=2)
        with psgd.torch.Learner(model, sgd(model), algorithm, comm) as learner:
            common = net()
            for step in range(3):
                x, y = minibatch(comm.rank, step)
                cross_entropy(model(x), y).backward()
                learner.step(samples=len(x))
                if step == 1:
                    common.load_state_dict(whole(model))
            if evaluates:
                batches = [minibatch(comm.rank, step) for step in (50, 51)]
                found = learner.evaluate(batches, score)["loss"]
                losses = []
                for step in (50, 51):
                    x, y = together(range(comm.size), step)
                    losses.append(cross_entropy(common(x), y).item())
                assert found == pytest.approx(np.mean(losses), rel=1e-5)
                assert model.module.last.training
            x, y = minibatch(comm.rank, 3)
            loss = cross_entropy(model(x), y)
            loss.backward()
            learner.step(samples=len(x))
            learner.finish()
        return loss.item(), whole(model)

    loss, values = run(evaluates=False)
    again, same = run(evaluates=True)
    assert again == loss
    assert all(torch.equal(values[name], same[name]) for name in values)


def test_frozen_parameters_come_from_the_first_host(comm, mesh):
    plain = net(comm.rank // SHARDS)
    plain.middle.requires_grad_(False)
    model = sharded(plain, mesh)
    learner = trained(comm, model, sgd(model), psgd.DataParallelSGD())
    assert not any(name.startswith("middle") for name in learner.parameters)
    values = whole(model)
    assert torch.equal(values["middle.weight"], net().middle.weight)
    assert (values["last.weight"] - net().last.weight).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("algorithm", "where"),
    [(psgd.DataParallelSGD(gradient_bits=4), "rank 3"), (psgd.DiLoCo(sync_steps=2), "ranks 2, 3")],
)
def test_not_finite_on_one_shard_ends_all_ranks(comm, mesh, algorithm, where):
    """With DiLoCo it has come to the whole host by the end of the block."""
    model = sharded(net(), mesh)

    def train():
        for step in range(2):
            x, y = minibatch(comm.rank, step)
            cross_entropy(model(x), y).backward()
            if comm.rank == 3:
                model.last.weight.grad[0, 0] = np.nan
            learner.step(samples=len(x))

    with psgd.torch.Learner(model, sgd(model), algorithm, comm) as learner:
        with pytest.raises(SharedError, match=rf"not finite.*on {where}\)"):
            train()
        assert learner.comm.size == HOSTS


def test_a_minibatch_is_skipped_on_all_ranks(comm, mesh):
    """As if it had not been."""

    def run(steps, *, bad):
        model = sharded(net(), mesh)
        algorithm = psgd.DataParallelSGD(gradient_bits=4)
        options = {"not_finite": "skip"}
        with psgd.torch.Learner(model, sgd(model), algorithm, comm, **options) as learner:
            for step in steps:
                x, y = minibatch(comm.rank, step)
                cross_entropy(model(x), y).backward()
                loss = np.inf if step == bad and comm.rank == 1 else 1.0
                learner.step(samples=len(x), loss=loss)
            return whole(model), learner.skipped.minibatches

    values, skipped = run(range(4), bad=2)
    same, none = run([0, 1, 3], bad=None)
    assert (skipped, none) == (1, 0)
    assert all(torch.equal(values[name], same[name]) for name in values)


@pytest.mark.parametrize(
    "algorithm",
    [psgd.PowerSGD(rank=1), psgd.BlockMomentumSGD(sync_steps=2, gradient_bits=4)],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_other_algorithms_learn_and_keep_hosts_equal(comm, mesh, algorithm):
    x, y = together(range(comm.size), 0)
    model = sharded(net(), mesh)
    before = cross_entropy(model(x), y).item()
    with psgd.torch.Learner(model, sgd(model), algorithm, comm) as learner:
        for _ in range(6):
            x, y = minibatch(comm.rank, 0)
            cross_entropy(model(x), y).backward()
            learner.step(samples=len(x))
        learner.finish()
        peers, own = learner.comm, learner.parameters.flat
        everywhere = np.empty(HOSTS * own.size, own.dtype)
        peers.allgather(own, everywhere, [own.size] * HOSTS)
        assert np.array_equal(*everywhere.reshape(HOSTS, -1))
    x, y = together(range(comm.size), 0)
    assert cross_entropy(model(x), y).item() < before - 0.02


def test_unequal_samples_of_a_host_are_refused(comm, mesh):
    model = sharded(net(), mesh)
    with psgd.torch.Learner(model, sgd(model), psgd.DataParallelSGD(), comm) as learner:
        x, y = minibatch(comm.rank, 0)
        cross_entropy(model(x), y).backward()
        with pytest.raises(SharedError, match="equal numbers of samples"):
            learner.step(samples=len(x) - (comm.rank == 0))


def test_a_host_without_samples(comm, mesh):
    """Its ranks take the step all the same. Announced samples save the ranks a sum in each step."""
    plain = net()
    x, y = together(range(SHARDS), 0)
    cross_entropy(plain(x), y).backward()
    sgd(plain).step()
    model = sharded(net(), mesh)
    with psgd.torch.Learner(model, sgd(model), psgd.DataParallelSGD(), comm) as learner:
        own = SAMPLES if comm.rank < SHARDS else 0
        if own:
            x, y = minibatch(comm.rank, 0)
            cross_entropy(model(x), y).backward()
        learner.announce(own, SHARDS * SAMPLES)
        assert learner.step(samples=own) == SHARDS * SAMPLES
        assert distance(model, plain) < 1e-6


def test_checkpoint_continues_bit_for_bit(comm, mesh, tmp_path):
    shared = Path(comm.allgather_object(tmp_path)[0])

    def learner_of(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return psgd.torch.Learner(model, optimizer, psgd.DataParallelSGD(gradient_bits=4), comm)

    def take(learner, steps):
        for step in steps:
            x, y = minibatch(comm.rank, step)
            cross_entropy(learner.model(x), y).backward()
            learner.step(samples=len(x))

    folder = shared / f"shard-{mesh.get_local_rank()}"
    with learner_of(sharded(net(), mesh)) as learner:
        take(learner, range(3))
        with psgd.Checkpoints(folder, keep=2) as checkpoints:
            checkpoints.save(learner)
            first = checkpoints.wait()
        if comm.rank < SHARDS:  # the model of one host, for any other program
            whole_model = {"model": learner.model.module.state_dict()}
            dcp.save(whole_model, checkpoint_id=shared / "model", process_group=mesh.get_group())
        comm.barrier()
        saved = whole(learner.model)
        take(learner, range(3, 6))
        expected = whole(learner.model)
        with psgd.Checkpoints(folder, keep=2) as checkpoints:
            checkpoints.save(learner)
    with learner_of(sharded(net(7), mesh)) as learner:
        with pytest.raises(SharedError, match="samples of the loaded checkpoint must be the same"):
            psgd.load_checkpoint(learner, first if comm.rank % SHARDS else folder)
        psgd.load_checkpoint(learner, first)
        assert all(torch.equal(p, saved[n]) for n, p in whole(learner.model).items())
        take(learner, range(3, 6))
        assert all(torch.equal(p, expected[n]) for n, p in whole(learner.model).items())
    alone = net(8)
    dcp.load({"model": alone.state_dict()}, checkpoint_id=shared / "model")
    assert all(torch.equal(p, saved[n]) for n, p in alone.named_parameters())


def score(model, x, y):
    return {"loss": cross_entropy(model(x), y).item()}


class Muon(torch.optim.SGD):
    pass


REFUSED = {
    "a model that is not sharded": (lambda m, mesh: psgd.torch.ShardedModel(m), "must be sharded"),
    "some parameters not sharded": (
        lambda m, mesh: psgd.torch.ShardedModel(_ignoring(m, mesh)),
        "parameter 'scale' is not sharded",
    ),
    "statistics": (lambda m, mesh: sharded(_with_norm(m), mesh), "BatchNorm1d 'norm'"),
    "servers": (lambda m, mesh: _learner(m, mesh, psgd.DataParallelASGD()), "DataParallelASGD"),
    "sums": (lambda m, mesh: _learner(m, mesh, reduction="sum"), "reduction='sum'"),
    "a scaler": (
        lambda m, mesh: _learner(m, mesh, scaler=torch.amp.GradScaler("cpu")),
        "scaler must not",
    ),
    "matrices": (lambda m, mesh: _learner(m, mesh, optimizer=Muon), "Muon needs whole matrices"),
}


def _ignoring(model, mesh):
    fully_shard(model, mesh=mesh, ignored_params={model.scale})
    return model


def _with_norm(model):
    model.norm = nn.BatchNorm1d(3)
    return model


def _learner(model, mesh, algorithm=None, optimizer=torch.optim.SGD, **options):
    model = sharded(model, mesh)
    algorithm = algorithm or psgd.DataParallelSGD()
    comm = psgd.Communicator.world()
    biases = torch.optim.SGD([p for p in model.parameters() if p.ndim == 1], lr=0.1)
    matrices = optimizer([p for p in model.parameters() if p.ndim == 2], lr=0.1)
    psgd.torch.Learner(model, [biases, matrices], algorithm, comm, **options)


@pytest.mark.parametrize(("made", "text"), REFUSED.values(), ids=REFUSED)
def test_refused(comm, mesh, made, text):
    with pytest.raises(UserError, match=text):
        made(net(), mesh)


def test_refuses_native_replication(comm, process_group):
    both = init_device_mesh("cpu", (HOSTS, SHARDS), mesh_dim_names=("host", "shard"))
    with pytest.raises(UserError, match=r"on a mesh of 2 dimensions: shard the model inside"):
        sharded(net(), both)


def test_refuses_the_sampler_and_the_bare_model(comm, mesh):
    model = sharded(net(), mesh)
    with pytest.raises(UserError, match="ShardedModel"):
        psgd.torch.Learner(model.module, sgd(model), psgd.DataParallelSGD(), comm)
    with psgd.torch.Learner(model, sgd(model), psgd.DataParallelSGD(), comm) as learner:
        sampler = psgd.torch.sampler(64, learner, 16)
        with pytest.raises(UserError, match="DistributedSampler"):
            next(iter(sampler))
        with pytest.raises(UserError, match="close that learner first"):
            psgd.torch.Learner(model, sgd(model), psgd.DataParallelSGD(), comm)
    with pytest.raises(UserError, match="belongs to a ShardedModel already"):
        psgd.torch.ShardedModel(model.module)
