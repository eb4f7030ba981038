"""Ports for servers that a test starts later."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """Return a free port of this host that no other program gets by chance in the meantime.

    Below the ports from which Linux takes those of clients (32768 and above).
    """
    for port in random.sample(range(20_000, 32_000), 1000):
        with socket.socket() as asked:
            try:
                asked.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")
