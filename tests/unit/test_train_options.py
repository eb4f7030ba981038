"""The command line of train.py: what is refused before anything starts, and what schedules mean."""

from __future__ import annotations

import json
import random
import re
import time

import pytest

from parallel_sgd import UserError
from parallel_sgd.command_line import parser, read, simulate
from parallel_sgd.command_line.options import describe
from parallel_sgd.command_line.train.command import _new_output
from parallel_sgd.launcher import THREAD_VARIABLES
from parallel_sgd.schedules import Cosine, Linear, Steps, WarmUp


def refused(line: str) -> str:
    with pytest.raises(UserError) as caught:
        read(line.split())
    return str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--gradient 1", "unrecognized arguments: --gradient"),
        ("--epocs 1", "unrecognized arguments: --epocs: did you mean --epochs?"),
        ("--gradient-bits 0:1,0:2", "--gradient-bits: '0:1,0:2' must give each number of samples"),
        ("--bits-of b", "--bits-of: bits_of='b' must be pattern:value pairs as *.bias:32,<1024"),
        ("--bits-of :8", "--bits-of: bits_of=':8' must be pattern:value pairs"),
        ("--bits-of b:8,b:4", "--bits-of: 'b:8,b:4' must give each pattern once"),
        ("--bits-of b:x", "bits_of['b']='x' must be a number from 0.05 to 8, 16 or 32"),
        ("--bits-of b:12", "bits_of['b']=12 must be a number from 0.05 to 8, 16 or 32"),
        (
            "--gradient-bits x",
            "gradient_bits='x' must be a number from 0.05 to 8, 16 or 32, or",
        ),
        (
            "--algorithm powersgd --bits-of b:8",
            "--bits-of={'b': 8} is not an option of powersgd, but of",
        ),
        ("--output=", "output='' must be the path of a folder"),
        ("--resume=", "resume='' must be the path of a folder"),
        ("--trace=", "trace='' must be the path of a file"),
        ("--data=", "data='' must be the path of a file"),
        ("--labels=", "labels='' must be the path of a file"),
        ("--labels y.npy", "labels='y.npy': digits has labels of its own"),
        ("--not-finite ignore", "not_finite='ignore' must be one of 'stop', 'skip', 'reduce'"),
        (
            "--not-finite skip --not-finite-factor 0.1",
            "not_finite_factor=0.1 has no effect without",
        ),
        ("--model softmax --hidden 7", "hidden=[7]: a softmax model has no hidden layers"),
    ],
)
def test_what_is_refused(line, message):
    assert refused(line).startswith(message)


STATE = "an --optimizer that has a state"
CLASSES = "a --model whose classes"


@pytest.mark.parametrize(
    ("line", "option", "needed"),
    [
        ("--keep 5", "keep=5", "--checkpoint-every N"),
        ("--cuda-aware", "cuda_aware=True", "--device cuda"),
        ("--data library --classes 9", "classes=9", CLASSES),
        ("--model bytes --classes 256", "classes=256", CLASSES),
        ("--threshold mean", "threshold='mean'", "gradient_bits=1 and code='sign'"),
        ("--gradient-bits 1 --threshold mean", "threshold='mean'", "gradient_bits=1 and code='"),
        ("--code sign", "code='sign'", "gradient_bits=1"),
        ("--code entropy --gradient-bits 16", "code='entropy'", "gradient_bits=0.05 to 8"),
        ("--code levels --gradient-bits 2.5", "code='levels'", "gradient_bits=4 or "),
        ("--gradient-bits 1 --half-format bfloat16", "half_format='bfloat16'", ""),
        ("--no-error-feedback", "error_feedback=False", "gradient_bits of less"),
        ("--algorithm model-averaging --inner-state zero", "inner_state='zero'", STATE),
        ("--algorithm block-momentum --no-reset-sgd-momentum", "reset_sgd_momentum=False", STATE),
        ("--algorithm diloco --merge-weight 0.5", "merge_weight=0.5", "overlap"),
        ("--algorithm async --staleness 9", "staleness=9", "mode='bounded'"),
        ("--algorithm async --block-size 64", "block_size=64", "gradient_bits of"),
    ],
)
def test_options_without_effect(line, option, needed):
    assert refused(line).startswith(f"{option} has no effect without {needed}")


@pytest.mark.parametrize(
    "line",
    [
        "--keep 5 --checkpoint-every 9",
        "--keep 3",
        "--cuda-aware --device cuda",
        "--gradient-bits auto --half-format bfloat16 --no-error-feedback",
        "--gradient-bits 0:32,9:1 --code sign --threshold mean",
        "--gradient-bits 0:32,20:0.5,40:1.7",
        "--gradient-bits 0:16,9:4 --code entropy",
        "--algorithm model-averaging --inner-state zero --optimizer adam",
        "--block-size 64",
    ],
)
def test_options_with_an_effect(line):
    read(line.split())


