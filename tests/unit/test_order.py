"""The order in which a server answers: written, read again, and refused where it does not fit."""

from __future__ import annotations

import numpy as np
import pytest

from parallel_sgd import UserError
from parallel_sgd.parameter_server import order as order_module
from parallel_sgd.parameter_server.order import AnyOrder, RecordedOrder, ReplayedOrder


def recorded(folder, workers, server=0, servers=1, of=3):
    order = RecordedOrder(str(folder), server, servers, of)
    for worker in workers:
        assert order.next() is None  # anybody may come
        order.answered(worker)
    order.close()


def replayed(folder, server=0, servers=1, of=3):
    order, found = ReplayedOrder(str(folder), server, servers, of), []
    while (worker := order.next()) is not None:
        assert order.next() == worker  # until it was answered
        found.append(worker)
        order.answered(worker)
    order.answered(2)
    assert order.next() is None  # after the end anybody again
    order.close()
    return found


def test_any_order_lets_anybody_come():
    order = AnyOrder()
    order.answered(1)
    order.close()
    assert order.next() is None


@pytest.mark.parametrize("workers", [[], [1], [0, 2, 2, 1, 0, 0, 2]], ids=str)
def test_what_was_recorded_is_replayed(tmp_path, workers):
    recorded(tmp_path / "made" / "here", workers)
    assert replayed(tmp_path / "made" / "here") == workers


def test_a_long_order_is_written_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(order_module, "FLUSHED", 8)
    workers = np.random.default_rng(5).integers(0, 3, 43).tolist()
    order = RecordedOrder(str(tmp_path), 0, 1, 3)
    for count, worker in enumerate(workers, 1):
        order.answered(worker)
        assert len(order._unwritten) == count % 8
    order.close()
    assert replayed(tmp_path) == workers


def test_every_server_has_its_own(tmp_path):
    recorded(tmp_path, [0, 1, 1], server=0, servers=2)
    recorded(tmp_path, [2, 0], server=1, servers=2)
    assert replayed(tmp_path, server=0, servers=2) == [0, 1, 1]
    assert replayed(tmp_path, server=1, servers=2) == [2, 0]


def test_recording_again_writes_anew(tmp_path):
    recorded(tmp_path, [0, 1, 1, 2])
    recorded(tmp_path, [2])
    assert replayed(tmp_path) == [2]


@pytest.mark.parametrize(
    ("servers", "workers", "here"),
    [(1, 2, "2 and 1"), (1, 4, "4 and 1"), (2, 3, "3 and 2"), (3, 1, "1 and 3")],
)
def test_another_number_of_ranks(tmp_path, servers, workers, here):
    recorded(tmp_path, [0, 1])
    message = rf"^replay='.*' is of 3 workers and 1 servers, but here are {here}$"
    with pytest.raises(UserError, match=message):
        ReplayedOrder(str(tmp_path), 0, servers, workers)


@pytest.mark.parametrize("what", ["nothing", "one half", "the other half", "no JSON"])
def test_where_nothing_is_recorded(tmp_path, what):
    recorded(tmp_path, [0, 1])
    order, about = sorted(tmp_path.iterdir(), key=lambda path: path.suffix == ".json")
    if what in ("nothing", "one half"):
        order.unlink()
    if what in ("nothing", "the other half"):
        about.unlink()
    if what == "no JSON":
        about.write_text("servers: 1")
    with pytest.raises(UserError, match=r"^replay='.*': no order of server 0 \("):
        ReplayedOrder(str(tmp_path), 0, 1, 3)


def test_an_order_of_another_server_only(tmp_path):
    recorded(tmp_path, [0, 1], server=1, servers=2)
    with pytest.raises(UserError, match=r"no order of server 0 \("):
        ReplayedOrder(str(tmp_path), 0, 2, 3)
