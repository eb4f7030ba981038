"""Checkpoints: all of a learner, written while training goes on."""

from __future__ import annotations

import math
import os
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, Self, cast

from ...array_files import require_safetensors
from ...communication import Communicator, InBackground, is_rank_failure
from ...communication.job_environment import job_name
from ...communication.liveness.rank_status import report_checkpoint
from ...errors import SharedError, SharedProblem, UserError
from ...options import values_of
from ...plain_values import to_json
from ...state import weight_of
from ...validation import checked_path, integer, line_of, mapping
from ...version import __version__
from ..learner import Learner, require_learner
from ..state.state_tree import HostArray, HostCopies, capture, flatten
from . import files
from .folder_lock import FolderLock

_pending_writes: defaultdict[Path, list[InBackground[Path]]] = defaultdict(list)
"""What ranks of this process write in the background, by folder, until somebody has been told."""
_pending_lock = threading.Lock()


class Checkpoints:
    """A folder of checkpoints that keeps the latest ones, and the best.

    Args:
        folder: the same on all ranks, on a file system that all share; made with the first
            checkpoint. From then on no other process can save there, until this one closes it or
            ends.
        keep: how many of the latest to keep, at least 1; beside them the one with the lowest
            `metric` stays. Older ones are removed.
        facts: what else must be the same when a checkpoint is taken up again, by name (a seed,
            say); compared by `repr`.
    Raises:
        UserError: a value that is not possible, or the library safetensors is missing.

    Every rank makes one, and closes it at the end of training: by `close`, or in a `with` block. An
    error in the background that nobody is told of by then is printed as the program ends, with exit
    code 1. Local.

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
        keep: int = 3,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        require_safetensors()
        self.folder = checked_path("folder", folder)
        self.keep = integer("keep", keep, 1)
        self.facts = mapping("facts", facts)
        self._lock = FolderLock("folder", self.folder)
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
        """Save all of a learner, between any two of its steps; training is not affected.

        Args:
            learner: saved are its parameters, the optimizer's state, the algorithm's (residuals,
                block starts, momenta) and the bytes sent; sources go on from its samples.
            extra: what this rank's program wants back from `load_checkpoint`, such as a scheduler's
                or a random generator's state: a plain value, which comes back equal and of the same
                types. Plain are None, bool, int, float, complex, str, bytes, list, tuple, set, dict
                with keys of such, OrderedDict, Counter, deque, NumPy's arrays and numbers; where
                `parallel_sgd.torch` is imported PyTorch's tensors, too.
            metric: the same on all ranks; lower is better; None or NaN: not to be compared.
            background: write while training goes on, after a copy in memory. False, or an MPI
                that does not let several threads communicate: return when it is on the disk.
        Raises:
            UserError: on all ranks, if any of them has failed, or `extra` is or holds something
                else, or this checkpoint or the one before it, written in the background, could not
                be written. The earlier ones are untouched.

        Collective; on a rank that only serves it does nothing, since the workers save what servers
        hold. Waits until the checkpoint before is written. What goes wrong in the background is
        raised on all ranks by the next step, `save`, `wait`, `close` or `load_checkpoint` of this
        folder, whichever comes first. Cost in the foreground: a copy of the state, whose memory is
        kept for the next one; on the disk the state of every rank.
        """
        if self._closed:
            raise UserError(f"Checkpoints({str(self.folder)!r}) are closed: nothing more is saved")
        if require_learner(learner).serves:
            return
        learner.require_own_model("save")
        if learner.recovery is None:
            self._save(learner, extra, metric, background)
        else:  # where a rank dies there is no checkpoint, and the others have gone back
            learner.recovery.fault_tolerant(lambda: self._save(learner, extra, metric, background))

    def _save(self, learner: Learner, extra: Any, metric: Any, background: bool) -> None:
        learner.meet()  # a rank that has failed would be waited for below
        self.wait()
        numbers: dict[str, Any] = {}
        arrays: dict[str, HostArray] = {}
        problem = None
        try:
            tree, live = flatten(capture(learner))  # collective: before what may fail on one rank
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
            problem = f"no memory for the copy of a checkpoint: {error}"
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
            _add_pending(self.folder, self._writing)
            learner.beside(self._writing)

    def hold(self) -> None:
        """Keep other processes from saving in the folder, if it is there, before the first
        checkpoint. Local, for one rank.

        Raises:
            UserError: one of them does; says which.
        """
        self._lock.hold(make=False)

    def wait(self) -> Path | None:
        """Wait until what is written in the background is on the disk.

        Returns:
            The latest checkpoint that this object has written.
        Raises:
            UserError: on all ranks, if it could not be written.

        Collective.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            _remove_pending(writing)
            if not is_rank_failure(
                writing.error()
            ):  # a rank has died: the one before is the newest
                self._written = writing.result()
        return self._written

    def close(self) -> None:
        """Wait as `wait` does, and give back the ranks' communicator and the memory of copies.

        Then nothing more can be saved. To close it again does nothing. At the end of a `with` block
        it is closed; by an error the block ends at once, and what is being written goes on.

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
        """Whether this rank still writes in the background. Local."""
        return self._writing is not None and not self._writing.done

    def latest(self) -> Path | None:
        """The newest checkpoint in the folder, by samples; None where there is none. Local."""
        checkpoints = files.checkpoints_in(self.folder)
        return checkpoints[-1] if checkpoints else None

    def _communicator(self, learner: Learner) -> Communicator | None:
        """For the background; None where MPI does not allow it. Collective at the first call."""
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
        if world.generation == generation:  # else it is revoked
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
        """Write, on all ranks, the state tree, unless one has a problem. Collective on `comm`."""
        path = None
        if comm.rank == 0 and problem is None:
            path, problem = self._attempt(lambda: files.begin(self.folder, manifest["samples"]))
        begun = comm.allgather_object((path, problem, paths_of(self.folder)))
        path = cast(Path, begun[0][0])
        part = path and files.part_of(path)
        problem = problem or folder_difference([places for *_, places in begun], comm)
        if problem or any(problem for _, problem, _ in begun):
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
                    report_checkpoint(path)
            if part.exists():
                shutil.rmtree(part, ignore_errors=True)
            elif problem is None:
                what = "older checkpoints could not be removed from"
                _, problem = self._attempt(lambda: self._remove_old(path), what)
        comm.raise_together(problem)
        return path

    def _lock_folder(self) -> None:
        """Make the folder, and keep other processes from writing to it. For one rank."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock.hold()

    def _remove_old(self, path: Path) -> None:
        """Of the checkpoints in the folder keep the latest, the best, and this new one; and of
        those of this job, too, which may be started again by itself."""
        whole, own, job = {}, set(), job_name()
        for saved in files.checkpoints_in(self.folder):
            try:
                manifest = files.read_manifest(saved)
            except UserError:  # another's affair: neither counted nor removed
                continue
            whole[saved] = manifest["metric"]
            if manifest.get("job") == job:
                own.add(saved)
        samples = {saved: files.sort_key(saved.name)[0] for saved in whole}
        again = {saved for saved in whole if samples[saved] == samples[path] and saved != path}
        replaced = {saved for saved in again if not _is_better(whole[saved], whole[path])}
        left, kept = [saved for saved in whole if saved not in replaced], {path}
        for some in (left, [saved for saved in left if saved in own]):
            rated = [saved for saved in some if whole[saved] is not None]
            kept |= {*some[-self.keep :]}
            kept |= {*sorted(rated, key=lambda saved: (whole[saved], -samples[saved]))[:1]}
        for saved in whole.keys() - kept:
            files.remove(saved)

    def _attempt(
        self, work: Any, otherwise: str = "no checkpoint could be written to"
    ) -> tuple[Any, str | None]:
        """What `work` returns, and what went wrong in one line: others wait to be told."""
        try:
            return work(), None
        except Exception as error:
            return None, f"{otherwise} {str(self.folder)!r}: {line_of(error)}"


