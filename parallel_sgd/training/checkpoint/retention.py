"""Retention: a folder of checkpoints keeps the latest and the best."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...communication.job_environment import job_name
from ...errors import UserError
from . import files

KEEP = 3  #: default number of checkpoints to keep, beside the best one

Rating = tuple[float | None, str | None]  #: the metric of a checkpoint, and the job that wrote it


class Retention:
    """Removes old checkpoints from a folder. Local, for one rank.

    The metric and the job of each checkpoint are kept. Manifests written by this process are not
    read; any further manifest is read once, and again after a change.

    Args:
        folder: of the checkpoints.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[Path, tuple[tuple[int, int], Rating | None]] = {}

    def add(self, path: Path, manifest: Mapping[str, Any]) -> None:
        """Add a checkpoint that was just written."""
        self._known[path] = self._version(path), (manifest["metric"], manifest.get("job"))

    def remove_old(self, path: Path, keep: int) -> None:
        """Remove checkpoints, except the latest, the best, and the new checkpoint.

        The same number of checkpoints of this job is kept, too, since the job may be restarted
        automatically. Checkpoints with the same samples are replaced by the new checkpoint, unless
        their metric is better.

        Args:
            path: the new checkpoint.
            keep: number of latest checkpoints to keep.
        """
        whole, of_this_job, job = {}, set(), job_name()
        for saved in files.checkpoints_in(self._folder):
            facts = self._rating(saved)
            if facts is None:  # damaged or of another format: neither counted nor removed
                continue
            whole[saved], its_job = facts
            if its_job == job:
                of_this_job.add(saved)
        samples = {saved: files.sort_key(saved.name)[0] for saved in whole}
        same_samples = {
            saved for saved in whole if samples[saved] == samples[path] and saved != path
        }
        replaced = {saved for saved in same_samples if not _is_better(whole[saved], whole[path])}
        remaining, kept = [saved for saved in whole if saved not in replaced], {path}
        for group in (remaining, [saved for saved in remaining if saved in of_this_job]):
            rated = [saved for saved in group if whole[saved] is not None]
            kept |= {*group[-keep:]}
            kept |= {*sorted(rated, key=lambda saved: (whole[saved], -samples[saved]))[:1]}
        for saved in whole.keys() - kept:
            files.remove(saved)

    def _rating(self, path: Path) -> Rating | None:
        """Return metric and job of a checkpoint; None if damaged or of another format."""
        try:
            version = self._version(path)
            if path not in self._known or self._known[path][0] != version:
                self._known[path] = version, None
                self.add(path, files.read_manifest(path))
        except (OSError, UserError):
            return None
        return self._known[path][1]

    @staticmethod
    def _version(path: Path) -> tuple[int, int]:
        status = (path / files.MANIFEST).stat()
        return status.st_mtime_ns, status.st_size


def _is_better(metric: float | None, other: float | None) -> bool:
    return metric is not None and (other is None or metric < other)
