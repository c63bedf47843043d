"""Builds the documentation with Sphinx: docstrings, notebooks, and pages that share the README."""

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
# Sections of the README begin below the top; widgets need a kernel.
suppress_warnings = ["myst.header", "mystnb.unknown_mime_type"]
