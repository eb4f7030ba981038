"""Train ResNet-20 on images in CIFAR's files

A ResNet-20 learns color images of 32 by 32 pixels from files in the format of CIFAR-10. This is for
anyone who has CIFAR, or their own images in the same simple format: one byte for the class, then
3,072 bytes for red, green and blue. [He et al.](https://arxiv.org/abs/1512.03385) designed this
network for CIFAR. The gradients have 4 bits.

Without `--data`, each rank writes small files of made-up images: ten figures in random colors,
sizes and places. For the real CIFAR-10, unpack its binary version, give the folder, and take more
epochs: `--data cifar-10-batches-bin --epochs 100 --minibatch 128 --lr 0.1`. The files are
memory-mapped, and a rank reads only its part of each minibatch.
[Data](../data.md#cifar-10) says more on this format, and on others, such as folders of PNG files.

On the left of the figure, each row has test images that the network assigns to one class. A frame
marks an image that really belongs to another class. On the right is the test accuracy after each
epoch.
"""

import argparse
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from drawing import BLUE, VERMILION, panels, save
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import parallel_sgd as psgd
from parallel_sgd.torch.models import ResidualBlock

CIFAR10 = ["airplane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
FIGURES = ["disc", "ring", "square", "frame", "triangle", "plus", "cross", "rows", "bars", "checks"]
WRONG = [color / 255 for color in bytes.fromhex(VERMILION[1:])]  # the color of frames


def made_up(count, seed):
    """Return images uint8 [count, 3, 32, 32], and their classes."""
    random = np.random.default_rng(seed)
    y = random.integers(10, size=count)
    center, size = random.uniform(12, 20, (2, count, 1, 1)), random.uniform(7, 11, (count, 1, 1))
    pixels = np.arange(32)
    v, u = (pixels[:, None] - center[0]) / size, (pixels - center[1]) / size
    radius, far = np.hypot(u, v), np.maximum(abs(u), abs(v))
    rows, columns = np.sin(8 * v) > 0, np.sin(8 * u) > 0
    square = far < 1
    figures = [
        *(radius < 1, (radius < 1) & (radius > 0.6), square, square & (far > 0.6)),
        square & (2 * abs(u) < 1 + v),
        square & (np.minimum(abs(u), abs(v)) < 0.3),
        square & (abs(abs(u) - abs(v)) < 0.4),
        *(square & rows, square & columns, square & (rows ^ columns)),
    ]
    figure = np.choose(y[:, None, None], figures)[:, None]
    dark, bright = random.integers(0, 118, (2, count, 3, 1, 1))
    x = np.where(figure, 118 + bright, dark) + random.integers(0, 20, (count, 3, 32, 32))
    return x.astype(np.uint8), y.astype(np.uint8)


def write_files(folder, count):
    """Write the six files of CIFAR-10: `count` images to train on, and a quarter to test on."""
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    for seed, name in enumerate(names):
        x, y = made_up(count // (4 if "test" in name else 5), seed)
        np.column_stack([y, x.reshape(len(y), -1)]).tofile(Path(folder, name))


def resnet20():
    layers = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
    for before, after in pairwise(widths):
        layers.append(ResidualBlock(before, after, stride=after // before))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def score(model, x, y):
    logits = model(x)
    return {"loss": cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}


def draw(names, model, test, accuracies, path):
    """Draw test images in rows by the class that the model sees, and the accuracy by epoch."""
    x, y = test.read(np.arange(min(len(test), 200)))
    with torch.no_grad():
        seen = model.eval()(torch.tensor(x)).argmax(1).numpy()
    figure, (left, right) = panels(2, title="ResNet-20 on two ranks, with gradients of 4 bits")
    sheet = np.ones((10, 36, 6, 36, 3))  # rows of images with a frame of two pixels
    for row in range(10):
        mine = np.flatnonzero(seen == row)
        mine = mine[np.argsort(y[mine] == row, kind="stable")][:6]  # the wrong ones first
        for column, i in enumerate(mine):
            if y[i] != row:
                sheet[row, :, column] = WRONG
            sheet[row, 2:-2, column, 2:-2] = x[i].transpose(1, 2, 0)
    left.imshow(sheet.reshape(360, 216, 3))
    left.set_yticks(range(18, 360, 36), names)
    left.set_xticks([])
    left.tick_params(length=0)
    left.spines[:].set_visible(False)
    left.grid(visible=False)
    epochs = range(1, len(accuracies) + 1)
    right.plot(epochs, [100 * accuracy for accuracy in accuracies], "o-", color=BLUE)
    right.set(xlabel="epoch", ylabel="test accuracy, %", ylim=(0, 102), xticks=epochs)
    save(figure, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", metavar="FOLDER", help="with the binary version of CIFAR-10")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--minibatch", type=int, default=20, help="images of all ranks")
    parser.add_argument("--lr", type=float, default=0.05, help="the highest")
    parser.add_argument("--figure", default="cifar.png", metavar="PATH")
    options = parser.parse_args()
    comm = psgd.Communicator.world()
    with tempfile.TemporaryDirectory() as folder:
        if not options.data:
            write_files(folder, 500)
        train, test = psgd.data.cifar10(options.data or folder)  # mapped: may be deleted now
    torch.manual_seed(0)
    model = resnet20()
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, weight_decay=1e-4)
    learner = psgd.torch.Learner(model, optimizer, psgd.DataParallelSGD(gradient_bits=4), comm)
    sampler = psgd.torch.sampler(train, learner, options.minibatch)
    loader = DataLoader(train, batch_sampler=sampler)
    test_loader = DataLoader(test, 100, sampler=range(comm.rank, len(test), comm.size))
    steps = options.epochs * len(sampler)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, steps)

    accuracies = []
    for _ in sampler.epochs(options.epochs):
        for x, y in loader:
            cross_entropy(model(x), y).backward()
            learner.step(samples=len(x))
            scheduler.step()
        accuracies.append(learner.evaluate(test_loader, score)["accuracy"])
    sent, full = learner.bytes_sent, 4 * steps * sum(p.numel() for p in model.parameters())
    comm.print(f"{len(train)} images, {steps} steps: test accuracy {accuracies[-1]:.1%}")
    comm.print(f"each rank sent {sent / 1e6:.1f} MB; 32 bits a value are {full / 1e6:.1f} MB")
    learner.finish()
    if comm.rank == 0:
        draw(CIFAR10 if options.data else FIGURES, model, test, accuracies, options.figure)


if __name__ == "__main__":
    main()