def test_bits_by_pattern():
    """In the order given; the last colon ends a pattern."""
    _, algorithm, _ = read(["--bits-of", "<1024:32,tower:*.bias:16,E:1"])
    assert [*algorithm.bits_of.items()] == [("<1024", 32), ("tower:*.bias", 16), ("E", 1)]


VALUES = ["0", "1", "-1", "0.5", "1e400", "nan", "inf", "1e-400", "auto", "zero", "keep", "true"]
VALUES += ["pipe", "0:1,9:2", "0:32,9:1", "linear:0:0,9:1", "cosine:0:1,9:0", "cosine:0", ":"]
VALUES += ["a:b", "", "two\nlines", "9" * 30, "9" * 5000]


def test_any_command_line_is_read_or_refused_in_one_line():
    choose = random.Random(0)
    flags = [
        (action.option_strings[0], bool(action.const) or action.nargs == 0)
        for action in parser()._actions
        if action.option_strings and action.option_strings[0] not in ("-h", "--version")
    ]
    refused = 0
    for _ in range(300):
        line = []
        for flag, alone in choose.sample(flags, 2):
            line += [flag] if alone else [f"{flag}={choose.choice(VALUES)}"]
        try:
            read(line)
        except UserError as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) < 1000
    assert 100 < refused < 300


def test_options_of_simulate(monkeypatch, capsys):
    for name in THREAD_VARIABLES:  # else it would start anew with them
        monkeypatch.setenv(name, "1")
    with pytest.raises(UserError, match="cuda_aware=True has no effect without MPI"):
        simulate.main(["-n", "2", "--device", "cuda", "--cuda-aware"])
    assert simulate.main(["--help"]) == 0
    assert re.search(r"-n N[\s\S]*--gradient-bits", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        ("0.3", 0.3),
        ("0:0.3,100:0.1", Steps({0: 0.3, 100: 0.1})),
        ("linear:0:0,100:0.3", Linear({0: 0, 100: 0.3})),
        ("cosine:0:0.3,100:0.01", Cosine(start=0.3, end=0.01, samples=100)),
        ("warmup:50:0.3", WarmUp(50, 0.3)),
        (
            "warmup:50:cosine:0:0.3,100:0.01",
            WarmUp(50, Cosine(start=0.3, end=0.01, samples=100)),
        ),
    ],
)
@pytest.mark.parametrize("name", ["lr", "lr_per_sample"])
def test_rates(name, text, schedule):
    """And what options.json says of them."""
    _, _, optimizer = read([f"--{name.replace('_', '-')}", text])
    assert getattr(optimizer, name) == schedule
    told = json.loads(json.dumps(describe(optimizer)))[name]
    if isinstance(schedule, float):
        assert told == schedule
        return
    assert made(told) == schedule


def made(told):
    """The schedule that a file describes."""
    if not isinstance(told, dict):
        return told
    kinds = {kind.__name__: kind for kind in (Steps, Linear, Cosine, WarmUp)}
    values = {key: made(value) for key, value in told.items() if key not in ("name", "values")}
    if "values" in told:
        values["values"] = {int(at): rate for at, rate in told["values"].items()}
    return kinds[told["name"]](**values)


@pytest.mark.parametrize(
    "text",
    ["abc", "linear:abc", "cosine:0.3", "cosine:a:b,c:d", "0:", "warmup:5", "warmup:x:0.1", ""],
)
def test_what_is_no_rate_is_told_what_one_looks_like(text):
    assert refused(f"--lr={text}").startswith(
        f"--lr: lr={text!r} must be a number, or samples:rate"
    )
    assert re.search(r"0:0.3,.*linear:0:0,.*cosine:0:0.3,50000:0.01", refused(f"--lr={text}"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cosine:0:0.3", "'cosine:0:0.3' must give two rates, at 0 samples and at the end: cosine"),
        ("cosine:5:0.3,9:0", "'cosine:5:0.3,9:0' must give two rates, at 0 samples and at the end"),
        ("cosine:0:1,5:1,9:0", "'cosine:0:1,5:1,9:0' must give two rates, at 0 samples and at the"),
        ("cosine:0:-1,9:0", "Cosine: start=-1.0 must be a finite number, at least 0"),
        ("cosine:0:1,0:2", "must give each number of samples once"),
        ("linear:5:1", "Linear values={5: 1.0} must begin at 0 samples"),
        ("0:nan", "Steps values[0]=nan must be a finite number"),
        ("0:1," + "9" * 30 + ":2", "must be a whole number, at least 0 and less than 2**63"),
        ("warmup:0:0.3", "WarmUp: samples=0 must be a whole number, at least 1"),
        ("warmup:9:-1", "WarmUp: then=-1.0 must be a finite number, at least 0"),
        ("inf", "lr=inf must be a finite number"),
    ],
)
def test_rates_that_are_not_possible(text, message):
    assert message in refused(f"--lr={text}")


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda form: "runs/now")
    names = []
    for _ in range(3):
        names.append(_new_output())
        (tmp_path / names[-1]).mkdir(parents=True)
    assert names == ["runs/now", "runs/now-2", "runs/now-3"]
