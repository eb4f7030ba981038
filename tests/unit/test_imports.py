"""Which package may import which: imports point only down; importing the library starts nothing."""

from __future__ import annotations

import ast
import doctest
import importlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import parallel_sgd

PACKAGE = Path(parallel_sgd.__file__).parent

# From the bottom up; packages of one layer do not know each other.
LAYERS: list[set[str]] = [
    {"kernels"},
    {"errors", "lazy", "palette", "runtime", "starting", "state", "version"},
    {"trace"},
    {"validation", "warning"},
    {"patterns", "plain_values"},
    {"checks"},
    {"options"},
    {"files"},
    {"parameters"},
    {"communication"},
    {"array_files", "compression"},
    {"costs", "schedules", "second_moment"},
    {"local_step"},
    {"optimizers"},
    {"embedding", "exchange"},
    {"parameter_server"},
    {"algorithms"},
    {"data", "models"},
    {"training"},
    {"planning", "torch"},
    {"argument_parser"},
    {"launcher"},
    {"command_line"},
    {"testing"},
    {"__init__", "__main__"},
]
LAYER = {package: layer for layer, packages in enumerate(LAYERS) for package in packages}

# The same inside of packages that have subpackages: each name is a subpackage, or a file beside
# them. A name that is in no list is below all others.
SUB_LAYERS: dict[str, list[set[str]]] = {
    "communication": [
        {"communicator"},
        {"liveness", "clocks", "cuda", "roles", "subset"},
        {"background", "mpi", "c10d"},
        {"threads", "entry_point"},
        {"elastic"},
        {"world"},
    ],
    "training": [
        {"runner"},
        {"state", "consistency", "non_finite", "shares"},
        {"recovery"},
        {"model_adapter", "feed"},
        {"arguments", "step"},
        {"learner"},
        {"checkpoint"},
        {"reports"},
        {"session"},
    ],
    "data": [
        {"dataset"},
        {"order"},
        {"fingerprint", "items", "joined", "sequences", "sparse_rows"},
        {"readers", "sources", "tasks"},
        {"examples", "standardization"},
        {"formats"},
    ],
    "torch": [
        {"module"},
        {"overlap", "loop_checks"},
        {"gradients", "optimizer", "ddp"},
        {"model_state"},
        {"adapter"},
        {"learner"},
        {"objective"},
        {"tasks", "trainers"},
    ],
    "launcher": [],
    "command_line": [
        {"train", "cluster", "doctor"},
        {"past_run", "predict", "simulate"},
        {"plan"},
    ],
}
SUB_LAYER = {
    (package, part): layer
    for package, layers in SUB_LAYERS.items()
    for layer, parts in enumerate(layers)
    for part in parts
}

# Packages that know less than all that is below them.
GROUND = {
    "kernels",
    "errors",
    "lazy",
    "runtime",
    "state",
    "trace",
    "version",
    "validation",
    "checks",
}
GROUND |= {"files", "options", "parameters", "patterns"}
KNOWN_ONLY = {
    "communication": GROUND - {"parameters"} | {"starting"},
    "compression": GROUND,
    "costs": GROUND | {"communication", "compression"},
    "local_step": GROUND | {"second_moment"},
    "optimizers": GROUND | {"local_step", "schedules", "second_moment"},
    "second_moment": GROUND,
    "embedding": GROUND - {"parameters"}
    | {"array_files", "communication", "local_step", "optimizers"},
    "data": GROUND,
    "models": GROUND,
    "__main__": {"command_line"},
}

# Libraries that belong to one package.
OWNERS = {
    "numba": {"kernels"},
    "llvmlite": {"kernels"},
    "cupy": {"kernels", "models", "command_line", "torch"},  # models, command_line: is it there?
    "mpi4py": {"communication"},
    "torch": {"communication", "launcher", "torch"},
    "PIL": {"data"},
    "pyarrow": {"data"},
    "accelerate": {"torch"},
    "lightning": {"torch"},
    "pytorch_lightning": {"torch"},
    "transformers": {"torch"},
    "wandb": {"training"},
    "mlflow": {"training"},
}


