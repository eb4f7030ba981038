"""Format of messages: a header of 16 int64, including a checksum, and a body of plain numbers.

Nothing is pickled. A server checks every field before use.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, fields
from enum import IntEnum

import numpy as np

from ..communication.endpoint import HEADER_LENGTH, Bytes, Header
from ..errors import UserError

FORM = 0x5053_4744_0002  #: version of the header's format
PRIME = (1 << 61) - 1  # a prime: every flipped bit changes the checksum, even the highest
LARGEST = 1 << 53  #: above every field except the factor and the bits


class Kind(IntEnum):
    """Kinds of requests and answers."""

    # requests of workers
    PUSH = 1  #: body: an encoded vector. Answer: MODEL
    PULL = 2  #: Answer: MODEL
    PULL_ROWS = 3  #: body: ids. Answer: ROWS
    PUSH_ROWS = 4  #: body: ids, and a gradient row of each. Answer: DONE
    PULL_STATE = 5  #: Answer: STATE
    PUSH_STATE = 6  #: body: as that of STATE. Answer: DONE
    PUSH_BACKUP = 7  #: body: the model pulled by this worker. Answer: DONE
    COPY_TABLES = 8  #: keep a copy of all rows as they are now. Answer: DONE
    WRITE_TABLES = 9  #: begin to write the copy; body: path of a folder. Answer: DONE
    ASK_WRITTEN = 10  #: Answer: TEXT, empty until the files are complete
    LOAD_TABLES = 11  #: body: the path of a folder. Answer: DONE
    COUNT_TABLES = 12  #: Answer: STATE, int64 counts of every table
    MEET = 13  #: Answer: DONE, once all workers have asked
    LEAVE = 14  #: no more pushes; body: statistics. Answer: FINAL, once all workers have asked
    FAIL = 15  #: a problem of this worker; body: text. Answer: FAILED
    SUM_SAMPLES = 16  #: samples in a step. Answer: DONE with the sum, once all have asked
    SET_ROWS = 17  #: body: as that of PUSH_ROWS, with values. Answer: DONE
    AGREE_ON_WHOLE = 18  #: samples of a whole minibatch. Answer: DONE, once all have asked
    # answers of servers
    MODEL = 32
    ROWS = 33
    STATE = 34
    DONE = 35
    TEXT = 36
    FINAL = 37  #: body: the model, then the statistics of all workers
    HEARTBEAT = 38  #: the answer is delayed; restarts the worker's timeout
    REFUSED = 39  #: body: text. The request has changed nothing
    FAILED = 40  #: body: text. Training has failed for all


ANSWERS = dict.fromkeys((kind for kind in Kind if kind < Kind.MODEL), Kind.DONE) | {
    Kind.PUSH: Kind.MODEL,
    Kind.PULL: Kind.MODEL,
    Kind.PULL_ROWS: Kind.ROWS,
    Kind.PULL_STATE: Kind.STATE,
    Kind.COUNT_TABLES: Kind.STATE,
    Kind.ASK_WRITTEN: Kind.TEXT,
    Kind.LEAVE: Kind.FINAL,
    Kind.FAIL: Kind.FAILED,
}
"""The answer to each request, unless the request is refused or training has failed."""


class Malformed(UserError):
    """An invalid message."""


@dataclass(kw_only=True)
class Message:
    """The fields of a header."""

    kind: Kind
    table: int = 0  #: number of a table, from 0
    clock: int = 0  #: pushes of this worker so far, this one included
    version: int = 0  #: of the model; in a request, of the latest answered model
    samples: int = 0  #: in a push, of its gradient; in an answer, seen by all workers
    body: int = 0  #: length of the body in bytes
    count: int = 0  #: of ids; 1 in a push that was applied before ranks failed
    factor: float = 1.0  #: of the learning rate, for this push
    bits: float = 32  #: per value of a push
    staleness: int = 0  #: updates between this worker's pull and its push
    queued_ns: int = 0  #: time from the request's arrival to the start of its handling
    applied_ns: int = 0  #: time of handling
    held_ns: int = 0  #: time of holding back the answer

    def packed(self) -> Header:
        header = np.zeros(HEADER_LENGTH, np.int64)
        values = [getattr(self, name) for name in NAMES]
        for place in FLOAT_FIELDS:
            values[place] = struct.unpack("q", struct.pack("d", values[place]))[0]
        header[1 : 1 + len(NAMES)] = values
        header[0] = _checksum(header)
        return header


NAMES = tuple(field.name for field in fields(Message))
FLOAT_FIELDS = [NAMES.index(name) for name in ("factor", "bits")]


def unpacked(header: Header) -> Message:
    """Parse and check a header.

    Raises:
        Malformed: the header is damaged, of a different format, or has an invalid field.
    """
    if len(header) != HEADER_LENGTH or header[0] != _checksum(header):
        raise Malformed("a message's header is damaged, or of another version of parallel_sgd")
    values = dict(zip(NAMES, header[1:].tolist(), strict=False))
    if values["kind"] not in set(Kind):
        raise Malformed(f"kind={values['kind']} of a message is not known")
    kind = Kind(values.pop("kind"))
    fractions = {}
    for name in (NAMES[place] for place in FLOAT_FIELDS):
        value = struct.unpack("d", struct.pack("q", values.pop(name)))[0]
        if not 0 <= value < math.inf:
            raise Malformed(f"{name}={value} of a message must be a finite number, at least 0")
        fractions[name] = value
    for name, value in values.items():
        if not 0 <= value < LARGEST:
            raise Malformed(f"{name}={value} of a message must be from 0 to {LARGEST - 1}")
    return Message(kind=kind, **fractions, **values)


def _checksum(header: Header) -> int:
    """Return a checksum of all numbers after the first."""
    checksum = FORM
    for number in header[1:].tolist():
        checksum = (31 * checksum + number) % PRIME
    return checksum


def as_text(body: Bytes) -> str:
    """Decode a body of UTF-8."""
    return body.tobytes().decode(errors="replace")


def from_text(text: str) -> Bytes:
    """Encode a text as a body."""
    return np.frombuffer(text.encode(), np.uint8)
