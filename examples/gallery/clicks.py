"""Predict clicks by embeddings on a parameter server

Two workers learn to predict clicks from ids, and a server keeps an embedding of each id. A sample
has eight ids, such as those of the user, the page and the product. Each of these fields has 10^11
possible ids, so a table of all embeddings would take 25 TB. The server makes a row only when an id
occurs for the first time. A worker pulls the rows of its minibatch and pushes their gradients. No
other rows travel. This is for anyone who recommends or ranks items.

The clicks are made up, so the lowest possible loss is known. The figure shows it as a line. The
other line is the loss of a model that knows only the share of clicks. On the right, the server's
table grows as new ids occur. The workers do not wait for each other, so no two runs are alike.

For your own data, give `Source` a data set with int64 ids as x: hashes will do. With
`-n 4 --servers 2` two servers share the rows. [Parameter servers](../parameter_servers.md) has
further modes, such as workers that keep in step.
"""

import argparse

import numpy as np
from drawing import BLUE, GREEN, GREY, panels, save

import parallel_sgd as psgd

WIDTH, FIELDS = 8, 8
MINIBATCH = 64  # of each worker
EVERY = 200  # steps between two points of the figure


def draw(curve, share_loss, bayes_loss, path):
    samples, losses, rows = zip(*curve, strict=True)
    figure, (left, right) = panels(2, title="Clicks: two workers, and rows on one server")
    thousands = [count / 1000 for count in samples]
    left.plot(thousands, losses, "o-", markersize=4, color=BLUE)
    for loss, name in ((share_loss, "share of clicks alone"), (bayes_loss, "best possible")):
        left.axhline(loss, color=GREY, linestyle="--")
        left.annotate(
            name, (thousands[-1], loss), (0, 4), color=GREY, ha="right", textcoords="offset points"
        )
    left.set(xlabel="thousands of samples", ylabel="test loss, nats")
    right.plot(thousands, [count / 1000 for count in rows], "o-", markersize=4, color=GREEN)
    right.set(xlabel="thousands of samples", ylabel="thousands of rows on the server", ylim=0)
    save(figure, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=150_000)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--figure", default="clicks.png", metavar="PATH")
    options = parser.parse_args()
    comm = psgd.Communicator.world()
    train, test = psgd.data.clicks(options.samples, FIELDS, test=10_000)
    table = psgd.Embedding(name="ids", width=WIDTH, optimizer=psgd.Adagrad(lr=0.05))
    algorithm = psgd.DataParallelASGD(sync_steps=1, tables=(table,))
    model = psgd.models.EmbeddedMLP(FIELDS, WIDTH, [32], classes=2)
    learner = psgd.Learner(model.parameters, psgd.SGD(lr=options.lr), algorithm, comm)
    model.rows = rows = learner.tables["ids"]
    source = psgd.data.Source(train, minibatch_size=MINIBATCH * learner.comm.size)

    x, y = test.arrays()
    curve = []
    minibatches = psgd.data.with_next(source.minibatches(learner))  # none for a server
    for step, ((ids, clicked), following) in enumerate(minibatches):
        if comm.rank == 0 and step % EVERY == 0:
            curve.append((learner.samples, model.evaluate(x, y)[0], rows.counts()["rows"]))
        coming = following and following[0]  # their rows are fetched meanwhile
        model.gradient(ids, clicked, out=learner.gradient, coming=coming)
        learner.step(samples=len(ids))
    learner.meet()  # until both workers are done
    if comm.rank == 0:
        counts = rows.counts()
        curve.append((learner.samples, model.evaluate(x, y)[0], counts["rows"]))
        share, bayes = y.mean(), test.bayes_loss()
        share_loss = -share * np.log(share) - (1 - share) * np.log(1 - share)
        print(f"test loss {curve[-1][1]:.3f}, between {bayes:.3f} and {share_loss:.3f}")
        row_bytes = counts["bytes"] / counts["rows"]
        print(f"the server has {counts['rows']:,} rows of {row_bytes:.0f} bytes")
        draw(curve, share_loss, bayes, options.figure)
    learner.finish()  # a server serves until all workers are here


if __name__ == "__main__":
    main()
