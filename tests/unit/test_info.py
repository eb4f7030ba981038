"""`parallel-sgd info`: how a model would be placed, how fast ranks exchange, what it refuses."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parallel_sgd import Communicator, Parameters, simulate
from parallel_sgd.__main__ import main
from parallel_sgd.command_line import info, links
from parallel_sgd.communication import without_launcher
from parallel_sgd.compression import registered_bits
from parallel_sgd.costs import LINK_EFFICIENCY, KernelSpeeds, Link
from parallel_sgd.training import RunFolder

SHAPES = ["W1=784x512", "b1=512", "W2=512x10", "b2=10"]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No launcher, a folder of its own, and no MPI to look for."""
    for name in set(os.environ) - set(without_launcher(os.environ)):
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(info, "collect", lambda: {"versions": {"python": "3"}})


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["info", *arguments]) == 0
    return capsys.readouterr().out


def placed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    return json.loads(told(capsys, "--json", *arguments))["placement"]


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    shown = told(capsys, "--servers", "3", "--shapes", *SHAPES)
    assert shown == (
        "versions\n"
        "  python                3\n"
        "placement\n"
        "  rule                  round-robin\n"
        "  all servers           407,050 values (1.63 MB in float32)\n"
        "  server 0              2 slices, 134,656 values (0.54 MB in float32), 33.1%\n"
        "                        W1[0:262], b1\n"
        "  server 1              2 slices, 139,264 values (0.56 MB in float32), 34.2%\n"
        "                        W1[262:524], W2\n"
        "  server 2              2 slices, 133,130 values (0.53 MB in float32), 32.7%\n"
        "                        W1[524:784], b2\n"
        "  largest and smallest  139,264 and 133,130 values (1.05 times as many)\n"
    )


def test_the_table_of_one_slice_and_of_many_names(capsys: pytest.CaptureFixture[str]) -> None:
    shown = told(capsys, "--servers", "2", "--shapes", "a-long-name=10")
    assert "  server 0              1 slice, 10 values (0.00 MB in float32), 100.0%\n" in shown
    assert "  server 1              0 slices, 0 values (0.00 MB in float32), 0.0%\n" in shown
    assert shown.endswith("  largest and smallest  10 and 0 values\n")
    names = [f"a-name-to-be-kept-in-one-{i}" for i in range(9)]
    shown = told(capsys, "--servers", "1", "--shapes", *(f"{name}=1" for name in names))
    assert all(len(line) <= 100 for line in shown.splitlines())
    assert re.findall(r"a-name\S*\d", shown) == names


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    placement = placed(capsys, "--servers", "2", "--shapes", *SHAPES[:2])
    first, second = placement.pop("servers")
    assert first == {
        "slices": 2,
        "values": 201_216,
        "float32_mb": 0.804864,
        "share": 201_216 / 401_920,
        "names": ["W1[0:392]", "b1"],
    }
    assert second["names"] == ["W1[392:784]"]
    amounts = {"values": 401_920, "largest": 201_216, "smallest": 200_704}
    assert placement == {"rule": "round-robin", **amounts}


def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    def names(*options: str) -> list[list[str]]:
        placement = placed(capsys, "--servers", "2", "--shapes", *SHAPES, *options)
        return [server["names"] for server in placement["servers"]]

    assert names("--whole-parameters") == [["W1", "W2"], ["b1", "b2"]]
    assert names("--min-block", "1000000") == names("--whole-parameters")
    assert names("--min-block", "5")[0] == ["W1[0:392]", "b1[0:256]", "W2[0:256]", "b2[0:5]"]
    assert names("--placement", "hash") == [["W1[392:784]", "b1", "W2", "b2"], ["W1[0:392]"]]
    assert names("--placement", "round-robin") == names()
    again = placed(capsys, "--servers", "1", "--shapes", "w=x=3x4", "--shapes", "b=0")
    assert again["servers"][0]["names"] == ["w=x", "b"]
    assert again["values"] == 12


def test_a_model_as_train_leaves_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arrays = {"W1": np.ones((784, 512)), "scalar": np.ones(()), "none": np.ones((0, 3))}
    folder = RunFolder(tmp_path / "run", {})
    folder.create()
    folder.write_model(Parameters({name: a.astype(np.float32) for name, a in arrays.items()}))
    placement = placed(capsys, "--servers", "2", "--model", "run/model.npz")
    names = [server["names"] for server in placement["servers"]]
    assert names == [["W1[0:392]", "scalar"], ["W1[392:784]", "none"]]
    assert placement["values"] == 784 * 512 + 1
    np.savez_compressed("small.npz", W=np.zeros((3, 4)))
    assert placed(capsys, "--servers", "1", "--model", "small.npz")["values"] == 12


