"""The CUDA kernels compile for every supported chip without a warning or a spilled register."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from parallel_sgd.kernels.cuda import launch
from parallel_sgd.kernels.top_k_reference import position_bits

CHIPS = ("sm_75", "sm_80", "sm_90")
FOLDER = Path(launch.__file__).parent
FILES = sorted(path.name for path in FOLDER.glob("*.cu"))


LENGTHS = (*(32 << i for i in range(6)), launch.LARGEST_KEPT + 1)


def _variants(lengths: Sequence[int] = LENGTHS) -> Iterator[tuple[str, dict[str, int]]]:
    """Every file with the macros that it is compiled with."""
    for length in lengths:
        yield "one_bit.cu", launch.macros(length)
        for bits in (4, 8):
            yield "levels.cu", launch.macros(length, BITS=bits)
        yield "top_k.cu", launch.macros(length, POSITION_BITS=position_bits(length))
    yield "entropy.cu", {}
    yield "half.cu", {}
    for file in ("largest.cu", "low_rank.cu", "optimizer_steps.cu", "outer_steps.cu"):
        for bits in (32, 64):
            yield file, {"REAL_BITS": bits}


def _options(macros: dict[str, int]) -> list[str]:
    return [f"-D{name}={value}" for name, value in macros.items()]


def test_every_file_is_compiled() -> None:
    assert {file for file, _ in _variants()} == set(FILES)


@functools.cache
def _nvrtc() -> Any:
    """The compiler library of the wheel nvidia-cuda-nvrtc (or -cu12), or None."""
    package = importlib.util.find_spec("nvidia")
    for root in (package and package.submodule_search_locations) or ():
        for path in Path(root).glob("**/libnvrtc.so.*"):
            if "alt" not in path.name:
                return ctypes.CDLL(str(path))
    return None


def _compile(file: str, options: list[str], kind: str) -> tuple[str, str]:
    """What NVRTC makes of a file, as "CUBIN" or "PTX", and all that it has to say."""
    nvrtc = _nvrtc()
    if nvrtc is None:
        pytest.skip("no NVRTC: pip install nvidia-cuda-nvrtc")
    program, code = ctypes.c_void_p(), launch.source(file).encode()
    made = nvrtc.nvrtcCreateProgram(ctypes.byref(program), code, None, 0, None, None)
    assert made == 0
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    nvrtc.nvrtcCompileProgram(program, len(options), given)
    texts = []
    for what in (kind, "ProgramLog"):
        size = ctypes.c_size_t()
        nvrtc[f"nvrtcGet{what}Size"](program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value + 1)
        nvrtc[f"nvrtcGet{what}"](program, text)
        texts.append(text.raw.rstrip(b"\0\n").decode("latin"))
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return texts[0], texts[1]


@pytest.mark.parametrize("chip", CHIPS)
def test_nvrtc(chip: str) -> None:
    """All that is ever compiled; for later chips what needs the most registers."""
    for file, macros in _variants(LENGTHS if chip == CHIPS[0] else LENGTHS[-2:]):
        options = [f"--gpu-architecture={chip}", "--ptxas-options=-warn-spills", *launch.EXACT]
        binary, log = _compile(file, [*options, *_options(macros)], "CUBIN")
        assert not log, f"{file}, {macros}"
        assert binary.startswith("\x7fELF")


def _reals() -> list[tuple[str, int]]:
    """Every file, with the bits of its real numbers: those of blocks are float32."""
    widths = {file: macros.get("REAL_BITS") for file, macros in _variants()}
    return [(file, bits) for file in FILES for bits in ((32, 64) if widths[file] else (32,))]


@pytest.mark.parametrize(("file", "bits"), _reals())
def test_arithmetic_is_exact(file: str, bits: int) -> None:
    """No contraction, no approximation, no flushing of denormals."""
    options = ["--gpu-architecture=compute_75", *launch.EXACT, f"-DREAL_BITS={bits}"]
    ptx, log = _compile(file, options, "PTX")
    assert ".visible .entry" in ptx, log
    for instruction in re.findall(r"^\s+(?:@%\w+ )?([a-z][\w.]*)", ptx, re.M):
        assert not re.search(r"^fma|ftz|approx|full", instruction), instruction


@pytest.mark.parametrize("file", FILES)
def test_nvcc(file: str, tmp_path: Path) -> None:
    """The files as they lie there, with their defaults: among them 1-bit blocks of 1024 values.

    By the compiler that others have, for one chip: `test_nvrtc` has the others.
    """
    nvcc = shutil.which("nvcc")
    if nvcc is None or shutil.which("g++") is None:
        pytest.skip("no nvcc, or no g++ for it")
    strict = ["-Werror", "all-warnings", "-Xptxas", "-warn-spills"]
    command = [nvcc, "-fatbin", f"-arch={CHIPS[0]}", *strict, *launch.EXACT, str(FOLDER / file)]
    done = subprocess.run([*command, "-o", str(tmp_path / "out")], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
