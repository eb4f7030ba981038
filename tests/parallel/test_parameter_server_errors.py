"""What parameter servers and their workers refuse, who is told, and that a server lives on."""

from __future__ import annotations

import re
import time
from collections import Counter

import numpy as np
import pytest
from invariants import same_bits
from served_training import (
    N,
    Serial,
    asynchronous,
    beside_and_apart,
    finished,
    gradient_at,
    learner_of,
    put_gradient,
    servers_of,
    starting_point,
    turns,
)

from parallel_sgd import SGD, Learner, Parameters, UserError, simulate
from parallel_sgd.communication import HEADER_LENGTH
from parallel_sgd.errors import SharedError
from parallel_sgd.parameter_server import Kind, Message
from parallel_sgd.parameter_server.conversation import Ask
from parallel_sgd.parameter_server.requests import Answers
from parallel_sgd.parameter_server.wire import NAMES, _checksum

pytestmark = pytest.mark.messages


def test_as_many_servers_as_ranks(comm):
    for servers in (comm.size + (comm.size == 1), comm.size + 1):
        message = rf"^servers={servers} must be less than the number of ranks, {comm.size}$"
        with pytest.raises(SharedError, match=message):
            Learner(starting_point(), SGD(lr=0.1), asynchronous(servers=servers), comm)


@pytest.mark.parametrize(
    ("roles", "servers", "message"),
    [
        (["worker", "auto", "server"], None, r"role='auto' on rank 1: if some ranks are .* all"),
        (
            ["worker", "worker", "worker"],
            None,
            r"role='worker' on all ranks: there must be workers",
        ),
        (["server", "server", "server"], None, r"role='server' on all ranks: there must be worker"),
        (["server", "worker", "worker"], 2, r"servers=2, but 1 ranks have role='server'$"),
    ],
)
def test_roles_that_do_not_fit(roles, servers, message):
    def body(comm):
        algorithm = asynchronous(role=roles[comm.rank], servers=servers)
        with pytest.raises(SharedError, match=f"^{message}"):
            Learner(starting_point(), SGD(lr=0.1), algorithm, comm)

    simulate(3, body, timeout_s=5)


def test_a_role_in_the_environment_that_is_none(monkeypatch):
    monkeypatch.setenv("PARALLEL_SGD_ROLE", "parameter server")
    message = (
        r"^PARALLEL_SGD_ROLE='parameter server' must be one of worker, server \(on ranks 0, 1\)$"
    )

    def body(comm):
        with pytest.raises(SharedError, match=message):
            Learner(starting_point(), SGD(lr=0.1), asynchronous(), comm)

    simulate(2, body, timeout_s=5)


@pytest.mark.parametrize("by_environment", [False, True])
def test_a_server_that_comes_first(by_environment, monkeypatch):
    """Any ranks may serve where each says what it is, itself or by whoever started it."""
    if by_environment:  # what a program says itself goes before it
        monkeypatch.setenv("TRAINING_ROLE", "PSERVER")

    def body(comm):
        servers = "auto" if by_environment else "server"
        algorithm = asynchronous(role=servers if comm.rank == 0 else "worker")
        learner = Learner(starting_point(), SGD(lr=0.1), algorithm, comm)
        assert learner.serves == (comm.rank == 0)
        assert (learner.comm.size, learner.comm.rank) == (
            (1, 0) if learner.serves else (2, comm.rank - 1)
        )
        if not learner.serves:
            put_gradient(learner, 0, 2)
            learner.step(samples=2)
        return finished(comm, learner)[0]

    assert len(set(simulate(3, body, timeout_s=5))) == 1


def test_a_worker_with_another_model(comm):
    parameters, culprit = starting_point(), comm.size - 2
    if comm.rank == culprit:
        parameters = Parameters({"W": np.zeros((N, 1)), "b": np.zeros(0)})
    make = lambda: Learner(parameters, SGD(lr=0.1), asynchronous(), comm)  # noqa: E731
    if comm.size == 1:
        make()
        return
    with pytest.raises(SharedError, match=r"^layout of the parameters must be the"):
        make()


