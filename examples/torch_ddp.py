"""DistributedDataParallel with gradients of a few bits: one line more than PyTorch's own.

torchrun --nproc-per-node 4 examples/torch_ddp.py
parallel-sgd run -n 4 examples/torch_ddp.py
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

if dist.is_torchelastic_launched():  # by torchrun
    dist.init_process_group("gloo")
else:  # by mpiexec
    psgd.torch.init_process_group(psgd.Communicator.world())

torch.manual_seed(0)
train, test = psgd.data.fashion_mnist(options.data)
model = DistributedDataParallel(ResNet())
handle = psgd.torch.compress(model, gradient_bits=options.gradient_bits)  # the line
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
    if dist.get_rank() == 0:
        sent = handle.report()["bytes_per_value"]
        print(f"epoch {epoch}: loss of rank 0 {loss:.4f}, {sent:.3f} bytes sent per value")

handle.close()
dist.destroy_process_group()
