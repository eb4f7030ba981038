"""The benchmark of training with PyTorch's models on both sides."""

from __future__ import annotations

import json
import math
import sys
import warnings
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from benchmark_players import options_of

from benchmarks.training import command as training
from benchmarks.training import conductor as conducting
from benchmarks.training import memory, own_cost, summary, tasks
from benchmarks.training.contenders import CONTENDERS, PERIOD, PLAIN, TIMED, TIMED_MODULES
from benchmarks.training.member import Member, memory_bytes
from parallel_sgd import Communicator, UserError, simulate
from parallel_sgd.models import MLP

torch = pytest.importorskip("torch")

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of PyTorch, at itself
    from benchmarks.training.modules import module_of, values_of
    from benchmarks.training.peer import Peer
    from benchmarks.training.torch_ours import Hooked, TorchOurs

LEARNERS = [name for name in TIMED_MODULES if CONTENDERS[name].algorithm]
HOOKED = [name for name in TIMED_MODULES if CONTENDERS[name].hook == "exchange"]


@pytest.fixture
def small(monkeypatch):
    """A task of each kind that takes no time."""
    monkeypatch.setattr(tasks, "BATCH", 4)
    mlp = tasks.Task("mlp", partial(MLP, [784, 8, 10], seed=1), tasks._synthetic, batch=4)
    text = tasks.Task(
        "transformer",
        partial(tasks._transformer, width=8, layers=1, heads=2),
        partial(tasks._sequences, 1),
        tasks._sequences_tested,
        batch=tasks.SEQUENCES,
    )
    images = tasks.Task("ResNet", tasks._resnet, tasks._images, batch=4)
    for task in (mlp, text, images):
        monkeypatch.setitem(tasks.TASKS, task.title, task)


@pytest.fixture
def process_group():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_modules_have_about_as_many_parameters_and_tensors_as_is_said():
    sizes = {
        name: [p.numel() for p in module_of(task.model())[1].parameters()]
        for name, task in tasks.MODULES.items()
    }
    millions = {name: round(sum(parts) / 1e6, 1) for name, parts in sizes.items()}
    assert millions == {"5M": 4.6, "24M": 23.9, "transformer": 4.9, "ResNet": 0.2}
    assert [len(sizes[name]) for name in ("transformer", "ResNet")] == [77, 47]


def test_a_module_has_the_initial_values_of_its_seed_on_every_rank():
    first, again, other = (
        values_of(*module_of(tasks.TASKS["text"].model(seed=seed))) for seed in (3, 3, 4)
    )
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_ranks_share_the_sequences_that_one_rank_would_have():
    parts = [tasks._sequences(2, rank, 2, 7) for rank in range(2)]
    x, y = tasks._sequences(4, 0, 1, 7)
    assert np.array_equal(np.stack([part[0] for part in parts], 1).reshape(x.shape), x)
    assert np.array_equal(np.stack([part[1] for part in parts], 1).reshape(y.shape), y)
    assert np.array_equal(x[..., 1:], y[..., :-1])


def test_everybody_is_in_one_table():
    assert set(TIMED_MODULES) <= set(CONTENDERS)
    assert {name for name in CONTENDERS if CONTENDERS[name].modules} <= set(TIMED_MODULES)
    assert not any(CONTENDERS[name].modules for name in TIMED)
    assert all(CONTENDERS[name].ours for name in HOOKED) and HOOKED


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", LEARNERS)
def test_our_contenders_learn_and_end_with_one_model(name):
    def rank(comm):
        member = Member(comm.rank, comm.size, lambda *a: TorchOurs(comm, *a), comm.barrier)
        member.begin(name, "mlp", 0.002)
        answer = member.steps(2 * PERIOD)
        member.end()
        return answer

    answers = simulate(2, rank)
    assert all(answer["losses"][-1] < answer["losses"][0] for answer in answers)
    assert len({answer["digest"] for answer in answers}) == (1 if CONTENDERS[name].period else 2)


