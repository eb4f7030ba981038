"""Train a ResNet on images in PyTorch

A small residual network with batch normalization learns images twice: with gradients of 32 bits a
value, and of 1 bit. This is for anyone with a PyTorch model of images. On the left of the figure,
the accuracy rises in the same way in both trainings. On the right are the test images that the
second model finds hardest.

The script trains on Fashion-MNIST if Debian's package `dataset-fashion-mnist` is installed, or if
you give a folder with the four files of Fashion-MNIST (`--data FOLDER`). Otherwise it trains on
scikit-learn's digits. This page shows the digits. For your own data, return your tensors from
`images`, and put your network in the place of `ResNet`. The ranks average the running means of
batch normalization by themselves. [PyTorch](../pytorch.md) has the details;
[train_torch.py](../../train_torch.py) is shorter.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from drawing import BLUE, VERMILION, label_ends, panels, save
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import parallel_sgd as psgd
from parallel_sgd.torch.models import ResNet

DEBIANS = "/usr/share/datasets/fashion-mnist"  # of its package dataset-fashion-mnist
CLOTHES = (
    *("T-shirt", "trousers", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "boot"),
)


def images(folder, count):
    """Return the names of the classes, and images [n, 1, h, w] to train on and to test on."""
    if folder == "digits" or (folder is None and not Path(DEBIANS).is_dir()):
        names, size, parts = "0123456789", 8, psgd.data.digits()
    else:
        names, size, parts = CLOTHES, 28, psgd.data.fashion_mnist(folder or DEBIANS)
    tensors = []
    for part in parts:
        x, y = part.read(np.arange(min(count, len(part))))
        tensors.append(TensorDataset(torch.tensor(x).view(-1, 1, size, size), torch.tensor(y)))
    return names, *tensors


def score(model, x, y):
    logits = model(x)
    return {
        "loss": cross_entropy(logits, y),
        "accuracy": (logits.argmax(1) == y).float().mean(),
    }


def train(bits, training, test, comm, options):
    """Train with gradients of some bits a value; return the model and the scores by epoch."""
    torch.manual_seed(0)
    model = ResNet(channels=(16, 32), blocks=(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    learner = psgd.torch.Learner(model, optimizer, psgd.DataParallelSGD(gradient_bits=bits), comm)
    sampler = psgd.torch.sampler(training, learner, options.minibatch)
    loader = DataLoader(training, batch_sampler=sampler)
    own = [test[comm.rank :: comm.size]]  # of the test images, those that this rank measures
    scores = []
    for _ in range(options.epochs):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            learner.step(samples=len(x))
        scores.append(learner.evaluate(own, score))
    sent = learner.bytes_sent
    learner.close()
    return model, scores, sent


@torch.no_grad()
def draw(model, accuracies, test, names, path):
    figure, (left, right) = panels(2, title="A ResNet on two ranks, and what it finds hardest")
    for (bits, values), color in zip(accuracies.items(), (BLUE, VERMILION), strict=True):
        epochs = range(1, len(values) + 1)
        left.plot(epochs, values, "o-", markersize=3, color=color, label=f"{bits} bit")
    left.set(xlabel="epoch", ylabel="test accuracy in %", ylim=(None, 100))
    label_ends(left)
    x, y = test[:]
    logits = model.eval()(x)
    hardest = cross_entropy(logits, y, reduction="none").argsort(descending=True)[:9]
    right.set_axis_off()
    right.set_title("class → the model's answer", fontsize=9)
    for place, i in enumerate(hardest.tolist()):
        row, column = divmod(place, 3)
        inner = right.inset_axes([column / 3 + 0.05, 0.66 - row / 3, 0.24, 0.24])
        inner.imshow(x[i, 0], cmap="gray_r")
        inner.set_xticks([])
        inner.set_yticks([])
        inner.set_title(f"{names[y[i]]} → {names[logits[i].argmax()]}", fontsize=8)
    save(figure, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", metavar="FOLDER", help="of Fashion-MNIST, or: digits")
    parser.add_argument("--images", type=int, default=10_000, help="to train on, at most")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--minibatch", type=int, default=64, help="images of all ranks")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--figure", default="resnet_images.png", metavar="PATH")
    options = parser.parse_args()
    comm = psgd.Communicator.world()
    names, training, test = images(options.data, options.images)
    accuracies = {}
    for bits in (32, 1):
        model, scores, sent = train(bits, training, test, comm, options)
        accuracies[bits] = [100 * each["accuracy"] for each in scores]
        last = "test loss {loss:.3f}, accuracy {accuracy:.1%}".format(**scores[-1])
        comm.print(f"{bits} bit: {last}, {sent / 1e6:.1f} MB sent by each rank")
    if comm.rank == 0:
        draw(model, accuracies, test, names, options.figure)


if __name__ == "__main__":
    main()
