"""Train a small ResNet on Fashion-MNIST, in PyTorch."""

import argparse

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import parallel_sgd as psgd
from parallel_sgd.torch.models import ResNet

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", metavar="FOLDER", help="with the four files of Fashion-MNIST")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--minibatch", type=int, default=256)
parser.add_argument("--lr", type=float, default=0.1)
options = parser.parse_args()
line = "epoch {}: test accuracy {accuracy:.2%}, loss {loss:.4f}"


@torch.no_grad()
def score(model, x, y):
    """The share of images that a model gets right, and its mean loss; 500 images at a time."""
    logits = torch.cat([model(part) for part in x.split(500)])
    right = (logits.argmax(1) == y).float().mean()
    return {"accuracy": right, "loss": cross_entropy(logits, y)}


torch.manual_seed(0)
train, test = psgd.data.fashion_mnist(options.data)
test = TensorDataset(*map(torch.from_numpy, test.arrays()))
model = ResNet()
optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
loader = DataLoader(train, options.minibatch, shuffle=True)

for epoch in range(1, options.epochs + 1):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    print(line.format(epoch, **score(model.eval(), *test[:])))
