"""Sphinx: ``sphinx-build -W docs docs/_build``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from mpistrat.version import __version__

project = "mpistrat"
author = "The mpistrat developers"
copyright = author
version = release = __version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "myst_parser"]
myst_enable_extensions = ["deflist"]
exclude_patterns = ["_build"]
default_role = "py:obj"

myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say them
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True  # else attributes are described twice

html_theme = "furo"
html_title = f"mpistrat {version}"
