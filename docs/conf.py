"""Builds the documentation with Sphinx: pages, docstrings and notebooks."""

import re

project = "demo_optax"
author = "The demo_optax authors"
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax", "myst_nb"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "demo_optax"

default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings give shapes, dtypes and units
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
# Notebooks run in the tests, which store their pictures.
nb_execution_mode = "off"
# Widgets need a kernel.
suppress_warnings = ["mystnb.unknown_mime_type"]


def setup(app):
    """Links follow the repository's folders; Sphinx has the notebooks in ``docs/notebooks``."""
    app.connect("source-read", link_notebooks)


def link_notebooks(app, name, source):
    if name.startswith("notebooks/"):
        source[0] = source[0].replace("](../docs/", "](/")
    link = r"\[([^][]*)\]\((?:\.\./\.\./notebooks/)?(\w+)\.ipynb\)"
    source[0] = re.sub(link, r"{doc}`\1 </notebooks/\2>`", source[0])
