"""What a training run says: to the terminal, and at its end to the run folder."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ..algorithms import DataParallelSGD, LocalUpdates
from ..training import Progress, RunFolder, Session


def blocks(algorithm: LocalUpdates, samples: int, minibatch_size: int, ranks: int) -> str:
    """How often the ranks will synchronize: a default block is long for little data."""
    steps = algorithm.sync_steps or -(-(algorithm.block_size_on(ranks) or 1) // minibatch_size)
    block, samples = steps * minibatch_size, max(samples - algorithm.distributed_after, 0)
    line = f"a block is {block:,} samples of all ranks, the run {samples / block:.1f} blocks"
    return line if samples >= block else f"{line}: they synchronize only at its end"


def print_progress(progress: Progress, epochs: int) -> None:
    if progress.epoch in (1, epochs) or progress.epoch % max(1, epochs // 10) == 0:
        print(
            f"epoch {progress.epoch:4d}/{epochs}  {progress.samples:9d} samples  "
            f"train loss {progress.train_loss:.4f}  test loss {progress.test_loss:.4f}  "
            f"accuracy {100 * progress.test_accuracy:.2f} %  {progress.seconds:.2f} s",
            flush=True,
        )


def finish(
    folder: RunFolder,
    session: Session,
    history: list[Progress],
    serial: list[Progress] | None,
    *,
    plot: bool,
) -> None:
    """Write the summary and the picture, and print what a reader wants to know."""
    last, ranks = history[-1], session.comm.size
    name = ranks_in_words(ranks)
    if not isinstance(session.algorithm, DataParallelSGD):
        name += f", {type(session.algorithm).__name__}"
    bits = getattr(session.algorithm, "gradient_bits", None)
    if bits is not None:
        name += f", {bits} bit" if isinstance(bits, int) else f", bits {dict(bits)}"
    rows = {name: last} | ({"serial SGD, same seed": serial[-1]} if serial else {})
    width = max(24, *map(len, rows))
    print()
    for label, row in rows.items():
        print(
            f"{label:{width}s} test loss {row.test_loss:.4f}   "
            f"accuracy {100 * row.test_accuracy:.2f} %   {row.seconds:.2f} s"
        )
    minibatches = -(-len(session.train) // session.minibatch_size) * session.epochs
    full = minibatches * 2 * (ranks - 1) * session.model.parameters.flat.nbytes
    if last.bytes_sent and session.resume is None:  # else other ranks may have sent some of it
        print(
            f"bytes sent, all ranks    {last.bytes_sent:13,d}; every gradient in 32 bit: "
            f"{full:,d}, {full / last.bytes_sent:.1f} times as much"
        )
    curves = {"training": [(p.samples, p.train_loss) for p in history]}
    curves[f"test, {name}"] = [(p.samples, p.test_loss) for p in history]
    if serial:
        curves["test, serial SGD"] = [(p.samples, p.test_loss) for p in serial]
    if plot:
        folder.write_loss_curves(curves)
    summary: dict[str, Any] = {label: asdict(row) for label, row in rows.items()}
    if session.resume is None:
        summary["bytes_in_32_bit"] = full
    folder.write_json("summary.json", summary)
    print(f"run folder                {folder.path}")


def ranks_in_words(size: int) -> str:
    return f"{size} rank" if size == 1 else f"{size} ranks"
