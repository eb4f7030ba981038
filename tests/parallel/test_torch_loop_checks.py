"""A loop that trains wrongly without an error is warned of, once; one that is right never."""

from __future__ import annotations

import warnings
from collections import deque

import pytest
import torch
from few_weights import errors_of
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch_models import MLP, Branches, batch, learner_of, made

import parallel_sgd as psgd

pytestmark = [pytest.mark.few_ranks, pytest.mark.threads(1, 2), pytest.mark.ranks(2)]

STEPS = 40

ALGORITHMS = {
    "every step": psgd.DataParallelSGD(),
    "overlap": psgd.DataParallelSGD(overlap=True, bucket_values=50),
    "blocks": psgd.DiLoCo(sync_steps=2),
    "warm start": psgd.DataParallelSGD(distributed_after=10**6),
}


def warned(on_ranks, body):
    """The texts of the warnings of a body, on ranks whose number it asserts, and that number."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sizes = on_ranks(lambda comm: (body(comm), comm.size)[1])
    assert len(sizes) == sizes[0]
    assert all(warning.filename == __file__ for warning in caught)
    texts = [str(warning.message) for warning in caught]
    return on_ranks(lambda comm: texts)[0], sizes[0]  # the first rank's


def backward(learner, step, samples=3, **options):
    x, y = batch(learner.model, learner.comm.rank * learner.distributed, step, samples)
    F.cross_entropy(learner.model(x), y).backward(**options)


def clip_norm(learner):
    torch.nn.utils.clip_grad_norm_(learner.model.parameters(), 0.1)


def clip_value(learner):
    torch.nn.utils.clip_grad_value_(learner.model.parameters(), 0.01)


def scale_one(learner):
    next(learner.model.parameters()).grad.mul_(0.5)


def replace(learner):
    for p in learner.model.parameters():
        p.grad = p.grad.clamp(-0.1, 0.1)


@pytest.mark.parametrize("change", [clip_norm, clip_value, scale_one, replace])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_gradients_that_are_changed_before_a_step(on_ranks, name, change):
    def body(comm):
        with learner_of(made(MLP), comm, algorithm=ALGORITHMS[name]) as learner:
            for step in range(4):
                backward(learner, step)
                change(learner)
                learner.step(samples=3)

    texts, ranks = warned(on_ranks, body)
    assert len(texts) == (ranks > 1 and name in ("every step", "overlap"))
    for text in texts:
        assert text.startswith("the gradient of '0.weight' was changed between backward and step.")
        assert "clip_norm=" in text and ("overlap=True" in text) == (name == "overlap")


def reads(learner, step):
    backward(learner, step)
    assert sum(float(p.grad.norm()) for p in learner.model.parameters()) > 0


def zeroes(learner, step):
    learner.model.zero_grad(set_to_none=step % 2 == 0)
    backward(learner, step)


def throws_away(learner, step):
    """What a generator's loss leaves in its discriminator, say."""
    with learner.no_sync():
        backward(learner, step + 1)
    learner.model.zero_grad(set_to_none=step % 2 == 0)
    backward(learner, step)


def adds_up(learner, step):
    with learner.no_sync():
        backward(learner, step)
        backward(learner, step + 1)
    backward(learner, step + 2)


def retains(learner, step):
    with learner.no_sync():
        x, y = batch(learner.model, learner.comm.rank, step, 3)
        loss = F.cross_entropy(learner.model(x), y)
        loss.backward(retain_graph=True)
    loss.backward()


def assigns(learner, step):
    x, y = batch(learner.model, learner.comm.rank, step, 3)
    parameters = list(learner.model.parameters())
    gradients = torch.autograd.grad(F.cross_entropy(learner.model(x), y), parameters)
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient


def logs_the_norm(learner, step):
    backward(learner, step)
    torch.nn.utils.clip_grad_norm_(learner.model.parameters(), float("inf"))


def copies(learner, step):
    backward(learner, step)
    for p in learner.model.parameters():
        p.grad = p.grad.clone()


def takes_the_mean(learner, step):
    adds_up(learner, step)
    for p in learner.model.parameters():
        p.grad.div_(3)


def zeroes_a_head(learner, step):
    """Between the backwards of two heads, of which one has looked at its gradient alone."""
    first, *_, last = learner.model
    with learner.no_sync():
        x, _ = batch(learner.model, learner.comm.rank, step, 3)
        last(first(x)).square().mean().backward()
    learner.model.zero_grad(set_to_none=False)
    first(x).square().mean().backward()


RIGHT = [reads, zeroes, throws_away, adds_up, retains, assigns, zeroes_a_head]
NOT_WHILE_SENT = [logs_the_norm, copies, takes_the_mean]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("train", RIGHT, ids=lambda train: train.__name__)
def test_loops_that_are_right(on_ranks, train, overlap):
    def body(comm):
        algorithm = psgd.DataParallelSGD(overlap=overlap)
        with learner_of(made(MLP), comm, algorithm=algorithm, clip_norm=0.1) as learner:
            for step in range(STEPS):
                train(learner, step)
                learner.step(samples=3)

    assert warned(on_ranks, body)[0] == []


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("train", NOT_WHILE_SENT, ids=lambda train: train.__name__)
def test_changes_that_are_right_unless_gradients_are_being_sent(on_ranks, train, overlap):
    def body(comm):
        algorithm = psgd.DataParallelSGD(overlap=overlap)
        with learner_of(made(MLP), comm, algorithm=algorithm) as learner:
            for step in range(STEPS):
                train(learner, step)
                learner.step(samples=3)

    texts, ranks = warned(on_ranks, body)
    assert len(texts) == (overlap and ranks > 1)
    assert all("overlap=True" in text for text in texts)