def sources() -> dict[str, str]:
    """Dotted name below the package, with the text, of every module; `kernels` is a link."""
    texts = {}
    for folder, _, names in os.walk(PACKAGE, followlinks=True):
        for name in names:
            path = Path(folder, name)
            if path.suffix == ".py":
                parts = path.relative_to(PACKAGE).with_suffix("").parts
                texts[".".join(parts)] = path.read_text()
    return texts


def imported(module: str, text: str) -> Iterator[str]:
    """Full dotted names of what a module imports anywhere, also by `import_module("name")`."""
    here = ["parallel_sgd", *module.split(".")[:-1]]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) + 1 - node.level] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            name = node.args[0]
            if called == "import_module" and isinstance(name, ast.Constant):
                assert isinstance(name.value, str)
                yield name.value


def offences(module: str, text: str) -> list[str]:
    package = module.split(".")[0]
    if package not in LAYER:
        return [f"{module}: {package!r} needs a layer"]
    problems = []
    for name in imported(module, text):
        library, _, rest = name.partition(".")
        if library in OWNERS and package not in OWNERS[library]:
            problems.append(f"{module} imports {name}, which belongs to {OWNERS[library]}")
        if library != "parallel_sgd":
            continue
        other = rest.split(".")[0]
        if other == package:
            problems += points_up_inside(module, rest)
            continue
        if other not in LAYER:  # a name that the package's own __init__ defines
            other = "__init__"
        if LAYER[other] >= LAYER[package]:
            problems.append(f"{module} imports {name}, which points up")
        elif package in KNOWN_ONLY and other not in KNOWN_ONLY[package]:
            problems.append(
                f"{module} imports {name}, and {package} may know {KNOWN_ONLY[package]}"
            )
    return problems


def points_up_inside(module: str, name: str) -> list[str]:
    """The same of an import within a package, between its subpackages.

    A package's own `__init__` may import all of it.
    """
    package, _, inside = module.partition(".")
    part, other = inside.split(".")[0], [*name.split("."), ""][1]
    if part in ("", "__init__", other) or package not in SUB_LAYERS:
        return []
    if SUB_LAYER.get((package, other), -1) > SUB_LAYER.get((package, part), -1):
        return [f"{module} imports {name}, which points up inside of {package}"]
    if SUB_LAYER.get((package, other), -1) == SUB_LAYER.get((package, part), -1) >= 0:
        return [f"{module} imports {name}, and packages of one layer do not know each other"]
    return []


@pytest.mark.parametrize(("module", "text"), sources().items(), ids=sources())
def test_imports_point_down(module, text):
    assert offences(module, text) == []


def test_the_sources_are_all_there():
    assert {"__init__", "kernels.reference", "communication.cuda.nccl", "training.learner"} <= set(
        sources()
    )


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("kernels.cpu", "from ..errors import UserError"),
        ("kernels.cpu", "from .. import parameters"),
        ("kernels.cuda.launch", "from ...errors import UserError"),
        ("parameters", "import parallel_sgd.communication"),
        ("validation", "from .options import Whole"),
        ("communication.cuda.staging", "def f():\n    from ...compression.codec import OneBit"),
        ("communication.cuda.staging", "from ...parameters import Parameters"),
        ("compression.codec", "from ..communication import Communicator"),
        ("compression.codec", "from mpi4py import MPI"),
        ("costs.model", "from ..exchange.layout import cut_pieces"),
        ("optimizers", "import numba"),
        ("data.source", "from ..models import MLP"),
        ("models.mlp", "from parallel_sgd import Learner"),
        ("algorithms.data_parallel", "from ..training.learner import Learner"),
        ("training.session.loop", "import importlib; importlib.import_module('mpi4py.MPI')"),
        ("attic.old", "import sys"),
        ("communication.liveness.watchdog", "from ..elastic.membership import Lobby"),
        ("communication.communicator", "from .mpi import communicator"),
        ("training.recovery.rollback", "from ..learner import Learner"),
        ("training.checkpoint.saver", "from ..session.run_folder import RunFolder"),
        ("data.readers.idx", "from ..sources import shared"),
    ],
)
def test_what_would_point_up_is_noticed(module, text):
    assert len(offences(module, text)) == 1


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("kernels.cpu", "from . import simd\nfrom .blocks import Blocks\nimport numba"),
        ("exchange.reduction", "from ..compression import Codec\nfrom ..costs import Measured"),
        ("__init__", "from . import data\nfrom .training import Learner"),
        ("training.learner", "from ..algorithms import Algorithm"),
    ],
)
def test_what_points_down_is_let_pass(module, text):
    assert offences(module, text) == []


