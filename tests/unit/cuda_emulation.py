"""A stand-in for CuPy that runs the CUDA kernels on the CPU, on NumPy arrays.

It has what `parallel_sgd.kernels.cuda` uses of CuPy. A kernel is compiled by the C compiler with
`cuda_emulation.h`; every launch checks the arguments against the kernel's signature, which CuPy
itself does not.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

COMPILER = shutil.which("cc")
FLAGS = ["-std=gnu11", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-shared"]
FLAGS += ["-U_FORTIFY_SOURCE"]  # which takes a jump between stacks for an error
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused-parameter"]

_TYPES: dict[str, type[np.generic]] = {
    "int": np.int32,
    "unsigned": np.uint32,
    "long long": np.int64,
    "unsigned long long": np.uint64,
    "float": np.float32,
    "unsigned char": np.uint8,
    "unsigned short": np.uint16,
}
_REALS: dict[int, dict[str, type[np.generic]]] = {
    32: {"real": np.float32, "word": np.uint32},
    64: {"real": np.float64, "word": np.uint64},
}

_folder = tempfile.TemporaryDirectory(prefix="cuda_emulation_")


class Program:
    """The kernels of one source, compiled as C with a launcher for each."""

    def __init__(self, code: str, options: tuple[str, ...]) -> None:
        defines = [option for option in options if option.startswith("-D")]
        bits = 64 if "-DREAL_BITS=64" in defines else 32
        self._types = {**_TYPES, **_REALS[bits]}
        self._signatures = _signatures(code)
        header = Path(__file__).with_suffix(".h").read_text()
        launchers = map(_launcher, self._signatures, self._signatures.values())
        program = "\n".join([header, code, *launchers])
        name = hashlib.sha256("\n".join([program, *defines]).encode()).hexdigest()[:16]
        library = Path(_folder.name) / f"{name}.so"
        command = [str(COMPILER), *FLAGS, *WARNINGS, *defines, "-x", "c", "-", "-lm", "-o"]
        if not library.exists():
            subprocess.run([*command, str(library)], input=program, text=True, check=True)
        self._library = ctypes.CDLL(str(library))

    def get_function(self, name: str) -> Callable[..., None]:
        launch = self._library[f"launch_{name}"]
        parameters = self._signatures[name]

        def function(grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...]) -> None:
            assert len(arguments) == len(parameters), f"{name} takes {parameters}"
            checked = map(self._check, parameters, arguments)
            launch(ctypes.c_uint(*grid), ctypes.c_uint(*block), *checked)

        return function

    def _check(self, parameter: tuple[str, str], argument: Any) -> Any:
        kind, name = parameter
        expected: np.dtype[Any] = np.dtype(self._types[kind.replace("const ", "").rstrip(" *")])
        assert argument.dtype == expected, f"{name} must be {expected}, is {argument.dtype}"
        if "*" not in kind:
            assert isinstance(argument, np.generic), f"{name} must be a number"
            return np.ctypeslib.as_ctypes_type(expected)(argument.item())
        assert argument.flags.c_contiguous, f"{name} must be contiguous"
        assert argument.flags.writeable or kind.startswith("const"), f"{name} is written"
        return ctypes.c_void_p(argument.ctypes.data)


class Module:
    """`cupy.cuda.Module`, whose binary is here a `Program`."""

    def load(self, binary: Program) -> None:
        self.get_function = binary.get_function


def _signatures(code: str) -> dict[str, list[tuple[str, str]]]:
    """The (type, name) of every parameter of every kernel."""
    code = re.sub(r"//[^\n]*", "", code).replace("__restrict__", "")
    kernels = re.findall(r"^(?:BLOCK|ELEMENT)_KERNEL (\w+)\(([^)]*)\)", code, re.M)
    parameter = re.compile(r"\s*(.*\W)(\w+)\s*", re.S)
    return {
        name: [(m[1].strip(), m[2]) for m in map(parameter.fullmatch, text.split(",")) if m]
        for name, text in kernels
    }


def _launcher(name: str, parameters: list[tuple[str, str]]) -> str:
    """C: keep the arguments where every lane finds them, and run the grid."""
    fields = " ".join(f"{kind} {field};" for kind, field in parameters)
    declared = ", ".join(f"{kind} {field}" for kind, field in parameters)
    given = ", ".join(field for _, field in parameters)
    kept = ", ".join(f"arguments_of_{name}.{field}" for _, field in parameters)
    return f"""
static struct arguments_of_{name} {{ {fields} }} arguments_of_{name};
static void {name}_of_lane(void) {{ {name}({kept}); }}
void launch_{name}(unsigned grid, unsigned block, {declared})
{{
    arguments_of_{name} = (struct arguments_of_{name}){{ {given} }};
    run_grid({name}_of_lane, grid, block);
}}"""


def cupy() -> ModuleType:
    """The module that takes CuPy's place."""
    module: Any = ModuleType("cupy")
    module.ndarray = np.ndarray
    module.asarray = np.array  # a copy, as a device would have
    module.asnumpy = np.array
    module.zeros = np.zeros
    module.empty = np.empty
    module.cuda = SimpleNamespace(
        Device=lambda: SimpleNamespace(id=-1),
        get_current_stream=lambda: SimpleNamespace(synchronize=lambda: None),
        using_allocator=lambda allocator: contextlib.nullcontext(),
        Module=Module,
        compiler=SimpleNamespace(
            compile_using_nvrtc=lambda code, options: (Program(code, options), None)
        ),
    )
    return module  # type: ignore[no-any-return]
