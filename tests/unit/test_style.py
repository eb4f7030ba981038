"""Docstrings are plain English: the first line says what a thing does or is, and names it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("parallel_sgd", "kernels", "benchmarks")

#: First words that begin a riddle. A first line begins with a verb or a noun.
RIDDLE = re.compile(r"(Whether|What|Whatever|Where|Who|Whose|Which|That|Of|As|How|When)\b")
RELATIVE = re.compile(r"\b(that|which|what|who|where)\b", re.IGNORECASE)
BARE = re.compile(r"\b(other|one|them|they|it)\b", re.IGNORECASE)
WORD = re.compile(r"[A-Za-z']+")

#: Of 1,000 words of a file's docstrings. The field's best code has 9 to 13, and 5 to 14.
MOST_RELATIVE, MOST_BARE = 25, 25
#: A short file may have so many, whatever its length.
ALWAYS = 2

KINDS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of every docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, KINDS) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text


def offences(source: str) -> list[str]:
    """Name the riddles of a file, and counts above the limits."""
    found = list(docstrings(source))
    problems = [
        f"line {line}: {text.splitlines()[0]}" for line, text in found if RIDDLE.match(text)
    ]
    whole = " ".join(text for _, text in found)
    words = len(WORD.findall(whole))
    for kind, pattern, most in (
        ("relative", RELATIVE, MOST_RELATIVE),
        ("bare", BARE, MOST_BARE),
    ):
        count = len(pattern.findall(whole))
        if count > max(ALWAYS, most * words / 1000):
            problems.append(f"{count} {kind} pronouns in {words} words: at most {most} in 1,000")
    return problems


FILES = sorted(
    str(path.relative_to(ROOT))
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    if "parallel_sgd/kernels/" not in str(path)
)


@pytest.mark.parametrize("file", FILES)
def test_docstrings_are_plain(file: str) -> None:
    assert offences((ROOT / file).read_text()) == []


def test_the_files_are_there() -> None:
    assert {"parallel_sgd/training/learner.py", "kernels/reference.py"} <= set(FILES)


@pytest.mark.parametrize(
    "source",
    [
        '"""What the ranks say."""',
        'def f():\n    """Whether it is ready."""',
        '"""Send it to the one that asks, which is where it was, as they say that it is."""',
    ],
)
def test_riddles_are_noticed(source: str) -> None:
    assert offences(source)


def test_plain_english_passes() -> None:
    assert offences('"""Collect a status report from every rank within ANSWER_TIMEOUT_S."""') == []
