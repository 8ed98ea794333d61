"""The options of ``mpistrat.rc``."""

import ast
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import mpistrat
from mpistrat.collectives.algorithms.choose import ALGORITHMS
from mpistrat.runtime import environment
from mpistrat.runtime.environment import OptionError

ROOT = Path(__file__).parents[2]
ATTRIBUTES = [option.attribute for option in environment.options()]
# Of each option: a text of the environment, the value of it, another value for a program, and a text that has none.
CASES = {
    "accounting": ("here", "here", "there", None),
    "all_reduce": ("Ordered", "ordered", "mpi", None),
    "contact_seconds": ("2.5", 2.5, 10.0, "0"),
    "data_block_bytes": ("1000000", 1000000, 500000, "0"),
    "data_blocks": ("1000000", 1000000, 500000, "0"),
    "data_root": ("here", "here", "there", None),
    "debug": ("variables,collectives", {"variables", "collectives"}, {"variables"}, "variable"),
    "device": ("cuda:1", "cuda:1", "auto", "moon"),
    "elastic": ("/dev/shm/here", "/dev/shm/here", "there", None),
    "elastic_memory": ("1000000", 1000000, 500000, "-1"),
    "elastic_ranks": ("FEWER", "fewer", "same", "more"),
    "gpu_direct": ("ON", "on", "off", "perhaps"),
    "hang_abort_seconds": ("60", 60.0, 1, "soon"),
    "hang_seconds": ("2.5", 2.5, 0, "-1"),
    "launcher": ("SRUN", "srun", "mpirun", "ssh"),
    "nccl_half": ("1", True, False, "2"),
    "progress": ("0", False, True, "2"),
    "record": ("no", False, True, "2"),
    "record_dir": ("here", "here", "there", None),
    "restart": ("2", 2, 1, "-1"),
    "roles": ("chief=1, worker=2", "chief=1,worker=2", "ps=1", "chief"),
    "scratch": ("here", "here", "there", None),
    "site": ("here", "here", "there", None),
    "srun_mpi": ("PMIx", "pmix", "pmi2", None),
    "stack_signal": ("12", 12, 0, "9"),
    "trace": ("here", "here", "there", None),
    "trace_bytes": ("1000000", 1000000, 500000, "0"),
    "tuned": ("yes", True, False, "2"),
    "verify": ("sums, copies", frozenset({"copies", "sums"}), frozenset({"sums"}), "weights"),
}


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for option in environment.options():
        monkeypatch.delenv(option.variable, raising=False)
    yield
    for attribute in ATTRIBUTES:
        delattr(mpistrat.rc, attribute)


def variable(attribute):
    return f"MPISTRAT_{attribute.upper()}"


def test_every_option_is_tested():
    assert sorted(CASES) == ATTRIBUTES


@pytest.mark.parametrize("attribute", CASES)
def test_program_before_variable_before_default(monkeypatch, attribute):
    text, value, other, _ = CASES[attribute]
    default = getattr(mpistrat.rc, attribute)
    assert default != value
    monkeypatch.setenv(variable(attribute), f" {text} ")
    assert getattr(mpistrat.rc, attribute) == value
    setattr(mpistrat.rc, attribute, other)
    assert getattr(mpistrat.rc, attribute) == other
    delattr(mpistrat.rc, attribute)
    assert getattr(mpistrat.rc, attribute) == value
    monkeypatch.setenv(variable(attribute), "")
    assert getattr(mpistrat.rc, attribute) == default


@pytest.mark.parametrize(
    ("value", "checks"),
    [
        ("1", environment.CHECKS),
        (True, environment.CHECKS),
        ("on", environment.CHECKS),
        ("0", ()),
        (False, ()),
        ((), ()),
        ("data, output", ("data", "output")),
        (("gradients",), ("gradients",)),
    ],
)
def test_all_checks_by_one_switch(value, checks):
    mpistrat.rc.debug = value
    assert mpistrat.rc.debug == set(checks)