@pytest.mark.usefixtures("small", "process_group")
@pytest.mark.parametrize("task", ["mlp", "transformer", "ResNet"])
@pytest.mark.parametrize("name", ["no exchange", "our hook, 32 bit"])
def test_pytorch_takes_the_very_steps_that_ours_takes(name, task):
    make = TorchOurs if CONTENDERS[name].algorithm else Hooked
    trained = []
    for who, trainer in (
        (name, make(Communicator.single(), name, task, 0.01, 1)),
        (PLAIN, Peer(PLAIN, task, 0.01, 1)),
    ):
        member = Member(0, 1, lambda *a, trainer=trainer: trainer, lambda: None)
        member.begin(who, task, 0.01)
        before = trainer.values().copy()
        trained.append((before, member.steps(3)["losses"], trainer.values()))
        member.end()
    for ours, theirs in zip(*trained, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    assert not np.array_equal(trained[0][0], trained[0][2])


@pytest.mark.usefixtures("small", "process_group")
def test_our_hook_sends_as_few_bits_as_its_contender_says():
    hooked = Hooked(Communicator.single(), "our hook, 1 bit", "mlp", 0.002, 1)
    member = Member(0, 1, lambda *a: hooked, lambda: None)
    member.begin("our hook, 1 bit", "mlp", 0.002)
    losses = member.steps(10)["losses"]
    (state,) = hooked.states
    assert losses[-1] < losses[0] and state.state_dict()["residuals"]
    member.end()
    with pytest.raises(UserError, match="closed"):
        state.state_dict()


@pytest.mark.usefixtures("small")
def test_the_test_loss_of_a_module_falls():
    learner = TorchOurs(Communicator.single(), "no exchange", "transformer", 0.1, 1)
    member = Member(0, 1, lambda *a: learner, lambda: None)
    member.begin("no exchange", "transformer", 0.1)
    first = member.evaluate()["loss"]
    member.steps(20)
    assert first == pytest.approx(math.log(256), rel=0.02)
    assert member.evaluate()["loss"] < first - 0.5


@pytest.mark.usefixtures("small")
def test_a_minibatch_that_is_not_finite_is_told_and_not_fatal():
    learner = TorchOurs(Communicator.single(), "no exchange", "mlp", 0.1, 1)
    before = learner.values()
    x, y = tasks._synthetic(0, 1, 1)
    assert math.isnan(learner.step(np.full_like(x[0], np.nan), y[0]))
    assert np.array_equal(learner.values(), before)


TOLD = """
import os, sys
from benchmarks.training.member import Member, memory_bytes
class Fake(Member):
    def begin(self):
        return dict(interface=os.environ["GLOO_SOCKET_IFNAME"])
Fake(int(sys.argv[1]), 2, None, None).follow(sys.argv[2], "ours")
"""


def test_a_side_is_played_by_another_module_on_the_network_that_is_said(monkeypatch):
    asked = []

    def commands(side, module, hosts, path):
        asked.append(module)
        return [[sys.executable, "-c", TOLD, str(rank), path] for rank in range(2)]

    monkeypatch.setattr(conducting, "_commands", commands)
    playing = conducting.conducted(
        conducting.Here(2), ["ours", "peer"], played_by={"ours": "torch_ours"}, interface="lo"
    )
    with playing as conductor:
        assert conductor.first("ours", "begin") == {"interface": "lo"}
    assert asked == ["benchmarks.training.torch_ours", "benchmarks.training.peer"]


def test_ranks_of_this_machine_are_started_without_hosts():
    here = conducting.Here(2)
    (ours,) = conducting._commands("ours", "m", here, "path")
    assert ours[1:] == ["-m", "parallel_sgd", "run", "-n", "2", "-m", "m", "path"]
    peers = conducting._commands("peer", "m", here, "path")
    assert [peer[1:] for peer in peers] == [
        ["-m", "m", rank, "2", "127.0.0.1", "path"] for rank in "01"
    ]


@pytest.mark.parametrize(
    "arguments", ["--models transformer", "--only 'our hook, 1 bit'", "--only '8 bit, overlap'"]
)
def test_what_is_pytorchs_goes_with_its_models(arguments):
    with pytest.raises(UserError, match="goes with --torch"):
        training.main(options_of(f"training {arguments}"))


def test_which_sides_play_and_where(monkeypatch):
    asked = []

    class Playing:
        def __init__(self, hosts, sides, **how):
            asked.append((type(hosts), list(sides), how))

        def __enter__(self):
            return SimpleNamespace()

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(training, "conducted", Playing)
    monkeypatch.setattr(training, "measure_steps", lambda *a: [])
    report = training.main(options_of("training --torch --here -n 2"))
    assert asked == [
        (
            conducting.Here,
            ["ours", "peer"],
            {"played_by": {"ours": "torch_ours"}, "interface": "lo"},
        )
    ]
    assert report.title.startswith("Training PyTorch's models on 2 ranks of one machine, one")


def test_the_learners_own_cost_is_that_of_a_step_beside_a_plain_loops_and_ddps(small):
    cost = own_cost.measure("mlp", most_steps=3)
    assert (cost.model, cost.steps) == ("mlp", 3)
    assert min(cost.seconds, cost.plain_seconds, cost.ddp_seconds) > 0
    assert own_cost.measure("mlp", most_s=0).steps == 1


def test_own_costs_are_found_in_a_process_of_one_thread(monkeypatch):
    asked = []

    def run(command, env, **_):
        asked.append((command[1:], env["OMP_NUM_THREADS"]))
        cost = {"model": "24M", "seconds": 0.3, "plain_seconds": 0.2, "ddp_seconds": 1, "steps": 4}
        return SimpleNamespace(returncode=len(asked) - 1, stdout=json.dumps(cost))

    monkeypatch.setattr(own_cost.subprocess, "run", run)
    assert own_cost.own_costs(["24M"]) == [own_cost.OwnCost("24M", 0.3, 0.2, 1, 4)]
    assert asked == [(["-m", "benchmarks.training.own_cost", "24M"], "1")]
    with pytest.raises(UserError, match="own cost of 5M was not found"):
        own_cost.own_costs(["5M"])


def test_memory_is_of_the_rank_with_most_in_processes_of_each_contenders_own():
    started = []

    class Ranks:
        def all(self, side, command, **options):
            started[-1].append(options.get("count", command))
            answer = {"memory": "bytes", "steps": "peak_bytes"}.get(command)
            return [{answer: n + 40 * (command == "steps")} for n in (10, 50)] if answer else [{}]

    @contextmanager
    def playing(names):
        started.append([])
        yield Ranks()

    found = memory.measure_memory(playing, "5M", ["1 bit", "DDP, post-local SGD"])
    assert [(one.contender, one.before_bytes, one.peak_bytes) for one in found] == [
        ("1 bit", 50, 90),
        ("DDP, post-local SGD", 50, 90),
    ]
    assert found[0].added_bytes == 40
    assert started[0] == ["begin", 6, "end", "memory", "begin", 6, "end"] and PERIOD in started[1]


def test_a_process_knows_its_memory():
    before = memory_bytes("VmRSS")
    held = np.ones(1 << 23)
    assert memory_bytes("VmRSS") >= before + 0.9 * held.nbytes
    del held
    assert memory_bytes("VmHWM") >= before + 0.9 * (8 << 23)


def test_own_costs_and_memory_are_reported_and_read_again(tmp_path):
    results = summary.Results(
        2,
        {"cores": 2},
        to_loss=[],
        torch=True,
        own_costs=[own_cost.OwnCost("5M", 0.03, 0.02, 0.025, 7)],
        memory=[
            memory.Memory("24M", name, 100 << 20, peak << 20)
            for name, peak in (("32 bit", 400), (PLAIN, 300))
        ],
    )
    report = summary.Summary(results)
    rows = {row.name: row for row in report.rows}
    assert rows["5M, one rank, a step of the learner"].ratio == pytest.approx(1.5)
    ours = rows["24M, 32 bit: memory of a rank"]
    assert (ours.value, ours.unit) == (300, "MiB") and ours.ratio == pytest.approx(1.5)
    report.write(tmp_path / "torch.json")
    again = summary.read(str(tmp_path / "torch.json"))
    assert again == results


@pytest.mark.parametrize("option", ["--own-cost", "--memory"])
def test_what_is_asked_of_the_learner_goes_with_pytorchs_models(option):
    with pytest.raises(UserError, match=f"{option} goes with --torch"):
        training.main(options_of(f"training {option}"))
