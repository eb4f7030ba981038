"""Requests handled and answered at once by a server: table rows, state, and files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..communication.endpoint import as_bytes
from ..embedding import ServedTables, Table
from .requests import Request
from .served import ServedModel
from .wire import Kind, Malformed, Message, as_text, from_text

Array = npt.NDArray[Any]


def _pull_rows(model: ServedModel, tables: ServedTables, request: Request) -> Array:
    message = request.message
    _require_form(tables, message)
    return as_bytes(tables.pull(message.table, request.body.view(np.int64)))


def _push_rows(model: ServedModel, tables: ServedTables, request: Request) -> None:
    message, worker = request.message, request.worker
    ids, gradient = _ids_and_rows(tables, request)
    if message.clock > tables.row_clocks.get(worker, 0):  # else a repeated push, already applied
        tables.push(worker, message.table, ids, gradient, message.samples, message.factor)
        tables.row_clocks[worker] = message.clock


def _set_rows(model: ServedModel, tables: ServedTables, request: Request) -> None:
    tables.set(request.message.table, *_ids_and_rows(tables, request))


def _ids_and_rows(tables: ServedTables, request: Request) -> tuple[Array, Array]:
    """Split a body into ids, int64 [count], and rows, float32 [count, width]."""
    options, ids = _require_form(tables, request.message), 8 * request.message.count
    rows = request.body[ids:].view(np.float32).reshape(-1, options.width)
    return request.body[:ids].view(np.int64), rows


def _require_form(tables: ServedTables, message: Message) -> Table:
    """Check that the message's table exists and that the body has the right length.

    A body has ids, int64 [count]. PUSH_ROWS and SET_ROWS append rows, float32 [count, width].

    Returns:
        The table's options.
    """
    if message.table >= len(tables.options):
        known = ", ".join(f"{i}: {options.name!r}" for i, options in enumerate(tables.options))
        raise Malformed(f"table={message.table} is not known; there are {known or 'none'}")
    options = tables.options[message.table]
    row = 0 if message.kind == Kind.PULL_ROWS else 4 * options.width
    required = (8 + row) * message.count
    if message.body != required:
        raise Malformed(
            f"body={message.body} of {message.kind.name} with {message.count} ids of table "
            f"{options.name!r} must be {required}: does the worker have another width?"
        )
    return options


DirectRequest = Callable[[ServedModel, ServedTables, Request], Array | None]

DIRECT_REQUESTS: dict[Kind, DirectRequest] = {
    Kind.PULL_ROWS: _pull_rows,
    Kind.PUSH_ROWS: _push_rows,
    Kind.SET_ROWS: _set_rows,
    Kind.PULL_STATE: lambda model, tables, request: model.state(),
    Kind.PUSH_STATE: lambda model, tables, request: model.set_state(request.body),
    Kind.PUSH_BACKUP: lambda model, tables, request: model.set_backup(request.worker, request.body),
    Kind.COPY_TABLES: lambda model, tables, request: tables.copy(),
    Kind.WRITE_TABLES: lambda model, tables, request: tables.write(as_text(request.body)),
    Kind.ASK_WRITTEN: lambda model, tables, request: from_text(tables.written()),
    Kind.LOAD_TABLES: lambda model, tables, request: tables.load(as_text(request.body)),
    Kind.COUNT_TABLES: lambda model, tables, request: as_bytes(tables.counts()),
}
"""A handler for each kind of request. Returns the body of the answer."""
