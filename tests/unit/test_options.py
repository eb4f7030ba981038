"""Options that declare themselves: checks, groups, documentation, and the command line."""

from __future__ import annotations

import argparse
import inspect
import re
from dataclasses import FrozenInstanceError, dataclass, make_dataclass, replace

import pytest

from parallel_sgd import SGD, UserError
from parallel_sgd.algorithms import ALGORITHMS
from parallel_sgd.command_line import options as on_command_line
from parallel_sgd.command_line import parser, read
from parallel_sgd.options import (
    BySamples,
    Choice,
    Folder,
    Options,
    Real,
    Whole,
    all_options,
    group,
    option,
    options,
    values_of,
)


@options
class Inner(Options):
    """Of several."""

    bits: int = option(32, Choice(32, 1), "on the wire")
    size: int | None = option(None, Whole(1), "of a block")


@options
class Another(Inner):
    bias: float = option(0.5, Real(), "only here")


@options
class Outer(Options):
    """The first line.

    More.
    """

    inner: Inner = group(Inner, size=64)
    rate: float = option(0.1, Real(below=1), "how fast")
    place: str = option("here", Folder(), "of this rank", compare=False)


def test_defaults_and_groups():
    usual = Outer()
    assert values_of(usual) == {"bits": 32, "size": 64, "rate": 0.1, "place": "here"}
    assert (usual.bits, usual.size, usual.inner) == (32, 64, Inner(size=64))
    flat, as_object = Outer(bits=1, rate=0), Outer(inner=Inner(bits=1, size=64), rate=0.0)
    assert flat == as_object
    assert flat.inner == Inner(bits=1, size=64)
    assert replace(flat, bits=32).inner == usual.inner
    assert replace(flat, rate=0.5) == Outer(bits=1, rate=0.5)
    assert Outer(inner=Inner(bits=1), size=8).inner == Inner(bits=1, size=8)
    assert Outer(size=None).size is None


def test_a_group_of_another_class_has_options_of_its_own():
    other = Outer(inner=Another(bias=0.25), bits=1)
    assert other.inner == Another(bias=0.25, bits=1)
    assert values_of(other)["inner"] == "Another"
    assert other != Outer(inner=Inner(size=None), bits=1)
    with pytest.raises(TypeError, match="bias"):
        Outer(bias=0.25)


def test_equality_hash_and_repr():
    one, same = Outer(rate=0.5, place="a"), Outer(rate=0.5, place="b")
    assert one == same and hash(one) == hash(same)
    assert repr(one) == repr(same) == "Outer(bits=32, size=64, rate=0.5)"
    assert eval(repr(one)) == one
    assert one != Outer()
    with pytest.raises(FrozenInstanceError):
        one.rate = 0.1


@pytest.mark.parametrize(
    ("given", "hint"),
    [({"bit": 1}, "'bit': did you mean 'bits'"), ({"inner": Inner(), "colour": 1}, "'colour': It")],
)
def test_unknown_names(given, hint):
    with pytest.raises(TypeError, match=f"Outer has no option {hint}.*bits, size, rate, place"):
        Outer(**given)


def test_options_are_given_by_name():
    with pytest.raises(TypeError, match=r"Outer: options must be given by name, as Outer\(bits="):
        Outer(1)


@pytest.mark.parametrize("value", [3, None, {}, Inner, SGD(lr=0.1)])
def test_what_is_no_group(value):
    with pytest.raises(
        UserError, match=r"inner=.* of Outer must be an instance such as Inner\(\), .*: bits, size$"
    ):
        Outer(inner=value)


def test_a_class_that_is_not_decorated():
    class Bare(Options):
        pass

    with pytest.raises(TypeError, match="Bare must be decorated by @options"):
        Bare()


def test_signature_and_documentation():
    signature = inspect.signature(Outer)
    assert {name: p.default for name, p in signature.parameters.items()} == values_of(Outer())
    assert all(p.kind is p.KEYWORD_ONLY for p in signature.parameters.values())
    assert [option.path for option in all_options(Outer)] == ["inner", "inner", "", ""]
    assert inspect.getdoc(Outer) == (
        "The first line.\n\nMore.\n\nOptions:\n"
        "    bits: on the wire (default: 32)\n    size: of a block (default: 64)\n"
        "    rate: how fast (default: 0.1)\n    place: of this rank (default: 'here')"
    )


BITS = BySamples(Choice(32, 1), words=("auto",))


@pytest.mark.parametrize(
    ("check", "value", "plain"),
    [
        (Whole(1, 3), 3, 3),
        (Real(), 2, 2.0),
        (Real(most=1, positive=True), 1, 1.0),
        (Choice("a", True), True, True),
        (BITS, {9: 1, 0: 32}, {0: 32, 9: 1}),
        (BITS, "auto", "auto"),
        (BITS, 1, 1),
    ],
    ids=str,
)
def test_what_is_possible(check, value, plain):
    assert repr(check("it", value)) == repr(plain)


