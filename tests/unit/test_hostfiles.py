"""Hostfiles of both dialects: reading, handing over, translating, and telling what is wrong."""

import os
from pathlib import Path

import pytest

from parallel_sgd.errors import UserError
from parallel_sgd.launcher import MPICH, OPEN_MPI, Hostfile, read_hostfile

SAMPLES = Path(__file__).parents[2] / "hostfiles"


def hostfile(folder: Path, text: str) -> Hostfile:
    path = folder / "hosts"
    path.write_text(text)
    return read_hostfile(path)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n0 slots=4\nn1 slots=2\n", {"n0": 4, "n1": 2}),
        ("n0:4\nn1:2", {"n0": 4, "n1": 2}),
        ("n0\nn1.example.org\n10.0.0.7\n", {"n0": None, "n1.example.org": None, "10.0.0.7": None}),
        ("# all\n\n  n0   slots = 4  # the big one\n\t\nn-1 # small\n", {"n0": 4, "n-1": None}),
        ("n0 slots=4 max_slots=8\nn1 max-slots=2 slots=1\n", {"n0": 4, "n1": 1}),
        ("n0:4 binding=user:0,1 ifname=eth0\nn1 user=me\n", {"n0": 4, "n1": None}),
        ("n0 slots=2\r\nn1:3\r\n", {"n0": 2, "n1": 3}),
        ("\ufeffn0 slots=2\n", {"n0": 2}),
    ],
)
def test_reads_both_dialects(tmp_path: Path, text: str, hosts: dict[str, int | None]) -> None:
    read = [(host.name, host.slots) for host in hostfile(tmp_path, text).hosts]
    assert read == list(hosts.items())


@pytest.mark.parametrize(
    ("text", "dialect", "options"),
    [
        ("n0 slots=4\nn1 # one\n", MPICH, ["-hosts", "n0:4,n1:1"]),
        ("n0:4\nn1\n", OPEN_MPI, ["--host", "n0:4,n1:1"]),
        ("n0:4\nn1 slots=2\n", OPEN_MPI, ["--host", "n0:4,n1:2"]),
        ("n0:4\nn1 slots=2\n", MPICH, ["-hosts", "n0:4,n1:2"]),
        ("n0\u00a0slots=4\n", OPEN_MPI, ["--host", "n0:4"]),  # which mpiexec takes for a letter
        ("n0:4\u00a0\n", MPICH, ["-hosts", "n0:4"]),
        # MPICH takes a comment only on a line of its own
        ("n0:4 # big\nn1:2\n", MPICH, ["-hosts", "n0:4,n1:2"]),
        # Open MPI takes none of these
        ("n0 slots=4\r\nn1 slots=2\r\n", OPEN_MPI, ["--host", "n0:4,n1:2"]),
        ("\ufeffn0 slots=4\n", OPEN_MPI, ["--host", "n0:4"]),
        ("n0 slots=4\nn1\nn0 slots=2\n", OPEN_MPI, ["--host", "n0:6,n1:1"]),
        ("n0:1\nn1:1\nn0:1\n", MPICH, ["-hosts", "n0:2,n1:1"]),
        ("n0:4\r\n", MPICH, ["-hosts", "n0:4"]),
    ],
)
def test_translates(tmp_path: Path, text: str, dialect: str, options: list[str]) -> None:
    assert hostfile(tmp_path, text).mpiexec_options(dialect) == options


@pytest.mark.parametrize(
    ("text", "dialect", "option"),
    [
        ("n0 slots=4 max_slots=8 # big\nn1\n", OPEN_MPI, "--hostfile"),
        ("# a comment\nn0:4\nn1 ifname=eth0\n", MPICH, "-f"),
        ("n0\nn1\n", OPEN_MPI, "--hostfile"),
        ("n0\nn1\n", MPICH, "-f"),
    ],
)
def test_hands_over_a_file_of_the_right_dialect_as_it_stands(
    tmp_path: Path, text: str, dialect: str, option: str
) -> None:
    assert hostfile(tmp_path, text).mpiexec_options(dialect) == [option, str(tmp_path / "hosts")]


