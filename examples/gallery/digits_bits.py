"""Compare gradients of 32, 4, 1 and a quarter of a bit

A small network learns scikit-learn's digits four times, each time with another number of bits in a
gradient's value. This is for anyone who wonders how much a few bits cost in loss. The figure shows
the test loss against the megabytes that both ranks have sent. With any of these numbers of bits,
the network reaches the same loss in the same number of steps. With fewer bits the line only moves
to the left, because the messages are smaller.

For your own data, replace `psgd.data.digits()` by two `psgd.data.Arrays(x, y)`, and the sizes of
the `MLP` by yours. A `TrainingSession` runs the loop and measures the test loss;
[training sessions](../training.md) lists its other arguments. To see what other numbers of bits do,
give them: `--bits 8 2 0.5`. [Choosing](../choosing.md) has the same comparison for larger models.
"""

import argparse

from drawing import PALETTE, label_ends, logarithmic, panels, save

import parallel_sgd as psgd


def train(bits, comm, options):
    """Train with gradients of some bits a value; return a row of figures for each epoch."""
    training, test = psgd.data.digits()
    model = psgd.models.MLP([64, *options.hidden, 10], seed=0)
    samples = options.epochs * len(training)
    rate = psgd.schedules.Linear({0: options.lr, samples: options.lr / 10})
    algorithm = psgd.DataParallelSGD(gradient_bits=bits)
    with psgd.Learner(model.parameters, psgd.SGD(lr=rate), algorithm, comm) as learner:
        session = psgd.TrainingSession(
            learner=learner,
            objective=model,
            train=training,
            minibatch_size=options.minibatch,
            epochs=options.epochs,
            validation=psgd.CrossValidation(data=test, name="test"),
        )
        return session.run()


def draw(runs, path):
    most, least = max(runs), min(runs)
    ratio = runs[most][-1].bytes_sent / runs[least][-1].bytes_sent
    title = f"Gradients of {least:g} bit instead of {most:g}: {ratio:.0f} times fewer bytes"
    figure, axes = panels(title=title)
    for (bits, rows), color in zip(runs.items(), PALETTE, strict=False):
        sent = [row.bytes_sent / 1e6 for row in rows]
        losses = [row.metrics["test_loss"] for row in rows]
        axes.plot(sent, losses, "o-", markersize=3, color=color, label=f"{bits:g} bit")
    axes.set(xlabel="megabytes sent by all ranks", ylabel="test loss")
    logarithmic(axes, "xy")
    label_ends(axes)
    save(figure, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bits", type=float, nargs="+", default=[32, 4, 1, 0.25])
    parser.add_argument("--hidden", type=int, nargs="*", default=[256], help="sizes of layers")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--minibatch", type=int, default=32, help="samples of all ranks")
    parser.add_argument("--lr", type=float, default=0.3)
    parser.add_argument("--figure", default="digits_bits.png", metavar="PATH")
    options = parser.parse_args()
    comm = psgd.Communicator.world()
    runs = {}
    for bits in options.bits:
        runs[bits] = train(bits, comm, options)
        last = runs[bits][-1]
        loss, accuracy = last.metrics["test_loss"], last.metrics["test_accuracy"]
        megabytes = last.bytes_sent / 1e6
        comm.print(f"{bits:5g} bit: {megabytes:6.2f} MB, test loss {loss:.3f}, {accuracy:.1%}")
    if comm.rank == 0:
        draw(runs, options.figure)


if __name__ == "__main__":
    main()
