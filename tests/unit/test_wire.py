"""The header of a parameter server's messages: every field comes through, and damage is seen."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import pytest

from parallel_sgd import UserError
from parallel_sgd.communication import HEADER_LENGTH
from parallel_sgd.parameter_server import Kind, Malformed, Message
from parallel_sgd.parameter_server.server import HANDLERS
from parallel_sgd.parameter_server.wire import NAMES, _checksum, unpacked

FULL = Message(
    kind=Kind.PUSH,
    table=3,
    clock=17,
    version=2**40 + 1,
    samples=2**33,
    body=2**35 + 5,
    count=11,
    factor=0.1,
    bits=0.25,
    staleness=4,
    queued_ns=5,
    applied_ns=6,
    held_ns=2**52,
)


def with_checksum(header):
    """The header with a checksum that fits: what only a program that means it can send."""
    header[0] = _checksum(header)
    return header


def test_every_field_has_a_place_of_its_own():
    values = [getattr(FULL, name) for name in NAMES]
    assert len({*values}) == len(fields(Message)) == len(NAMES) < HEADER_LENGTH
    assert FULL.packed().shape == (HEADER_LENGTH,)
    assert FULL.packed().dtype == np.int64


@pytest.mark.parametrize(
    "message",
    [
        FULL,
        *(Message(kind=kind) for kind in Kind),
        *(Message(kind=Kind.PUSH, factor=factor) for factor in (0.0, 5e-324, 1.0, 1e308)),
    ],
)
def test_a_header_comes_through(message):
    assert unpacked(message.packed()) == message


@pytest.mark.parametrize("place", range(HEADER_LENGTH))
@pytest.mark.parametrize("bit", [0, 1, 31, 62, 63])
def test_a_flipped_bit_is_refused(place, bit):
    header = FULL.packed()
    header.view(np.uint64)[place] ^= np.uint64(1 << bit)
    with pytest.raises(Malformed, match=r"^a message's header is damaged, or of another version"):
        unpacked(header)


@pytest.mark.parametrize("one", range(1, len(NAMES)))
def test_exchanged_fields_are_refused(one):
    header = FULL.packed()
    header[[one, one + 1]] = header[[one + 1, one]]
    with pytest.raises(Malformed, match="damaged"):
        unpacked(header)


@pytest.mark.parametrize(
    "header",
    [
        np.zeros(HEADER_LENGTH, np.int64),
        np.full(HEADER_LENGTH, -1),
        FULL.packed()[:-1],
        np.append(FULL.packed(), 0),
    ],
    ids=["zeros", "ones", "short", "long"],
)
def test_what_is_no_header(header):
    with pytest.raises(Malformed, match="damaged"):
        unpacked(header)


@pytest.mark.parametrize("kind", [0, -1, 31, 41, 2**40])
def test_a_kind_that_is_not_known(kind):
    header = FULL.packed()
    header[1 + NAMES.index("kind")] = kind
    with pytest.raises(Malformed, match=rf"^kind={kind} of a message is not known"):
        unpacked(with_checksum(header))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("kind", "factor", "bits")])
def test_what_must_not_be_negative(name):
    header = FULL.packed()
    header[1 + NAMES.index(name)] = -2
    with pytest.raises(Malformed, match=rf"^{name}=-2 of a message must be from 0 to"):
        unpacked(with_checksum(header))


@pytest.mark.parametrize("factor", [-0.5, -5e-324, math.inf, -math.inf, math.nan])
def test_factors_that_no_rate_can_have(factor):
    with pytest.raises(Malformed, match=rf"^factor={factor} of a message must be a finite number"):
        unpacked(Message(kind=Kind.PUSH, factor=factor).packed())


def test_malformed_is_the_users_to_fix():
    assert issubclass(Malformed, UserError)


def test_requests_come_before_answers():
    requests = [kind for kind in Kind if kind < Kind.MODEL]
    assert requests == list(range(1, 1 + len(requests)))
    assert set(HANDLERS) == set(requests)
    assert {Kind.REFUSED, Kind.FAILED, Kind.HEARTBEAT, Kind.FINAL} <= {*Kind} - {*requests}
