"""What a tracker sends to a service, and what becomes of rows while the service fails."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from limits import patience

import parallel_sgd as psgd
from parallel_sgd import UserError
from parallel_sgd.communication import simulate_recovery
from parallel_sgd.communication.threads import communicator
from parallel_sgd.runtime import SimulatedFailure
from parallel_sgd.training.session import tracker as trackers
from parallel_sgd.training.session import tracking_services as services
from parallel_sgd.training.session.tracker import Sender, Tracker, numbers, run_ids


class FakeRun(services.TrackedRun):
    """A run of a service that fails, or is silent, as long as it is told to."""

    made: ClassVar[list[FakeRun]] = []

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.calls: list[Any] = []
        self.made.append(self)

    #: called before each call, with its name
    before: Callable[[str], object] = staticmethod(lambda name: None)
    problem: str | None = None

    @staticmethod
    def require() -> None:
        return None

    def open(self) -> str | None:
        self.before("open")
        self.calls.append(("open", self.run_id))
        self.run_id = self.run_id or f"run-{len(self.made)}"
        return self.problem

    def log(self, rows: Sequence[services.Row]) -> int:
        self.before("log")
        self.calls += [("log", row["samples"]) for row in rows]
        return len(rows)

    def close(self, end: str) -> None:
        self.before("close")
        self.calls.append(("close", end))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeRun]:
    class Run(FakeRun):
        made: ClassVar[list[FakeRun]] = []

    monkeypatch.setitem(services.SERVICES, "mlflow", Run)
    monkeypatch.setattr(trackers, "RETRY_S", 0.01)
    return Run


def row(samples: int, **more: Any) -> psgd.Progress:
    values = {"train_loss": 0.5, "learning_rate": None, "minibatch_size": 4, "bytes_sent": 8}
    return psgd.Progress(1.0, samples, seconds=0.1, **{**values, **more})


def failing(times: int, at: str) -> Callable[[str], None]:
    """What fails so many times at a call of this name."""
    left = [times]

    def before(name: str) -> None:
        if name == at and left[0] > 0:
            left[0] -= 1
            raise ConnectionError("the network\nis down")

    return staticmethod(before)


def ran(fake: type[FakeRun], folder: psgd.RunFolder | None = None, end: str = "finished") -> Any:
    tracker = Tracker("mlflow", "p")
    tracker.begin({"lr": 0.1}, folder)
    for samples in (10, 20, 30):
        tracker.log(row(samples))
    tracker.finish(end)
    return fake.made[-1]


ROWS = [("log", 10), ("log", 20), ("log", 30)]


@pytest.mark.parametrize("end", ["finished", "failed", "killed", "preempted"])
def test_rows_are_sent_in_order_between_begin_and_end(fake, end, capsys):
    run = ran(fake, end=end)
    assert run.calls == [("open", None), *ROWS, ("close", end)]
    assert (run.project, run.name, run.config) == ("p", None, {"lr": 0.1})
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("at", ["open", "log"])
def test_after_failures_all_rows_arrive_and_one_line_warns(fake, at, monkeypatch, capsys):
    monkeypatch.setattr(fake, "before", failing(3, at))
    tracker = Tracker("mlflow")
    tracker.begin({}, None)
    for samples in (10, 20, 30):
        tracker.log(row(samples))
    (run,), arrived = fake.made, threading.Event()
    for _ in range(1000):
        if run.calls[1:] == ROWS or arrived.wait(0.01):
            break
    tracker.finish()
    assert run.calls == [("open", None), *ROWS, ("close", "finished")]
    assert capsys.readouterr().err == (
        "parallel_sgd: mlflow: the network is down; training goes on\n"
    )


def test_a_service_that_stays_away_ends_neither_training_nor_its_end(fake, monkeypatch, capsys):
    monkeypatch.setattr(fake, "before", failing(10**6, "open"))
    run = ran(fake)
    assert run.calls == []
    first, last = capsys.readouterr().err.splitlines()
    assert first.endswith("the network is down; training goes on")
    assert last.startswith(
        "parallel_sgd: mlflow: 3 rows have not arrived (the network is down); a run's folder"
    )


def test_the_last_line_has_the_last_problem(fake, monkeypatch, capsys):
    problems, failed_twice = ["the network is down"], threading.Event()

    def fail(name: str) -> None:
        if name == "log":
            problems.append("x" * 1000)
            if len(problems) == 4:
                failed_twice.set()
            raise ConnectionError(problems[-2])

    monkeypatch.setattr(fake, "before", staticmethod(fail))
    tracker = Tracker("mlflow")
    tracker.begin({}, None)
    tracker.log(row(10))
    assert failed_twice.wait(10)
    tracker.finish()
    first, last = capsys.readouterr().err.splitlines()
    assert first == "parallel_sgd: mlflow: the network is down; training goes on"
    assert last.startswith("parallel_sgd: mlflow: 1 rows have not arrived (xxx")
    assert last.endswith("x…); a run's folder has them in metrics.jsonl")


@pytest.mark.parametrize("at", ["log", "open"])
def test_a_run_that_could_not_be_closed_is_a_line_also_after_a_warning(
    fake, monkeypatch, capsys, at
):
    first = failing(1, at)

    def fail(name: str) -> None:
        first(name)
        if name == "close":
            raise ConnectionError("it is closed already")

    monkeypatch.setattr(fake, "before", staticmethod(fail))
    tracker = Tracker("mlflow")
    tracker.begin({}, None)
    tracker.log(row(10))
    (run,) = fake.made
    for _ in range(1000):
        if ("log", 10) in run.calls:
            break
        threading.Event().wait(0.01)
    tracker.finish()
    assert capsys.readouterr().err.splitlines() == [
        "parallel_sgd: mlflow: the network is down; training goes on",
        "parallel_sgd: mlflow: the run could not be closed: it is closed already",
    ]


def test_a_silent_service_is_waited_for_a_limited_time(fake, monkeypatch, capsys):
    silence = threading.Event()
    monkeypatch.setattr(fake, "before", staticmethod(lambda name: silence.wait(60)))
    for name in ("OPEN_S", "END_S"):
        monkeypatch.setattr(trackers, name, 0.05)
    began = trackers.time.monotonic()
    ran(fake)
    assert trackers.time.monotonic() - began < 5 * patience()
    silence.set()
    assert capsys.readouterr().err.splitlines() == [
        "parallel_sgd: mlflow: no answer within 0.05 s; training goes on",
        "parallel_sgd: mlflow: 3 rows have not arrived (no answer within 0.05 s); a run's folder "
        "has them in metrics.jsonl",
    ]


@pytest.mark.parametrize("end", ["finished", "failed"])
def test_no_wait_for_a_service_is_longer_than_the_ranks_can_wait(fake, monkeypatch, capsys, end):
    silence = threading.Event()
    monkeypatch.setattr(fake, "before", staticmethod(lambda name: silence.wait(60)))
    tracker = Tracker("mlflow")
    tracker.begin({}, None, timeout_s=0.2)
    tracker.finish(end)
    silence.set()
    assert capsys.readouterr().err.splitlines() == [
        "parallel_sgd: mlflow: no answer within 0.05 s; training goes on",
        "parallel_sgd: mlflow: the end of the run is not confirmed within 0.05 s",
    ]


def test_the_ranks_own_limit_reaches_the_tracker(fake, monkeypatch, capsys):
    silence = threading.Event()
    monkeypatch.setattr(fake, "before", staticmethod(lambda name: silence.wait(60)))
    data = psgd.data.Arrays(np.ones((8, 2), np.float32), np.zeros(8, np.int64))

    def body(comm: psgd.Communicator) -> None:
        model = psgd.models.MLP([2, 2], seed=0)
        algorithm = psgd.DataParallelSGD()
        with psgd.Learner(model.parameters, psgd.SGD(lr=0.1), algorithm, comm) as learner:
            psgd.TrainingSession(
                learner=learner,
                objective=model,
                train=data,
                minibatch_size=4,
                epochs=1,
                report=lambda row: silence.set(),
                tracker=Tracker("mlflow"),
            ).run()

    psgd.simulate(2, body, timeout_s=4)
    assert capsys.readouterr().err.startswith("parallel_sgd: mlflow: no answer within 1 s;")


class FakeClient:
    """What MLflow gets: the step and the name of each metric. The second request fails."""

    def __init__(self) -> None:
        self.requests: list[int] = []
        self.got: list[tuple[int, str]] = []

    def log_batch(self, run_id: str, metrics: Sequence[Any]) -> None:
        self.requests.append(len(metrics))
        if len(self.requests) == 2:
            raise ConnectionError("the network is down")
        self.got += [(metric[3], metric[0]) for metric in metrics]


def test_no_row_is_sent_twice_after_a_failure(monkeypatch):
    """Three rows of 400 metrics are two requests of MLflow, which takes 1,000 in one."""
    entities = SimpleNamespace(Metric=lambda *values: values)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(entities=entities))
    monkeypatch.setattr(trackers, "RETRY_S", 0.01)
    client, opened = FakeClient(), threading.Event()

    def open_late(run: services.MlflowRun) -> None:
        opened.wait(10)
        run.run_id, run._client = "number", client

    monkeypatch.setattr(services.MlflowRun, "open", open_late)
    sender = Sender("mlflow", services.MlflowRun("p", None, None, {}, None))
    names = [f"m{k}" for k in range(400)]
    for samples in (1, 2, 3):
        sender.log({"samples": samples, "time": 0.0, **dict.fromkeys(names, 0.5)})
    opened.set()
    for _ in range(1000):
        if len(client.got) == 1200 or sender._over.wait(0.01):
            break
    sender._stop()
    assert client.requests == [800, 400, 400]
    assert client.got == [(samples, name) for samples in (1, 2, 3) for name in names]


def test_a_run_that_is_only_kept_on_the_disk_is_a_warning(fake, monkeypatch, capsys):
    monkeypatch.setattr(fake, "problem", "kept on the disk")
    assert ran(fake).calls[-1] == ("close", "finished")
    assert capsys.readouterr().err == "parallel_sgd: mlflow: kept on the disk; training goes on\n"


def test_the_threads_of_senders_end(fake):
    before = set(threading.enumerate())
    ran(fake)
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert before.issuperset(threading.enumerate())


def test_the_folder_keeps_the_number_and_the_next_start_continues(fake, tmp_path):
    folder = psgd.RunFolder(tmp_path / "mine", {})
    folder.create()
    assert ran(fake, folder).name == "mine"
    assert json.loads((tmp_path / "mine" / "tracker.json").read_text()) == {"mlflow": "run-1"}
    (tmp_path / "mine" / "tracker.json").write_text('{"wandb": "x", "mlflow": "run-1"}')
    assert ran(fake, folder).calls[0] == ("open", "run-1")
    assert run_ids(folder.path) == {"wandb": "x", "mlflow": "run-1"}
    folder.close()


@pytest.fixture
def late(fake, tmp_path, monkeypatch):
    """A tracker, the folder of its run, and what the service waits for before it answers."""
    answer = threading.Event()
    monkeypatch.setattr(fake, "before", staticmethod(lambda name: answer.wait(60)))
    monkeypatch.setattr(trackers, "OPEN_S", 0.01)
    folder = psgd.RunFolder(tmp_path / "run", {})
    folder.create()
    tracker = Tracker("mlflow")
    tracker.begin({}, folder)
    yield tracker, folder, answer
    folder.close()


def test_a_number_that_comes_late_is_kept_with_a_row(fake, late):
    tracker, folder, answer = late
    assert not (folder.path / "tracker.json").exists()
    answer.set()
    opened = fake.made[0]
    for samples in range(10, 10_000, 10):
        tracker.log(row(samples))
        if opened.run_id is not None and run_ids(folder.path):
            break
        threading.Event().wait(0.01)
    assert run_ids(folder.path) == {"mlflow": "run-1"}
    tracker.finish()


def test_a_number_that_comes_after_the_last_row_is_kept(late):
    tracker, folder, answer = late
    tracker.log(row(10))
    assert run_ids(folder.path) == {}
    answer.set()
    tracker.finish()
    assert run_ids(folder.path) == {"mlflow": "run-1"}


def test_at_the_end_a_number_that_the_disk_refuses_is_a_line(capsys, late, monkeypatch):
    tracker, _, answer = late

    def full(folder: psgd.RunFolder, name: str, content: object) -> None:
        raise UserError(f"output={name!r} cannot be written: No space left on device")

    monkeypatch.setattr(psgd.RunFolder, "write_json", full)
    answer.set()
    tracker.finish()
    assert capsys.readouterr().err.splitlines()[1:] == [
        "parallel_sgd: mlflow: the run's number is not kept: output='tracker.json' cannot be "
        "written: No space left on device"
    ]


@pytest.mark.parametrize("text", ["[1]", "{", '{"mlflow": 3}'])
def test_a_damaged_number_is_named(text, tmp_path):
    (tmp_path / "tracker.json").write_text(text)
    with pytest.raises(UserError, match=r"tracker\.json'"):
        run_ids(tmp_path)


def test_a_second_begin_and_an_end_without_a_begin_do_nothing(fake):
    tracker = Tracker("mlflow")
    tracker.finish()
    tracker.begin({}, None)
    tracker.begin({}, None)
    tracker.finish()
    tracker.finish()
    assert len(fake.made) == 1


@pytest.mark.parametrize("size", [1, 2])
def test_an_interrupted_session_does_not_wait_for_its_tracker(fake, monkeypatch, capsys, size):
    """As Ctrl-C in a notebook: the service is silent at the end."""
    silence, trains = threading.Event(), threading.Event()
    monkeypatch.setattr(communicator, "PYTHON_S", communicator.PYTHON_S * patience())
    monkeypatch.setattr(trackers, "FAIL_S", 60.0)
    monkeypatch.setattr(
        fake, "before", staticmethod(lambda name: name == "close" and silence.wait(60))
    )
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt() -> None:
        trains.wait(30)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def body(comm: psgd.Communicator) -> None:
        model = psgd.models.MLP([2, 2], seed=0)
        data = psgd.data.Arrays(np.ones((8, 2), np.float32), np.zeros(8, np.int64))
        algorithm = psgd.DataParallelSGD()
        with psgd.Learner(model.parameters, psgd.SGD(lr=0.1), algorithm, comm) as learner:
            psgd.TrainingSession(
                learner=learner,
                objective=model,
                train=data,
                minibatch_size=4,
                epochs=10**6,
                report=lambda row: trains.set(),
                tracker=Tracker("mlflow"),
            ).run()

    threading.Thread(target=interrupt).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            psgd.simulate(size, body)
    finally:
        signal.signal(signal.SIGINT, before)
        silence.set()
    assert "cannot be interrupted" not in capsys.readouterr().err


def test_numbers_of_a_row():
    metrics = {"test_loss": 0.25, "test_auc": float("nan")}
    event = row(10, train_loss=float("inf"), metrics=metrics, details={"x": 1}, event="skipped")
    assert numbers(event) == {
        **{"epoch": 1.0, "samples": 10, "minibatch_size": 4, "bytes_sent": 8, "seconds": 0.1},
        "test_loss": 0.25,
    }


def test_options_for_mlflow():
    config = {"lr": 0.1, "bits": {0: 32, 100: {"a b": 1}}, "none": None, "w(x)": {}}
    assert dict(services.flat(config)) == {
        "lr": 0.1,
        "bits.0": 32,
        "bits.100.a b": 1,
        "w_x_": {},
    }


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("tensorboard",), "service='tensorboard' must be 'wandb' or 'mlflow'"),
        (("wandb", ""), "project='' must be a text"),
        (("wandb", "p", 3), "name=3 must be a text"),
    ],
)
def test_wrong_arguments(arguments, expected):
    with pytest.raises(UserError) as caught:
        Tracker(*arguments)
    assert str(caught.value) == expected


def fake_wandb(mode: str, *, key: bool, run: object = None) -> SimpleNamespace:
    settings = SimpleNamespace(settings=SimpleNamespace(mode=mode))
    return SimpleNamespace(
        setup=lambda: settings, login=lambda prompt, verify: key and run is None, run=run
    )


def test_wandb_needs_a_key_only_online(monkeypatch):
    for mode, key in (("offline", False), ("disabled", False), ("online", True)):
        monkeypatch.setitem(sys.modules, "wandb", fake_wandb(mode, key=key))
        Tracker("wandb").require()
    monkeypatch.setitem(sys.modules, "wandb", fake_wandb("online", key=False))
    with pytest.raises(UserError, match=r"^tracker='wandb' needs an API key.*WANDB_MODE=offline$"):
        Tracker("wandb").require()


def test_wandb_with_a_run_of_the_program_is_logged_in(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", fake_wandb("online", key=True, run=object()))
    Tracker("wandb").require()


@pytest.mark.parametrize("at", ["setup", "login"])
def test_what_wandb_refuses_is_one_line_for_all_ranks(monkeypatch, at):
    def refuse(**options: Any) -> None:
        raise RuntimeError("API key must have\n40 characters")

    wandb = fake_wandb("online", key=True)
    setattr(wandb, at, refuse)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with pytest.raises(UserError) as caught:
        Tracker("wandb").require()
    assert str(caught.value) == "tracker='wandb' cannot be used: API key must have 40 characters"


def test_wandb_gives_up_before_training_does(monkeypatch):
    """Time is left for the run on the disk, so that one line is printed."""
    given: list[dict[str, Any]] = []
    run = SimpleNamespace(define_metric=lambda name, step_metric: None)
    wandb = SimpleNamespace(
        Error=RuntimeError,
        Settings=lambda **settings: given.append(settings),
        init=lambda **options: run,
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for name in ("WANDB_INIT_TIMEOUT", "WANDB_FINISH_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    services.WandbRun("p", None, None, {}, None).open()
    assert 10 + given[0]["init_timeout"] + 5 < trackers.OPEN_S  # 10: for the account
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "40")
    services.WandbRun("p", None, None, {}, None).open()
    assert given[1] == {"finish_timeout": trackers.END_S}


def test_missing_packages(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(services.importlib.util, "find_spec", lambda name: None)
    for package in ("wandb", "mlflow"):
        with pytest.raises(UserError, match=rf"^tracker='{package}' needs {package} \("):
            Tracker(package).require()


def test_a_sender_that_nobody_ends_stops_with_the_program(fake, tmp_path: Path):
    run = fake("p", None, None, {}, None)
    sender = Sender("mlflow", run)
    sender.wait_until_open(10)
    sender._stop()
    assert sender._over.wait(10)
    assert run.calls == [("open", None)]


def test_a_rank_in_place_of_the_failed_first_one_continues_the_run(fake, tmp_path):
    x = np.random.default_rng(0).standard_normal((48, 4)).astype(np.float32)
    data = psgd.data.Arrays(x, x[:, :3].argmax(1))

    def body(comm: psgd.Communicator) -> None:
        model, number = psgd.models.MLP([4, 3], seed=0), comm.world_ranks[comm.rank]

        def fail(row: psgd.Progress) -> None:
            if row.epoch >= 2 and number == 0:
                raise SimulatedFailure

        algorithm = psgd.DataParallelSGD()
        with psgd.Learner(model.parameters, psgd.SGD(lr=0.1), algorithm, comm) as learner:
            psgd.TrainingSession(
                learner=learner,
                objective=model,
                train=data,
                minibatch_size=12,
                epochs=4,
                callbacks=[fail],
                folder=psgd.RunFolder(tmp_path / "run"),
                tracker=Tracker("mlflow"),
            ).run()

    assert len(simulate_recovery(3, body, timeout_s=60)) == 3
    first, second = fake.made
    assert first.calls[0] == ("open", None) and second.calls[0] == ("open", "run-1")
    logged = {call[1] for run in fake.made for call in run.calls if call[0] == "log"}
    assert logged == {48, 96, 144, 192}
    assert second.calls[-1] == ("close", "finished")