def test_hooks_of_the_program(on_ranks):
    """Masks on gradients, before and after the learner has moved them; and parameters that are used
    now and then."""

    def body(comm):
        model = made(Branches)
        first, second = (branch.weight for branch in model.branches)
        first.register_hook(lambda gradient: gradient * 0.5)

        def halve(p):
            p.grad.mul_(0.5)

        with learner_of(model, comm) as learner:
            second.register_post_accumulate_grad_hook(halve)
            for step in range(STEPS):
                model.which = step % 2
                backward(learner, step)
                learner.step(samples=3)

    assert warned(on_ranks, body)[0] == []


def fetched_ahead(batches, count):
    """Batches, when so many more have been taken from their source."""
    waiting = deque()
    for given in batches:
        waiting.append(given)
        if len(waiting) > count:
            yield waiting.popleft()
    yield from waiting


class Loop:
    """Over a data set that is dealt out, several minibatches to a step."""

    def __init__(self, comm, algorithm, minibatches=8, ahead=0):
        self.model = made(MLP)
        self.learner = learner_of(self.model, comm, algorithm=algorithm)
        samples = 4 * comm.size * minibatches
        data = TensorDataset(*batch(self.model, 0, 0, samples))
        sampler = psgd.torch.sampler(data, self.learner, 4 * comm.size)
        self.loader = DataLoader(data, batch_sampler=sampler)
        self.ahead = ahead  # minibatches that are fetched in this thread, as for workers

    def run(self, train, times):
        with self.learner as learner:
            for _ in self.loader.batch_sampler.epochs(3):
                given = []
                for x, y in fetched_ahead(self.loader, self.ahead):
                    given.append((x, y))
                    if len(given) == times:
                        train(learner, given)
                        given.clear()


def backwards(learner, given):
    for x, y in given[:-1]:
        with learner.no_sync():
            (F.cross_entropy(learner.model(x), y) / len(given)).backward()
    x, y = given[-1]
    (F.cross_entropy(learner.model(x), y) / len(given)).backward()


@pytest.mark.parametrize("ahead", [0, 3])
@pytest.mark.parametrize("name", ["every step", "overlap", "blocks"])
def test_samples_of_the_last_backward_alone(on_ranks, name, ahead):
    """As DDP's loops have it: half of the samples would not be used."""

    def train(learner, given):
        backwards(learner, given)
        learner.step(samples=len(given[-1][0]))

    def body(comm):
        Loop(comm, ALGORITHMS[name], minibatches=12, ahead=ahead).run(train, 2)

    texts, _ = warned(on_ranks, body)
    assert len(texts) == 1
    assert texts[0].startswith(
        "step(samples=4) after 2 backwards on 2 minibatches of the sampler: one minibatch has 4"
    )


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_minibatches_that_are_added_up_split_or_left_out(on_ranks, ahead):
    def adds(learner, given):
        backwards(learner, given)
        learner.step(samples=sum(len(x) for x, _ in given))

    def splits(learner, given):
        (x, y), *_ = given
        backwards(learner, list(zip(x.split(2), y.split(2), strict=True)))
        learner.step(samples=len(x))

    def leaves_out(learner, given):
        backwards(learner, given[-1:])
        learner.step(samples=len(given[-1][0]))

    def body(comm):
        for train, times in ((adds, 2), (splits, 1), (leaves_out, 2)):
            for minibatches in (2, 8):
                Loop(comm, psgd.DataParallelSGD(), minibatches, ahead).run(train, times)

    assert warned(on_ranks, body)[0] == []


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_same_samples_on_all_ranks(on_ranks, name):
    """As a DataLoader without the sampler gives them."""

    def body(comm):
        with learner_of(made(MLP), comm, algorithm=ALGORITHMS[name]) as learner:
            for step in range(12):
                x, y = batch(learner.model, 0, step, 3)
                F.cross_entropy(learner.model(x), y).backward()
                learner.step(samples=3)

    texts, ranks = warned(on_ranks, body)
    assert len(texts) == (ranks > 1 and name != "warm start")
    for text in texts:
        assert text.startswith("all ranks have had the same gradient, to the bit, 4 times in a ro")
        assert "parallel_sgd.torch.sampler" in text


def test_gradients_of_zeros_say_nothing(on_ranks):
    def body(comm):
        with learner_of(made(MLP), comm) as learner:
            for step in range(12):
                x, y = batch(learner.model, comm.rank, step, 3)
                (0 * F.cross_entropy(learner.model(x), y)).backward()
                learner.step(samples=3)

    assert warned(on_ranks, body)[0] == []


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("what", ["changed", "the same", "short", "buffer"])
def test_a_warning_that_is_made_an_error_ends_all_ranks(on_ranks, what):
    """Also where the program catches it: no rank waits for one that has raised it alone."""

    def short(learner, given):
        backwards(learner, given)
        learner.step(samples=len(given[-1][0]))

    def body(comm):
        if what == "short":
            return Loop(comm, psgd.DataParallelSGD()).run(short, 2)
        model = made(MLP)
        if what == "buffer":
            model.register_buffer("queue", torch.zeros(2))
        with learner_of(model, comm) as learner:
            if what == "buffer":
                model.queue += comm.rank
            for step in range(12):
                x, y = batch(model, comm.rank * (what != "the same"), step, 3)
                F.cross_entropy(model(x), y).backward()
                if what == "changed":
                    clip_norm(learner)
                learner.step(samples=3)
            learner.finish()

    message, size = errors_of(on_ranks, body)
    expected = {
        "changed": "was changed between backward and step",
        "the same": "all ranks have had the same gradient",
        "short": "after 2 backwards on 2 minibatches",
        "buffer": "buffer 'queue' differs between ranks",
    }
    assert expected[what] in (message or "") or (size == 1 and what != "short" and not message)