@pytest.mark.parametrize(
    ("check", "value", "message"),
    [
        (Whole(1, 3), 4, "it=4 must be a whole number from 1 to 3"),
        (Whole(1), True, "it=True must be a whole number, at least 1"),
        (Real(below=1), 1, "it=1 must be a finite number, at least 0 and less than 1, also in fl"),
        (Real(positive=True), 0, "it=0 must be more than 0"),
        (Real(most=1, positive=True), 2, "it=2 must be more than 0 and at most 1"),
        (Choice("a", "b"), 1, "it=1 must be 'a' or 'b'"),
        (Choice(1, 2), True, "it=True must be 1 or 2"),
        (BITS, 2, "it=2 must be 32 or 1, or values by samples (0:32,20000:1), or auto"),
        (BITS, {0: 2}, "it[0]=2 must be 32 or 1"),
        (BITS, {9: 1}, "it={9: 1} must begin at 0 samples"),
        (Folder(), "", "it='' must be the path of a folder"),
    ],
    ids=str,
)
def test_what_is_not_possible(check, value, message):
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        check("it", value)


@pytest.mark.parametrize(
    ("check", "text", "value"),
    [
        (Whole(), "-7", -7),  # read, and not checked yet
        (Real(), "1e-3", 1e-3),
        (Choice("auto", True, False), "FALSE", False),
        (Choice(32, 1), "1", 1),
        (Choice(32, 1), "8", 8),
        (Choice(0.5, 1), "0.5", 0.5),
        (Choice(0.5, 1), "8", 8),
        (Choice("a", "b"), "c", "c"),
        (BITS, "0:32,9:1", {0: 32, 9: 1}),
        (BITS, "auto", "auto"),
    ],
    ids=str,
)
def test_what_texts_mean(check, text, value):
    assert repr(check.read(text)) == repr(value)


def test_options_that_depend_on_each_other():
    inner = Inner(bits=1, size=3)
    with pytest.raises(UserError, match=r"^size=3 and bits=1: at most one of size, bits may be"):
        inner.require_at_most_one("size", "bits")
    with pytest.raises(UserError, match=r"^size=3 has no effect without bits=32$"):
        inner.require_use("size", inner.bits == 32, "bits=32")
    inner.require_use("size", True, "bits=32")
    Inner(bits=1).require_use("size", False, "bits=32")


@dataclass(frozen=True, kw_only=True)
class RecoveryStatus:
    """One of an outsider's, whose types are texts."""

    rate: float = 1.0
    often: int | None = None
    loud: bool = False
    name: str = "x"


FIELDS = [
    ("rate", float, 1.0),
    ("often", int | None, None),
    ("loud", bool, False),
    ("name", str, "x"),
]
Typed = make_dataclass("Typed", FIELDS, frozen=True, kw_only=True)


def built(kind, line, reserved=()):
    p = argparse.ArgumentParser()
    on_command_line.add_options(p.add_argument_group("mine"), {"mine": kind}, "mine", reserved)
    return on_command_line.build("mine", {"mine": kind}, p.parse_args(line.split()))


@pytest.mark.parametrize("kind", [RecoveryStatus, Typed])
def test_plain_dataclasses_on_the_command_line(kind):
    assert built(kind, "") == kind()
    made = built(kind, "--rate 0.5 --often 3 --loud --name=y")
    assert made == kind(rate=0.5, often=3, loud=True, name="y")


@pytest.mark.parametrize("hint", ["list[int]", "int | str", "Nowhere"])
def test_types_that_say_nothing_to_the_command_line(hint):
    kind = make_dataclass("Odd", [("it", hint, None)])
    with pytest.raises(UserError, match=f"^option it of Odd: its type.*{hint.split('[')[0]}"):
        built(kind, "")


@pytest.mark.parametrize("name", ["epochs", "momentum", "lr", "algorithm"])
def test_names_that_train_has_already(name):
    kind = make_dataclass("Mine", [(name, int, 3)], frozen=True, kw_only=True)
    with pytest.raises(UserError, match=f"^option {name} of Mine must have another name: train.py"):
        parser(algorithms={**ALGORITHMS, "mine": kind})


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_help_shows_the_options_of_what_is_chosen(algorithm, capsys):
    with pytest.raises(SystemExit):
        read(["--algorithm", algorithm, "--optimizer", "adam", "--help"])
    said = capsys.readouterr().out
    shown = {name.replace("-", "_") for name in re.findall(r"^  --([a-z0-9-]+)", said, re.M)}
    own = {option.name for option in all_options(ALGORITHMS[algorithm])} - {"tables"}
    others = {option.name for kind in ALGORITHMS.values() for option in all_options(kind)}
    assert own <= shown
    assert shown.isdisjoint(others - own)
    assert "beta1" in shown and "momentum" not in shown


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--block-momentum=3", "--block-momentum=3.0 is not an option of data-parallel"),
        ("--algorithm slowmo --outer-momentum 0.5", "--outer-momentum=0.5 is not an option of slo"),
        ("--beta1 0.5", "--beta1=0.5 is not an option of sgd"),
        ("--distributed-after many", "--distributed-after: distributed_after='many' must be a who"),
    ],
)
def test_options_of_others(line, message):
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        read(line.split())
