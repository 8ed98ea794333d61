"""Slurm's lists of hosts and counts: examples, generated lists, and comparison with scontrol if it is installed."""

import itertools
import os
import shutil
import subprocess
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import core

from mpistrat.cluster_resolver import TFConfigClusterResolver, expand_counts, expand_hostlist

HOSTS = {
    "": [],
    "login": ["login"],
    "n[009-011]": ["n009", "n010", "n011"],
    "n[1-3,07,10-12]": ["n1", "n2", "n3", "n07", "n10", "n11", "n12"],
    "n[010,9-11]": ["n010", "n9", "n10", "n11"],
    "n[99-101]": ["n99", "n100", "n101"],
    "n[1-03]": ["n1", "n2", "n3"],
    "a,b[1-2],c": ["a", "b1", "b2", "c"],
    "r[1-2]n[01-03]": ["r1n01", "r1n02", "r1n03", "r2n01", "r2n02", "r2n03"],
    "n[1][2]": ["n12"],
    "n[1-3]-ib": ["n1-ib", "n2-ib", "n3-ib"],
    "[1-2]": ["1", "2"],
    "x[1-2],x[1-2]": ["x1", "x2", "x1", "x2"],
    "gpu-compute-on-demand-dy-g4dnxlarge-[1-4]": [
        f"gpu-compute-on-demand-dy-g4dnxlarge-{number}" for number in range(1, 5)
    ],
    "n10,n2": ["n10", "n2"],
}


@pytest.mark.parametrize("text", HOSTS)
def test_hosts(text):
    assert expand_hostlist(text) == HOSTS[text]


@pytest.mark.parametrize(
    ("text", "position", "what"),
    [
        ("a[1", 1, "not closed"),
        ("a[1-2,", 1, "not closed"),
        ("ab[", 2, "not closed"),
        ("a]", 1, "not allowed"),
        ("n[3-1]", 2, "descends"),
        ("n[]", 2, "expected a number"),
        ("n[1,]", 4, "expected a number"),
        ("n[-3]", 2, "expected a number"),
        ("n[1-]", 3, "expected a comma"),
        ("n[a]", 2, "expected a number"),
        ("n[0x1]", 3, "expected a comma"),
        ("n[[1]]", 2, "expected a number"),
        ("n[1 - 2]", 3, "expected a comma"),
        ("a,,b", 2, "expected a name"),
        (",a", 0, "expected a name"),
        ("a,", 2, "expected a name"),
        ("a b", 1, "' ' is not allowed"),
        ("n[0-9999999]", 2, "hosts"),
        ("n[0-9999][0-9999]", 17, "hosts"),
        ("n[\u0967-\u0969]", 2, "expected a number"),
        (f"n[{'9' * 5000}]", 101, "expected a comma"),
    ],
)
def test_no_list_of_hosts(text, position, what):
    with pytest.raises(ValueError, match=rf"{what}.*, at position {position}$") as caught:
        expand_hostlist(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"), [("3,1(x2)", [3, 1, 1]), ("2(x3)", [2, 2, 2]), ("1", [1]), ("0,2", [0, 2])]
)
def test_counts(text, expected):
    assert expand_counts(text) == expected


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("", 0),
        ("x", 0),
        ("2(x)", 1),
        ("2(x0)", 3),
        ("2,", 2),
        ("2 ", 1),
        ("2(x3", 1),
        ("-1", 0),
        ("\u0663", 0),
        ("1,99999999999", 2),
        ("9" * 5000, 0),
    ],
)
def test_no_list_of_counts(text, position):
    with pytest.raises(ValueError, match=f"at position {position}$"):
        expand_counts(text)


# --- generated lists -------------------------------------------------------------------------------------

NAMES = st.builds("".join, st.tuples(st.sampled_from("abcxyz0189"), st.text("abcxyz0189-.", max_size=5)))


@st.composite
def ranges(draw):
    """Draw a part of a bracket, and its numbers."""
    low = draw(st.integers(0, 1200))
    width = draw(st.integers(1, 5))
    written = f"{low:0{width}}"
    if draw(st.booleans()):
        return written, [written]
    high = low + draw(st.integers(0, 5))
    return f"{written}-{high}", [str(number).zfill(len(written)) for number in range(low, high + 1)]


@st.composite
def brackets(draw):
    parts = draw(st.lists(ranges(), min_size=1, max_size=3))
    return f"[{','.join(text for text, _ in parts)}]", [number for _, numbers in parts for number in numbers]


