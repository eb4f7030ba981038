"""Train a model of your own in NumPy

Softmax regression in NumPy, with a gradient written by hand, learns scikit-learn's digits on two
ranks. This is for anyone whose model is a few arrays and a formula: `parallel_sgd` needs the arrays
by name, and the sum of the gradients over a rank's samples.

The left of the figure shows what the model has learned: a blue pixel speaks for a class, a red
pixel against the class. On the right, every point of the two ranks lies on the line of one process.
With 32 bits a value, two ranks that share each minibatch take the steps of serial SGD.

For your own data, replace `psgd.data.digits()` by two `psgd.data.Arrays(x, y)`, and
`loss_and_gradient` by your own formula. [Data](../data.md) lists the formats of files. With
`--gradient-bits 1` the ranks send a thirtieth of the bytes.
"""

import argparse

import numpy as np
from drawing import BLUE, VERMILION, panels, save

import parallel_sgd as psgd

PIXELS, CLASSES = 64, 10


def loss_and_gradient(model, x, y, gradient):
    """Return the loss of x [m, 64] and y [m], and set the gradient: both are sums over samples."""
    logits = x @ model["weights"] + model["biases"]
    logits -= logits.max(axis=1, keepdims=True)
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    right = np.arange(len(y)), y
    loss = -np.log(probabilities[right]).sum()
    probabilities[right] -= 1  # now the loss's derivative by the logits
    gradient["weights"][:] = x.T @ probabilities
    gradient["biases"][:] = probabilities.sum(axis=0)
    return loss


def train(comm, options):
    """Train on all ranks of comm; return the model and the test loss after each epoch."""
    training, test = psgd.data.digits()
    test_x, test_y = test.arrays()
    model = psgd.Parameters(
        {
            "weights": np.zeros((PIXELS, CLASSES), np.float32),
            "biases": np.zeros(CLASSES, np.float32),
        }
    )
    algorithm = psgd.DataParallelSGD(gradient_bits=options.gradient_bits)
    learner = psgd.Learner(model, psgd.SGD(lr=options.lr), algorithm, comm)
    source = psgd.data.Source(training, minibatch_size=options.minibatch, epochs=options.epochs)
    unused = model.like()  # takes the gradient of the test samples
    losses = []
    for epoch in range(options.epochs):
        for x, y in source.epoch(epoch, learner):  # this rank's part of each minibatch
            loss_and_gradient(model, x, y, learner.gradient)
            learner.step(samples=len(x))
        losses.append(loss_and_gradient(model, test_x, test_y, unused) / len(test_y))
    learner.finish()
    right = (test_x @ model["weights"] + model["biases"]).argmax(axis=1) == test_y
    return model, losses, right.mean()


def draw(model, losses, alone, path):
    figure, (left, right) = panels(2, title="Softmax regression on digits, in NumPy, on two ranks")
    images = model["weights"].T.reshape(2, 5, 8, 8)  # two rows of five classes
    framed = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=np.nan)
    extreme = np.abs(images).max()
    picture = framed.transpose(0, 2, 1, 3).reshape(20, 50)
    left.imshow(picture, cmap="RdBu", vmin=-extreme, vmax=extreme)
    left.set_axis_off()
    left.set_title("weights of the classes 0 to 4 and 5 to 9", fontsize=10)
    epochs = range(1, len(losses) + 1)
    right.plot(epochs, alone, color=VERMILION, linewidth=2, label="one process")
    right.plot(epochs, losses, "o", color=BLUE, markersize=5, label="two ranks")
    right.set(xlabel="epoch", ylabel="test loss", ylim=0)
    right.legend(frameon=False)
    save(figure, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--minibatch", type=int, default=64, help="samples of all ranks")
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--gradient-bits", type=float, default=32)
    parser.add_argument("--figure", default="numpy_model.png", metavar="PATH")
    options = parser.parse_args()
    comm = psgd.Communicator.world()
    model, losses, accuracy = train(comm, options)
    if comm.rank == 0:
        _, alone, _ = train(psgd.Communicator.single(), options)
        print(f"{comm.size} ranks: test loss {losses[-1]:.4f}, accuracy {accuracy:.1%}")
        print(f"one process: test loss {alone[-1]:.4f}")
        draw(model, losses, alone, options.figure)


if __name__ == "__main__":
    main()
