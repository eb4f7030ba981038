"""`parallel-sgd plan --config`: a file with the recommended options, as train.py reads them."""

from __future__ import annotations

import shlex
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_plan import ARGUMENTS, JOB, ONE_BIT, SPEEDS

from parallel_sgd import BlockMomentumSGD
from parallel_sgd.__main__ import main
from parallel_sgd.command_line import plan, read
from parallel_sgd.command_line.doctor import command
from parallel_sgd.command_line.train.arguments import given_as_config
from parallel_sgd.costs import Link
from parallel_sgd.planning import Candidate, Job, candidates, recommend

PLANS = {
    "full precision": replace(JOB, link=Link.ethernet(1e13, 1e-6), nodes=4),
    "few bits": replace(JOB, nodes=8),
    "one bit": ONE_BIT,
    "block momentum": replace(JOB, link=Link.ethernet(1e8, 1e-3)),
    "large buckets": replace(JOB, nodes=1024, step_s=2.0),
}


@pytest.fixture(autouse=True)
def known_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "measure_kernel_speeds", lambda: SPEEDS)


def planned(capsys: pytest.CaptureFixture[str], config: object, **changed: str) -> tuple[int, str]:
    given = {**ARGUMENTS, **{f"--{name}": value for name, value in changed.items()}}
    code = main(["plan", *(word for pair in given.items() for word in pair), f"--config={config}"])
    said = capsys.readouterr()
    return code, said.err or said.out


def options_of(arguments: list[str]) -> tuple[Any, ...]:
    options, *made = read(arguments)
    return {name: value for name, value in vars(options).items() if name != "config"}, *made


def require_same(file: Path, words: list[str]) -> None:
    """The file gives these options, and names no other one."""
    assert options_of([str(file)]) == options_of(words)
    flags = {word.removeprefix("--") for word in words if word.startswith("--")}
    assert {name.replace("_", "-") for name in tomllib.loads(file.read_text())} == flags


@pytest.mark.parametrize("name", PLANS)
def test_the_file_gives_the_recommended_options(tmp_path: Path, name: str) -> None:
    job, file = PLANS[name], tmp_path / "config.toml"
    recommended = recommend(job)
    file.write_text(plan._config_text(recommended, job, "momentum"))
    require_same(file, recommended.options.split())


def test_these_plans_differ() -> None:
    options = [recommend(job).options for job in PLANS.values()]
    assert len(set(options)) == len(options)
    assert recommend(PLANS["one bit"]).options == "--gradient-bits 1"
    assert "--bucket-values" in recommend(PLANS["large buckets"]).options
    _, algorithm, _ = read(recommend(PLANS["block momentum"]).options.split())
    assert isinstance(algorithm, BlockMomentumSGD)


@pytest.mark.parametrize("candidate", candidates(JOB), ids=lambda c: f"{c.name} {c.bits}")
def test_every_algorithm_can_be_written(tmp_path: Path, candidate: Candidate) -> None:
    """Also those that are never recommended, such as parameter servers."""
    words = f"{candidate.options} --gradient-bits {candidate.bits}".split()
    file = tmp_path / "config.toml"
    file.write_text(given_as_config(words))
    require_same(file, words)


def test_a_value_of_its_own_word_or_behind_the_name(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    words = ["--hidden", "8", "4", "--lr=0:0.5,100:0.1", "--no-overlap"]
    file.write_text(given_as_config(words, heading=["Planned."]))
    assert options_of([str(file)]) == options_of(words)
    assert set(tomllib.loads(file.read_text())) == {"hidden", "lr", "overlap"}
    assert file.read_text().startswith("# Planned.\n")


def test_the_command_writes_the_file_and_names_the_next_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.toml"
    file.write_text("an older one")
    code, said = planned(capsys, file)
    assert code == 0
    *_, printed = (line for line in said.splitlines() if line.startswith("train.py "))
    require_same(file, printed.split()[1:])
    first = file.read_text().splitlines()[0]
    assert first.startswith("# Planned for 64 nodes, links of 1,196 MB/s")
    assert "; 60,000,000 parameters, 200 ms a step of 64 samples a rank." in first
    program, name, *arguments = shlex.split(said.splitlines()[-1])
    assert (program, name) == ("parallel-sgd", "doctor")
    given = command._parser().parse_args(arguments)
    assert (given.hostfile, given.ranks, given.job) == ("hosts", None, "job.sh")
    assert given.command == ["train.py", str(file)]


def test_what_the_plan_assumed_can_be_uncommented(tmp_path: Path) -> None:
    job: Job = replace(JOB, ranks_per_node=2)
    text = plan._config_text(recommend(job), job, "adam")
    file = tmp_path / "config.toml"
    file.write_text(text.replace("# minibatch_size", "minibatch_size").replace("# opti", "opti"))
    options, _, optimizer = read([str(file)])
    assert (options.minibatch_size, options.optimizer) == (64 * 2 * 64, "adam")
    assert optimizer.lr == 0.001


def test_one_machine_needs_no_hostfile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a b.toml"
    changed = {"nodes": "1", "ranks-per-node": "4"}
    code, said = planned(capsys, file, **changed)
    assert code == 0
    assert said.splitlines()[-1] == f"parallel-sgd doctor -n 4 --job job.sh train.py '{file}'"


def test_without_a_file_there_is_no_next_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *(word for pair in ARGUMENTS.items() for word in pair)]) == 0
    assert "parallel-sgd doctor" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("/no/such/config.toml", "--config=/no/such/config.toml must be a file in a folder that"),
        (".", "--config=. must be a file in a folder that exists"),
        ("", "--config='' must be the path of a file"),
        ("/dev/full", "--config='/dev/full' cannot be written: No space left on device"),
        ("/proc/config.toml", "--config='/proc/config.toml' cannot be written: "),
    ],
)
def test_a_place_where_no_file_can_be(
    capsys: pytest.CaptureFixture[str], config: str, message: str
) -> None:
    code, said = planned(capsys, config)
    assert code == 2
    assert said.startswith(f"parallel-sgd: error: {message}") and said.count("\n") == 1