@st.composite
def entries(draw, suffix):
    """Draw one name of a list with its brackets, and its hosts."""
    pieces = [(name, [name]) for name in draw(st.lists(NAMES, min_size=1, max_size=1))]
    for _ in range(draw(st.integers(0, 2))):
        pieces.append(draw(brackets()))
        if draw(st.booleans()):
            name = draw(NAMES)
            pieces.append((name, [name]))
    while not suffix and len(pieces) > 1 and not pieces[-1][0].endswith("]"):
        pieces.pop()
    return "".join(text for text, _ in pieces), list(map("".join, itertools.product(*(means for _, means in pieces))))


def lists(suffix=True):
    """Return a strategy for lists of hosts, each with its hosts."""
    return st.lists(entries(suffix), min_size=1, max_size=4).map(
        lambda found: (",".join(text for text, _ in found), [host for _, hosts in found for host in hosts])
    )


@pytest.mark.full
@settings(max_examples=300, deadline=None)
@given(lists())
def test_generated_lists(case):
    text, hosts = case
    assert expand_hostlist(text) == hosts


@pytest.mark.full
@settings(max_examples=300, deadline=None)
@pytest.mark.parametrize("expand", [expand_hostlist, expand_counts])
@given(text=st.text("an19[],- (x", max_size=12))
def test_garbage_is_a_list_or_a_clear_error(expand, text):
    said = "at position"
    try:
        assert isinstance(expand(text), list)
    except ValueError as error:
        said = str(error)
    assert "at position" in said


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 9)), min_size=1, max_size=6))
def test_generated_counts(pairs):
    text = ",".join(str(count) if times == 1 else f"{count}(x{times})" for count, times in pairs)
    assert expand_counts(text) == [count for count, times in pairs for _ in range(times)]


@pytest.fixture(scope="module")
def scontrol(tmp_path_factory):
    """Return a function that runs ``scontrol show hostnames``, which needs a configuration but no daemon."""
    program = shutil.which("scontrol")
    if program is None:
        pytest.skip("Slurm's scontrol is not installed")
    configuration = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    configuration.write_text("ClusterName=test\nSlurmctldHost=localhost\n")

    def hostnames(text):
        ended = subprocess.run(
            [program, "show", "hostnames", text],
            env={**os.environ, "SLURM_CONF": str(configuration)},
            capture_output=True,
            text=True,
            check=True,
        )
        if ended.stderr or "Invalid hostlist" in ended.stdout:  # the exit status is 0 on errors too
            pytest.fail(f"{text!r}: {ended.stdout}{ended.stderr}")
        return ended.stdout.split()

    return hostnames


@pytest.mark.full
@pytest.mark.timeout(600)
@settings(max_examples=75, deadline=None, derandomize=True)
@given(st.lists(lists(suffix=False), min_size=24, max_size=36))
def test_scontrol_agrees(scontrol, cases):
    """Each call has several lists, because the start of scontrol takes most of the time."""
    text = ",".join(text for text, _ in cases)
    assert expand_hostlist(text) == scontrol(text)


TOO_MANY = {
    "two ranges": "node[0-999999,1000000-1999999]",
    "many ranges": "node[" + ",".join(["0-1048575"] * 50) + "]",
    "many factors": "n" + "[0-1048575]" * 50,
    "three factors": "n[0-1023][0-1023][0-1]",
    "three names": ",".join(["node[0-999999]"] * 3),
    "names": ",".join(["n"] * (2**20 + 1)),
}


@pytest.mark.parametrize("what", core(TOO_MANY, "three factors"))
def test_hosts_are_limited_in_all(what):
    text = TOO_MANY[what]
    began = time.monotonic()
    with pytest.raises(ValueError, match="more than 1048576 hosts up to") as caught:
        expand_hostlist(text)
    assert len(str(caught.value)) < 10_200
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("text", ["1(x1048576),1", "1048576(x1000)", ",".join(["1(x1048576)"] * 100), "16777216,1"])
def test_counts_are_limited_in_all(text):
    with pytest.raises(ValueError, match="more than 1048576"):
        expand_counts(text)


@pytest.mark.parametrize("text", ["[" * 50_000, "[" * 50_000 + "]" * 50_000, '{"cluster":' * 200 + "1" + "}" * 200])
def test_nested_text(monkeypatch, text):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(ValueError, match="TF_CONFIG is nested too deeply"):
        TFConfigClusterResolver().cluster_spec()
