"""Nothing that is read, from a disk or from another rank, is unpickled or executed.

Every source is walked for what could do so. What stays is in `REASONS`, with the reason.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import parallel_sgd

PACKAGE = Path(parallel_sgd.__file__).parent
ROOT = PACKAGE.parent

#: Libraries that unpickle or execute what they read, or load code from where they are told.
MODULES = {
    *("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"),
    *("copyreg", "multiprocessing", "yaml", "ruamel", "jsonpickle", "code", "codeop", "imp"),
    *("runpy", "ctypes", "cffi", "dbm", "pandas", "xmlrpc", "socketserver", "http"),
}

#: Called by their bare name.
BUILTINS = {"eval", "exec", "compile", "__import__", "breakpoint", "input"}

#: Of any module or object; of classes also to derive from them.
CALLS = {
    *("read_pickle", "to_pickle", "unsafe_load", "full_load", "mktemp", "extractall"),
    *("unpack_archive", "spec_from_file_location", "exec_module", "load_library", "dlopen"),
    *("system", "popen", "all_gather_object", "gather_object", "broadcast_object_list"),
    *("scatter_object_list", "send_object_list", "recv_object_list", "CDLL", "PyDLL"),
    *("run_path", "run_module", "load_module", "LoadLibrary", "fork_exec", "create_server"),
    *("FunctionCache", "IndexDataCacheFile"),
}

#: Safe with this argument alone, by the library's name, as sources import it.
ONLY_WITH = {
    **{f"{numpy}.load": ("allow_pickle", False) for numpy in ("np", "numpy")},
    **{f"{part}.read_array": ("allow_pickle", False) for part in ("npy", "format")},
    "torch.load": ("weights_only", True),
    "load": ("allow_pickle", False),
    "read_array": ("allow_pickle", False),
}

#: mpi4py's methods on objects, which it pickles; those on arrays have a capital.
PICKLING = {
    *("send", "recv", "bsend", "ssend", "isend", "ibsend", "issend", "irecv", "sendrecv"),
    *("bcast", "gather", "scatter", "allgather", "alltoall", "reduce", "allreduce", "scan"),
    *("exscan", "mprobe", "improbe", "probe", "iprobe"),
}

REASONS = {
    "launcher/rank.py: import runpy": "runs the user's program, which the command line names",
    "launcher/rank.py: run_path": "the same",
    "launcher/rank.py: run_module": "the same",
    "command_line/train/model.py: spec_from_file_location": "--model FILE.py:FUNCTION is a program",
    "command_line/train/model.py: exec_module": "the same",
    "launcher/job.py: import ctypes": "prctl of the C library that Python itself runs on",
    "communication/liveness/rank_process.py: import ctypes": "the same",
    "communication/liveness/rank_process.py: CDLL": "the same",
    "launcher/job.py: CDLL": "the same",
    "runtime.py: import ctypes": "raises an interrupt in a thread of Python that itself runs this",
    "kernels/emitter.py: exec": "a text of this file's, with the name of a function of ours",
    "kernels/machine_code.py: FunctionCache": "Numba keeps its machine code beside Python's .pyc "
    "files, or in the user's own cache: who can write there can write the package itself",
    "kernels/machine_code.py: IndexDataCacheFile": "the same",
    "testing/contract.py: eval": "the repr of the algorithm that is under test",
    "communication/c10d/connections.py: create_server": "takes ranks, which know a token, and "
    "closes what else connects; open for the moment in which ranks connect",
    "torch/process_group.py: create_server": "tells a random token to whoever connects, and reads "
    "nothing; open for the moment in which ranks find an address for PyTorch's process group",
}


def sources() -> Iterator[tuple[str, str]]:
    """Every file of the package, and the programs beside it; `kernels` is a link."""
    for folder, _, names in os.walk(PACKAGE, followlinks=True):
        for name in sorted(names):
            if name.endswith(".py"):
                path = Path(folder, name)
                yield str(path.relative_to(PACKAGE)), path.read_text()
    for path in [*ROOT.glob("*.py"), *sorted((ROOT / "examples").rglob("*.py"))]:
        yield str(path.relative_to(ROOT)), path.read_text()


def dangers(text: str) -> Iterator[str]:
    """What in a source could unpickle or execute what is read."""
    tree = ast.parse(text)
    imported = {name for node in ast.walk(tree) for name in modules_of(node)}
    for node in ast.walk(tree):
        yield from (f"import {name}" for name in modules_of(node) if name in MODULES)
        if isinstance(node, ast.ClassDef):
            yield from (name for name in map(name_of, node.bases) if name in CALLS)
        if isinstance(node, ast.Call):
            yield from in_call(node, "mpi4py" in imported)
            # A library that is imported late is called by a name that is a text.
            first = node.args[0] if node.args else None
            if name_of(node.func) == "import_module" and isinstance(first, ast.Constant):
                name = str(first.value).partition(".")[0]
                if name in MODULES:
                    yield f"import {name}"


def modules_of(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [(node.module or "").partition(".")[0]]
    return []


def name_of(function: ast.expr) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


def in_call(call: ast.Call, on_mpi: bool) -> Iterator[str]:
    name = name_of(call.func)
    keywords = {k.arg: getattr(k.value, "value", None) for k in call.keywords}
    if isinstance(call.func, ast.Name) and name in BUILTINS:
        yield name
    if name in CALLS:
        yield name
    owner = name_of(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    key, value = ONLY_WITH.get(f"{owner}.{name}" if owner else name, ("", None))
    if key and keywords.get(key) is not value:
        yield f"{name} without {key}={value}"
    if keywords.get("allow_pickle") is True or keywords.get("shell") is True:
        yield f"{name} that may"
    if name in {"njit", "jit"} and keywords.get("cache") is True:
        yield f"{name}(cache=True)"
    if on_mpi and isinstance(call.func, ast.Attribute) and name in PICKLING:
        yield f"{name} of mpi4py"


def test_nothing_that_is_read_is_unpickled_or_executed():
    found = {f"{path}: {danger}" for path, text in sources() for danger in dangers(text)}
    assert found - REASONS.keys() == set(), "each needs another way, or a reason"
    assert REASONS.keys() - found == set(), "reasons for what is not there any more"


@pytest.mark.parametrize(
    ("line", "danger"),
    [
        ("import pickle", "import pickle"),
        ("from multiprocessing.pool import Pool", "import multiprocessing"),
        ("importlib.import_module('yaml.loader')", "import yaml"),
        ("eval(text)", "eval"),
        ("np.load(file)", "load without allow_pickle=False"),
        ("np.load(file, allow_pickle=True)", "load without allow_pickle=False"),
        ("npy.read_array(file)", "read_array without allow_pickle=False"),
        ("torch.load(file)", "load without weights_only=True"),
        ("torch.load(file, weights_only=False)", "load without weights_only=True"),
        ("np.save(file, x, allow_pickle=True)", "save that may"),
        ("subprocess.run(line, shell=True)", "run that may"),
        ("os.system(line)", "system"),
        ("tempfile.mktemp()", "mktemp"),
        ("archive.extractall()", "extractall"),
        ("class Files(caching.IndexDataCacheFile): ...", "IndexDataCacheFile"),
        ("dist.all_gather_object(items, item)", "all_gather_object"),
        ("from mpi4py import MPI\ncomm.recv()", "recv of mpi4py"),
        ("import mpi4py.MPI\ncomm.allgather(x)", "allgather of mpi4py"),
    ],
)
def test_what_would_be_found(line, danger):
    assert danger in [*dangers(line)]


@pytest.mark.parametrize(
    "line",
    [
        "json.loads(text)",
        "tomllib.load(file)",
        "np.load(file, allow_pickle=False)",
        "waiting.load(vector)",
        "torch.load(file, weights_only=True)",
        "comm.allgather(send, receive, counts)",
        "from mpi4py import MPI\ncomm.Allgather(send, receive)",
        "model.eval()",
        "re.compile(pattern)",
    ],
)
def test_what_is_harmless(line):
    assert [*dangers(line)] == []
