"""Distributions are built from what is in git alone, and tried in new environments.

Nothing is downloaded: an environment links the libraries of this one that it should have.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import distribution, distributions
from pathlib import Path

import pytest
from limits import patience

from parallel_sgd import __version__

ROOT = Path(__file__).parents[2]
#: The libraries that the package requires, and those that these require.
REQUIRED = ("numpy", "numba", "llvmlite", "msgpack")

BACKEND = "import sys, setuptools.build_meta as backend; backend.build_{}(sys.argv[1])"

TRAINING = """\
import numpy as np, parallel_sgd as psgd

def train(comm):
    model = psgd.Parameters({"w": np.zeros(3, np.float32)})
    learner = psgd.Learner(model, psgd.SGD(lr=0.1), psgd.DataParallelSGD(gradient_bits=1), comm)
    learner.gradient["w"][:] = comm.rank + 1
    learner.step(samples=1)
    learner.finish()
    return model["w"]

print(psgd.__file__, *psgd.simulate(2, train)[0].round(2))
"""


def command(
    *words: str | Path, cwd: Path, env: dict[str, str] | None = None, limit_s: int = 120
) -> str:
    """Return the output of a command that must succeed."""
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=clean | (env or {}),
        capture_output=True,
        text=True,
        timeout=limit_s * patience(),
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def tracked() -> list[str]:
    """Return the paths of all files in git."""
    return command("git", "ls-files", "-z", cwd=ROOT).rstrip("\0").split("\0")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout: the files in git, as they are now, and links as links."""
    folder = tmp_path_factory.mktemp("tree")
    for name in tracked():
        if (ROOT / name).is_symlink() or (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def built(kind: str, tree: Path, folder: Path) -> Path:
    """Build a distribution as `python -m build --no-isolation` does."""
    copy = folder / "copy"
    shutil.copytree(tree, copy, symlinks=True)
    command(sys.executable, "-c", BACKEND.format(kind), folder, cwd=copy)
    (path,) = (path for path in folder.iterdir() if path != copy)
    return path


@pytest.fixture(scope="module")
def sdist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("sdist", tree, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("wheel", tree, tmp_path_factory.mktemp("wheel"))


def contents(path: Path) -> dict[str, str]:
    """Return the hash of each file of a wheel."""
    with zipfile.ZipFile(path) as wheel:
        return {
            name: hashlib.sha256(wheel.read(name)).hexdigest()
            for name in wheel.namelist()
            if not name.endswith("/")
        }


def environment(folder: Path, libraries: Sequence[str]) -> Path:
    """Return the bin folder of a new environment with pip and some libraries installed here."""
    command(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    (site,) = folder.glob("lib/python*/site-packages")
    pip = folder / "bin" / "pip"
    pip.write_text(
        f"#!{folder}/bin/python\nimport runpy\nrunpy.run_module('pip', run_name='__main__')\n"
    )
    pip.chmod(0o755)
    for name in ("pip", *libraries):
        found = distribution(name)
        for part in {file.parts[0] for file in found.files or () if file.parts[0] != ".."}:
            source, target = Path(str(found.locate_file(part))), site / part
            if source.exists() and not target.exists() and part != "__pycache__":
                target.symlink_to(source)
    return folder / "bin"


def test_wheel_has_the_packages_files_and_no_others(wheel: Path) -> None:
    expected = {
        name if name.startswith("parallel_sgd/") else f"parallel_sgd/{name}"
        for name in tracked()
        if name.startswith(("parallel_sgd/", "kernels/")) and name != "parallel_sgd/kernels"
    }
    found = set(contents(wheel))
    metadata = {name for name in found if name.startswith(f"parallel_sgd-{__version__}.dist-info/")}
    assert found - metadata == expected
    assert {"parallel_sgd/py.typed", "parallel_sgd/kernels/cuda/kernel.h"} <= found
    assert sum(name.endswith(".cu") for name in found) >= 9
    with zipfile.ZipFile(wheel) as opened:
        folder = f"parallel_sgd-{__version__}.dist-info"
        license = opened.read(f"{folder}/licenses/LICENSE").decode()
        text = opened.read(f"{folder}/METADATA").decode()
    assert license == (ROOT / "LICENSE").read_text()
    assert text.endswith((ROOT / "README.md").read_text())
    assert f"\nVersion: {__version__}\n" in text


def test_wheel_of_the_sdist_is_the_wheel_of_the_checkout(
    sdist: Path, wheel: Path, tmp_path: Path
) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {"LICENSE", "README.md", "pyproject.toml", "setup.py"} <= names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "runs/"))]
    (tmp_path / "wheel").mkdir()
    assert contents(built("wheel", folder, tmp_path / "wheel")) == contents(wheel)


