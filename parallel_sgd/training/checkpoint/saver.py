"""Checkpoints: all state of a learner, written while training continues."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from numbers import Real
from pathlib import Path
from typing import Any, Self, cast

from ...array_files import require_safetensors
from ...communication import Communicator, InBackground
from ...communication.job_environment import job_name
from ...communication.liveness.rank_status import Status, report_status
from ...errors import RanksLost, SharedError, UserError
from ...plain_values import to_json
from ...state import weight_of
from ...validation import checked_path, integer, line_of, mapping
from ...version import __version__
from ..learner import Learner, require_learner
from ..state.state_tree import HostArray, HostCopies, capture, flatten
from . import files
from .compatibility import compatibility_facts
from .folder_lock import FolderLock
from .pending_writes import add_pending_write, remove_pending_write
from .retention import KEEP, Retention


class Checkpoints:
    """A folder of checkpoints that keeps the latest and the best.

    Every rank creates this object, and closes it at the end of training: by `close`, or in a `with`
    block. A background error not yet reported by then is printed as the program ends, with exit
    code 1. Creation is local.

    Args:
        folder: the same on all ranks, on a file system that all ranks share. Made with the first
            checkpoint. From then on no other process can save there, until this process closes the
            object or ends.
        keep: number of latest checkpoints to keep, at least 1. In addition, the checkpoint with the
            lowest `metric` is kept. Older checkpoints are removed.
        facts: further values that must be equal when a checkpoint is loaded, by name (a seed, say).
            Compared by `repr`.
    Raises:
        UserError: a value is not possible, or the library safetensors is missing.

    >>> import tempfile, numpy as np, parallel_sgd as psgd
    >>> comm = psgd.Communicator.single()
    >>> model = psgd.models.SoftmaxRegression(4, 3)
    >>> learner = psgd.Learner(model.parameters, psgd.SGD(lr=0.5), psgd.DataParallelSGD(), comm)
    >>> with psgd.Checkpoints(tempfile.mkdtemp(), keep=2) as checkpoints:
    ...     checkpoints.save(learner, extra={"note": "before the first step"})
    >>> psgd.load_checkpoint(learner, checkpoints.folder).extra
    {'note': 'before the first step'}
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int = KEEP,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        require_safetensors()
        self.folder = checked_path("folder", folder)
        self.keep = integer("keep", keep, 1)
        self.facts = mapping("facts", facts)
        self._lock = FolderLock("folder", self.folder)
        self._retention = Retention(self.folder)
        self._copies = HostCopies()
        self._writing: InBackground[Path] | None = None
        self._written: Path | None = None
        self._comms: tuple[Communicator, Communicator, int, Communicator] | None = None
        self._closed = False

    def save(
        self,
        learner: Learner,
        extra: Any = None,
        *,
        metric: float | None = None,
        background: bool = True,
    ) -> None:
        """Save all state of a learner, between any two steps. Training is not affected.

        Args:
            learner: its parameters, the optimizer's state, the algorithm's state (residuals, block
                starts, momenta) and the bytes sent are saved. Sources continue from its samples.
            extra: state of this rank's program, returned by `load_checkpoint`, such as a
                scheduler's or a random generator's state. It must be a plain value, and is restored
                equal and of the same types. Plain are None, bool, int, float, complex, str, bytes,
                list, tuple, set, dict with plain keys, OrderedDict, Counter, deque, NumPy's arrays
                and numbers. With `parallel_sgd.torch` imported, PyTorch's tensors are plain too.
            metric: the same on all ranks; lower is better. None or NaN: not compared.
            background: copy the state in memory, and write the copy while training continues.
                False, or with an MPI that does not let several threads communicate: return when the
                checkpoint is on the disk.
        Raises:
            UserError: on all ranks, if any rank has failed, if `extra` is not plain, or if this
                checkpoint or the previous background write could not be written. Earlier
                checkpoints are untouched.

        Collective. On a rank that only serves it does nothing, since the workers save the servers'
        state. Waits for the previous background write. A background error is raised on all ranks by
        the next step, `save`, `wait`, `close` or `load_checkpoint` of this folder, whichever comes
        first.
        Cost: in the foreground a copy of the state, whose memory is reused; on the disk the state
        of every rank.
        """
        if self._closed:
            raise UserError(
                f"Checkpoints({str(self.folder)!r}) is closed: it can save no more checkpoints"
            )
        if require_learner(learner).serves:
            return
        learner.access.require_own("save")
        # There is no checkpoint if a rank fails, and training has rolled back to before.
        learner.recovery.commit_once(lambda: self._save(learner, extra, metric, background))

    def _save(self, learner: Learner, extra: Any, metric: Any, background: bool) -> None:
        learner.meet()  # raises on a failed rank, instead of waiting below
        self.wait()
        numbers: dict[str, Any] = {}
        arrays: dict[str, HostArray] = {}
        problem = None
        try:
            tree, live = flatten(
                capture(learner)
            )  # collective: first, since the rest may fail on one rank
            metric = None if metric is None else _metric(metric)
            arrays = self._copies.of(live)
            numbers = {
                "state": tree,
                "weight": weight_of(learner.state),
                "bytes_sent": learner.bytes_sent,
                "extra": to_json("extra", extra),
            }
        except UserError as error:
            problem = str(error)
        except MemoryError as error:
            problem = f"not enough memory for the copy of a checkpoint: {error}"
        learner.comm.raise_together(problem)
        manifest = self._manifest(learner, metric)
        background_comm = self._communicator(learner) if background else None
        comm = background_comm or learner.comm
        if comm.rank == 0:
            _, problem = self._attempt(self._lock_folder)
        lock = self._lock.hold_again()

        def write_external(folder: Path) -> files.Facts:
            written: files.Facts = {}
            for component in learner.runner.external:
                written |= component.write(str(folder.resolve()))
            return written

        def write() -> Path:
            try:
                return self._write(comm, problem, arrays, numbers, manifest, write_external)
            finally:
                lock.release()

        if background_comm is None:
            self._written = write()
        else:
            self._writing = InBackground(f"checkpoint of rank {comm.rank}", write)
            add_pending_write(self.folder, self._writing)
            learner.background_tasks.add(self._writing)

    def hold(self) -> None:
        """Keep other processes from saving in the folder, if the folder exists, before the first
        checkpoint.

        Raises:
            UserError: another process is saving there. The error names the process.

        Local, for one rank.
        """
        self._lock.hold(make=False)

    def wait(self) -> Path | None:
        """Wait until the background write is on the disk.

        Returns:
            The latest checkpoint written by this object.
        Raises:
            UserError: on all ranks, if the checkpoint could not be written.

        Collective.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            remove_pending_write(writing)
            with suppress(RanksLost):  # then the previous checkpoint is the newest
                self._written = writing.result()
        return self._written

    def close(self) -> None:
        """Wait as `wait` does, then free the ranks' communicator and the memory of copies.

        Nothing more can be saved after that. Closing twice is allowed. The end of a `with` block
        closes the object. On an error the block ends at once, and the background write continues.

        Raises:
            UserError: as `wait`.

        Collective.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.wait()
        finally:
            self._release()

    def _release(self) -> None:
        self._lock.release()
        self._copies = HostCopies()
        self._close_communicator()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, frames: object) -> None:
        if error is None:
            self.close()
        elif isinstance(error, SharedError) and not self.writing:
            self._release()
        self._lock.release()
        self._closed = True

    @property
    def writing(self) -> bool:
        """Return whether this rank's background write is still running. Local."""
        return self._writing is not None and not self._writing.done

    def latest(self) -> Path | None:
        """Return the newest checkpoint in the folder, by samples, or None. Local."""
        checkpoints = files.checkpoints_in(self.folder)
        return checkpoints[-1] if checkpoints else None

    def _communicator(self, learner: Learner) -> Communicator | None:
        """Return a communicator for the background, or None without support by MPI.

        Collective at the first call.
        """
        made_of = learner.comm, learner.world, learner.world.generation
        if self._comms is None or self._comms[:3] != made_of:
            self._close_communicator()
            try:
                self._comms = *made_of, learner.comm.duplicate()
            except SharedError:
                return None
        return self._comms[3]

    def _close_communicator(self) -> None:
        comms, self._comms = self._comms, None
        if comms is None:
            return
        _, world, generation, duplicate = comms
        if world.generation == generation:  # else the communicator is revoked
            duplicate.close()

    def _manifest(self, learner: Learner, metric: float | None) -> dict[str, Any]:
        return {
            "format": files.FORMAT,
            "parallel_sgd": __version__,
            "ranks": learner.comm.size,
            "samples": learner.samples,
            "metric": metric,
            **({"job": job} if (job := job_name()) else {}),
            **compatibility_facts(learner, self.facts),
        }

    def _write(
        self,
        comm: Communicator,
        problem: str | None,
        arrays: Mapping[str, HostArray],
        numbers: Mapping[str, Any],
        manifest: dict[str, Any],
        write_external: Callable[[Path], files.Facts],
    ) -> Path:
        """Write the state tree on all ranks, unless a rank has a problem. Collective on `comm`."""
        path = None
        if comm.rank == 0 and problem is None:
            path, problem = self._attempt(lambda: files.begin(self.folder, manifest["samples"]))
        gathered_begin = comm.allgather_object((path, problem, paths_of(self.folder)))
        path = cast(Path, gathered_begin[0][0])
        part = path and files.part_of(path)
        problem = problem or folder_difference([places for *_, places in gathered_begin], comm)
        if problem or any(problem for _, problem, _ in gathered_begin):
            if comm.rank == 0 and part:
                shutil.rmtree(part, ignore_errors=True)
            comm.raise_together(problem)
        written, problem = self._attempt(lambda: files.write_rank(part, comm.rank, arrays, numbers))
        if problem and not part.exists():
            rank = comm.world_ranks[comm.rank]
            problem += f" (rank {rank} on {comm.host}: do all ranks share this folder?)"
        if comm.rank == 0 and not problem:
            more, problem = self._attempt(lambda: write_external(part))
            written = {**written, **(more or {})}
        gathered = comm.allgather_object((written or {}, problem))
        if comm.rank == 0:
            manifest["files"] = {k: v for remote, _ in gathered for k, v in remote.items()}
            if not any(problem for _, problem in gathered):
                _, problem = self._attempt(lambda: files.publish(part, path, manifest))
                if problem is None:
                    self._retention.add(path, manifest)
                    report_status(Status.CHECKPOINT, str(path.resolve()))
            if part.exists():
                shutil.rmtree(part, ignore_errors=True)
            elif problem is None:
                what = "older checkpoints could not be removed from"
                _, problem = self._attempt(
                    lambda: self._retention.remove_old(path, self.keep), what
                )
        comm.raise_together(problem)
        return path

    def _lock_folder(self) -> None:
        """Make the folder, and keep other processes from writing to it. For one rank."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock.hold()

    def _attempt(
        self, work: Any, otherwise: str = "no checkpoint could be written to"
    ) -> tuple[Any, str | None]:
        """Run `work`. Return its result, and its error as a single line for the waiting ranks."""
        try:
            return work(), None
        except Exception as error:
            return None, f"{otherwise} {str(self.folder)!r}: {line_of(error)}"


def paths_of(folder: Path) -> tuple[str, str]:
    """Return the absolute path of a folder as given, and its path without links. Local."""
    return os.path.abspath(folder), os.path.realpath(folder)


def folder_difference(places: Sequence[tuple[str, str]], comm: Communicator) -> str | None:
    """Describe a difference between the ranks' folders of checkpoints, or return None.

    Args:
        places: the result of `paths_of` on each rank, in rank order.

    Local.
    """
    if any(len(set(names)) == 1 for names in zip(*places, strict=True)):
        return None
    rank = next(k for k, (name, _) in enumerate(places) if name != places[0][0])
    return (
        f"folder of checkpoints must be the same on all ranks: rank {comm.world_ranks[0]} has "
        f"{places[0][0]!r}, and rank {comm.world_ranks[rank]} has {places[rank][0]!r}"
    )


def _metric(metric: Any) -> float | None:
    """Check a metric. Return None if it cannot be compared."""
    if isinstance(metric, bool) or not isinstance(metric, Real):
        raise UserError(f"metric={metric!r} must be a number or None")
    return float(metric) if math.isfinite(metric) else None
