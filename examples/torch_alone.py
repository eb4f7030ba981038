"""Train a small ResNet on Fashion-MNIST, or else on scikit-learn's digits, in PyTorch."""

import argparse
import gzip
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, relu
from torch.utils.data import DataLoader, TensorDataset

DEBIANS = "/usr/share/datasets/fashion-mnist"  # of its package dataset-fashion-mnist

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", metavar="FOLDER", help="with the four files of Fashion-MNIST")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--minibatch", type=int, default=256)
parser.add_argument("--lr", type=float, default=0.1)
options = parser.parse_args()
line = "epoch {}: test accuracy {accuracy:.2%}, loss {loss:.4f}"


class Block(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut = nn.Identity()
        if stride > 1:
            project = nn.Conv2d(before, after, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(project, nn.BatchNorm2d(after))

    def forward(self, x):
        change = relu(self.norm1(self.conv1(x)))
        return relu(self.shortcut(x) + self.norm2(self.conv2(change)))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(16)
        sizes = [(16, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1)]
        self.blocks = nn.Sequential(*(Block(*size) for size in sizes))
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        x = relu(self.first_norm(self.first(x)))
        return self.head(self.blocks(x).mean((2, 3)))


def fashion(folder):
    """Images [n, 1, 28, 28] and labels [n], to train and to test on, of the published files."""

    def read(name, header):
        path = Path(folder, name)
        with path.open("rb") if path.is_file() else gzip.open(f"{path}.gz") as file:
            return np.frombuffer(file.read(), np.uint8, offset=header)

    for part in ("train", "t10k"):
        x = read(f"{part}-images-idx3-ubyte", 16).reshape(-1, 1, 28, 28)
        yield x.astype(np.float32) / 255, read(f"{part}-labels-idx1-ubyte", 8)


def digits():
    """The same of scikit-learn's images, 8 by 8."""
    from sklearn.datasets import load_digits  # pip install scikit-learn

    x, y = load_digits(return_X_y=True)
    x = x.reshape(-1, 1, 8, 8).astype(np.float32) / 16
    order = np.random.default_rng(0).permutation(len(y))
    return [(x[part], y[part]) for part in (order[360:], order[:360])]


@torch.no_grad()
def score(model, x, y):
    """The share of images that a model gets right, and its mean loss; 500 images at a time."""
    logits = torch.cat([model(part) for part in x.split(500)])
    right = (logits.argmax(1) == y).float().mean()
    return {"accuracy": right, "loss": cross_entropy(logits, y)}


torch.manual_seed(0)
if options.data or Path(DEBIANS).is_dir():
    pairs = fashion(options.data or DEBIANS)
else:
    pairs = digits()
    line += f" (of scikit-learn's digits: Fashion-MNIST is not in {DEBIANS})"
train, test = (TensorDataset(torch.tensor(x), torch.tensor(y).long()) for x, y in pairs)
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
