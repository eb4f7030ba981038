"""What the package starts reads no standard input but its own: the user's belongs to the user."""

from __future__ import annotations

import ast
from pathlib import Path

import parallel_sgd

PACKAGE = Path(parallel_sgd.__file__).parent
STARTS = {"run", "call", "check_call", "check_output", "Popen"}


def without_stdin(text: str) -> list[int]:
    """The lines in which a program is started that reads what this one was given."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and getattr(node.func.value, "id", "") == "subprocess"
        and node.func.attr in STARTS
        and not {"stdin", "input"} & {keyword.arg for keyword in node.keywords}
    ]


def test_every_program_that_is_started_is_told_what_to_read():
    found = {path: without_stdin(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert len(found) > 100
    assert not {str(path): lines for path, lines in found.items() if lines}


def test_what_counts():
    assert without_stdin("import subprocess\nsubprocess.run(['ip'], text=True)") == [2]
    assert without_stdin("subprocess.Popen('ip', stdin=subprocess.DEVNULL)") == []