def dependencies(texts: dict[str, str]) -> dict[str, set[str]]:
    """What each module of the package imports of it, also inside functions."""
    modules = {module.removesuffix(".__init__") for module in texts}
    known: dict[str, set[str]] = {}
    for module, text in texts.items():
        own = known[module.removesuffix(".__init__")] = set()
        for name in imported(module, text):
            library, _, rest = name.partition(".")
            while rest and rest not in modules:  # a name in a module
                rest = rest.rpartition(".")[0]
            if library == "parallel_sgd":
                own.add(rest or "__init__")
    return known


def circles(texts: dict[str, str]) -> set[str]:
    """Modules that know themselves, by way of others: what remains as others are taken away that
    know, or are known by, nothing that remains."""
    known = dependencies(texts)
    while True:
        needed = set().union(*known.values())
        rest = {
            module: others & known.keys()
            for module, others in known.items()
            if others & known.keys() and module in needed
        }
        if rest == known:
            return set(rest)
        known = rest


def test_no_modules_import_each_other():
    assert circles(sources()) == set()


def test_modules_that_import_each_other_are_noticed():
    texts = {
        "communication.__init__": "from .mpi import world",
        "communication.communicator": "def f():\n    from . import mpi",
        "communication.mpi": "from .phrases import x\nfrom .communicator import Communicator",
        "communication.phrases": "import os",
        "exchange.links": "from ..communication import Communicator",
    }
    assert circles(texts) == {"communication.communicator", "communication.mpi"}


def test_a_run_needs_matplotlib_from_its_beginning_and_imports_it_at_its_end(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    folder = parallel_sgd.RunFolder(tmp_path / "run", {}, plot=True)
    with pytest.raises(parallel_sgd.UserError, match=r"needs matplotlib .*--no-plot$"):
        folder.create()


WITH_EXAMPLES = sorted(module for module, text in sources().items() if ">>> " in text)


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples_in_docstrings(module):
    if "sklearn" in sources()[module] or "digits(" in sources()[module]:
        pytest.importorskip("sklearn")
    name = "parallel_sgd" if module == "__init__" else f"parallel_sgd.{module}"
    failed, tried = doctest.testmod(importlib.import_module(name.removesuffix(".__init__")))
    assert tried > 0
    assert failed == 0


def test_there_are_examples():
    assert {"__init__", "parameters", "training.learner"} <= set(WITH_EXAMPLES)


ROOT = Path(__file__).parents[2]
PAGES = {
    str(page.relative_to(ROOT)): page
    for pattern in ("*.md", "*/*.md", "docs/*/*.md", "benchmarks/*/*.md")
    for page in ROOT.glob(pattern)
}


@pytest.mark.parametrize("page", PAGES)
def test_the_files_that_a_page_names_are_there(page):
    text = PAGES[page].read_text()
    links = re.findall(r"\]\(([^)#:]+)[^):]*\)", text)
    paths = re.findall(r"`((?:tests|parallel_sgd|kernels|benchmarks|examples)/[\w/]+\.\w+)`", text)
    tests = re.findall(r"`(test_\w+\.py)`", text)
    missing = [link for link in links if not (PAGES[page].parent / link).exists()]
    missing += [path for path in paths if not (ROOT / path).exists()]
    missing += [name for name in tests if not list((ROOT / "tests").rglob(name))]
    assert not missing
