"""What the site needs beside Sphinx's own: contents, mathematics without a network, and links."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_refnode

logger = logging.getLogger(__name__)

#: Of these modules the pages of docs/api have all that `__all__` says is public.
MODULES = (
    "parallel_sgd",
    "parallel_sgd.data",
    "parallel_sgd.models",
    "parallel_sgd.schedules",
    "parallel_sgd.torch",
    "parallel_sgd.testing",
    "parallel_sgd.options",
)

#: The contents beside every page. Pages that are named nowhere come last, so that none is lost.
CONTENTS = {
    "Begin": (
        *("tutorial", "faq", "choosing", "pytorch", "trainers/*", "numpy", "notebooks"),
        *("training", "data", "using", "launching", "restarts", "rank_failures", "hangs"),
        "parameter_servers",
    ),
    "Gallery": ("gallery", "gallery/*"),
    "Coming from": ("migration", "migration/*"),
    "Programming": ("api/*", "new_algorithm", "exploring", "../CONTRIBUTING"),
    "How it works": (
        *("algorithms", "design", "planning", "tracing", "misuse", "security"),
        *("decisions/*", "glossary"),
    ),
    "How well it works": (
        "measurements",
        "measurements/*",
        "experiments",
        "../benchmarks/results/README",
    ),
}
LAST = ("../hostfiles/README", "../CHANGELOG")


def contents(root: Path) -> str:
    """The contents as toctrees, of the pages that there are."""
    docs = root / "docs"
    pages = {page.with_suffix("") for page in docs.rglob("*.md")}
    pages |= {page.with_suffix("") for page in docs.rglob("*.rst")}
    groups = {}
    for caption, patterns in CONTENTS.items():
        found = []
        for pattern in patterns:
            if pattern.startswith(".."):
                found.append(pattern.removeprefix("../"))
                continue
            matching = {*docs.glob(f"{pattern}.md"), *docs.glob(f"{pattern}.rst")}
            those = sorted(pages & {page.with_suffix("") for page in matching})
            pages -= set(those)
            found += [str(page.relative_to(root)) for page in those]
        groups[caption] = found
    rest = sorted(str(page.relative_to(root)) for page in pages)
    groups["More"] = rest + [name.removeprefix("../") for name in LAST]
    return "".join(
        f"\n\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(names) + "\n```\n"
        for caption, names in groups.items()
    )


def add_contents(app: Sphinx, name: str, source: list[str]) -> None:
    """The front page is README.md, which does not list all pages."""
    if name == app.config.root_doc:
        source[0] += contents(Path(app.srcdir))


def escaped(text: str) -> str:
    """A line of a docstring, whose stars, bars and underscores are meant as they are."""
    parts = re.split(r"(``.+?``|`[^`]+`|(?<!\S)\*\w[^*]*\*(?!\w))", text)
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"(?<!\\)([*|])", r"\\\1", parts[i])
        parts[i] = re.sub(r"(\w)_(?=\W|$)", r"\1\\_", parts[i])
    return "".join(parts)


def read_docstring(
    app: Sphinx, what: str, name: str, obj: object, options: Any, lines: list[str]
) -> None:
    """Make reStructuredText of a docstring: what is indented after an empty line is verbatim."""
    result: list[str] = []
    shown: int | None = None  # the indent of the text before what is verbatim
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if shown is not None and line.strip() and indent <= shown:
            shown = None
        if shown is None and line.strip():
            before = next((each for each in reversed(result) if each.strip()), "")
            outer = len(before) - len(before.lstrip())
            example = line.lstrip().startswith((">>>", "..."))
            if result and not result[-1].strip() and indent > outer and not example:
                shown = outer
                if not before.rstrip().endswith("::"):
                    result += [" " * outer + "::", ""]
            elif not example:
                line = escaped(line)
        result.append(line)
    lines[:] = ([""] if what == "property" else []) + result  # else "a: b" were a type and a text


def shorter_signature(
    app: Sphinx,
    what: str,
    name: str,
    obj: object,
    options: Any,
    signature: str | None,
    returns: str | None,
) -> tuple[str | None, str | None]:
    """Names of types without what Python wraps them in, also where a default is no expression."""

    def plain(text: str | None) -> str | None:
        if text is None:
            return None
        text = re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", text)
        return re.sub(r"~(?:\w+\.)*(\w+)", r"\1", text) if re.search("<[a-z]", text) else text

    return (plain(with_values(signature, obj)), plain(returns))


def with_values(signature: str | None, obj: Any) -> str | None:
    """Put values where a signature names constants, as one would type them: 10 for COMMIT_EVERY."""
    if signature is None:
        return None
    parts = getattr(obj, "__mro__", [obj])
    names = [vars(sys.modules[each.__module__]) for each in parts if hasattr(each, "__module__")]

    def value(match: re.Match[str]) -> str:
        found = next((each[match[2]] for each in names if match[2] in each), None)
        if isinstance(found, int) and not isinstance(found, bool):
            return f"{match[1]}{found:_}" if found >= 10_000 else f"{match[1]}{found}"
        return f"{match[1]}{found!r}" if isinstance(found, float | str | tuple) else match[0]

    return re.sub(r"(= ?)([A-Z][A-Z_0-9]+)\b", value, signature)


def documented(app: Sphinx) -> dict[str, tuple[str, str]]:
    """Where each public object is, by the last part of its name; of several the shortest."""
    places: dict[str, tuple[str, str]] = {}
    objects = app.env.get_domain("py").get_objects()
    for full, _, kind, page, anchor, _ in sorted(objects, key=lambda each: -len(each[0])):
        if kind in ("class", "function", "exception", "method", "attribute", "data"):
            places[full.rpartition(".")[2]] = (page, anchor)
            places[".".join(full.split(".")[-2:])] = (page, anchor)
    return places


def resolve(app: Sphinx, env: Any, node: Any, text: nodes.Node) -> nodes.Node | None:
    """A public name, though it is written without its module, or with that in which it is made."""
    if node.get("refdomain") != "py":
        return None
    if not hasattr(env, "places_of_names"):
        env.places_of_names = documented(app)
    target = node["reftarget"].removesuffix("()")
    for name in (".".join(target.split(".")[-2:]), target.rpartition(".")[2]):
        if name in env.places_of_names and (name[:1].isupper() or "." in target):
            page, anchor = env.places_of_names[name]
            return make_refnode(app.builder, node["refdoc"], page, anchor, text, target)
    return None


def public_names(module: str) -> list[str]:
    """What a module says is public; where it says nothing, its own classes and functions."""
    found = import_module(module)
    own = [
        name
        for name, value in vars(found).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module
    ]
    return list(getattr(found, "__all__", own))


def described(folder: Path, module: str) -> set[str]:
    """Names of a module that the pages of the API have in a place of their own."""
    names = set()
    for page in folder.glob("*.rst"):
        current = ""
        for line in page.read_text().splitlines():
            if match := re.match(r"\.\. (?:py:)?currentmodule:: (\S+)", line):
                current = match[1]
            elif match := re.match(r"\.\. (?:py:)?(?:auto)?\w+:: (\w+)$", line):
                names.add(f"{current}.{match[1]}")
    return {name.rpartition(".")[2] for name in names if name.rpartition(".")[0] == module}


class Rest(SphinxDirective):
    """``.. rest:: module``: what is public there, and has no place of its own on any page."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Called by Sphinx."""
        name = self.arguments[0]
        module = import_module(name)
        names = set(public_names(name)) - described(Path(self.env.srcdir) / "docs" / "api", name)
        lines = []
        for each in sorted(each for each in names if not each.startswith("__")):
            value = getattr(module, each)
            if isinstance(value, ModuleType):
                continue
            kind = "data"
            if isinstance(value, type):
                kind = "autoexception" if issubclass(value, BaseException) else "autoclass"
            elif callable(value):
                kind = "autofunction"
            if kind == "data":
                known = isinstance(value, Mapping)
                text = f"By their names: {', '.join(map(str, value))}." if known else repr(value)
                lines += [f".. data:: {each}", f"   :module: {name}", "", f"   {text}", ""]
                continue
            members = ["   :members:"] if kind == "autoclass" else []
            lines += [f".. {kind}:: {name}.{each}", *members, ""]
        heading = [".. rubric:: More", ""] if lines else []
        return self.parse_text_to_nodes("\n".join(heading + lines))


