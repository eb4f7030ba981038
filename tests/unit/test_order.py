"""The order in which a server answers: written, read again, and refused where it does not fit."""

from __future__ import annotations

import numpy as np
import pytest

from parallel_sgd import UserError
from parallel_sgd.parameter_server import order as order_module
from parallel_sgd.parameter_server.order import AnyOrder, RecordedOrder, ReplayedOrder


def facts_of(servers=1, workers=3, **options):
    return {"servers": str(servers), "workers": str(workers), **options}


def recorded(folder, workers, server=0, servers=1):
    order = RecordedOrder(str(folder), server, facts_of(servers))
    for worker in workers:
        assert order.next() is None  # anybody may come
        order.answered(worker)
    order.close()


def replayed(folder, server=0, servers=1):
    order, found = ReplayedOrder(str(folder), server, facts_of(servers)), []
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
    order = RecordedOrder(str(tmp_path), 0, facts_of())
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


def test_a_recording_is_not_written_over(tmp_path):
    recorded(tmp_path, [0, 1, 1, 2])
    with pytest.raises(UserError, match=r"^record='.*' has a recording already$"):
        recorded(tmp_path, [2])
    assert replayed(tmp_path) == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("here", "differs"),
    [
        ({"workers": 2}, "workers=3, but here it is 2"),
        ({"servers": 2}, "servers=1, but here it is 2"),
        ({"mode": "geo"}, "mode=none, but here it is geo"),
    ],
)
def test_of_another_run(tmp_path, here, differs):
    recorded(tmp_path, [0, 1])
    with pytest.raises(UserError, match=rf"^replay='.*' is of {differs}$"):
        ReplayedOrder(str(tmp_path), 0, facts_of(**here))


@pytest.mark.parametrize("damage", ["cut", "longer", "nobody"])
def test_a_damaged_order_is_refused(tmp_path, damage):
    recorded(tmp_path, [0, 1, 2, 1])
    path = tmp_path / "order-of-server-0.i4"
    data = path.read_bytes()
    path.write_bytes({"cut": data[:-4], "longer": data + b"\0", "nobody": b"\7" * 16}[damage])
    with pytest.raises(UserError, match=r"^replay='.*': order-of-server-0\.i4 is damaged$"):
        replayed(tmp_path)


def test_a_job_that_was_ended_is_replayed_as_far_as_it_came(tmp_path, capsys):
    order = RecordedOrder(str(tmp_path), 0, facts_of())
    for worker in (2, 0, 1):
        order.answered(worker)
    order.write()
    order.answered(1)  # never written
    assert replayed(tmp_path) == [2, 0, 1]
    assert "server 0 has replayed all 3 recorded requests" in capsys.readouterr().err
    order.close()


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
        ReplayedOrder(str(tmp_path), 0, facts_of())


def test_an_order_of_another_server_only(tmp_path):
    recorded(tmp_path, [0, 1], server=1, servers=2)
    with pytest.raises(UserError, match=r"no order of server 0 \("):
        ReplayedOrder(str(tmp_path), 0, facts_of(2))
