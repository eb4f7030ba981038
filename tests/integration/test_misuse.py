"""docs/misuse.md says what happens: every misuse is seen anew, and compared with its row."""

from __future__ import annotations

import pytest
from jobs import ROOT
from limits import patience
from misuse_table import MISUSES, SECTIONS, prepared
from misuses import HEAD, Cells, Misuse, Outcome, cells_of, quoted, seen, table, this_mpi

DOCUMENT = ROOT / "docs" / "misuse.md"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return seen(MISUSES, prepared(tmp_path_factory.mktemp("misuse")))


@pytest.fixture(scope="module")
def cells() -> Cells:
    return cells_of(DOCUMENT.read_text())


HERE = [misuse for misuse in MISUSES if misuse.mpi in ("", this_mpi())]  # not of the other MPI


@pytest.mark.parametrize("misuse", HERE, ids=[misuse.name for misuse in HERE])
def test_what_the_table_says_is_what_happens(
    misuse: Misuse, outcomes: dict[str, Outcome], cells: Cells
) -> None:
    mpi = this_mpi()
    outcome = outcomes[misuse.name]
    now = quoted(outcome.printed), outcome.ranks, f"{misuse.within_s} s", outcome.code
    assert now == tuple(cells[misuse.name][column][mpi] for column in HEAD[2:])
    assert outcome.seconds <= misuse.within_s * patience()


def test_the_document_is_what_its_rows_make(cells: Cells) -> None:
    """No row of a misuse that is gone, and commands as they are now."""
    text = DOCUMENT.read_text()
    assert text[text.index("\n## ") :] == table(SECTIONS, cells)
