"""The examples in the documentation and in the docstrings run.

The ``python`` blocks of one page are one program, from top to bottom. A block that cannot run is preceded
by a line ``<!-- not run: the reason -->``. A page that needs a module that may be missing has a line
``<!-- needs the module: its name -->``.
"""

import concurrent.futures
import doctest
import importlib
import importlib.util
import io
import pkgutil
import re
from pathlib import Path

import pytest

import mpistrat

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"(?P<indent> *)(?P<ticks>```+|~~~+)(?P<info>.*)")
EXCUSE = re.compile(r"\s*<!-- not run: .+ -->\s*")
NEEDS = re.compile(r"^<!-- needs the module: (\w+) -->$", re.MULTILINE)
# Parts of the package that need an extra, by the module that it installs.
EXTRAS = {
    "mpistrat.integrations.torch": "torch",
    "mpistrat.integrations.hvd.torch": "torch",
    "mpistrat.integrations.joblib": "joblib",
    "mpistrat.integrations.lightning": "lightning",
    "mpistrat.integrations.keras": "tensorflow",  # with Keras, whose own choice of a backend it is
    "mpistrat.integrations.hvd.keras": "tensorflow",
    "mpistrat.integrations.hvd.tensorflow": "tensorflow",
}


def program(page: str) -> str:
    """The python blocks of a page, each line where it stands there; ValueError for other kinds of Python."""
    lines = []
    opening, runs = None, False  # the fence of the block that we are in, and whether that block runs
    previous = ""
    for number, line in enumerate(page.splitlines(), 1):
        fence = FENCE.fullmatch(line.rstrip())
        code = ""
        if opening is None:
            if fence:
                info = fence["info"].strip()
                if re.search("python|pycon|py3?$", info) and info != "python":
                    raise ValueError(f"line {number}: write ```python, not ```{info}, so that it is tested")
                opening, runs = fence, info == "python" and not EXCUSE.fullmatch(previous)
        elif fence and fence["ticks"].startswith(opening["ticks"]) and not fence["info"].strip():
            opening = None
        elif runs:
            code = line.removeprefix(opening["indent"])
        lines.append(code)
        previous = line
    if opening is not None:
        raise ValueError(f"the block {opening[0].strip()} is not closed")
    return "\n".join(lines) + "\n"


def programs():
    found = []
    for page in filter(Path.exists, PAGES):
        name = str(page.relative_to(ROOT))
        missing = [each for each in NEEDS.findall(page.read_text()) if importlib.util.find_spec(each) is None]
        try:
            text = program(page.read_text())
        except ValueError as error:
            raise ValueError(f"{name}, {error}") from None
        if text.strip():
            marks = pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} is not installed")
            found.append(pytest.param(text, id=name, marks=marks))
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("text", programs())
def test_page_runs(text, run_alone, run_ranks, tmp_path, request):
    """Alone and on two ranks, at the same time: each mostly waits."""
    # A traceback names this file, which has the page's name and line numbers.
    path = tmp_path / re.sub(r"\W+", "_", request.node.callspec.id)
    path.write_text(text)
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        ends = [
            pool.submit(run_alone, path, limit=250, cwd=tmp_path / "1"),
            pool.submit(run_ranks, 2, path, limit=250, cwd=tmp_path / "2"),
        ]
    for end in ends:
        end.result().check()


def test_program_keeps_lines():
    page = "a\n```python\nx = 1\n```\n- c\n  ```python\n  if x:\n      y = 2\n  ```\n```console\n$ ls\n```\n"
    assert program(page).splitlines() == ["", "", "x = 1", "", "", "", "if x:", "    y = 2", "", "", "", ""]


def test_program_leaves_out_what_gives_a_reason():
    page = "<!-- not run: needs a GPU -->\n```python\nx = 1\n```\n\n```python\ny = 2\n```\n"
    assert program(page).split() == ["y", "=", "2"]


@pytest.mark.parametrize("info", ["{code-block} python", "python no-run", "py", "pycon", "ipython3"])
def test_program_refuses_other_kinds_of_python(info):
    with pytest.raises(ValueError, match="line 1: write"):
        program(f"```{info}\nx = 1\n```\n")


def modules():
    """Every module of the package. ``__main__`` is a program, and has nothing else in it."""
    found = [module.name for module in pkgutil.walk_packages(mpistrat.__path__, "mpistrat.")]
    missing = tuple(name for name, module in EXTRAS.items() if importlib.util.find_spec(module) is None)
    return ["mpistrat", *(name for name in found if not name.endswith(".__main__") and not name.startswith(missing))]


@pytest.mark.parametrize("name", modules())
def test_docstrings_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    runner = doctest.DocTestRunner(optionflags=flags, verbose=False)
    output = io.StringIO()
    tests = doctest.DocTestFinder().find(module, name)
    if sum(runner.run(test, out=output.write).failed for test in tests):
        pytest.fail(output.getvalue(), pytrace=False)


# What users import; the other lines of the house are its own.
INSIDE = re.compile(
    r"mpistrat\.(bench|cli|collectives|context|nest|runtime|strateg|training\.|values|variables|verify)"
)
PUBLIC = [name for name in modules() if not INSIDE.match(name) and hasattr(importlib.import_module(name), "__all__")]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_an_example(name):
    module = importlib.import_module(name)
    public = [each for each in module.__all__ if callable(getattr(module, each))]
    assert [each for each in public if ">>>" not in (getattr(module, each).__doc__ or "")] == []
