"""Sphinx: ``sphinx-build -W docs docs/_build``."""

import importlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

sys.path.insert(0, str(Path(__file__).parents[1]))

from mpistrat.version import __version__

project = "mpistrat"
author = "The mpistrat developers"
copyright = author
version = release = __version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "myst_parser",
    "sphinx_design",
]
myst_enable_extensions = ["colon_fence", "deflist"]
exclude_patterns = ["_build"]
suppress_warnings = ["ref.python"]  # `Strategy` is also a class of mpistrat.compat.v1
default_role = "py:obj"

myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say them
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True  # else attributes are described twice

html_theme = "furo"
html_title = f"mpistrat {version}"
html_static_path = ["static"]
html_favicon = "static/favicon.svg"
html_css_files = ["pages.css"]


# --- the reference has every public name ---------------------------------------------------------------------


def public_names(module: types.ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield the address and the object of each public name of a module and of the modules that it exports."""
    for name in module.__all__:
        if name.startswith("_"):
            continue
        value = getattr(module, name)
        if isinstance(value, types.ModuleType):
            yield from public_names(value)
        else:
            yield f"{module.__name__}.{name}", value


def warn_of_missing_names(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of each public name that no page describes. One page for all addresses of a class is enough."""
    described = set(env.get_domain("py").objects)
    addresses: dict[Any, list[str]] = {}
    for address, value in public_names(importlib.import_module("mpistrat")):
        shared = isinstance(value, (type, types.FunctionType))  # a constant has one address
        addresses.setdefault(value if shared else address, []).append(address)
    for names in addresses.values():
        if described.isdisjoint(names):
            logging.getLogger(__name__).warning(
                "the reference lacks %s: add it to a page of docs/reference, by autoclass, autofunction, "
                "autoexception or autodata",
                " = ".join(names),
            )


def setup(app: Sphinx) -> None:
    app.connect("env-check-consistency", warn_of_missing_names)
