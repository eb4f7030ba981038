"""Start a model from the final model of another run: CNTK's seed model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...data.readers.files import npz_member, npz_names
from ...errors import UserError
from ...kernels import array_module
from ...parameters import Parameters
from ...validation import checked_path

MODEL = "model.npz"  #: file in a run's folder


def read_model(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the model of a run, by any algorithm on any number of ranks: arrays by name.

    Args:
        path: the run's folder, or a ``model.npz``.
    Raises:
        UserError: there is no model, or the file is not a model.

    Nothing in the file is executed. Local.
    """
    file = checked_path("initial_model", path, "run's folder or model.npz")
    file = file / MODEL if file.is_dir() else file
    try:
        return {name: np.array(npz_member(file, name)) for name in npz_names(file)}
    except UserError as error:
        raise UserError(f"initial_model={str(path)!r} is not a model.npz: {error}") from error


def set_parameters(
    parameters: Parameters, values: Mapping[str, Any], *, name: str | Path = "initial_model"
) -> None:
    """Set a model's parameters, before the learner is created.

    Args:
        parameters: changed.
        values: an array for each parameter, of its shape, by name.
        name: the source of the values, for errors.
    Raises:
        UserError: names or shapes differ, or a value is not finite. Nothing has changed then.

    Local.
    """
    require_shapes(parameters.shapes, values, name=name)
    for key, value in values.items():
        require_finite(key, value, name=name)
    xp = array_module(parameters.flat)
    for key, value in values.items():
        parameters[key][...] = xp.asarray(value, parameters.dtype)


def require_shapes(
    wanted: Mapping[str, Any],
    values: Mapping[str, Any],
    *,
    name: str | Path,
    kinds: Mapping[str, str] | None = None,
) -> None:
    """Check the names and shapes of values against a model. Local.

    Args:
        wanted: the shape of each parameter, by name.
        kinds: the kind of each value, by name, if not "parameter".
        name: the source of the values, for errors.
    Raises:
        UserError: names or shapes differ.
    """
    shapes = {key: list(np.shape(value)) for key, value in values.items()}
    needed = {key: list(shape) for key, shape in wanted.items()}
    for key in [*needed, *shapes]:
        if shapes.get(key) != needed.get(key):
            raise UserError(
                f"{name} is of another model: its {(kinds or {}).get(key, 'parameter')} {key} is "
                f"{shapes.get(key, 'missing')}, but here {needed.get(key, 'there is none')}"
            )


def require_finite(key: str, value: Any, *, name: str | Path) -> None:
    """Check that a parameter holds finite numbers. Local."""
    if value.dtype.kind != "f" or not np.isfinite(value).all():
        raise UserError(f"{name}: its parameter {key} must hold finite numbers")
