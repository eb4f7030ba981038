"""The order in which a server answers: written, read again, and refused where it does not fit."""

from __future__ import annotations

import os
from collections import Counter

import numpy as np
import pytest
from disks import files_of_at_most

from parallel_sgd import UserError
from parallel_sgd.parameter_server import Order, RecordedOrder, ReplayedOrder
from parallel_sgd.parameter_server import order as order_module

ORDER, ABOUT = "order-of-server-0.i4", "order-of-server-0.json"


def facts_of(servers=1, workers=3, **options):
    return {"servers": str(servers), "workers": str(workers), **options}


def recorded(folder, workers, server=0, servers=1):
    order = RecordedOrder(str(folder), server, facts_of(servers))
    for worker in workers:
        assert order.next() is None  # anybody may come
        order.answered(worker)
    order.close()


def replayed(folder, server=0, servers=1):
    order, workers = ReplayedOrder(str(folder), server, facts_of(servers)), []
    while (worker := order.next()) is not None:
        assert order.next() == worker  # until it was answered
        workers.append(worker)
        order.answered(worker)
    order.answered(2)
    assert order.next() is None  # after the end anybody again
    order.close()
    return workers


def test_any_order_lets_anybody_come():
    order = Order()
    order.answered(1)
    order.close()
    assert order.next() is None


@pytest.mark.parametrize("workers", [[], [1], [0, 2, 2, 1, 0, 0, 2]], ids=str)
def test_what_was_recorded_is_replayed(tmp_path, workers):
    recorded(tmp_path / "made" / "here", workers)
    assert replayed(tmp_path / "made" / "here") == workers


def test_a_long_order_is_written_in_parts(tmp_path):
    workers = np.random.default_rng(5).integers(0, 3, 2 * order_module.FLUSH_EVERY + 43).tolist()
    order = RecordedOrder(str(tmp_path), 0, facts_of())
    for count, worker in enumerate(workers, 1):
        order.answered(worker)
        assert len(order._unwritten) == count % order_module.FLUSH_EVERY
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
    path = tmp_path / ORDER
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


def missing(path):
    path.unlink()


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def folder(path):
    path.unlink()
    path.mkdir()


#: What may stand in the place of a description.
NO_ORDERS = [
    b"[1, 2]",
    b'"requests"',
    b"7",
    b'{"a":' * 100_000,
    b"[" * 100_000,
    b'{"servers": "1", "workers": "3"}',
    b'{"requests": [2]}',
    b'{"requests": true}',
    b'{"requests": 1e999}',
    b'{"requests": ' + b"9" * 5000 + b"}",
    bytes(range(256)),
    '{"requests": 2}'.encode("utf-16") + b"!",
]


@pytest.mark.parametrize(
    ("name", "replace", "why"),
    [
        *((name, missing, "") for name in (ORDER, ABOUT)),
        *((n, by, rf"{n} (must|cannot) be ") for n in (ORDER, ABOUT) for by in (pipe, folder)),
        *((ABOUT, lambda path, by=text: path.write_bytes(by), "") for text in NO_ORDERS),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path, name, replace, why):
    recorded(tmp_path, [0, 1])
    replace(tmp_path / name)
    with pytest.raises(UserError, match=rf"^replay='.*': no order of server 0 \({why}") as caught:
        ReplayedOrder(str(tmp_path), 0, facts_of())
    assert "\n" not in str(caught.value)


def mutated(random, data):
    """With some bytes changed, cut out, or put in."""
    for _ in range(random.integers(1, 4)):
        at = int(random.integers(0, len(data) + 1))
        some = random.choice([b"[", b"{", b'"', b"\0", b"9", b"null", b"\xff", b"\\ud800"])
        data = data[:at] + bytes(some) * int(random.integers(0, 3)) + data[at + 1 :]
    return data


def test_hundreds_of_changed_recordings_are_taken_or_refused(tmp_path):
    """By nothing but a UserError of one line, which can be sent to other ranks."""
    recorded(tmp_path, [0, 1, 2, 1])
    random, ends = np.random.default_rng(9), Counter()
    right = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for number in range(1000):
        changed = sorted(right)[number % 4 > 0]
        changed.write_bytes(mutated(random, right[changed]))
        try:
            order = ReplayedOrder(str(tmp_path), 0, facts_of())
        except UserError as error:
            assert str(error).encode()
            assert "\n" not in str(error)
            ends["refused"] += 1
        else:
            assert order.next() in (None, 0, 1, 2)
            ends["taken"] += 1
        changed.write_bytes(right[changed])
    assert min(ends.values()) > 5, ends


@pytest.mark.parametrize("folder", ["/dev/null", "/dev/null/x", "a\0b"])
def test_what_cannot_be_recorded_to(folder):
    with pytest.raises(UserError, match=r"^record='.*' must be a folder"):
        RecordedOrder(folder, 0, facts_of())


def test_a_full_disk_is_said(tmp_path):
    order = RecordedOrder(str(tmp_path), 0, facts_of())
    order.answered(1)
    order._file.close()
    order._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    message = r"^record='.*': the order cannot be written: .*No space left"
    with pytest.raises(UserError, match=message):
        order.write()
    order.answered(1)
    with pytest.raises(UserError, match=message):
        order.close()
    order.close()  # nothing is left to write


def test_a_full_disk_leaves_a_recording_that_can_be_replayed(tmp_path):
    order = RecordedOrder(str(tmp_path), 0, facts_of(more="b" * 200))
    for worker in (2, 0, 1):
        order.answered(worker)
    order.write()
    with files_of_at_most(100), pytest.raises(UserError, match=r"\.json' cannot be written: File"):
        order.close()
    assert len(os.listdir(tmp_path)) == 2
    assert ReplayedOrder(str(tmp_path), 0, facts_of(more="b" * 200)).next() == 2


def test_a_write_that_fails_half_way_does_not_damage_a_recording(tmp_path):
    order = RecordedOrder(str(tmp_path), 0, facts_of())
    for _ in range(50):
        order.answered(2)
    with files_of_at_most(90), pytest.raises(UserError, match=r"cannot be written: .*File too la"):
        order.write()
    order.close()
    assert replayed(tmp_path) == [2] * 22


def test_a_recording_that_cannot_begin_is_not_in_the_way(tmp_path):
    with files_of_at_most(10), pytest.raises(UserError, match=r"\.json' cannot be written: File"):
        recorded(tmp_path, [1])
    assert os.listdir(tmp_path) == []
    recorded(tmp_path, [0, 1])
    assert replayed(tmp_path) == [0, 1]
