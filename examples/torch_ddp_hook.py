"""DistributedDataParallel with gradients of a few bits: one line more than PyTorch's own.

parallel-sgd run -n 4 examples/torch_ddp_hook.py
"""

import argparse

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import parallel_sgd as psgd
from parallel_sgd.torch.models import ResNet

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--data", metavar="FOLDER", help="with the four files of Fashion-MNIST")
parser.add_argument("--gradient-bits", type=float, default=4)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--minibatch", type=int, default=64, help="of each rank")
parser.add_argument("--lr", type=float, default=0.1)
options = parser.parse_args()

comm = psgd.Communicator.world()
psgd.torch.init_process_group(comm)  # in place of dist.init_process_group("gloo")

torch.manual_seed(0)
train, test = psgd.data.fashion_mnist(options.data)
model = DistributedDataParallel(ResNet())
state = psgd.torch.hook_state(comm, gradient_bits=options.gradient_bits)
model.register_comm_hook(state, psgd.torch.hook)  # the line: DDP's exchange becomes ours
optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
sampler = DistributedSampler(train)
loader = DataLoader(train, options.minibatch, sampler=sampler)

for epoch in range(1, options.epochs + 1):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    comm.print(f"epoch {epoch}: loss of rank 0 {loss:.4f}, bytes sent {state.bytes_sent:,}")

state.close()
dist.destroy_process_group()
