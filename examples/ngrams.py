"""The next byte of Python's library from hashed n-grams, with a row of a server's table for each.

    parallel-sgd run -n 4 --servers 1 examples/ngrams.py

Losses are in nats per byte. Without a table, on one rank and after as many of these samples,
`ByteLanguageModel()` has 1.94 at its best rate, and the small one of the README's figures 2.16.
"""

from __future__ import annotations

import time

import numpy as np

import parallel_sgd as psgd

WIDTH, HIDDEN = 16, [128]
SAMPLES, TESTED = 131_072, 20_000
MINIBATCH = 32  # of each worker


def main() -> None:
    comm = psgd.Communicator.world()
    train, test = (
        whole.split(samples)[1]
        for whole, samples in zip(psgd.data.library_ngrams(), (SAMPLES, TESTED), strict=True)
    )
    table = psgd.Embedding(name="n-grams", width=WIDTH, optimizer=psgd.Adagrad(lr=0.1))
    algorithm = psgd.DataParallelASGD(sync_steps=1, tables=(table,))
    orders, classes = len(psgd.data.ORDERS), psgd.data.NGRAM_CLASSES
    model = psgd.models.EmbeddedMLP(orders, WIDTH, HIDDEN, classes)
    rate = psgd.schedules.Linear({0: 0.3, SAMPLES: 0.03})
    learner = psgd.Learner(model.parameters, psgd.SGD(lr=rate), algorithm, comm)
    model.rows = learner.tables["n-grams"]
    source = psgd.data.Source(train, minibatch_size=MINIBATCH * learner.comm.size)

    first = comm.rank == 0  # a worker: the last ranks serve
    x, y = test.arrays()
    if first:
        shares = np.bincount(y)[np.unique(y)] / len(y)
        print(f"test loss: shares of the bytes {-(shares * np.log(shares)).sum():.4f}")
        print(f"before training {model.evaluate(x, y)[0]:.4f}", flush=True)
    begin = time.perf_counter()
    for (some_x, some_y), following in psgd.data.with_next(source.minibatches(learner)):
        coming = following[0] if following else None
        model.gradient(some_x, some_y, out=learner.gradient, coming=coming)
        learner.step(samples=len(some_x))
    seconds = time.perf_counter() - begin
    learner.meet()  # until all workers are done
    if first:  # before `finish`: then the servers leave
        loss, accuracy = model.evaluate(x, y)
        print(f"after {seconds:.1f} s {loss:.4f}, {100 * accuracy:.1f} % right", flush=True)
        counts = learner.tables["n-grams"].counts()
        row_bytes = counts["bytes"] / counts["rows"]
        print(f"{counts['rows']:,d} rows, {row_bytes:.0f} bytes each with id and optimizer state")
    learner.finish()


if __name__ == "__main__":
    main()