def _add_pending(folder: Path, writing: InBackground[Path]) -> None:
    with _pending_lock:
        known = _pending_writes[folder.resolve()]
        known[:] = [other for other in known if not other.done or other.failed] + [writing]


def _remove_pending(writing: InBackground[Path]) -> None:
    with _pending_lock:
        for folder, known in list(_pending_writes.items()):
            known[:] = [other for other in known if other is not writing]
            if not known:
                del _pending_writes[folder]


def wait_for_pending_writes(path: Path) -> SharedProblem | None:
    """Until nothing that this process writes concerns a path: that of a checkpoint, of a folder of
    them, or of a run. Local.

    Returns:
        What went wrong there, if nobody has been told yet.
    Raises:
        what is not the user's to mend.
    """
    here = path.resolve()
    with _pending_lock:
        folders = (here, here.parent, here / files.CHECKPOINTS)
        concerned = [writing for folder in folders for writing in _pending_writes.get(folder, ())]
    problems: dict[str, None] = {}
    for writing in concerned:
        reported = writing.done and not writing.failed
        error = writing.error()
        _remove_pending(writing)
        if reported:
            continue
        if isinstance(error, UserError):
            problems[str(error)] = None
        elif error is not None:
            raise error
    return SharedProblem("; ".join(problems)) if problems else None


def compatibility_facts(learner: Learner, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What a learner must have in common with a checkpoint that it takes up."""
    parameters = learner.parameters
    return {
        "algorithm": _options(learner.algorithm),
        "optimizer": _options(learner.local_step.optimizer),
        "layout": {name: list(shape) for name, shape in parameters.shapes.items()},
        "dtype": str(parameters.dtype),
        "facts": {name: repr(value) for name, value in facts.items()},
    }


def paths_of(folder: Path) -> tuple[str, str]:
    """Return where a folder is: its whole path as it is called, and without links. Local."""
    return os.path.abspath(folder), os.path.realpath(folder)


def folder_difference(places: Sequence[tuple[str, str]], comm: Communicator) -> str | None:
    """Say where ranks have other folders of checkpoints than each other; None where they do not.

    Args:
        places: `paths_of` each rank's, in rank order.

    Local.
    """
    if any(len(set(names)) == 1 for names in zip(*places, strict=True)):
        return None
    odd = next(k for k, (name, _) in enumerate(places) if name != places[0][0])
    return (
        f"folder of checkpoints must be the same on all ranks: rank {comm.world_ranks[0]} has "
        f"{places[0][0]!r}, and rank {comm.world_ranks[odd]} has {places[odd][0]!r}"
    )


def _is_better(metric: float | None, other: float | None) -> bool:
    """Whether a checkpoint of the one metric is better than one of the other."""
    return metric is not None and (other is None or metric < other)


def _metric(metric: Any) -> float | None:
    """A number, or None where it cannot be compared."""
    if isinstance(metric, bool) or not isinstance(metric, Real):
        raise UserError(f"metric={metric!r} must be a number or None")
    return float(metric) if math.isfinite(metric) else None


def _options(options: Any) -> dict[str, Any]:
    """The class of a dataclass of options, and the `repr` of each."""
    values = {name: repr(value) for name, value in values_of(options).items()}
    return {"name": type(options).__name__, "options": values}
