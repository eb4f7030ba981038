"""DistributedDataParallel with our hook on a GPU that the ranks share, beside DDP as it is."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch_models import MODELS, batch, made

import parallel_sgd as psgd

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.usefixtures("process_group"),
    pytest.mark.ranks(2),
]


def trained(comm, model, state=None):
    ddp = DistributedDataParallel(copy.deepcopy(model), device_ids=[0], bucket_cap_mb=0.0005)
    if state is not None:
        ddp.register_comm_hook(state, psgd.torch.hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(8):
        x, y = batch(model, comm.rank, step % 2, 6)
        optimizer.zero_grad()
        loss = cross_entropy(ddp(x.cuda()), y.cuda())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    flat = torch.cat([p.detach().cpu().reshape(-1) for p in ddp.parameters()]).numpy()
    assert all(np.array_equal(flat, other) for other in comm.allgather_object(flat))
    return flat, losses


@pytest.mark.parametrize("name", ["mlp", "convnet", "attention"])
def test_32_bits_as_ddp(comm, name):
    model = made(MODELS[name]).to("cuda")
    with psgd.torch.hook_state(comm) as state:
        ours, _ = trained(comm, model, state)
    theirs, _ = trained(comm, model)
    assert np.abs(ours - theirs).max() < 1e-9


@pytest.mark.parametrize("name", ["mlp", "convnet"])
def test_1_bit_learns(comm, name):
    model = made(MODELS[name], dtype=torch.float32).to("cuda")
    with psgd.torch.hook_state(comm, gradient_bits=1, block_size=16) as state:
        _, losses = trained(comm, model, state)
        assert state.state_dict()["residuals"]
    assert losses[-1] < losses[0]
