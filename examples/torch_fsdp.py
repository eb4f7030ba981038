"""A transformer that FSDP2 shards inside each host, trained by DiLoCo or few bits between hosts.

torchrun --nproc-per-node 4 examples/torch_fsdp.py --shards 2       # two "hosts" on one machine
parallel-sgd run -n 4 examples/torch_fsdp.py --shards 2 --algorithm data-parallel
"""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

import parallel_sgd as psgd
from parallel_sgd.torch.models import ByteTransformer

ALGORITHMS = {
    "diloco": lambda bits: psgd.DiLoCo(sync_steps=20, gradient_bits=bits),
    "data-parallel": lambda bits: psgd.DataParallelSGD(gradient_bits=bits),
}

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--data", default="library", metavar="FOLDER", help="of text files")
parser.add_argument("--shards", type=int, help="ranks that share a model; default: of a host")
parser.add_argument("--algorithm", choices=ALGORITHMS, default="diloco")
parser.add_argument("--gradient-bits", type=float, default=4)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--minibatch", type=int, default=8, help="sequences of each rank")
parser.add_argument("--lr", type=float, default=2e-3)
options = parser.parse_args()

comm = psgd.Communicator.world()
psgd.torch.init_process_group(comm)
shards = options.shards or comm.local_size
mesh = init_device_mesh("cpu", (comm.size // shards, shards), mesh_dim_names=("host", "shard"))

torch.manual_seed(0)
if options.data == "library":
    train, test = psgd.data.library_sequences(64)
else:
    train, test = psgd.data.text_sequences(options.data, 64, suffixes=[""])
model = ByteTransformer(width=options.width, layers=2, heads=4, context=64)
for part in (*model.layers, model):
    fully_shard(part, mesh=mesh["shard"])
model = psgd.torch.ShardedModel(model)  # before the optimizer, which gets this rank's shards
optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
algorithm = ALGORITHMS[options.algorithm](options.gradient_bits)
learner = psgd.torch.Learner(model, optimizer, algorithm, comm, clip_norm=1.0)

# Ranks that share a model must have equally many samples, and forwards.
sampler = DistributedSampler(train)
loader = DataLoader(train, options.minibatch, sampler=sampler, drop_last=True)
test_sampler = DistributedSampler(test, shuffle=False, drop_last=True)
test_loader = DataLoader(test, 16, sampler=test_sampler)


def score(model, x, y):
    return {"loss": cross_entropy(model(x).flatten(0, 1), y.flatten())}


def minibatches(count):
    epoch = 0
    while count > 0:
        sampler.set_epoch(epoch)
        for minibatch, _ in zip(loader, range(count), strict=False):
            yield minibatch
        count, epoch = count - len(loader), epoch + 1


for x, y in minibatches(options.steps):
    score(model, x, y)["loss"].backward()
    learner.announce(len(x), len(x) * comm.size)  # else the ranks would sum them in each step
    learner.step(samples=len(x))
learner.finish()
loss = learner.evaluate(test_loader, score)["loss"]
sent = f"{learner.bytes_sent:,} bytes sent by rank 0 between hosts"
comm.print(f"{options.steps} steps: test loss {loss:.4f} nats a byte, {sent}")
learner.close()
dist.destroy_process_group()
