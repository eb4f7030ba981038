"""Print the progress and the results of a training run, and write the results to its folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...algorithms import ALGORITHMS, Algorithm, BlockPeriod, DataParallelASGDState, ExchangeState
from ...options import values_of
from ...training import Learner, Progress, RunFolder, TrainingSession
from ...training.reports.page import KINDS, value_in_words
from ...training.reports.record import SUMMARY, RunRecord
from ...training.session.run_folder import REPORT
from ...training.session.state import loss_curves


def blocks(period: BlockPeriod, samples: int, minibatch_size: int, ranks: int) -> str:
    """Describe how often the ranks will synchronize: a default block is long for little data.

    Args:
        period: the algorithm's block period.
        samples: the samples of the run, without its warm start.
        minibatch_size: the samples of all ranks in a minibatch.
        ranks: the number of ranks.
    """
    steps = period.sync_steps or -(-(period.samples_on(ranks) or 1) // minibatch_size)
    block = steps * minibatch_size
    line = f"a block is {block:,} samples of all ranks, the run {samples / block:.1f} blocks"
    return line if samples >= block else f"{line}: they synchronize only at its end"


def print_choices(learner: Learner) -> None:
    """Print the choices made before training, with the measurements behind them.

    For each exchange, a line with its plan, and a line with its gradient bits if these are "auto".
    With parameter servers, a line with the gradient bits. Nothing on a single rank.
    """
    for component in learner.runner.components:
        if isinstance(component, DataParallelASGDState) and component.measured:
            print(f"gradient bits: {component.bits} ({component.measured})", flush=True)
        if not isinstance(component, ExchangeState) or learner.comm.size == 1:
            continue
        print(component.plan, flush=True)
        if component.bits is not None:
            bits = [f"{bits} for {n:,} values" for bits, n in component.values_by_bits().items()]
            why = f" ({component.measured})" if component.measured else ""
            print(f"gradient bits: {', '.join(bits)}{why}", flush=True)


def print_progress(progress: Progress, epochs: int) -> None:
    """Print a line of progress: about ten lines in all, and every line with an event."""
    whole = progress.epoch == int(progress.epoch)
    among = progress.epoch in (1, epochs) or progress.epoch % max(1, epochs // 10) == 0
    if whole and not among and progress.event is None:
        return
    losses = {} if progress.train_loss is None else {"train_loss": progress.train_loss}
    parts = [
        f"epoch {progress.epoch:4g}/{epochs}",
        f"{progress.samples:9d} samples",
        *metrics_in_words({**losses, **progress.metrics}),
        f"{progress.seconds:.2f} s",
        *([progress.event] if progress.event else []),
    ]
    print("  ".join(parts), flush=True)


def metrics_in_words(metrics: Mapping[str, float | None]) -> list[str]:
    """Return each metric in words: "test loss 0.1160", "accuracy 97.21 %"."""
    words = []
    for name, value in metrics.items():
        title = name.replace("_", " ").removeprefix("test ") if "accuracy" in name else name
        title = title.replace("_", " ")
        words.append(f"{title} {'not finite' if value is None else value_in_words(name, value)}")
    return words


def finish(
    folder: RunFolder,
    session: TrainingSession,
    full: int,
    name: str,
    history: list[Progress],
    serial: list[Progress] | None,
    *,
    plot: bool,
) -> None:
    """Write the summary and the loss curves, and print the results.

    Args:
        folder: the run's folder.
        session: the training session that has ended.
        full: bytes of all ranks for exchanging every gradient in 32 bits.
        name: the label of the run.
        history: the progress of the run.
        serial: the progress of the serial run for comparison, if any.
        plot: draw the loss curves.
    """
    last, resumed = history[-1], bool(session.checkpoints and session.checkpoints.resume)
    name += _described(session.learner.algorithm)
    rows = {name: last} | ({"serial SGD, same seed": serial[-1]} if serial else {})
    width = max(24, *map(len, rows))
    print()
    for label, row in rows.items():
        print(
            f"{label:{width}s} "
            + "   ".join([*metrics_in_words(row.metrics), f"{row.seconds:.2f} s"])
        )
    details = last.details or {}
    if "workers" in details:
        _print_workers(details["workers"])
        print()
    if "workers" in details:
        _print_bytes(details["workers"])
    elif last.bytes_sent and not resumed:  # else other ranks may have sent some of it
        line = f"{'bytes sent, all ranks':24s} {last.bytes_sent:,d}"
        times = full / last.bytes_sent
        if round(times, 1) != 1:
            line += f"; with every gradient in 32 bits {full:,d}, {times:.1f} times as much"
        print(line)
    if plot:
        curves = loss_curves(history, f", {name}")
        folder.write_loss_curves(curves | loss_curves(serial or [], ", serial SGD", train=False))
    summary: dict[str, Any] = {label: row.as_dict() for label, row in rows.items()}
    if not resumed:
        summary["bytes_in_32_bit"] = full
    folder.write_json(SUMMARY, summary)
    folder.write_report()
    if speed := speed_in_words(RunRecord.read(folder.path)):
        print(f"{'samples per second':24s} {speed}")
    print(f"{'report':24s} {folder.path / REPORT}")


def speed_in_words(run: RunRecord) -> str:
    """Return the speed of a run, and the parts of its ranks' time: "7,100; compute 61 %, …".

    Empty if nothing was trained.
    """
    speed = run.samples_per_second
    if speed is None:
        return ""
    seconds = {
        name: sum(rank["seconds"].get(kind, 0.0) for rank in run.ranks)
        for kind, name in KINDS.items()
    }
    total = sum(seconds.values())
    parts = [f"{name} {s / total:.0%}".replace("%", " %") for name, s in seconds.items() if s]
    return f"{speed:,.0f}; " + ", ".join(parts) if parts else f"{speed:,.0f}"


def _described(algorithm: Algorithm[Any]) -> str:
    """Return the label of a run after its ranks: algorithm (if not the default), mode, and bits."""
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


def ranks_in_words(size: int, trainers: int, workers: int) -> str:
    """Return "4 ranks", "4 workers and 1 server", or "2 workers with 4 ranks in all and 1 server".

    Args:
        size: number of all ranks.
        trainers: number of ranks that train.
        workers: number of workers, some perhaps with several ranks.
    """
    if trainers == size:
        return _counted(size, "rank")
    training = _counted(workers, "worker")
    if workers != trainers:
        training += f" with {_counted(trainers, 'rank')} in all"
    return f"{training} and {_counted(size - trainers, 'server')}"


def failures_in_words(failed: int) -> str:
    """Return ", of which 1 has failed", or ""."""
    return f", of which {failed} {'has' if failed == 1 else 'have'} failed" if failed else ""


def _counted(number: int, name: str) -> str:
    return f"{number} {name}" if number == 1 else f"{number} {name}s"


def _print_workers(workers: list[dict[str, Any]]) -> None:
    """Print where each worker's time went, and the staleness of its pushes."""
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
        )


def _print_bytes(workers: list[dict[str, Any]]) -> None:
    """Print the bytes between workers and servers, and between the ranks of each worker."""
    between = sum(worker["bytes_sent"] + worker["bytes_received"] for worker in workers)
    within = sum(worker["bytes_within"] for worker in workers)
    print(f"bytes between workers and servers {between:,d}")
    if within:
        print(f"bytes within the workers {within:,d}")
