"""Settings of Sphinx for the docs site, which ``ci/docs_site.py`` builds."""

from __future__ import annotations

import builtins
import re
from importlib.metadata import version as version_of
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.nodes import find_pending_xref_condition

from aqueduct.config import DEFAULT

project = "Aqueduct"
author = "The authors of Aqueduct"
copyright = author
version = release = version_of("aqueduct-arrow")
html_title = f"Aqueduct {version}"

extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}

myst_heading_anchors = 4
"""Headings down to this level have anchors, by GitHub's rule."""

autodoc_class_signature = "mixed"
autodoc_default_options: dict[str, Any] = {
    "members": True,
    "undoc-members": True,
    # What these classes of Python bring is not listed again.
    "inherited-members": "BaseException, Enum, dict, object, tuple",
}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
maximum_signature_line_length = 90
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "navigation_with_keys": True,
    "light_css_variables": {"color-brand-primary": "#0f6b6b", "color-brand-content": "#0f6b6b"},
    "dark_css_variables": {"color-brand-primary": "#5cc8c0", "color-brand-content": "#5cc8c0"},
}
highlight_language = "text"
pygments_style = "default"
pygments_dark_style = "github-dark"


def _shortened(*given: Any) -> tuple[str, str | None] | None:
    """A signature with the default of a config by its name, and not by its hundred settings."""
    signature, returns = given[-2:]
    return signature and (signature.replace(repr(DEFAULT), "DEFAULT"), returns)


def _linked(*given: Any) -> None:
    """Makes a link of each page that a docstring names; one that does not exist is a warning."""
    lines = given[-1]
    lines[:] = [re.sub(r"\bdocs/([\w/-]+)\.md\b", r":doc:`/\1`", line) for line in lines]


def _inner(*given: Any) -> bool | None:
    """Leaves out what is public for other modules of the library alone."""
    described = getattr(given[3], "__doc__", None) or ""
    return True if described.rstrip().endswith("for this library.") else None


OTHERS = frozenset({"Mode"})
"""Names in signatures of spark_udfs that are not those of aqueduct."""


def _unlinked(app: Sphinx, doctree: nodes.document) -> None:
    """Leaves types of Python alone: Sphinx takes ``bytes`` for an attribute of that name."""
    spark = app.env.docname.endswith("/spark")
    for link in list(doctree.findall(addnodes.pending_xref)):
        target = link.get("reftarget", "")
        if link.get("refdomain") == "py" and (
            hasattr(builtins, target) or (spark and target in OTHERS)
        ):
            short = find_pending_xref_condition(link, "resolved")
            link.replace_self((link if short is None else short).children)


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-signature", _shortened)
    app.connect("autodoc-process-docstring", _linked)
    app.connect("autodoc-skip-member", _inner)
    app.connect("doctree-read", _unlinked)
