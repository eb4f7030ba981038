"""Click prediction from ids of which there are 10^11 in each field, with their rows on servers.

    parallel-sgd run -n 4 --servers 1 examples/clicks.py

Only rows that occur are ever made, pulled, or pushed to. The losses to compare with are that of the
share of clicks alone, and the Bayes loss, which no model goes below. One epoch is best: rows of ids
that occur once are learned by heart in a second one.
"""

from __future__ import annotations

import time

import numpy as np

import parallel_sgd as psgd

WIDTH, HIDDEN = 8, [32]
MINIBATCH = 64  # of each worker


def main() -> None:
    comm = psgd.Communicator.world()
    train, test = psgd.data.clicks()
    table = psgd.Embedding(name="clicks", width=WIDTH, optimizer=psgd.Adagrad(lr=0.05))
    algorithm = psgd.DataParallelASGD(sync_steps=1, tables=(table,))
    model = psgd.models.EmbeddedMLP(train.fields, WIDTH, HIDDEN, classes=2)
    learner = psgd.Learner(model.parameters, psgd.SGD(lr=0.1), algorithm, comm)
    model.rows = learner.tables["clicks"]
    source = psgd.data.Source(train, minibatch_size=MINIBATCH * learner.comm.size)

    first = comm.rank == 0  # a worker: the last ranks serve
    x, y = test.arrays()
    if first:
        share = y.mean()
        known = -share * np.log(share) - (1 - share) * np.log(1 - share)
        print(f"test loss: share of clicks {known:.4f}, Bayes {test.bayes_loss():.4f}")
        print(f"before training {model.evaluate(x, y)[0]:.4f}", flush=True)
    begin = time.perf_counter()
    for (some_x, some_y), following in psgd.data.with_next(source.minibatches(learner)):
        coming = following[0] if following else None
        model.gradient(some_x, some_y, out=learner.gradient, coming=coming)
        learner.step(samples=len(some_x))
    seconds = time.perf_counter() - begin
    learner.meet()  # until all workers are done
    if first:  # before `finish`: then the servers leave
        print(f"after {seconds:.1f} s {model.evaluate(x, y)[0]:.4f}", flush=True)
        counts = learner.tables["clicks"].counts()
        row_bytes = counts["bytes"] / counts["rows"]
        print(f"{counts['rows']:,d} rows, {row_bytes:.0f} bytes each with id and optimizer state")
    learner.finish()


if __name__ == "__main__":
    main()
