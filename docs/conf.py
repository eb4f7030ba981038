"""The site of the documentation: the Markdown pages as they are, and the API from its docstrings.

    make docs                                          into build/docs: open index.html there
    sphinx-build -W -n -b html -c docs . build/docs    the same

The site's root is that of the checkout, so that links between pages are those that one can follow
in the repository. Nothing is fetched, neither as it is built nor as it is read.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import parallel_sgd  # noqa: E402 - from this checkout

project = "parallel_sgd"
author = "the parallel_sgd developers"
release = version = parallel_sgd.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "site_extension",
]
root_doc = "README"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "hostfiles/*.md",
    "benchmarks/results/*.md",
    "docs/**",
]
exclude_patterns = [".*", "build", "parallel_sgd", "kernels", "tests", "runs", "**/__pycache__"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}

# Markdown as GitHub reads it: the same anchors, the same mathematics, and images with a width.
myst_enable_extensions = ["dollarmath", "html_image"]
myst_fence_as_directive = ["math"]
myst_heading_anchors = 4
myst_dmath_double_inline = True

# Docstrings: Google's form; a name in single backticks is code, and a link where it is public.
default_role = "py:obj"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Options", "params_style")]
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_type_aliases = {
    name: name for name in ("Array", "Counts", "DType", "HostArray", "npt.DTypeLike")
}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # types and names that are not public are shown unlinked

html_theme = "furo"
html_title = "parallel_sgd"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_scaled_image_link = False  # a small image of the gallery links to a page
html_theme_options = {"navigation_with_keys": True}
pygments_style = "tango"