def test_who_may_not_step(comm):
    learner = learner_of(comm, asynchronous(), SGD(lr=0.1))
    if learner.serves:
        message = rf"^rank {comm.rank} is a server and takes no steps: call learner\.finish\(\)"
        with pytest.raises(UserError, match=message):
            learner.step(samples=1)
    else:
        put_gradient(learner, 0, 1)
        learner.step(samples=1)
    final = finished(comm, learner)
    if not learner.serves:
        with pytest.raises(UserError, match=r"^step\(\) after finish\(\): this worker has dis"):
            learner.step(samples=1)
    learner.finish()
    assert same_bits(learner.parameters.flat, final)


def how_it_ends(comm, algorithm, value=np.nan):
    """The error on this rank, where the last worker cannot go on; its learner is gone then."""
    learner = Learner(starting_point(), SGD(lr=0.1), algorithm, comm)
    rank = comm.rank
    culprit = learner.comm.size - 1
    x = learner.parameters.flat
    try:
        for step in range(0 if learner.serves else 6):
            put_gradient(learner, step, 2)
            if rank != culprit:
                time.sleep(2e-3)
            elif step == 2 and value is None:
                learner.fail("label 12")
            elif step == 2:
                learner.gradient.flat[N // 2] = value
            learner.step(samples=2)
        learner.finish()
    except SharedError as error:
        assert learner.serves or np.isfinite(x).all() or rank == culprit
        learner.close()  # collective: all ranks have raised the error
        return str(error)
    return "no error"


@beside_and_apart
@pytest.mark.parametrize("value", [np.nan, np.inf, None], ids=["nan", "inf", "fail"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mode": "bounded", "staleness": 1},
        {"mode": "sync"},
        {"pipeline": True},
        {"currency": "deltas", "sync_steps": 2},
    ],
    ids=lambda options: ", ".join(map(str, options.values())) or "async",
)
def test_one_worker_that_cannot_go_on_ends_all(comm, apart, options, value):
    algorithm = asynchronous(servers=servers_of(comm, apart), **options)
    texts = comm.allgather_object(how_it_ends(comm, algorithm, value))
    assert len(set(texts)) == 1, texts
    what = {"deltas": "model"}.get(algorithm.currency, "gradient")
    said = "label 12" if value is None else f"the {what} is not finite: "
    culprit = comm.size - 1 - algorithm.servers
    assert re.match(rf"{re.escape(said)}.*\(on rank {culprit}\)$", texts[0]), texts[0]


def step_and_finish(learner):
    learner.step(samples=1)
    learner.finish()


def test_a_gradient_too_large_for_few_bits_ends_all(comm):
    parameters = starting_point(np.float32)
    learner = Learner(parameters, SGD(lr=0.1), asynchronous(gradient_bits=1), comm)
    learner.gradient.flat[:] = 1e35 if comm.rank == 0 else 1
    message = r"^the gradient is too large: .* gradient_bits=1; .* \(on rank 0\)$"
    with pytest.raises(SharedError, match=message):
        learner.finish() if learner.serves else step_and_finish(learner)
    if not learner.serves:  # the servers have ended: nothing may wait for them any more
        for ask in (learner.finish, learner.meet):
            with pytest.raises(SharedError, match=message):
                ask()


def test_errors_among_workers_call_them_by_their_ranks_in_the_world(comm):
    """Also in what is made of their communicator, as checkpoints do."""
    if comm.size != 3:
        return
    role = "server" if comm.rank == 0 else "worker"
    learner = Learner(starting_point(), SGD(lr=0.1), asynchronous(role=role), comm)
    if not learner.serves:
        assert (learner.comm.size, learner.comm.rank) == (2, comm.rank - 1)
        with pytest.raises(SharedError, match=r"differs: rank 1: 1; rank 2: 2$"):
            learner.comm.require_agreement({"n": comm.rank})
        with pytest.raises(SharedError, match=r"^bad \(on rank 2\)$"):
            learner.comm.raise_together("bad" if comm.rank == 2 else None)
        with (
            pytest.raises(SharedError, match=r"^bad \(on rank 1\)$"),
            learner.comm.duplicate() as apart,
        ):
            apart.raise_together("bad" if comm.rank == 1 else None)
        alone = learner.comm.split(comm.rank)
        with pytest.raises(SharedError, match=rf"^bad \(on rank {comm.rank}\)$"), alone:
            alone.raise_together("bad")
    learner.finish()


def header(checksum=True, **values):
    """A header with these numbers, whatever they are."""
    numbers = Message(kind=Kind.PUSH, clock=1).packed()
    for name, value in values.items():
        numbers[1 + NAMES.index(name)] = value
    numbers[0] = _checksum(numbers) if checksum else numbers[0]
    return numbers


class Raw:
    """In the place of a message: what is sent is this header."""

    kind = Kind.PUSH

    def __init__(self, header, body=0):
        self.header, self.body = header, body

    def packed(self):
        return self.header


BODY = np.zeros(24, np.uint8)
NO_TEXT = np.full(24, 0xFF, np.uint8)


def wrong_messages(client):
    """By what is said of them: messages that no worker sends, and their bodies."""
    right = {"clock": client.clock + 1, "version": client.versions[0], "samples": 1}
    push = lambda **values: Message(kind=Kind.PUSH, **{**right, **values})  # noqa: E731
    part = np.zeros(client.parts[0].bytes, np.uint8)
    whole = part.nbytes
    damaged = header(**right, body=24)
    damaged[5] ^= 4
    yield r"^bits=7 of this push are none of gradient_bits$", push(bits=7.0, body=whole), part
    yield r"^bits=inf of a message must be a fin", push(bits=np.inf, body=whole), part
    yield rf"^clock={client.clock} of this", push(clock=client.clock, body=whole), part
    yield rf"^clock={client.clock + 2} of", push(clock=client.clock + 2, body=whole), part
    yield r"^version=.* of this push must", push(version=right["version"] + 1, body=whole), part
    yield rf"^body=24 of this push must be {whole}", push(body=24), BODY
    yield rf"^body={whole} of this push must be 0", push(samples=0, body=whole), part
    yield rf"^body=0 of this push must be {whole}", push(), None
    yield r"^kind=77 of a message is not known", Raw(header(kind=77, body=24), 24), BODY
    yield r"^a message's header is damaged, or of another", Raw(damaged, 24), BODY
    yield r"^a message's header is damaged", Raw(np.zeros(HEADER_LENGTH, np.int64), whole), part
    yield r"^a message's header is damaged", Raw(np.zeros(40, np.int64), 24), BODY
    yield r"^samples=-5 of a message must be from 0 to", Raw(header(samples=-5, body=24), 24), BODY
    yield r"^factor=nan of a message must be a fin", push(factor=np.nan, body=whole), part
    for announced in (8, 48, 2**41):
        message = rf"^body={announced} of this message "
        yield message, Raw(header(body=announced), 24), BODY
    for kind in (Kind.MODEL, Kind.FINAL, Kind.REFUSED, Kind.FAILED, Kind.HEARTBEAT):
        yield rf"^a worker cannot send {kind.name}$", Message(kind=kind, body=24), BODY
    yield r"^table=5 is not known", Message(kind=Kind.PULL_ROWS, table=5, count=3, body=24), BODY
    yield r"^table=0 is not known", Message(kind=Kind.PUSH_ROWS, count=3, body=24), BODY
    yield r"^body=24 of the state must be", Message(kind=Kind.PUSH_STATE, body=24), BODY
    yield r"^body=24 must be|without delay", Message(kind=Kind.PUSH_BACKUP, body=24), BODY
    yield r"without delay", Message(kind=Kind.PUSH_BACKUP, body=whole), part
    yield r"^body=24 of the statistics is not pos", Message(kind=Kind.LEAVE, body=24), BODY
    yield r"has no tables$", Message(kind=Kind.LOAD_TABLES, body=24), BODY
    yield r"has no tables$", Message(kind=Kind.LOAD_TABLES, body=24), NO_TEXT
    yield r"^there is no copy of the tables", Message(kind=Kind.WRITE_TABLES, body=24), NO_TEXT


@beside_and_apart
def test_a_server_refuses_what_is_wrong_and_lives_on(comm, apart):
    """Refused messages change nothing: with them, the training is that without them."""
    learner = learner_of(comm, asynchronous(servers=servers_of(comm, apart)), SGD(lr=0.2))
    serial, refused = Serial(SGD(lr=0.2)), 0
    if not learner.serves:
        client, x = learner.state.client, learner.parameters.flat
        for step, worker in turns(learner, 3):
            m = 1 + (worker + step) % 3
            if worker == learner.comm.rank:
                client.pull(out=x)
                for message, wrong, its_body in wrong_messages(client):
                    with pytest.raises(UserError, match=message) as caught:
                        client.ask([Ask(0, wrong, its_body)])
                    assert not isinstance(caught.value, SharedError)
                    refused += 1
                put_gradient(learner, step, m)
                client.push(learner.gradient.flat, None, m, 1.0, out=x)
            serial.step(gradient_at(serial.x, worker, step, m), m)
        assert refused == 3 * 31
    final = finished(comm, learner)
    if not learner.serves:
        assert same_bits(final, serial.x)
        assert [worker.pushes for worker in learner.state.table] == [3] * learner.comm.size


class NoAnswer:
    """In the place of a server's answer: other numbers."""

    kind = Kind.MODEL

    def __init__(self, message, **values):
        self.body, self._header = message.body, message.packed()
        for name, value in values.items():
            self._header[1 + NAMES.index(name)] = value
        self._header[0] = _checksum(self._header) if values else 0

    def packed(self):
        return self._header


NO_ANSWERS = {
    "damaged": ({}, "a message's header is damaged, or of another version of parallel_sgd"),
    "a request": ({"kind": Kind.PULL}, "kind=PULL is no answer to PULL"),
    "another": ({"kind": Kind.DONE}, "kind=DONE is no answer to PULL"),
    "longer": ({"body": 1 << 40}, rf"body={1 << 40} of this answer must be \d+"),
}


@pytest.fixture
def servers_send(monkeypatch):
    """Sets what sends answers: it is called with what would send them first."""
    right = Answers.send

    def give(send):
        def sends(own, *given, **options):
            send(right, own, *given, **options)

        monkeypatch.setattr(Answers, "send", sends)

    return give


@beside_and_apart
@pytest.mark.parametrize("name", NO_ANSWERS)
def test_after_nonsense_from_a_server_the_next_answer_is_right(on_ranks, servers_send, apart, name):
    """Nothing of the conversation is left over, with this server or with others."""
    values, said = NO_ANSWERS[name]

    def body(comm):
        learner = learner_of(comm, asynchronous(servers=servers_of(comm, apart)), SGD(lr=0.2))
        if not learner.serves:
            client, x = learner.state.client, learner.parameters.flat
            before = x.copy()
            for _ in range(2):
                with pytest.raises(UserError, match=rf"^the server on rank \d .* answer: {said}$"):
                    client.pull(out=x)
                assert same_bits(x, before)
            client.pull(out=x)
            assert same_bits(x, starting_point().flat)
        learner.finish()

    def wrong(right, self, worker, message, body=None, *, of=None):
        sent = self.__dict__.setdefault("sent", Counter())
        sent[worker] += message.kind == Kind.MODEL
        if message.kind == Kind.MODEL and sent[worker] <= 2:
            message = NoAnswer(message, **values)
        right(self, worker, message, body, of=of)

    servers_send(wrong)
    on_ranks(body)


def test_an_answer_that_is_not_as_long_as_announced(on_ranks, servers_send):
    def shorter(right, self, worker, message, body=None, *, of=None):
        if message.kind == Kind.STATE:
            body = body[:-8]
        right(self, worker, message, body, of=of)

    def body(comm):
        learner = learner_of(comm, asynchronous(), SGD(lr=0.2))
        if not learner.serves:
            client = learner.state.client
            with pytest.raises(UserError, match=r"^a server's answer differs in length from"):
                client.ask_all(Kind.PULL_STATE)
            client.pull(out=learner.parameters.flat)
        learner.finish()

    servers_send(shorter)
    on_ranks(body)