def require_all_public_names(app: Sphinx, env: Any) -> None:
    """See that the pages of the API leave nothing out."""
    there = {name for name, *_ in env.get_domain("py").get_objects()}
    lacking = [
        f"{module}.{name}"
        for module in MODULES
        for name in public_names(module)
        if not name.startswith("__")
        and f"{module}.{name}" not in there
        and not isinstance(getattr(import_module(module), name), ModuleType)
    ]
    if lacking:
        logger.warning("docs/api says nothing of %s", ", ".join(lacking))


def mathml(text: str, display: str) -> str:
    """LaTeX as MathML, as far as the pages use LaTeX.

    Raises:
        ValueError: there is something that the conversion does not know, and would show as it is.
    """
    found = convert(re.sub(r"(\\(?:begin|end)\{)aligned\}", r"\1align*}", text), display=display)
    if unknown := re.search(r"<mi>(\\\w*|&)</mi>", found):
        raise ValueError(unknown[1])
    # What browsers heed of a table is its style.
    found = re.sub(
        r'<mtd columnalign="(\w+)"', r'<mtd style="text-align: \1; padding: 0.4ex 0"', found
    )
    return re.sub(
        r"(</mtd>)(<mtd style=\"text-align: right; padding: 0.4ex 0)", r"\1\2 0.4ex 2em", found
    )


def write_mathematics(self: Any, node: nodes.Element) -> None:
    """An equation as MathML, which browsers draw themselves."""
    display = isinstance(node, nodes.math_block)
    try:
        text = mathml(node.astext(), "block" if display else "inline")
    except Exception as error:  # the conversion has many kinds, all of which mean this
        logger.warning("%r is not understood in %r", str(error), node.astext(), location=node)
        text = ""
    self.body.append(f'<div class="math">{text}</div>\n' if display else text)
    raise nodes.SkipNode


def write_first_page(app: Sphinx, failure: Exception | None) -> None:
    """index.html, which web servers look for, is README.html."""
    if failure is None and app.builder.format == "html":
        shutil.copyfile(Path(app.outdir) / "README.html", Path(app.outdir) / "index.html")


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    renderers = (write_mathematics, None)
    app.add_html_math_renderer("mathml", renderers, renderers)
    app.config.html_math_renderer = "mathml"
    app.add_directive("rest", Rest)
    app.connect("source-read", add_contents)
    app.connect("autodoc-process-docstring", read_docstring, priority=400)  # then napoleon
    app.connect("autodoc-process-signature", shorter_signature)
    app.connect("missing-reference", resolve)
    app.connect("env-check-consistency", require_all_public_names)
    app.connect("build-finished", write_first_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
