"""What the tree promises: where things lie, what an import costs, what a public name looks like."""

import ast
import enum
import inspect
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import pytest

import mpistrat

ROOT = Path(__file__).parents[1]


def tracked(*patterns: str) -> list[str]:
    """The files of the tree, by git; where there is no git, all but what tools leave behind."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate", *patterns]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return [name for name in walked() if not patterns or name.startswith(tuple(f"{p}/" for p in patterns))]
    return [name for name in listed.splitlines() if (ROOT / name).exists()]


def walked() -> list[str]:
    left = re.compile(r"(^|/)(\.[^/]*|__pycache__|build|dist|_build|[^/]*\.egg-info|digits-out|statistics-demo)(/|$)")
    files = (str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file())
    return sorted(name for name in files if not left.search(name))


def test_top_level():
    found = {name.split("/")[0] for name in tracked()}
    required = {"setup.cfg", "pyproject.toml", "mpistrat", "tests", "README.md", "LICENSE"}
    assert required <= found
    optional = {"benchmarks", "docs", "packaging", "slurm", "MANIFEST.in", "setup.py"}
    optional |= {"CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "SECURITY.md"}
    assert {name for name in found - required if name[0] != "."} <= optional


def test_files_are_named_after_what_they_hold():
    vague = re.compile(r"(^|_)(utils?|helpers?|common|misc|manager)$")
    assert [name for name in tracked("mpistrat") if vague.search(Path(name).stem)] == []


def test_no_paths_of_this_machine():
    temporary = r"(?<![\w}])" + re.escape(tempfile.gettempdir()) + "/[a-z]"
    machine = "|".join([*map(re.escape, {f"{ROOT}/", f"{Path.home()}/", f"{sys.prefix}/"}), temporary])
    found = []
    for name in tracked():
        if (text := (ROOT / name).read_bytes()) and b"\0" not in text:
            for number, line in enumerate(text.decode(errors="replace").splitlines(), 1):
                if re.search(machine, line):
                    found.append(f"{name}:{number}: {line}")
    assert found == []


def test_imports_go_down():
    program = Path(sys.executable).with_name("lint-imports")
    if not program.exists():
        pytest.skip("import-linter is not installed")
    ended = subprocess.run([program, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


IMPORT = """
import sys
before = set(sys.modules)
import mpistrat
loaded = set(sys.modules) - before
heavy = {"mpi4py.MPI", "h5py", "cupy", "optree", "numpy", "rich", "click"} & loaded
assert not heavy, heavy
assert len(loaded) < 50, loaded  # what costs time at import is other modules
mpistrat.experimental.CommunicationOptions  # what most programs use of it must not load all that it names
others = {"asyncio", "mpistrat.asynchronous", "mpistrat.mesh", "mpistrat.training", "mpi4py.MPI"} & set(sys.modules)
assert not others, others
"""


def test_import_is_light(run_alone):
    run_alone("-c", IMPORT).check()


def test_the_stub_of_experimental_has_its_names():
    experimental = mpistrat.experimental
    stub = ast.parse(Path(experimental.__file__).with_suffix(".pyi").read_text())
    found = {node.targets[0].id for node in stub.body if isinstance(node, ast.Assign)}
    found |= {each.asname for node in stub.body if isinstance(node, ast.ImportFrom) for each in node.names} - {None}
    assert sorted(found) == experimental.__all__ == dir(experimental)


# --- public names --------------------------------------------------------------------------------------


def public_objects() -> dict[str, object]:
    """Everything that a public module exports, and the public members of what it exports, by full name."""
    found: dict[str, object] = {}

    def visit(name: str, thing: object) -> None:
        if name in found:
            return
        found[name] = thing
        if isinstance(thing, types.ModuleType):
            for member in getattr(thing, "__all__", ()):
                if not member.startswith("__"):
                    visit(f"{name}.{member}", getattr(thing, member))
        elif isinstance(thing, type):
            for member, value in vars(thing).items():
                documented = inspect.isroutine(value) or isinstance(value, property)
                if documented and not member.startswith("_"):
                    visit(f"{name}.{member}", value)

    visit("mpistrat", mpistrat)
    return found


@pytest.fixture(scope="module")
def public():
    return public_objects()


def test_public_names_exist(public):
    assert {"mpistrat.Strategy", "mpistrat.Strategy.run", "mpistrat.get_strategy"} <= set(public)


# They hand all arguments on to a function of the user's, as those of tf.distribute do, or take objects by names of the
# user's own.
FORWARDING = {
    f"mpistrat.{module}.PreemptionCheckpointHandler.{method}"
    for module in ("experimental", "training")
    for method in ("run", "save_checkpoint_if_preempted")
} | {
    "mpistrat.coordinator.Executor.submit",
    "mpistrat.Mesh",
    "mpistrat.experimental.Mesh",
    "mpistrat.training.Checkpoint",
    "mpistrat.experimental.ElasticLoop",
    "mpistrat.training.History.log",
}


def test_public_signatures_are_explicit(public):
    """``**kwargs`` hides which arguments there are, and swallows misspelt ones."""
    found = []
    for name, thing in public.items():
        if name in FORWARDING:
            continue
        if isinstance(thing, (staticmethod, classmethod)):
            thing = thing.__func__
        if isinstance(thing, type) and issubclass(thing, (enum.Enum, BaseException)):
            continue
        if callable(thing):
            try:
                parameters = inspect.signature(thing).parameters.values()
            except ValueError:
                continue  # a built-in without one
            found += [f"{name}({p})" for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD]
    assert found == []


def test_public_names_have_a_summary(public):
    """A docstring begins with one line that ends in a full stop or a colon."""
    found = []
    for name, thing in public.items():
        if isinstance(thing, (staticmethod, classmethod)):
            thing = thing.__func__
        if isinstance(thing, (type, types.ModuleType, property)) or callable(thing):
            text = thing.__doc__ or inspected_base_docstring(name, public)
            lines = inspect.cleandoc(text or "").splitlines() or [""]
            if not re.search(r"\S.*[.:?]$", lines[0]) or (len(lines) > 1 and lines[1].strip()):
                found.append(f"{name}: {lines[0]!r}")
    assert found == []


def inspected_base_docstring(name: str, public: dict[str, object]) -> str | None:
    """The docstring that a method without one inherits."""
    owner, _, member = name.rpartition(".")
    if isinstance(public.get(owner), type):
        for base in public[owner].__mro__[1:]:
            if getattr(vars(base).get(member), "__doc__", None):
                return vars(base)[member].__doc__
    return None


def test_the_table_of_layers_is_that_of_the_contract():
    text = (ROOT / "pyproject.toml").read_text()
    layers = re.search(r'containers = \["mpistrat"\]\nlayers = \[(.*?)\]', text, re.S)[1]
    contract = enumerate(re.findall(r'"(.+)"', layers))
    place = {name: number for number, names in contract for name in names.split(" | ")}
    rows = re.findall(r"^\| (`.+?`) \| ", (ROOT / "docs" / "development.md").read_text(), re.M)
    table = [name for row in rows for name in re.findall(r"`(\w+)`", row) if name in place]
    assert sorted(table) == sorted(place)
    assert [place[name] for name in table] == sorted(place.values())
