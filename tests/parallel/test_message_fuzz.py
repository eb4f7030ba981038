"""Random messages to a server, whose checksums fit: each is answered, and the server lives on."""

from __future__ import annotations

import os
from collections import Counter
from random import Random

import numpy as np
import pytest
from served_training import asynchronous, learner_of

import parallel_sgd as psgd
from parallel_sgd import UserError, simulate
from parallel_sgd.errors import SharedError
from parallel_sgd.parameter_server import Kind, Message
from parallel_sgd.parameter_server.conversation import Ask
from parallel_sgd.parameter_server.wire import ANSWERS, NAMES, _checksum

MESSAGES = int(os.environ.get("PARALLEL_SGD_FUZZ_MESSAGES", "800"))

TABLE = psgd.Embedding(name="t", width=2, optimizer=psgd.Adagrad(lr=0.1), entry_count=2)

#: What does not end training, or the worker's part in it; and is answered at once.
KINDS = [kind for kind in ANSWERS if kind not in (Kind.LEAVE, Kind.FAIL, Kind.WRITE_TABLES)]

NUMBERS = (0, 0, 1, 2, 3, 8, 24, -1, 2**31, 2**53 - 1, 2**53, 2**62, -(2**63))


class Raw:
    """In the place of a message: its header has any numbers."""

    def __init__(self, kind: Kind, sent: int, **values: int) -> None:
        self.kind, self.body = kind, sent
        self._header = Message(kind=kind, body=sent).packed()
        for name, value in values.items():
            self._header[1 + NAMES.index(name)] = value
        self._header[0] = _checksum(self._header)

    def packed(self) -> np.ndarray:
        return self._header


def random_ask(random: Random, right: dict[str, int], whole: int) -> Ask:
    kind = random.choice(KINDS)
    names = [name for name in NAMES if name not in ("kind", "body")]
    values = {**right, **{random.choice(names): random.choice(NUMBERS) for _ in range(2)}}
    count = random.choice((0, 1, 2, 3))
    if random.random() < 0.5:
        values = right | {"count": count}
    size = random.choice((0, 8 * count, 16 * count, whole, 2 * whole, random.randrange(300)))
    body = np.frombuffer(random.randbytes(size), np.uint8)
    if random.random() < 0.5:
        body = np.frombuffer(np.arange(size, dtype=np.float64).tobytes()[:size], np.uint8)
    # What announces a body and sends none is waited for, until its worker is given up.
    announced = random.choice(NUMBERS) if size and random.random() < 0.1 else size
    return Ask(0, Raw(kind, size, **{**values, "body": announced}), body if size else None)


@pytest.mark.filterwarnings("ignore")  # NumPy's, about numbers that are no gradients
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_random_messages(mode, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # bodies are paths, too

    def body(comm):
        learner = learner_of(
            comm, asynchronous(servers=1, mode=mode, tables=(TABLE,)), psgd.Adam(lr=0.1)
        )
        answers = Counter()
        if not learner.serves:
            client, random = learner.state.client, Random(mode)
            for number in range(MESSAGES):
                right = {"clock": client.clock + 1, "version": client.versions[0], "samples": 1}
                ask = random_ask(random, right, client.parts[0].bytes)
                try:
                    client.ask([ask])
                except SharedError as error:
                    raise AssertionError(f"message {number} has ended training") from error
                except UserError as error:
                    assert "\n" not in str(error) and str(error), number
                    answers["refused"] += 1
                else:
                    answers["answered"] += 1
            assert min(answers.values()) > MESSAGES // 20, answers
            client.ask([Ask(0, Message(kind=Kind.COUNT_TABLES))])
        learner.finish()
        return sum(answers.values())

    assert simulate(2, body, timeout_s=20)[0] == MESSAGES
    assert os.listdir() == []