def test_values_are_not_read(capsys: pytest.CaptureFixture[str]) -> None:
    head = b"\x93NUMPY\x01\x00v\x00" + b"{'descr': '<f4', 'fortran_order': False, 'shape': "
    head += b"(1000000, 1000000)}".ljust(118 - len(head) + 9) + b"\n"
    with zipfile.ZipFile("huge.npz", "w") as archive:
        archive.writestr("W.npy", head)
    assert placed(capsys, "--servers", "4", "--model", "huge.npz")["values"] == 10**12


class Trap:
    """Leaves a trace where it is unpickled."""

    def __reduce__(self) -> tuple:
        return Path.touch, (Path("sprung"),)


def test_nothing_in_a_file_is_executed(capsys: pytest.CaptureFixture[str]) -> None:
    np.savez("trap.npz", W=np.array([Trap()], object))
    assert main(["info", "--servers", "2", "--model", "trap.npz"]) == 2
    assert "trap.npz must hold parameters: 'W' is of object" in capsys.readouterr().err
    assert not Path("sprung").exists()


def test_only_rank_0_speaks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    assert told(capsys, "--servers", "2", "--model", "none.npz") == ""


def test_without_servers_it_is_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys) == "versions\n  python  3\n"
    assert json.loads(told(capsys, "--json")) == {"versions": {"python": "3"}}


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        ("--servers 2", "--servers needs the parameters, from one of --model .* and --shapes"),
        ("--servers 2 --model m.npz --shapes a=1", "--servers needs .* one of --model"),
        ("--servers 0 --shapes a=1", "servers=0 must be a whole number from 1 to"),
        ("--servers two --shapes a=1", "--servers: invalid int value: 'two'"),
        ("--servers", "--servers: expected one argument"),
        ("--servers 2 --shapes", "--shapes: expected at least one argument"),
        *(
            (f"--servers 2 --shapes {shape}", f"--shapes: '{shape}' must be like W1=784x128")
            for shape in ("a", "a=", "=3", "a=3x", "a=-3", "a=3,4", "a=٣")
        ),
        ("--servers 2 --shapes a=3 a=4", "--shapes: 'a=4' must name a parameter once"),
        ("--servers 2 --shapes a=3 --placement x", "placement='x' must be one of 'round-robin', "),
        ("--servers 2 --shapes a=3 --min-block 0", "min_block=0 must be a whole number"),
        ("--servers 9999999999 --shapes a=1", "servers=9999999999 must be a whole number from 1"),
        ("--servers 2 --shapes a=1 --min-block 9 --whole-parameters", "min-block=9 has no effect"),
        ("--servers 2 --model none.npz", "none.npz: there is no such file"),
        ("--servers 2 --model .", "\\. cannot be read: Is a directory"),
        ("--servers 2 --model text.npz", "text.npz must be a well-formed .npz file: File is not"),
        ("--servers 2 --model short.npz", "short.npz must be a well-formed .npz file: "),
        ("--servers 2 --model data.npz", "data.npz must hold parameters: 'y' is of int64"),
        ("--servers 2 --model empty.npz", "empty.npz must hold at least one parameter"),
        ("--servers 2 --model other.npz", "other.npz must be a well-formed .npz file: "),
        ("--model m.npz", "--model needs --servers"),
        ("--shapes a=1", "--shapes needs --servers"),
        ("--placement hash", "--placement needs --servers"),
        ("--min-block 3", "--min-block needs --servers"),
        ("--whole-parameters", "--whole-parameters needs --servers"),
    ],
)
def test_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: str, wrong: str
) -> None:
    Path("text.npz").write_text("not a zip file")
    np.savez("data.npz", x=np.zeros(3), y=np.zeros(3, np.int64))
    np.savez("empty.npz")
    with zipfile.ZipFile("short.npz", "w") as archive:
        archive.writestr("W.npy", b"\x93NUMPY\x01\x00v\x00{'descr'")
    with zipfile.ZipFile("other.npz", "w") as archive:
        archive.writestr("readme.txt", b"hello, this is text")
    assert main(["info", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert re.match(f"parallel-sgd: error: .*{wrong}", err), err


@pytest.fixture
def set_links(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Any], None]:
    """Set a limit of what is measured between ranks, by its name."""
    return partial(monkeypatch.setattr, links)


@pytest.fixture
def small(set_links: Callable[[str, Any], None], measurements: Callable[..., None]) -> None:
    """Nothing large is measured."""
    set_links("SIZES", (2500, 250_000))
    rates = dict.fromkeys(registered_bits(), 1e9)
    speeds = KernelSpeeds({**rates, 32: math.inf}, {**rates, 32: math.inf}, rates)
    measurements(
        measure_kernel_speeds=lambda *args, **options: speeds,
        measure_link=lambda comm, hosts: Link(5e-5, 1e6),
    )


class Commands(list[list[str]]):
    """Commands, which end with this exit code."""

    code = 0


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Commands:
    """The commands that would start ranks, which find what threads do."""
    commands = Commands()

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        ranks = int(command[command.index("-n") + 1])
        told = f"a word of MPI's\n{json.dumps(simulate(ranks, links.measure_on)[0])}\n"
        return subprocess.CompletedProcess(command, commands.code, stdout=told)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


@pytest.mark.usefixtures("small")
def test_links(capsys: pytest.CaptureFixture[str], started: Commands) -> None:
    report = json.loads(told(capsys, "--links", "-n", "3", "--json"))["links"]
    assert report["ranks"] == 3 and list(report["hosts"].values()) == [3]
    assert report["link"] == {"latency_s": 5e-5, "bytes_per_s": 1e6}
    few, many = report["exchanges"]
    assert (few["values"], many["values"]) == (2500, 250_000)
    assert few["transport"] == "collective"  # the other one is chosen by trials
    for row in (few, many):
        assert row["transport"] in row["seconds"] and row["gradient_bits"] == 1
        assert set(row["seconds"]) == {"collective", "pipelined"}
        assert list(row["predicted_s"]) == ["32", "16", "8", "4", "1", "0.5", "0.25", "0.1"]
    # 2 (K-1)/K n values of 4 bytes at 1 MB/s
    assert many["predicted_s"]["32"] == pytest.approx(4 / 3 / LINK_EFFICIENCY, rel=0.05)
    (command,) = started
    assert command[1:6] == ["-m", "parallel_sgd", "run", "-n", "3"]
    assert command[6:] == ["-m", "parallel_sgd.command_line.links"]


@pytest.mark.usefixtures("small")
def test_the_table_of_links(
    capsys: pytest.CaptureFixture[str], set_links: Callable[[str, Any], None], started: Commands
) -> None:
    set_links("MAX_SECONDS", 0.5)
    Path("hosts").write_text("one slots=3\ntwo\n")
    lines = told(capsys, "--links", "--hostfile", "hosts").splitlines()
    assert started[0][5:8] == ["4", "--hostfile", "hosts"]
    assert re.fullmatch(r"  ranks +4 on 1 host: .* \(4\)", lines[3])
    assert re.fullmatch(r"  memory between ranks +1 MB/s each way, 50 us", lines[4])
    assert re.search(
        "  0.01 MB of float32 +transport auto: collective; 32 bit, pipelined ", lines[6]
    )
    assert "gradient bits auto: 1" in lines[7]
    assert re.search(r"  1 MB .* 32 bit, not tried, as the prediction is more than 0.5 s", lines[9])
    assert re.search(
        r"predicted: 32 bit 1.63e\+03 ms, .* 1 bit 51.5 ms, .*, 0.1 bit 5.63 ms", lines[11]
    )


@pytest.mark.usefixtures("small")
def test_under_mpiexec_its_ranks_are_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, started: Commands
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    world = list[Communicator]()
    monkeypatch.setattr(links.Communicator, "world", lambda: world[0])

    def rank(comm: Communicator) -> None:
        if comm.rank == 0:
            world.append(comm)
            assert main(["info", "--links", "--json"]) == 0
        else:
            links.measure_on(comm)

    simulate(2, rank)
    assert json.loads(capsys.readouterr().out)["links"]["ranks"] == 2
    assert not started


@pytest.mark.usefixtures("small")
def test_ranks_that_end_with_an_error(
    capsys: pytest.CaptureFixture[str], started: Commands
) -> None:
    started.code = 3
    assert main(["info", "--links"]) == 2
    assert "--links: 2 ranks ended with exit code 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "launched", "wrong"),
    [
        ("-n 3", None, "-n 3 needs --links"),
        ("--hostfile hosts", None, "--hostfile hosts needs --links"),
        ("--links -n 1", None, "--links needs 2 ranks or more, but there is 1"),
        ("--links -n two", None, "-n/-np: must be a whole number from 1 to 1048576: 'two'"),
        ("--links --hostfile none", None, "hostfile 'none': there is no such file"),
        ("--links --hostfile one", None, "--hostfile one has 1 slot, and --links needs 2"),
        ("--links", 1, "--links needs 2 ranks or more, but there is 1"),
        ("--links -n 3", 2, "-n 3 must not be given if Open MPI's mpiexec has started"),
        ("--links --hostfile one", 2, "--hostfile one must not be given if Open MPI's"),
    ],
)
def test_links_that_cannot_be_measured(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    started: Commands,
    arguments: str,
    launched: int | None,
    wrong: str,
) -> None:
    Path("one").write_text("host\n")
    if launched is not None:
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", str(launched))
    assert main(["info", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert f"parallel-sgd: error: {wrong}" in err
    assert not started
