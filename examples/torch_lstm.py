"""Train an LSTM on lines of uneven lengths: `parallel-sgd run -n 2 examples/torch_lstm.py`."""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy

import parallel_sgd as psgd

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--lines", type=int, default=20_000, help="of Python's library")
parser.add_argument("--tokens", type=int, default=4096, help="of all ranks in a minibatch, at most")
parser.add_argument("--epochs", type=int, default=3)
options = parser.parse_args()


class NextByte(torch.nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.embedding = torch.nn.Embedding(256, width)
        self.lstm = torch.nn.LSTM(width, width, batch_first=True)
        self.output = torch.nn.Linear(width, 256)

    def forward(self, x):  # [m, longest]: what follows a line's end changes nothing before it
        return self.output(self.lstm(self.embedding(x))[0])  # [m, longest, 256]


def tensors(x, y):
    return [torch.from_numpy(part) for part in (y.values[y.mask], x.values, x.mask)]


def score(model, y, x, mask):
    logits = model(x)[mask]
    return {"loss": cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}


files = sorted(Path(argparse.__file__).parent.glob("*.py"))  # Python's library
lines = [line[:200] for file in files for line in file.read_bytes().split(b"\n") if len(line) > 1]
lines = [np.frombuffer(line, np.uint8) for line in lines[: options.lines]]
x, y = [line[:-1] for line in lines], [line[1:] for line in lines]  # y: the byte after each
test = psgd.data.SequenceArrays(x[::10], y[::10])
del x[::10], y[::10]

comm = psgd.Communicator.world()
torch.manual_seed(0)
model = NextByte()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
learner = psgd.torch.Learner(model, optimizer, psgd.DataParallelSGD(gradient_bits=4), comm)
source = psgd.data.SequenceSource(x, y, options.tokens, unit="tokens", epochs=options.epochs)
own = np.array_split(np.arange(comm.rank, len(test), comm.size), 8)
for epoch in range(options.epochs):
    for x, y in source.epoch(epoch, learner):
        score(model, *tensors(x, y))["loss"].backward()
        learner.step(samples=x.tokens)
    batches = [tensors(*test.read(part)) for part in own]
    scores = learner.evaluate(batches, score, samples=lambda batch: len(batch[0]))  # its tokens
    comm.print(epoch + 1, "test loss {loss:.4f}, accuracy {accuracy:.2%}".format(**scores))
