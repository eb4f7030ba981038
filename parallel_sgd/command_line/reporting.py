"""What a training run says: to the terminal, and at its end to the run folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..algorithms import ALGORITHMS, Algorithm, BlockPeriod, ExchangeState
from ..options import values_of
from ..training import Learner, Progress, RunFolder, Session


def blocks(period: BlockPeriod, samples: int, minibatch_size: int, ranks: int) -> str:
    """How often the ranks will synchronize: a default block is long for little data.

    Args:
        samples: of the run, without its warm start.
    """
    steps = period.sync_steps or -(-(period.samples_on(ranks) or 1) // minibatch_size)
    block = steps * minibatch_size
    line = f"a block is {block:,} samples of all ranks, the run {samples / block:.1f} blocks"
    return line if samples >= block else f"{line}: they synchronize only at its end"


def print_choices(learner: Learner) -> None:
    """What was chosen before training, and by what: for each exchange a line for the way of
    messages, and one for the bits where they are "auto"; nothing on one rank, and with parameter
    servers."""
    for component in learner.at_work.components:
        if not isinstance(component, ExchangeState) or learner.comm.size == 1:
            continue
        print(component.plan, flush=True)
        if component.bits is not None:
            bits = [f"{bits} for {n:,} values" for bits, n in component.values_by_bits().items()]
            why = f" ({component.measured})" if component.measured else ""
            print(f"gradient bits: {', '.join(bits)}{why}", flush=True)


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
    name: str,
    history: list[Progress],
    serial: list[Progress] | None,
    *,
    plot: bool,
) -> None:
    """Write the summary and the picture, and print what a reader wants to know."""
    last, ranks = history[-1], session.comm.size
    name += _described(session.algorithm)
    rows = {name: last} | ({"serial SGD, same seed": serial[-1]} if serial else {})
    width = max(24, *map(len, rows))
    print()
    for label, row in rows.items():
        print(
            f"{label:{width}s} test loss {row.test_loss:.4f}   "
            f"accuracy {100 * row.test_accuracy:.2f} %   {row.seconds:.2f} s"
        )
    details = last.details or {}
    if "workers" in details:
        _print_workers(details["workers"])
        print()
    minibatches = -(-len(session.train) // session.minibatch_size) * session.epochs
    full = minibatches * 2 * (ranks - 1) * session.model.parameters.flat.nbytes
    if "workers" in details:
        print(f"bytes between workers and servers {last.bytes_sent:,d}")
    elif last.bytes_sent and session.resume is None:  # else other ranks may have sent some of it
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
    summary: dict[str, Any] = {label: row.as_dict() for label, row in rows.items()}
    if session.resume is None:
        summary["bytes_in_32_bit"] = full
    folder.write_json("summary.json", summary)
    print(f"run folder                {folder.path}")


def _described(algorithm: Algorithm[Any]) -> str:
    """What a run is called by, beside its ranks: the algorithm, if not the usual one, its mode, and
    the bits."""
    options, text = values_of(algorithm), ""
    if type(algorithm) is not ALGORITHMS["data-parallel"]:
        text += f", {type(algorithm).__name__}"
    if "mode" in options:
        text += f" ({options['mode']})"
    bits, own = options.get("gradient_bits"), options.get("bits_of")
    if isinstance(bits, Mapping):
        text += f", bits {dict(bits)}"
    elif bits is not None:
        text += f", {bits} bit"
    return f"{text}, own bits {dict(own)}" if own else text


def ranks_in_words(size: int, workers: int) -> str:
    """ "4 ranks", or "4 workers and 1 server" """
    if workers == size:
        return _counted(size, "rank")
    return f"{_counted(workers, 'worker')} and {_counted(size - workers, 'server')}"


def _counted(number: int, name: str) -> str:
    return f"{number} {name}" if number == 1 else f"{number} {name}s"


def _print_workers(workers: list[dict[str, Any]]) -> None:
    """Where each worker's time went, and how stale its pushes were."""
    print(
        "\nworker   pushes  staleness: mean  most    seconds: compute     wait     wire    apply"
        "       MB sent, received"
    )
    for worker in workers:
        seconds = worker["seconds"]
        print(
            f"{worker['worker']:6d} {worker['pushes']:8d} {worker['mean_staleness']:16.2f} "
            f"{worker['largest_staleness']:5d} {seconds['compute']:19.2f} {seconds['wait']:8.2f} "
            f"{seconds['wire']:8.2f} {seconds['apply']:8.2f} "
            f"{worker['bytes_sent'] / 1e6:13.2f}, {worker['bytes_received'] / 1e6:.2f}"
            f"{'   lost' if worker['lost'] else ''}"
        )
