"""Run the examples of the gallery, and write their pages: `docs/gallery.md` and `docs/gallery/`.

    python examples/gallery/make_gallery.py mpi               those whose ranks MPI starts
    python examples/gallery/make_gallery.py torchrun          those whose ranks torchrun starts
    python examples/gallery/make_gallery.py numpy_model       only this

`make gallery` runs all. A page holds the docstring of the example's script, the command with its
output, the figure, and the code.
"""

from __future__ import annotations

import argparse
import ast
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INDEX = ROOT / "docs" / "gallery.md"
FOLDER = ROOT / "docs" / "gallery"
TIMEOUT_S = 300


@dataclass(frozen=True)
class Example:
    """A script of this folder and its page.

    Attributes:
        launcher: of the ranks; "mpi", or "torchrun" for a script that needs the packages of the
            environment without MPI.
        ranks: their number, with the servers.
        options: of `parallel-sgd run`.
        arguments: of the script.
        tolerance: the largest relative difference of a number that the script prints again, on
            another machine; None for numbers that depend on the order in which ranks meet.
    """

    name: str
    launcher: str = "mpi"
    ranks: int = 2
    options: str = ""
    arguments: str = ""
    tolerance: float | None = 0.1

    @property
    def command(self) -> str:
        """The command as a reader types it."""
        with_torchrun = "--with torchrun" if self.launcher == "torchrun" else ""
        launch = ["parallel-sgd run", with_torchrun, f"-n {self.ranks}", self.options]
        return " ".join(filter(None, [*launch, self.script, self.arguments]))

    @property
    def script(self) -> str:
        """The script's path from the root of the checkout."""
        return f"examples/gallery/{self.name}.py"

    @property
    def page(self) -> Path:
        """The path of the page."""
        return FOLDER / f"{self.name}.md"

    @property
    def figure(self) -> Path:
        """The path of the page's figure."""
        return self.page.with_suffix(".png")


INTRODUCTION = """# Gallery

Start here if you would rather change a program that runs than begin with an empty file. Each
example is a short script that you can copy. The script trains within seconds, downloads nothing,
and draws a figure. Its page shows the figure and the output of the last `make gallery`. Most
examples need the extras `train` and `torch`, and an MPI. The last three need no MPI, but `train`
and either `lightning`, or `transformers` and (for LoRA) the package `peft`.
"""

#: In the order of the gallery.
EXAMPLES = (
    Example("numpy_model"),
    Example("digits_bits"),
    Example("resnet_images", arguments="--data digits", tolerance=0.3),
    Example("transformer_bytes"),  # another Python has another library to learn
    Example("lstm_lines", tolerance=0.3),
    Example("cifar", tolerance=0.3),
    Example("gan", tolerance=0.3),
    Example("clicks", ranks=3, options="--servers 1"),
    Example("lora", launcher="torchrun"),
    Example("hugging_face_trainer", launcher="torchrun", tolerance=0.3),
    Example("lightning_autoencoder", launcher="torchrun"),
)


def read(example: Example) -> tuple[str, str, str]:
    """Return the parts of a script: title, prose and the code below its docstring."""
    source = (ROOT / example.script).read_text()
    tree = ast.parse(source)
    title, _, prose = (ast.get_docstring(tree) or "").partition("\n")
    code = source.splitlines()[tree.body[0].end_lineno :]
    return title.rstrip("."), prose.strip(), "\n".join(code).strip()


def run(example: Example, figure: Path, timeout_s: float = TIMEOUT_S) -> str:
    """Run an example's command in this environment and return what its ranks print.

    Raises:
        RuntimeError: the command fails; with all that it printed.
        subprocess.TimeoutExpired: the command takes too long, and is ended.
    """
    words = [sys.executable, "-m", "parallel_sgd", *shlex.split(example.command)[1:]]
    with subprocess.Popen(
        [*words, "--figure", str(figure)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        try:
            output, errors = job.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            job.terminate()  # the launcher ends its ranks
            raise
    if job.returncode:
        raise RuntimeError(f"{example.command} has failed:\n{output}{errors}")
    return output


def page_of(example: Example, output: str) -> str:
    """Return an example's page in Markdown."""
    title, prose, code = read(example)
    return f"""# {title}

{prose}

```console
$ {example.command}
{output.rstrip()}
```

![{title}]({example.figure.name})

The code, [{example.script}](../../{example.script}), with
[drawing.py](../../examples/gallery/drawing.py) for the figure's style:

```python
{code}
```

[All examples](../gallery.md)
"""


def index() -> str:
    """Return the index of all pages in Markdown."""
    rows = []
    for example in EXAMPLES:
        title, prose, _ = read(example)
        sentence = " ".join(prose.split("\n\n")[0].split()).split(". ")[0].rstrip(".:")
        page = f"gallery/{example.name}.md"
        image = f'<img src="gallery/{example.figure.name}" alt="{title}" width="280">'
        rows.append(f"| [{image}]({page}) | **[{title}]({page})**<br>{sentence}. |\n")
    return f"{INTRODUCTION}\n| | |\n|---|---|\n{''.join(rows)}"


def main() -> None:
    """Write the pages of the examples that the command line names, and the index."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    kinds = {"mpi", "torchrun"}
    parser.add_argument(
        "names",
        nargs="+",
        choices=[*sorted(kinds), *(example.name for example in EXAMPLES)],
        metavar="NAME",
        help="an example, or all of a launcher: mpi, torchrun",
    )
    wanted = set(parser.parse_args().names)
    FOLDER.mkdir(exist_ok=True)
    for example in EXAMPLES:
        if wanted & {example.name, example.launcher}:
            print(f"$ {example.command}", flush=True)
            output = run(example, example.figure)
            print(output, end="", flush=True)
            example.page.write_text(page_of(example, output))
    INDEX.write_text(index())


if __name__ == "__main__":
    main()