@pytest.mark.parametrize("attribute", [name for name, case in CASES.items() if case[3]])
def test_values_that_cannot_be_read(monkeypatch, attribute):
    wrong = CASES[attribute][3]
    monkeypatch.setenv(variable(attribute), wrong)
    with pytest.raises(OptionError, match=f"^{variable(attribute)}={wrong} cannot be read: use ") as found:
        getattr(mpistrat.rc, attribute)
    assert (found.value.attribute, found.value.variable) == (attribute, variable(attribute))
    assert found.value.value == wrong
    for value in (wrong, 3.5j):
        with pytest.raises(
            OptionError, match=f"^mpistrat.rc.{attribute}={re.escape(repr(value))} cannot be read: use "
        ):
            setattr(mpistrat.rc, attribute, value)
    monkeypatch.delenv(variable(attribute))
    getattr(mpistrat.rc, attribute)  # nothing of it was kept


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Make a text the site file, and return its path."""

    def write(text):
        path = tmp_path / "site.toml"
        path.write_text(text)
        monkeypatch.setenv("MPISTRAT_SITE", str(path))
        del mpistrat.rc.site  # so that it is read again
        return path

    return write


def test_site_file_comes_before_defaults_only(site, monkeypatch):
    path = site('hang_seconds = 300\ntuned = true\ndebug = ["data", "output"]\ndevice = "auto"\nprogress = "auto"')
    rc, options = mpistrat.rc, {option.attribute: option for option in environment.options()}
    assert (rc.hang_seconds, rc.tuned, rc.debug, rc.progress) == (300.0, True, {"data", "output"}, None)
    assert (options["tuned"].origin(rc), options["record"].origin(rc)) == (str(path), "default")
    monkeypatch.setenv("MPISTRAT_DEVICE", "cuda:1")
    assert (rc.device, options["device"].origin(rc)) == ("cuda:1", "MPISTRAT_DEVICE")
    rc.device = "cpu"
    assert (rc.device, options["device"].origin(rc)) == ("cpu", "mpistrat.rc.device")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hang_seconds = 'soon'", "{}: hang_seconds='soon' cannot be read: use seconds, or 0 for never"),
        ("hang_seconds = [1]", "{}: hang_seconds=[1] cannot be read: use seconds, or 0 for never"),
        ("hang_second = 1", "(it has no option 'hang_second': `mpistrat info` lists them), or /dev/null"),
        ("site = 'another'", "(it has no option 'site'"),
        ("gpu_verdicts = 1", "(gpu_verdicts is not an array of tables)"),
        ("hang_seconds", "MPISTRAT_SITE={} cannot be read: use a file of TOML (Expected "),
        ("# " + "x" * 70_000, "(it has more than 65536 bytes)"),
        ("a = " + "[" * 60_000, "MPISTRAT_SITE={} cannot be read"),
        (None, "MPISTRAT_SITE={} cannot be read: use a file of TOML (No such file or directory), or /dev/null"),
    ],
)
def test_site_file_that_cannot_be_read(site, text, said):
    path = site(text or "")
    if text is None:
        path.unlink()
    shown = str(path)[:80] if said.startswith("MPISTRAT_SITE") else str(path)
    with pytest.raises(OptionError, match=re.escape(said.format(shown))):
        getattr(mpistrat.rc, "hang_seconds")  # noqa: B009 - reading it is the test


def test_site_file_that_never_ends(monkeypatch, tmp_path):
    """A pipe without a writer does not block, and the null device is an empty file."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/null"):
        mpistrat.rc.site = path
        assert mpistrat.rc.hang_seconds == 120.0


def test_ways_to_write_a_flag(monkeypatch):
    for value in (True, 1, "1", "Yes", "ON"):
        mpistrat.rc.tuned = mpistrat.rc.progress = value
        assert mpistrat.rc.tuned is mpistrat.rc.progress is True
    for value in (None, "AUTO"):
        mpistrat.rc.progress = value
        assert mpistrat.rc.progress is None


def test_an_algorithm_that_there_is_not(monkeypatch):
    for name, origin in (("fast", "MPISTRAT_ALL_REDUCE=fast"), ("quick", "mpistrat.rc.all_reduce='quick'")):
        if origin.startswith("MPISTRAT"):
            monkeypatch.setenv("MPISTRAT_ALL_REDUCE", name)
        else:
            mpistrat.rc.all_reduce = name
        with pytest.raises(OptionError, match=f"{origin} cannot be read: use auto, {', '.join(ALGORITHMS)}"):
            mpistrat.experimental.CommunicationOptions()


def test_an_unknown_attribute():
    for use in (lambda: mpistrat.rc.devise, lambda: setattr(mpistrat.rc, "devise", "cpu")):
        with pytest.raises(
            AttributeError, match="'devise': it has accounting, all_reduce, contact_seconds, data_block_bytes"
        ):
            use()
    assert not hasattr(mpistrat.rc, "devise")


def test_what_reads_them_heeds_the_program(monkeypatch):
    monkeypatch.setenv("MPISTRAT_PROGRESS", "1")
    assert not mpistrat.training.progress(range(3)).disable
    mpistrat.rc.progress = False
    assert mpistrat.training.progress(range(3)).disable
    mpistrat.rc.all_reduce = "ordered"
    assert mpistrat.experimental.CommunicationOptions().algorithm == "ordered"


def test_import_stays_light():
    """Naming the options starts no MPI, and loads neither NumPy nor h5py."""
    program = "import mpistrat, sys; mpistrat.rc.device = 'cuda'; print({'mpi4py', 'numpy', 'h5py'} & {*sys.modules})"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "set()"


def test_the_table_of_the_documentation():
    """docs/options.md has each option as it is, with what it does."""
    page = (ROOT / "docs/options.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (.*?) \| (.*?) \|$", page, re.MULTILINE)
    shown = {frozenset(): "none", None: "auto", False: "0", True: "1", "": "none", 120.0: "120"}
    shown[int(signal.SIGRTMIN) + 7] = "SIGRTMIN + 7"
    assert rows == [
        (each.attribute, each.variable, each.values, str(shown.get(each.default, each.default)))
        for each in environment.options()
    ]
    for attribute in ATTRIBUTES:
        assert f"- `{attribute}`: " in page
        assert re.search(rf"^ *{attribute} : ", environment.RuntimeOptions.__doc__, re.MULTILINE)


def test_no_variable_is_read_elsewhere():
    """In the package the names of the variables stand in texts for users only."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}"
        for path in (ROOT / "mpistrat").rglob("*.py")
        if "MPISTRAT_" in (text := path.read_text())  # to parse all files takes 4 s
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and re.fullmatch("MPISTRAT_[A-Z_]+", str(node.value))
    ]
    assert not found