def test_installed_wheel_trains_with_the_required_libraries_alone(
    wheel: Path, tmp_path: Path
) -> None:
    bin = environment(tmp_path / "env", REQUIRED)
    command(bin / "pip", "install", "--no-index", "--quiet", wheel, cwd=tmp_path)
    installed = command(bin / "python", "-c", TRAINING, cwd=tmp_path)
    path, *values = installed.split()
    assert Path(path).is_relative_to(tmp_path / "env")
    assert values == ["-0.15", "-0.15", "-0.15"]
    assert "simulate" in command(bin / "parallel-sgd", "--help", cwd=tmp_path)
    assert __version__ in command(bin / "parallel-sgd", "--version", cwd=tmp_path)
    np_file = "import numpy as np; x = np.eye(8, dtype=np.float32); np.savez('d.npz', x=x, y=x)"
    command(bin / "python", "-c", np_file, cwd=tmp_path)
    words = "-n 2 --data d.npz --task regression --hidden 4 --epochs 2 --gradient-bits 1 --no-plot"
    output = command(bin / "parallel-sgd", "simulate", *words.split(), cwd=tmp_path)
    assert re.search(r"epoch +2/2", output)


@dataclass
class Stage:
    """A stage of a Dockerfile that is built in a folder, without its `apt-get` and `useradd`."""

    folder: Path
    bin: Path
    arguments: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"

    def place(self, path: str) -> Path:
        """Return the place of a path of the image."""
        return self.folder / os.path.join(self.workdir, path).lstrip("/")


def instructions(dockerfile: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the rest of each instruction of a Dockerfile without heredocs."""
    lines = [line for line in dockerfile.read_text().splitlines() if not line.startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line.strip():
            name, _, rest = line.partition(" ")
            yield name, rest.strip()


def perform(dockerfile: Path, context: Path, folder: Path, given: dict[str, str]) -> Stage:
    """Build the stages of a Dockerfile in folders, and return the last.

    Performed are COPY, WORKDIR, ARG, and RUN if the command begins with pip. pip finds every
    library in the stage's environment, and downloads nothing.
    """
    stages: dict[str, Stage] = {}
    stage, pips = Stage(folder, folder), 0
    libraries = [
        found.metadata["Name"]
        for found in distributions()
        if found.metadata["Name"] != "parallel_sgd"
    ]
    for name, rest in instructions(dockerfile):
        words = rest.split()
        if name == "FROM":
            assert re.fullmatch(r"python:\$\{PYTHON\}-slim", words[0])
            key = words[2] if words[1:2] == ["AS"] else str(len(stages))
            root = folder / key
            (root / "image").mkdir(parents=True)
            stage = Stage(root / "image", environment(root / "env", libraries))
            stages[key] = stage
        elif name == "ARG":
            key, _, value = rest.partition("=")
            stage.arguments[key] = given.get(key, value)
        elif name == "WORKDIR":
            stage.workdir = os.path.join(stage.workdir, rest)
            stage.place(".").mkdir(parents=True, exist_ok=True)
        elif name == "COPY":
            source = context
            if words[0].startswith("--from="):
                other = stages[words.pop(0).removeprefix("--from=")]
                words[0], source = words[0].lstrip("/"), other.folder
            *sources, target = words
            for path in sources:
                if (source / path).is_dir():
                    shutil.copytree(source / path, stage.place(target), symlinks=True)
                else:
                    shutil.copy2(source / path, stage.place(target))
        elif name == "RUN" and rest.startswith("pip "):
            path = f"{stage.bin}{os.pathsep}{os.environ['PATH']}"
            offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
            env = {**stage.arguments, **offline, "PATH": path}
            command("sh", "-ec", rest, cwd=stage.place("."), env=env)
            pips += 1
        else:
            assert name in ("RUN", "USER", "CMD"), f"not known here: {name} {rest}"
    assert pips == 2
    return stage


def test_dockerfile_installs_a_package_that_trains(tree: Path, tmp_path: Path) -> None:
    given = {"MPI": "mpich"}  # the MPI of this environment
    image = perform(tree / "packaging" / "Dockerfile", tree, tmp_path, given)
    assert image.arguments["TORCH_INDEX"].endswith("/cpu")
    home = image.place(".")
    assert home == image.folder / "home" / "mpiuser"
    where = command(image.bin / "python", "-c", "import parallel_sgd as p; print(p)", cwd=home)
    assert str(tmp_path) in where
    options = "--hidden 8 --epochs 1 --gradient-bits 32 --no-plot --output run"
    command(image.bin / "python", "train.py", *options.split(), cwd=home)
    assert (home / "run" / "model.npz").exists()
    *_, (name, rest) = instructions(tree / "packaging" / "Dockerfile")
    assert (name, rest) == ("CMD", '["parallel-sgd", "info"]')
    assert "numba" in command(image.bin / "parallel-sgd", "info", cwd=home).lower()
