"""What pages of the documentation show is run: programs on three ranks; of commands the options.

Those of README.md, docs/numpy.md, docs/pytorch.md, docs/data.md, docs/tutorial.md and
docs/new_algorithm.md have tests of their own (test_examples.py, test_torch_examples.py,
test_data_page.py, test_tutorial.py), so have those of docs/gallery (test_gallery.py), and so have
the checkpoints of docs/using.md.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_migration_names import FLAGS

import parallel_sgd as psgd

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *(ROOT / "README.md", ROOT / "CONTRIBUTING.md"),
        *(*ROOT.glob("docs/**/*.md"), *ROOT.glob("hostfiles/*.md")),
    ]
)
BLOCK = re.compile(r"^```python\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)

Names = dict[str, Any]


def digits(comm: psgd.Communicator) -> Names:
    """A model and data, as every page supposes them."""
    x = np.random.default_rng(0).standard_normal((60, 8)).astype(np.float32)
    model = psgd.models.MLP([8, 4, 3], seed=0)
    return {
        **{"psgd": psgd, "np": np, "comm": comm, "model": model, "parameters": model.parameters},
        **{"source": psgd.data.Source(x, x[:, :3].argmax(1), minibatch_size=12), "samples": 60},
        **{"x": x[:5], "y": x[:5, :3].argmax(1)},
    }


def with_learner(comm: psgd.Communicator) -> Names:
    names = digits(comm)
    names["learner"] = psgd.Learner(
        names["parameters"], psgd.SGD(lr=0.1), psgd.DataParallelSGD(overlap=True), comm
    )
    return names


def of_clicks(comm: psgd.Communicator) -> Names:
    train, _ = psgd.data.clicks(samples=200, test=40)
    return {**digits(comm), "train": train, "source": psgd.data.Source(train, minibatch_size=20)}


def for_session(comm: psgd.Communicator) -> Names:
    names = with_learner(comm)
    x = np.random.default_rng(1).standard_normal((60, 8)).astype(np.float32)
    data = psgd.data.Arrays(x, x[:, :3].argmax(1))
    return {**names, "train": data, "validation": data}


def of_its_own(comm: psgd.Communicator) -> Names:
    """What is a file."""
    return {}


def with_torch(comm: psgd.Communicator) -> Names:
    import torch

    names = for_session(comm)
    return {**names, "test": names["validation"], "torch": torch}


def ran(names: Names) -> None:
    assert names["rows"][-1].metrics["test_loss"] < 1.2


def runs(names: Names) -> None:
    assert "validation_confident" in names["session"].run()[-1].metrics


def skipped(names: Names) -> None:
    told = names["learner"].report()["skipped"]
    assert (told["minibatches"], told["samples"]) == (1, 12)


def kept(names: Names) -> None:
    assert names["session"].run()[-1].samples == 60


def tracks(names: Names) -> None:
    session = names["session"]
    assert repr(session.tracker) == "Tracker('wandb', project='digits', name=None)"
    untracked = dataclasses.replace(session, tracker=None, folder=None)
    assert untracked.run()[-1].samples == 180


def makes(names: Names) -> None:
    assert len([*names["net"]((2, 3), 4).parameters()]) == 2


def for_array(comm: psgd.Communicator) -> Names:
    rows, table = np.array([3, 5, 3]), psgd.Embedding(name="clicks", width=8)
    delta = np.ones((3, 8), np.float32)
    names = {"optimizer": psgd.SGD(lr=0.1), "table": table, "rows": rows, "delta": delta}
    return digits(comm) | names


def with_array(comm: psgd.Communicator) -> Names:
    names = for_array(comm)
    array = psgd.ArrayTable(name="counts", shape=(4, 8))
    learner = psgd.Learner(
        names["parameters"], psgd.SGD(lr=0.1), psgd.DataParallelASGD(tables=(array,)), comm
    )
    counts, values = learner.tables["counts"], np.ones((4, 8), np.float32)
    return {**names, "learner": learner, "counts": counts, "values": values}


def in_a_cell(comm: psgd.Communicator) -> Names:
    pytest.importorskip("sklearn")
    return {"__name__": "__main__"}


def with_two_bits(comm: psgd.Communicator) -> Names:
    pytest.importorskip("matplotlib").use("agg")
    row = [psgd.Progress(1.0, 60, 0.5, 0.1, 12, 1000, 0.1, {"test_loss": 0.5})]
    ranks = SimpleNamespace(simulate=lambda size, function: [function(comm)] * size)
    return {"psgd": ranks, "train": lambda comm, bits: [bits, row][1]}


def three_curves(names: Names) -> None:
    labels = [line.get_label() for line in names["plt"].gca().lines]
    names["plt"].close("all")
    assert labels == ["32 bits", "4 bits", "1 bits"]


def as_program(comm: psgd.Communicator) -> Names:
    started = SimpleNamespace(Communicator=SimpleNamespace(world=lambda: comm))
    return {"__name__": "__main__", "psgd": started, "train": lambda comm: comm.size}


def learned(names: Names) -> None:
    assert names["rows"][-1].metrics["test_accuracy"] > 0.9


def started_once(names: Names) -> None:
    assert names["rows"] == 1


def after_gradient(names: Names) -> None:
    names["learner"].step(samples=5)
    names["learner"].finish()


def finished(names: Names) -> None:
    names["learner"].finish()


def trained(names: Names) -> None:
    assert names["learner"].samples == 60
    names["learner"].close()


#: Page, which block; what it supposes, and what must hold, or be done, afterwards.
PROGRAMS: dict[tuple[str, int], tuple[Callable[..., Names], Callable[[Names], None]]] = {
    ("docs/using.md", 0): (with_learner, after_gradient),
    ("docs/notebooks.md", 0): (in_a_cell, learned),
    ("docs/notebooks.md", 1): (with_two_bits, three_curves),
    ("docs/notebooks.md", 2): (as_program, started_once),
    ("docs/parameter_servers.md", 0): (digits, lambda names: None),
    ("docs/parameter_servers.md", 1): (digits, lambda names: None),
    ("docs/parameter_servers.md", 2): (digits, lambda names: None),
    ("docs/parameter_servers.md", 3): (of_clicks, finished),
    ("docs/parameter_servers.md", 4): (for_array, finished),
    ("docs/parameter_servers.md", 5): (with_array, finished),
    ("docs/restarts.md", 0): (with_learner, trained),
    ("docs/tracing.md", 0): (digits, trained),
    ("docs/training.md", 0): (with_torch, ran),
    ("docs/training.md", 1): (with_torch, ran),
    ("docs/training.md", 2): (for_session, runs),
    ("docs/training.md", 3): (of_its_own, makes),
    ("docs/training.md", 4): (for_session, tracks),
    ("docs/training.md", 5): (for_session, skipped),
    ("docs/training.md", 6): (for_session, kept),
    ("docs/rank_failures.md", 0): (with_learner, trained),
    ("docs/rank_failures.md", 1): (with_learner, trained),
    ("docs/migration/cntk.md", 0): (for_session, lambda names: None),
    ("docs/migration/cntk.md", 1): (with_learner, trained),
    ("docs/migration/deepspeed.md", 0): (digits, lambda names: names["learner"].close()),
}
#: What every worker does, and no server: these are run by one rank, which is both.
ALONE = {("docs/parameter_servers.md", 4), ("docs/parameter_servers.md", 5)}
#: The same of cells, which start their ranks.
ALONE |= {("docs/notebooks.md", number) for number in range(3)}
#: Of these, all blocks but those above are run, or compared, by other tests.
ELSEWHERE = {
    "README.md",
    "docs/numpy.md",
    "docs/data.md",
    "docs/exploring.md",
    "docs/new_algorithm.md",
    "docs/pytorch.md",
    "docs/misuse.md",
    "docs/tutorial.md",
    *(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/gallery/*.md")),
}
ELSEWHERE_BLOCKS = {"docs/using.md": 1}


def blocks(page: str) -> list[str]:
    return BLOCK.findall((ROOT / page).read_text())


@pytest.mark.parametrize(("page", "number"), PROGRAMS)
def test_programs(page, number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before, after = PROGRAMS[page, number]
    code = compile(blocks(page)[number], page, "exec")

    def body(comm: psgd.Communicator) -> None:
        names = before(comm)
        exec(code, names)
        after(names)

    psgd.simulate(1 if (page, number) in ALONE else 3, body)


def test_no_program_is_left_out():
    for page in {str(path.relative_to(ROOT)) for path in PAGES} - ELSEWHERE:
        here = sum(name == page for name, _ in PROGRAMS) + ELSEWHERE_BLOCKS.get(page, 0)
        assert here == len(blocks(page)), f"{page}: PROGRAMS must say how its programs are run"


def commands(text: str) -> list[str]:
    """Of `console` blocks the lines that are typed, with those that go on with a backslash."""
    shown = re.findall(r"^```console\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    lines = "".join(shown).replace("\\\n", " ").splitlines()
    return [line[2:] for line in lines if line.startswith(("$ ", "# "))]


OF_EXAMPLES = {"--model", "--steps", "--evaluate-every", "--context", "--checkpoints", "--check"}
OF_PYTEST = {"--with-mpi", "-q"}


def options_of_ours(line: str) -> set[str]:
    """Of a command the options that our programs are given, and not mpiexec or srun."""
    words, found, ours = shlex.split(line.replace("…", ""), comments=True), set(), False
    for word in words:
        ours = (ours or word.endswith(("parallel-sgd", "train.py"))) and word != ":"
        if ours and re.match("--?[a-z]", word):
            found.add(word.partition("=")[0])
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_have_these_options(page):
    wrong = {
        line: unknown
        for line in commands(page.read_text())
        if (unknown := options_of_ours(line) - FLAGS - OF_EXAMPLES - OF_PYTEST)
    }
    assert wrong == {}


def test_commands_of_contributors_are_there():
    """Targets of the Makefile, scripts of the environment's packages, and files."""
    heads = re.findall(r"^([\w -]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = {name for head in heads for name in head.split()} | {".venv/mpich/installed"}
    found = commands((ROOT / "CONTRIBUTING.md").read_text())
    assert found
    for line in found:
        program, *words = shlex.split(line, comments=True)
        names = [word.partition("::")[0] for word in words if word.startswith("tests/")]
        assert [name for name in names if not (ROOT / name).exists()] == [], line
        if program == "make":
            assert {word for word in words if "=" not in word} <= targets, line


def test_options_are_told_from_others():
    line = "srun --mpi=pmi2 parallel-sgd run -n 5 --servers=1 train.py --lr -1 : -n 4 -x A=B"
    assert options_of_ours(line) == {"-n", "--servers", "--lr"}


def test_the_navigation_names_every_page_once(monkeypatch):
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(ROOT / "docs")
    from site_extension import contents

    named = re.findall(r"^(?!:)(\S+/\S+|CHANGELOG|CONTRIBUTING)$", contents(ROOT), re.MULTILINE)
    assert len(named) == len(set(named)) > 30
    assert {"CONTRIBUTING", "docs/decisions/one_clock"} <= set(named)
    captions = contents(ROOT).split(":caption: ")
    (begin,) = (part for part in captions if part.startswith("Begin"))
    assert "docs/data\n" in begin and "docs/api" not in begin


def test_signatures_show_the_values_of_constants(monkeypatch):
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(ROOT / "docs")
    from site_extension import with_values

    shown = with_values("(commit_every: int = COMMIT_EVERY, seed: int = 0)", psgd.Learner)
    assert shown == "(commit_every: int = 10, seed: int = 0)"
    shown = with_values("(most_bytes=MOST_BYTES, other=NO_SUCH)", psgd.data.load_parquet)
    assert shown == "(most_bytes=1_073_741_824, other=NO_SUCH)"


def test_nobody_is_told_to_install_what_no_index_has():
    """The project is installed from its checkout; nothing of that name is on an index."""
    sources = [*ROOT.glob("parallel_sgd/**/*.py"), *ROOT.glob("kernels/**/*.py"), *PAGES]
    for file in [*sources, *ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("*.py")]:
        found = re.findall(r"install '?parallel[-_]sgd.*", file.read_text())
        assert not found, f"{file}: {found[0]}"


def test_the_extra_of_the_documentation_has_what_its_pages_import():

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own = extras["optional-dependencies"]["docs"]
    assert "parallel_sgd[torch]" in own and any(each.startswith("sphinx") for each in own)
