"""The CUDA kernels compile for every supported chip without a warning or a spilled register."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from parallel_sgd.kernels.cuda import launch

CHIPS = ("sm_75", "sm_80", "sm_90")
FOLDER = Path(launch.__file__).parent


def _variants() -> Iterator[tuple[str, dict[str, int]]]:
    """Every file with the macros that it is compiled with."""
    lengths = [*(32 << i for i in range(6)), launch.LARGEST_KEPT + 1]
    for length in lengths:
        yield "one_bit.cu", launch.macros(length)
        for bits in (2, 4, 8):
            yield "levels.cu", launch.macros(length, bits)
    yield "half.cu", {}
    for file in ("largest.cu", "optimizer_steps.cu"):
        for bits in (32, 64):
            yield file, {"REAL_BITS": bits}


def _options(macros: dict[str, int]) -> list[str]:
    return [f"-D{name}={value}" for name, value in macros.items()]


def test_every_file_is_compiled() -> None:
    assert {file for file, _ in _variants()} == {path.name for path in FOLDER.glob("*.cu")}


@functools.cache
def _nvrtc() -> Any:
    """The compiler library of the wheel nvidia-cuda-nvrtc (or -cu12), or None."""
    package = importlib.util.find_spec("nvidia")
    for root in (package and package.submodule_search_locations) or ():
        for path in Path(root).glob("**/libnvrtc.so.*"):
            if "alt" not in path.name:
                return ctypes.CDLL(str(path))
    return None


def _compile(source: str, options: list[str]) -> tuple[int, str]:
    """NVRTC's error code, 0 for none, and all that it has to say."""
    nvrtc = _nvrtc()
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    made = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), None, 0, None, None)
    assert made == 0
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    error = nvrtc.nvrtcCompileProgram(program, len(options), given)
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return error, log.value.decode().strip()


@pytest.mark.parametrize("chip", CHIPS)
def test_nvrtc(chip: str) -> None:
    if _nvrtc() is None:
        pytest.skip("no NVRTC: pip install nvidia-cuda-nvrtc")
    for file, macros in _variants():
        options = [f"--gpu-architecture={chip}", "--ptxas-options=-warn-spills", *launch.EXACT]
        error, log = _compile(launch.source(file), [*options, *_options(macros)])
        assert (error, log) == (0, ""), f"{file}, {macros}"


@pytest.mark.parametrize("file", sorted(path.name for path in FOLDER.glob("*.cu")))
def test_nvcc(file: str, tmp_path: Path) -> None:
    """The files as they lie there, with their defaults: among them 1-bit blocks of 1024 values."""
    nvcc = shutil.which("nvcc")
    if nvcc is None or shutil.which("g++") is None:
        pytest.skip("no nvcc, or no g++ for it")
    chips = [f"-gencode=arch=compute_{chip[3:]},code={chip}" for chip in CHIPS]
    strict = ["-Werror", "all-warnings", "-Xptxas", "-warn-spills"]
    command = [nvcc, "-fatbin", *chips, *strict, *launch.EXACT, str(FOLDER / file)]
    done = subprocess.run([*command, "-o", str(tmp_path / "out")], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
