"""What "auto" chooses: the same on all ranks, by what was measured; and what is said of it."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import math
import threading
from collections.abc import Iterable

import numpy as np
import pytest
from cases import gradient_of
from invariants import same_on_all_ranks
from launched import own_rank

from parallel_sgd import (
    BlockMomentumSGD,
    Communicator,
    DataParallelSGD,
    Learner,
    MomentumSGD,
    Parameters,
    UserError,
)
from parallel_sgd.command_line import print_choices, read
from parallel_sgd.compression import EntropyCoded, OneBit, auto_bits, registered_bits
from parallel_sgd.costs import KernelSpeeds, Link, StepSearch, measure
from parallel_sgd.exchange import (
    ExchangePlan,
    Topology,
    choose_bits,
    choose_plan,
    cut_buckets,
    plan,
)
from parallel_sgd.training import capture, restore

LARGE, SMALL = 200_000, 3_000  #: values of two buckets

SLOW, FREE = Link(1e-5, 1e6), Link(0.0, math.inf)


def this_rank() -> int:
    """This rank, where a patched function is not told."""
    launched = own_rank()
    return int(threading.current_thread().name.split()[-1]) if launched is None else launched


def speeds(values_per_s: float = 1e9, bits: Iterable[float] = ()) -> KernelSpeeds:
    by_bits = dict.fromkeys([32, *(bits or registered_bits())], values_per_s)
    searches = {bits: StepSearch(1e-6, 0.0) for bits in by_bits}
    return KernelSpeeds({**by_bits, 32: math.inf}, {**by_bits, 32: math.inf}, by_bits, searches)


def measure_speeds(block_size, bits, like) -> KernelSpeeds:
    return speeds(bits=bits)


@pytest.fixture
def links(measurements):
    """Give every rank the same link and kernels without measuring them."""

    def give(link: Link, measure_speeds=measure_speeds) -> None:
        measurements(measure_link=lambda comm, hosts: link, measure_kernel_speeds=measure_speeds)

    return give


@pytest.fixture
def plans(monkeypatch):
    """Plans of exchanges with other trials, constants or measurements than theirs."""

    def change(**parts) -> None:
        for name, part in parts.items():
            monkeypatch.setattr(plan, name, part)

    return change


@pytest.fixture
def trials(plans):
    """Replace the trials of transports by a function."""
    return lambda function: plans(try_transports=function)


@pytest.fixture
def short_trials(plans):
    """Trials begin with 1000 values."""
    plans(SHORT_VECTOR=1000)


def on_hosts(comm: Communicator, hosts: str) -> Communicator:
    """These ranks, as if they were on other hosts."""
    apart = comm.duplicate()
    apart._hosts = list(hosts[: comm.size])
    return apart


def model(dtype=np.float32) -> Parameters:
    return Parameters({"a": np.zeros(SMALL, dtype), "b": np.zeros(LARGE, dtype)})


def learner_on(comm: Communicator, **options) -> Learner:
    algorithm = DataParallelSGD(gradient_bits="auto", bucket_values=1, **options)
    return Learner(model(), MomentumSGD(lr=0.1), algorithm, comm)


def forbidden(*args, **options):
    raise AssertionError("nothing is to be measured")


def test_one_rank_has_nothing_to_try(trials):
    trials(forbidden)
    chosen = choose_plan(model(), Communicator.single(), "auto", "auto")
    assert chosen == ExchangePlan("collective", Topology.flat(1), {})
    assert str(chosen) == "collective exchange"


def test_parameters_with_bits_of_their_own_keep_them(comm, links):
    links(SLOW)
    learner = learner_on(comm, bits_of={"a": 16})
    chosen = learner_on(comm).state.exchange.bits["0"]
    assert learner.state.exchange.values_by_bits() == {16: SMALL, chosen: LARGE}
    learner.gradient.flat[:] = gradient_of(comm.rank, 0, SMALL + LARGE)
    learner.step(samples=1)
    same_on_all_ranks(comm, learner.parameters.flat)


@pytest.mark.parametrize("places", ["aaaa", "abcd"])
def test_what_is_tried_has_the_codec(on_ranks, trials, places):
    """Inside one machine, too."""
    tried = []

    def try_transports(comm, values, codec, rounds):
        tried.append(codec)
        return {"pipelined": 1.0, "collective": 2.0}

    trials(try_transports)

    def body(comm):
        codec = OneBit()
        chosen = choose_plan(model(), on_hosts(comm, places), "auto", "auto", codec=codec)
        if comm.size > 1:
            assert chosen.transport == "pipelined"
            assert tried and all(other == codec for other in tried)

    on_ranks(body)


def test_what_is_tried_sends_its_bits(comm, plans):
    """Of zeros an entropy code sends none, so that any transport looks fast."""
    sent = []

    class Counted(plan.Exchange):
        def sum(self, *arguments):
            super().sum(*arguments)
            sent.append(self.bytes_sent)

    plans(Exchange=Counted)
    plan.try_transports(comm, 50_000, EntropyCoded(bits=1), rounds=1)
    expected = 2 * (comm.size - 1) / comm.size * 50_000 / 8
    assert len(sent) >= 4 and min(sent) >= 0.25 * expected


@pytest.mark.usefixtures("short_trials")
def test_what_is_tried_grows_until_it_takes_long_enough(on_ranks, plans):
    """A short vector takes as long as its messages are under way, and says little of a long one."""

    def try_transports(comm, values, codec, rounds):
        return {"pipelined": 1e-5 + 1e-9 * values, "collective": 1e-5 + 2e-9 * values}

    plans(try_transports=try_transports, TRIAL_S=1e-4)

    def body(comm):
        chosen = choose_plan(model(), on_hosts(comm, "abcd"), "auto", "auto")
        if comm.size > 1:  # after 1,000 and 9,090
            assert (chosen.transport, chosen.values) == ("pipelined", 47616)

    on_ranks(body)


@pytest.mark.parametrize(
    ("collective_s", "taken"), [(0.017, "collective"), (0.019, "pipelined"), (0.03, "pipelined")]
)
def test_over_a_network_collectives_must_be_clearly_faster(comm, trials, collective_s, taken):
    seconds = {"pipelined": 0.02, "collective": collective_s}
    trials(lambda comm, values, codec, rounds: seconds)
    chosen = choose_plan(model(), on_hosts(comm, "abcd"), "auto", "auto")
    if comm.size == 1:
        assert not chosen.seconds
        return
    assert (chosen.transport, chosen.seconds) == (taken, seconds)
    assert chosen.values == LARGE + SMALL  # as long as it takes 0.1 s
    assert f"{taken} exchange ({LARGE + SMALL} float32 tried: " in str(chosen)
    assert "pipelined 20 ms" in str(chosen)


@pytest.mark.usefixtures("short_trials")
def test_all_ranks_choose_the_same_plan(comm):
    """By exchanges that really take place."""
    chosen = choose_plan(model(), on_hosts(comm, "abcd"), "auto", "auto")
    assert len(set(comm.allgather_object(str(chosen)))) == 1
    assert set(chosen.seconds) == (set() if comm.size == 1 else {"collective", "pipelined"})
    if chosen.seconds:
        assert min(chosen.seconds.values()) > 0


def test_what_is_asked_for_is_not_tried(comm, trials):
    trials(forbidden)
    apart = on_hosts(comm, "abcd")
    for transport in ("collective", "pipelined"):
        assert choose_plan(model(), apart, transport, "auto").transport == transport
    short = Parameters({"w": np.zeros(plan.SHORT_VECTOR - 1, np.float32)})
    assert choose_plan(short, apart, "auto", "auto").transport == "collective"
    if comm.size == 4:
        chosen = choose_plan(model(), on_hosts(comm, "aabb"), "auto", "auto")
        assert chosen.transport == "pipelined"
        told = "pipelined exchange, 4 ranks in 2 hosts, each summed first"
        assert str(chosen) == told


@pytest.mark.parametrize(("link", "bits"), [(SLOW, 1), (FREE, 32)], ids=["slow", "free"])
def test_bits_by_the_link(comm, links, link, bits):
    links(link)
    learner = learner_on(comm)
    state, expected = learner.state.exchange, 32 if comm.size == 1 else bits
    assert [bucket.names for bucket in state.buckets] == [("b",), ("a",)]
    assert state.bits["0"] == expected
    assert set(comm.allgather_object(str(state.bits))) == {str(state.bits)}
    report = learner.report()
    if comm.size == 1:
        assert report is None
        return
    text = json.dumps(report, allow_nan=False)
    assert json.loads(text) == report
    assert sum(report["gradient_bits"].values()) == LARGE + SMALL
    seconds = report["tried"]["seconds"]
    clearly = seconds["collective"] < plan.CLEARLY_FASTER * seconds["pipelined"]
    assert report["transport"] == ("collective" if clearly else "pipelined")
    rate = None if link is FREE else link.bytes_per_s
    assert report["link"] == {"latency_s": link.latency_s, "bytes_per_s": rate}
    assert report["values_per_s"]["encode"] == {str(b): 1e9 for b in auto_bits()[:-1]}


def test_what_blocks_have_changed_has_no_fewer_than_four_bits(comm, links):
    links(SLOW)
    algorithm = BlockMomentumSGD(sync_steps=2, gradient_bits="auto")
    learner = Learner(model(), MomentumSGD(lr=0.1), algorithm, comm)
    assert set(learner.state.exchange.bits.values()) == {32 if comm.size == 1 else 4}


def test_every_bucket_has_bits_of_its_own(comm, links, measurements):
    links(SLOW)
    asked = {LARGE: 1, SMALL: 8}
    measurements(best_bits=lambda values, *args, **options: asked[values])
    state = learner_on(comm).state.exchange
    if comm.size > 1:
        assert state.bits == {"0": 1, "1": 8}
        assert state.values_by_bits() == {1: LARGE, 8: SMALL}
        codecs = state.current.codecs
        assert [codec.bits for codec in codecs] == [1, 8]


def test_ranks_of_a_host_count_as_one_sender(comm, links):
    links(SLOW)
    if comm.size != 4:
        return
    for hosts, expected in {"abcd": (4, 1), "aabb": (4, 2), "abbb": (2, 1)}.items():
        costs = measure(comm, Topology.over(hosts).hosts)
        assert (costs.ranks, costs.ranks_per_host) == expected


def test_ranks_that_measure_differently_choose_alike(comm, links):
    def own_speeds(block_size, bits, like) -> KernelSpeeds:
        return speeds(1e9 if this_rank() == 0 else 1e3, bits)  # the others would take 32

    links(SLOW, own_speeds)
    learner = learner_on(comm)
    for step in range(3):
        n = learner.gradient.flat.size
        learner.gradient.flat[:] = gradient_of(comm.rank, step, n)
        learner.step(samples=1)
    same_on_all_ranks(comm, learner.parameters.flat)
    bits = learner.state.exchange.bits
    assert set(comm.allgather_object(str(bits))) == {str(bits)}
    assert bits["0"] == (1 if comm.size > 1 else 32)


def test_where_bits_cannot_be_chosen_nothing_is_measured(comm, plans):
    plans(measure=forbidden)
    topology = Topology.flat(comm.size)
    for one, dtype in ((Communicator.single(), np.float32), (comm, np.float64)):
        parameters = model(dtype)
        buckets = cut_buckets(parameters, 1024, 1)
        choice = choose_bits(buckets, parameters, one, topology, 1024, auto_bits())
        assert choice == ({"0": 32, "1": 32}, None)


@pytest.mark.threads(1, 3)
def test_what_is_really_measured(comm):
    """Links between ranks and kernels, in numbers that can be; as said, and as JSON."""
    costs = measure(comm, Topology.flat(comm.size).hosts) if comm.size > 1 else None
    if costs is None:
        return
    assert len(set(comm.allgather_object(str(costs)))) == 1
    assert 0 < costs.link.latency_s < 1 and 1e6 < costs.link.bytes_per_s < 1e12
    assert costs.seconds(10**8, 32) > costs.seconds(10**6, 32) > 0
    assert costs.best_bits(10**6) in registered_bits()
    assert f"links of {costs.link.bytes_per_s / 1e6:,.4g} MB/s" in str(costs)
    json.dumps(costs.as_dict(), allow_nan=False)


def test_a_resumed_run_keeps_its_bits(on_ranks, links, measurements):
    """Bit for bit as if it had not stopped, though the measurement now says otherwise."""
    links(SLOW)
    chosen = {"bits": 1}
    measurements(best_bits=lambda *args, **options: chosen["bits"])

    def body(comm):
        comm.barrier()
        chosen["bits"] = 1
        comm.barrier()
        whole = learner_on(comm)

        def step(learner: Learner, number: int) -> None:
            n = learner.gradient.flat.size
            learner.gradient.flat[:] = gradient_of(comm.rank, number, n)
            learner.step(samples=2)

        step(whole, 0)
        saved = copy.deepcopy(capture(whole))
        comm.barrier()
        chosen["bits"] = 8
        comm.barrier()
        other = learner_on(comm)
        if comm.size > 1:
            assert other.state.exchange.bits == {"0": 8, "1": 8}
        restore(other, saved)
        kept = 1 if comm.size > 1 else 32
        bits = other.state.exchange.bits
        assert bits == whole.state.exchange.bits == {"0": kept, "1": kept}
        for number in (1, 2):
            step(whole, number)
            step(other, number)
        assert np.array_equal(whole.parameters.flat, other.parameters.flat)
        assert whole.parameters.flat.any()
        if comm.size > 1:
            ours, theirs = other.report(), whole.report()
            assert ours["gradient_bits"] == theirs["gradient_bits"] == {"1": LARGE + SMALL}
            assert "link" in theirs and "link" not in ours  # it has not decided

    on_ranks(body)


def test_what_is_said_before_training(comm, links):
    links(SLOW)
    learner, said = learner_on(comm), io.StringIO()
    plain = Learner(model(), MomentumSGD(lr=0.1), DataParallelSGD(), comm)
    if comm.rank == 0:
        with contextlib.redirect_stdout(said):
            print_choices(learner)
            print_choices(plain)
    if comm.size == 1 or comm.rank > 0:
        assert said.getvalue() == ""
        return
    chosen, bits, again = said.getvalue().splitlines()
    assert chosen == str(learner.state.exchange.plan)
    assert " exchange (203000 float32 tried: " in chosen
    assert again == str(plain.state.exchange.plan)
    assert bits.startswith("gradient bits: 1 for 203,000 values (links of 1 MB/s and 10 us; ")


def options_of(line: str) -> DataParallelSGD:
    _, algorithm, _ = read(line.split())
    assert isinstance(algorithm, DataParallelSGD)
    return algorithm


def test_the_command_line():
    algorithm = options_of(
        "--gradient-bits auto --overlap --transport pipelined --hierarchical false "
        "--bucket-values 5000"
    )
    assert algorithm == DataParallelSGD(
        gradient_bits="auto",
        overlap=True,
        transport="pipelined",
        hierarchical=False,
        bucket_values=5000,
    )
    assert options_of("--hierarchical True").hierarchical is True
    assert options_of("--hierarchical auto") == DataParallelSGD()
    assert options_of("--double-buffering --gradient-bits 4").double_buffering
    assert options_of("--gradient-bits 0:32,100:0.5").gradient_bits == {0: 32, 100: 0.5}


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        (
            "--gradient-bits automatic",
            "gradient_bits='automatic' must be a number from 0.05 to 8, .*20000:1\\), or auto$",
        ),
        (
            "--gradient-bits 0:auto",
            r"gradient_bits\[0\]='auto' must be a number from 0.05 to 8, 16 or 32",
        ),
        ("--hierarchical 1", "hierarchical='1' must be one of 'auto', True, False$"),
        ("--transport auto-matic", "transport='auto-matic' must be one of 'auto', 'collective'"),
        ("--bucket-values auto", "bucket_values='auto' must be a whole number$"),
        ("--bucket-values 0", "bucket_values=0 must be a whole number, at least 1$"),
        ("--overlap --double-buffering", "overlap=True and double_buffering=True: at most one"),
        (
            "--algorithm async --gradient-bits automatic",
            "gradient_bits='automatic' must be a number from 0.05 to 8, .*20000:1\\), or auto$",
        ),
        ("--algorithm diloco --overlap", "--overlap=True is not an option of diloco"),
    ],
)
def test_what_the_command_line_refuses(line, wrong):
    with pytest.raises(UserError, match=wrong) as raised:
        read(line.split())
    assert "\n" not in str(raised.value)