@pytest.mark.parametrize(
    ("text", "dialect", "wrong"),
    [
        ("n0\nn1 slots=2 max_slots=4\n", MPICH, r"hosts:2: .* MPICH.*'max_slots=4'"),
        ("n0:2 ifname=eth0\n", OPEN_MPI, r"hosts:1: .* Open MPI.*'ifname=eth0'"),
        ("n0 slots=2 max_slots=4\r\n", OPEN_MPI, r"hosts:1: .*line ends.*'max_slots=4'"),
        ("n0:1\nn0:2 ifname=eth0\n", MPICH, r"hosts:2: .*each host once.*'ifname=eth0'"),
        ("n0:2 ifname=eth0 # fast\n", MPICH, r"hosts:1: .*no comment.*'ifname=eth0'"),
    ],
)
def test_does_not_drop_what_a_list_of_hosts_cannot_say(
    tmp_path: Path, text: str, dialect: str, wrong: str
) -> None:
    with pytest.raises(UserError, match=wrong):
        hostfile(tmp_path, text).mpiexec_options(dialect)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", r"at least one host: .* names none"),
        ("# nothing\n\n", r"at least one host"),
        ("n0 slots=2\nn1 slots=two\n", r"hosts:2: slots must be a whole number.*'slots=two'"),
        ("n0 slots=0\n", r"hosts:1: slots must be .* from 1 to .*'slots=0'"),
        ("n0 slots=2147483647\n", r"hosts:1: slots must be .* to 1048576: 'slots=2147483647'"),
        ("n0:99999999999999999999\n", r"hosts:1: slots must be a whole number from 1 to 1048576"),
        ("n0:1048576\nn1\n", r"hosts' must have at most 1048576 slots in all: it has 1048577"),
        ("n0:\n", r"hosts:1: slots must be .*'n0:'"),
        ("n0:-1\n", r"hosts:1: slots must be .*'n0:-1'"),
        ("\n\nn0 slot=4\n", r"hosts:3: a line must read .*'n0 slot=4'"),
        ("n0 4\n", r"hosts:1: a line must read .*'n0 4'"),
        ("n0: 4\n", r"hosts:1: slots must be"),
        ("n0:4 slots=4\n", r"hosts:1: a line must read"),
        ("n0 slots=4 slots=4\n", r"hosts:1: a line must read"),
        ("n0:4 max_slots=8\n", r"hosts:1: a line must read"),
        ("n0 slots=4 ifname=eth0\n", r"hosts:1: a line must read"),
        ("n0 slots=4 max_slots=many\n", r"hosts:1: slots must be"),
        ("=4\n", r"hosts:1: a line must begin with a host's name: '=4'"),
        ("n0,n1\n", r"hosts:1: a line must begin with a host's name: 'n0,n1'"),
        ("slots=4\n", r"hosts:1: a line must begin with a host's name: 'slots=4'"),
    ],
)
def test_names_the_line_that_is_wrong(tmp_path: Path, text: str, wrong: str) -> None:
    with pytest.raises(UserError, match=wrong) as caught:
        hostfile(tmp_path, text)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^hostfile '.*none': there is no such file"):
        read_hostfile(tmp_path / "none")
    with pytest.raises(UserError, match=r"^hostfile .* cannot be read: Is a directory"):
        read_hostfile(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match=r"^hostfile .*pipe' must be a regular file: it is a pipe$"):
        read_hostfile(tmp_path / "pipe")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00n0")
    with pytest.raises(UserError, match="text file"):
        read_hostfile(tmp_path / "binary")


@pytest.mark.parametrize(
    ("text", "ranks", "bare_slots", "most"),
    [
        ("n0 slots=4\nn1 slots=4\n", 2, 1, 2),
        ("n0 slots=4\nn1 slots=4\n", 8, 1, 4),
        ("n0 slots=4\nn1 slots=4\n", 9, 1, 5),
        ("n0\nn1\n", 4, 1, 2),
        ("n0\nn1\n", 4, 8, 4),
        ("n0:1\nn0:1\nn1:1\n", 3, 1, 2),
    ],
)
def test_ranks_on_the_fullest_host(
    tmp_path: Path, text: str, ranks: int, bare_slots: int, most: int
) -> None:
    assert hostfile(tmp_path, text).most_ranks_on_a_host(ranks, bare_slots) == most


def test_the_samples_are_sound() -> None:
    for name, dialect in (("openmpi.hosts", OPEN_MPI), ("mpich.hosts", MPICH)):
        sample = read_hostfile(SAMPLES / name)
        assert [(host.name, host.slots) for host in sample.hosts] == [("localhost", 4)]
        assert sample.mpiexec_options(dialect)[1] == str(SAMPLES / name)
