"""Sphinx: ``python -m sphinx -W docs docs/_build``."""

import configparser
import contextlib
import functools
import importlib
import inspect
import pkgutil
import re
import shutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.nodes import make_refnode

sys.path.insert(0, str(Path(__file__).parents[1]))

from mpistrat.version import __version__

project = "mpistrat"
metadata = configparser.ConfigParser()
metadata.read(Path(__file__).parents[1] / "setup.cfg")
author = metadata["metadata"]["author"]
copyright = author
version = release = __version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "myst_parser",
    "sphinx_design",
    "sphinx_copybutton",
    "sphinx_codeautolink",
]
myst_enable_extensions = ["colon_fence", "deflist"]
exclude_patterns = ["_build"]
suppress_warnings = [
    "ref.python",  # `Strategy` is also a class of mpistrat.compat.v1
    "codeautolink.match_block",  # examples of which Sphinx does not show "# doctest: +SKIP"
]
default_role = "py:obj"

# Names in programs are links to the reference. The programs of a page are one program.
codeautolink_concat_default = True
copybutton_prompt_text = "$ "

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
html_js_files = ["open.js"]
templates_path = ["templates"]
html_sidebars = {
    "**": [
        *(f"sidebar/{part}.html" for part in ("brand", "search", "scroll-start", "navigation", "scroll-end")),
        "versions.html",  # shown where docs/build-versions gives the versions
    ]
}


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


# --- names in sentences are links to the reference -----------------------------------------------------------


_OWNERS = {"strategy": "Strategy", "context": "ReplicaContext", "dataset": "Dataset", "optimizer": "Optimizer"}


@functools.cache
def addresses(objects: frozenset[str]) -> dict[str, str]:
    """Return the shortest address by each way to write a name: with all of it, without the package, by its class."""
    found: dict[str, str] = {}
    for address in sorted(objects, key=len, reverse=True):
        parts = address.split(".")
        for way in (address, address.removeprefix("mpistrat."), ".".join(parts[-2:]), parts[-1]):
            if "." in way or way[0].isupper():
                found[way] = address
    return found


def link_names(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Make a link of each literal that is a name of the reference, where it is written like one."""
    objects = app.env.get_domain("py").objects
    known = addresses(frozenset(name for name in objects if not objects[name].aliased))
    for literal in list(doctree.findall(nodes.literal)):
        inside = literal.parent
        while inside is not None and not isinstance(inside, (nodes.reference, nodes.title, addnodes.desc)):
            inside = inside.parent
        owner, dot, name = literal.astext().partition("(")[0].partition(".")
        address = known.get(_OWNERS.get(owner, owner) + dot + name)
        if inside is None and address is not None and not literal.get("refuri"):
            entry = objects[address]
            link = make_refnode(app.builder, page, entry.docname, entry.node_id, [], address)
            literal.replace_self(link)
            link += literal


def map_methods(app: Sphinx, env: BuildEnvironment) -> None:
    """Tell codeautolink under which name the reference has each method: a program reaches it by the class's file."""
    objects = env.get_domain("py").objects
    for address in sorted(objects, key=len, reverse=True):  # the shortest address wins
        owner, _, name = address.rpartition(".")
        with contextlib.suppress(AttributeError, ImportError, ValueError):
            method = inspect.getattr_static(pkgutil.resolve_name(owner), name)
            function = getattr(method, "__func__", getattr(method, "fget", method))
            place = f"{function.__module__}.{function.__qualname__}"
            app.config.codeautolink_inventory_map[place] = address


# --- names break between their parts, not inside of words ----------------------------------------------------


def let_names_break(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Let a line end after each dot, underscore and the like of a long literal."""
    for text in [text for literal in doctree.findall(nodes.literal) for text in literal.findall(nodes.Text)]:
        if len(text) <= 20:
            continue
        parts = re.split(r"(?<=[._=/,(\[-])(?=\w)", text.astext())
        broken = [each for part in parts for each in (nodes.raw("", "<wbr>", format="html"), nodes.Text(part))]
        text.parent.replace(text, broken[1:])


# --- each example has a page ---------------------------------------------------------------------------------


DOCS = Path(__file__).parent
GALLERY = DOCS / "gallery"


def examples() -> dict[str, str]:
    """Return the text of each section of ``examples.md`` by the name of its page."""
    sections = (DOCS / "examples.md").read_text().split("\n## ")[1:]
    return {section.splitlines()[0].lower().replace(" ", "-"): section for section in sections}


def write_gallery(app: Sphinx, config: Config) -> None:
    """Write a page for each section of ``examples.md``, which is the page of their cards."""
    shutil.rmtree(GALLERY, ignore_errors=True)
    GALLERY.mkdir()
    for name, section in examples().items():
        page = re.sub(r"\]\((?=[\w/-]+\.\w+)", "](../", section).replace(":: examples/", ":: ../examples/")
        GALLERY.joinpath(f"{name}.md").write_text(f"# {page}")


def lead_to_gallery(app: Sphinx, page: str, source: list[str]) -> None:
    """Leave the cards on the page of examples, and lead to the page of an example where its section is named."""
    text = source[0]
    if page == "examples":
        cards = re.sub(r"\(#([\w-]+)\)", r"(gallery/\1.md)", text.partition("\n## ")[0])
        cards = re.sub(r':link: "#([\w-]+)"', r":link: gallery/\1.html", cards)
        pages = "\n".join(f"gallery/{name}" for name in examples())
        text = f"{cards}\n```{{toctree}}\n:hidden:\n\n{pages}\n```\n"
    source[0] = re.sub(r"\bexamples\.md#([\w-]+)", r"gallery/\1.md", text)


# --- the words that the search knows -------------------------------------------------------------------------


def index_synonyms(app: Sphinx, doctree: nodes.document) -> None:
    """Make entries of the index, which a search shows first, of a line ``<!-- search: ghost cells -->`` of the head."""
    head = Path(doctree["source"]).read_text().partition("\n## ")[0]
    for comment in re.findall(r"^<!-- search: (.+?)\s-->$", head, re.M | re.S):
        entries = [("single", " ".join(each.split()), "", "main", None) for each in comment.split(",")]
        doctree.append(addnodes.index(entries=entries))


# --- of an entry of the reference the first sentence shows ---------------------------------------------------


def fold_entries(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Fold what stands between the first paragraph of an entry and its members."""
    if not page.startswith("reference/"):
        return
    for content in doctree.findall(addnodes.desc_content):
        after = [each for each in content.children if not isinstance(each, addnodes.index)]
        own = [each for each in after if not isinstance(each, addnodes.desc)][1:]
        if own:
            start = nodes.raw("", '<details class="more"><summary>more</summary>', format="html")
            content.insert(content.index(own[0]), start)
            content.insert(content.index(own[-1]) + 1, nodes.raw("", "</details>", format="html"))


def setup(app: Sphinx) -> None:
    app.connect("config-inited", write_gallery)  # before codeautolink asks which pages are new
    app.connect("source-read", lead_to_gallery)
    app.connect("doctree-read", index_synonyms)
    app.connect("env-check-consistency", warn_of_missing_names)
    app.connect("env-updated", map_methods, priority=100)  # before codeautolink
    app.connect("doctree-resolved", link_names)
    app.connect("doctree-resolved", let_names_break)
    app.connect("doctree-resolved", fold_entries)
