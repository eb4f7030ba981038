"""Train a transformer on text: few bits in every step, or DiLoCo

A small transformer learns to predict the next byte of the source of Python's library. It starts
four times from the same weights, and each time the ranks exchange in another way. This is for
anyone who trains a language model over a slow network, and must choose between two remedies. One is
to send fewer bits in every step. The other is DiLoCo: the ranks train alone, and exchange once in a
block of steps.

The figure shows the test loss, in nats a byte, against the megabytes that each rank has sent. 1 bit
saves nearly all bytes, and costs little loss. DiLoCo with blocks of 20 steps saves about as many
bytes, but costs more loss, because this training of 120 steps has only six blocks. DiLoCo is
usually used with blocks of hundreds of steps, in trainings of many thousands. With 1 bit in
DiLoCo's blocks, both savings multiply.

For your own text, give a folder of `.txt` files: `--data FOLDER`. For your own model, replace
`ByteTransformer` and `score`. [torch_language.py](../../examples/torch_language.py) adds larger
models, checkpoints and bfloat16; [Choosing](../choosing.md) compares losses of longer trainings.
"""

import argparse
import itertools

import torch
from drawing import BLUE, GREEN, PURPLE, VERMILION, label_ends, logarithmic, panels, save
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset

import parallel_sgd as psgd
from parallel_sgd.torch.models import ByteTransformer

ALGORITHMS = {
    "32 bit": (lambda block: psgd.DataParallelSGD(), BLUE),
    "1 bit": (lambda block: psgd.DataParallelSGD(gradient_bits=1), VERMILION),
    "DiLoCo": (lambda block: psgd.DiLoCo(sync_steps=block), GREEN),
    "DiLoCo, 1 bit": (lambda block: psgd.DiLoCo(sync_steps=block, gradient_bits=1), PURPLE),
}


def score(model, x, y):
    return {"loss": cross_entropy(model(x).flatten(0, 1), y.flatten())}


def train(algorithm, training, test, comm, options):
    """Train from the same weights each time; return (bytes sent, test loss) now and then."""
    torch.manual_seed(0)
    model = ByteTransformer(options.width, options.layers, heads=2, context=options.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    learner = psgd.torch.Learner(model, optimizer, algorithm, comm, clip_norm=1.0)
    sampler = psgd.torch.sampler(training, learner, options.minibatch)
    loader = DataLoader(training, batch_sampler=sampler)
    own = DataLoader(Subset(test, range(comm.rank, options.tested, comm.size)), batch_size=32)
    points = []
    for step, (x, y) in enumerate(itertools.islice(loader, options.steps), 1):
        for group in optimizer.param_groups:  # the rate falls to a tenth
            group["lr"] = options.lr * (1 - 0.9 * step / options.steps)
        score(model, x, y)["loss"].backward()
        learner.step(samples=len(x))
        if step == options.steps:
            learner.finish()  # the last block may still be under way
        if step % options.block == 0 or step == options.steps:
            loss = learner.evaluate(own, score)["loss"]
            points.append((learner.bytes_sent, loss))
    learner.close()
    return points


def draw(curves, path):
    figure, axes = panels(title="A transformer on bytes of Python's library, on two ranks")
    for name, points in curves.items():
        sent, losses = zip(*points, strict=True)
        megabytes = [each / 1e6 for each in sent]
        color = ALGORITHMS[name][1]
        axes.plot(megabytes, losses, "o-", markersize=3, color=color, label=name)
    axes.set(xlabel="megabytes sent by each rank", ylabel="test loss, nats a byte")
    logarithmic(axes)
    label_ends(axes)
    save(figure, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", metavar="FOLDER", help="of text files; else Python's library")
    parser.add_argument("--context", type=int, default=64, help="bytes of a sequence")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--minibatch", type=int, default=16, help="sequences of all ranks")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--block", type=int, default=20, help="steps of a block of DiLoCo")
    parser.add_argument("--tested", type=int, default=128, help="test sequences")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--figure", default="transformer_bytes.png", metavar="PATH")
    options = parser.parse_args()
    comm = psgd.Communicator.world()
    if options.data:
        training, test = psgd.data.text_sequences(options.data, options.context, test=0.1)
    else:
        training, test = psgd.data.library_sequences(options.context, most_bytes=2_000_000)
    curves = {}
    for name, (make, _) in ALGORITHMS.items():
        curves[name] = train(make(options.block), training, test, comm, options)
        sent, loss = curves[name][-1]
        comm.print(f"{name:14} test loss {loss:.3f} after {sent / 1e6:7.3f} MB sent by each rank")
    if comm.rank == 0:
        draw(curves, options.figure)


if __name__ == "__main__":
    main()
