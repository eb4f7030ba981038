"""Texts that somebody has damaged, for readers of text files."""

from __future__ import annotations

import re

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

repeatable = settings(
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=300,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

NUMBER = re.compile(rb"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
EDITS = ["replace", "insert", "delete", "cut"]


@st.composite
def damaged(draw, contents, symbols):
    """One of `contents` with a few bytes replaced, inserted, or lost; most are of `symbols`."""
    content = bytearray(draw(st.sampled_from(contents)))
    byte = st.sampled_from(symbols) | st.integers(0, 255)
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(content)))
        kind = draw(st.sampled_from(EDITS))
        if kind == "insert":
            content.insert(place, draw(byte))
        elif kind == "replace":
            content[place : place + 1] = bytes([draw(byte)])
        elif kind == "delete":
            del content[place : place + draw(st.integers(1, 5))]
        elif draw(st.booleans()):  # seldom
            del content[place:]
    return bytes(content)
