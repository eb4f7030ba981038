"""A job with a PyTorch model: by DDP's hook, by a learner, or by one with overlap; with the word
"fail" backward fails on the last rank."""

import sys

import torch
from torch.nn.parallel import DistributedDataParallel

import parallel_sgd as psgd

way = sys.argv[1]
comm = psgd.Communicator.world()
torch.manual_seed(comm.rank)
model = layers = torch.nn.Sequential(torch.nn.Linear(50, 50), torch.nn.Linear(50, 50))
optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
if way == "ddp":
    psgd.torch.init_process_group(comm)
    model = DistributedDataParallel(layers, bucket_cap_mb=0.005)
    model.register_comm_hook(psgd.torch.hook_state(comm=comm, gradient_bits=1), psgd.torch.hook)
else:
    algorithm = psgd.DataParallelSGD(gradient_bits=1, overlap=way == "overlap", bucket_values=50)
    learner = psgd.torch.Learner(layers, optimizer, algorithm, comm)
for step in range(3):
    if "fail" in sys.argv and step == 2 and comm.rank == comm.size - 1:
        layers[0].weight.register_hook(lambda gradient: 1 / 0)
    model(torch.randn(8, 50)).square().mean().backward()
    if way == "ddp":
        optimizer.step()
    else:
        learner.step(samples=8)
sums = comm.allgather_object([p.sum().item() for p in layers.parameters()])
assert all(theirs == sums[0] for theirs in sums)
print("rank", comm.rank, "done", flush=True)
