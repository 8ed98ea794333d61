"""The programs of `benchmarks/` measure the library and its rivals, of results that are right."""

import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
NETWORK = ("--repetitions", "1", "--layers", "3", "--width", "40", "--rows", "7", "--blocks", "3")
LISTS = [f"all_reduce of 200 x {length} floats" for length in (16, 256, 4096)]
IN_LISTS = {"mpistrat", "Allreduce of as many bytes", "by hand", "by hand, same buffer"}
PLAIN = {"mpistrat", "one call", "4 MiB pieces", "not blocking"}

SMALL = [
    *("Adam, 6 variables", "Adam, 200 variables", "SGD, 6 variables", "SGD, 200 variables"),
    *("reduce of one float", "reduce of 64 KiB", "all_reduce of 60 arrays", "all_reduce of a number"),
    *("run", "update_state", "result"),
]
LOOPS = ["loop, data in memory, a step", "loop, data in HDF5 files, a step"]

# Of each comparison under two ranks: its arguments, and the ways of each case.
COMPARISONS = {
    "overhead": (
        ("--repetitions", "1", "--inner", "2"),
        {
            "run": {"mpistrat", "plain call"},
            "reduce": {"mpistrat", "Allreduce"},
            "assign_add": {"mpistrat", "Allreduce"},
            **dict.fromkeys(LISTS, IN_LISTS),
        },
    ),
    "allreduce": (
        ("--repetitions", "1", "--seconds", "0.1", "--sizes", "100B"),
        {
            "plain array": PLAIN,
            "buffer": PLAIN | {"4 MiB pieces, in place"},
            "bound": {"a copy in memory"},
        },
    ),
    "gradients": (
        ("--repetitions", "1", "--network", "ResNet-50", "--part", "20"),
        {
            "ResNet-50, separate arrays": {
                "mpistrat", "one buffer, one call", "small ones packed, others in 4 MiB pieces",
            },
            "ResNet-50, in place": {"mpistrat", "one buffer, 4 MiB pieces"},
        },
    ),
    "overlap": (
        NETWORK,
        {
            "3 layers": {
                "mpistrat", "mpistrat, one list at the end", "by hand", "computing alone", "reducing alone",
            }
        },
    ),
    "halos": (("--repetitions", "1", "--columns", "4"), {"4 columns": {"mpistrat", "by hand"}}),
    "step": (
        ("--repetitions", "1", "--momentum", "0.9"),
        {
            "sgd, momentum 0.9": {
                "mpistrat", "mpistrat, plain arrays", "by hand", "by hand, 2 MiB pieces",
            }
        },
    ),
    "shared_out": (
        ("--repetitions", "1", "--megabytes", "1", "--arrays", "3", "--implementation", "ordered", "--clip"),
        {"adam": {"mpistrat", "all on each rank"}, "memory": {"mpistrat", "all on each rank"}},
    ),
    "small": (
        ("--repetitions", "1", "--epochs", "3", "--inner", "2"),
        {
            case: {"mpistrat", "by hand"}
            for case in [*LOOPS, *(f"{case}, {kind}" for case in SMALL for kind in ("cold", "hot"))]
        },
    ),
}  # fmt: skip


def program_of(subject):
    """The file of a subject, in whichever folder of the benchmarks it is."""
    (path,) = FOLDER.glob(f"*/{subject}.py")
    return path


def ways_of(path):
    """The ways of each case in a file of rows."""
    found = {}
    for row in json.loads(path.read_text()):
        assert row["seconds"] > 0 or row["case"] == "memory"
        found.setdefault(row["case"], set()).add(row["way"])
    return found


MARKED = {
    "overhead": [pytest.mark.mpich],
    "gradients": [pytest.mark.core, pytest.mark.mpich],
    "small": [pytest.mark.mpich],
}


@pytest.mark.full
@pytest.mark.parametrize("subject", [pytest.param(each, marks=MARKED.get(each, [])) for each in COMPARISONS])
def test_every_rival_is_measured(run_ranks, tmp_path, subject):
    arguments, expected = COMPARISONS[subject]
    rows = tmp_path / "rows.json"
    ended = run_ranks(2, program_of(subject), *arguments, "--json", rows, limit=100).check()
    ended.shows(f"{subject}, 2 ranks\n", "mpistrat takes")
    if subject == "overlap":
        ended.shows("mpistrat hides ", "by hand hides ")
    if subject == "gradients":  # every 20th of the 161 tensors
        assert {row["bytes"] for row in json.loads(rows.read_text())} == {1_371_040}
    assert ways_of(rows) == expected


@pytest.mark.full
def test_groups_learn_as_much(run_ranks):
    """Of 360 test images, those that exchange seldom or send less recognize one less at most."""
    pytest.importorskip("sklearn")
    ended = run_ranks(4, program_of("groups_digits"), "--repetitions", "1", limit=200).check()
    found = {case: float(share) for case, share in re.findall(r"(?m)^(.*): (\S+) % of the test images", ended.output)}
    baseline = found.pop("all-reduce in each step")
    assert baseline > 98
    assert found.pop("weights every 8 steps") > baseline - 1
    assert {*found} == {"weights every 8 steps, Nesterov", "PowerSGD, rank 4"}
    assert min(found.values()) > baseline - 0.5, str(ended)


@pytest.mark.full
def test_ranks_are_launched_where_none_are(run_alone, tmp_path):
    rows = tmp_path / "rows.json"
    arguments = ["-n", "2", "--repetitions", "1", "--seconds", "0.1", "--sizes", "64B", "--json", rows]
    run_alone(program_of("allreduce"), *arguments, limit=100, cwd=tmp_path).check()
    assert ways_of(rows)["plain array"] == PLAIN


@pytest.mark.full
def test_chart(run_alone, tmp_path):
    pytest.importorskip("matplotlib")
    ways = [("plain array", "mpistrat"), ("buffer", "mpistrat"), ("plain array", "one call"), ("bound", "the wire")]
    rows = [
        {"subject": "allreduce", "case": case, "way": way, "bytes": nbytes, "seconds": 1e-8 * nbytes, "n": 4}
        for case, way in ways
        for nbytes in (1024, 1 << 20)
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    chart = tmp_path / "chart.png"
    arguments = [program_of("allreduce_chart"), tmp_path / "rows.json", chart, "--ranks-per-node", "2,2"]
    run_alone(*arguments, limit=100).check()
    assert chart.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


WRONG = """
import runpy, sys
sys.path.insert(0, {folder!r})
import {module}
{patch}
sys.argv = [{path!r}, *{arguments!r}]
runpy.run_path({path!r}, run_name="__main__")
"""


@pytest.mark.parametrize(
    ("subject", "module", "patch", "arguments", "said"),
    [
        (
            "allreduce",
            "allreduce_by_hand",
            "allreduce_by_hand.in_pieces = lambda comm, send, receive: lambda k: None",
            ["--sizes", "64B"],
            "rank 1: plain array, 4 MiB pieces: element 1 is 0, not 3",
        ),
        (
            "gradients",
            "allreduce_by_hand",
            "allreduce_by_hand.in_place = lambda comm, flat: lambda k: None",
            ["--part", "50", "--network", "ResNet-50"],
            "rank 1: in place, one buffer, 4 MiB pieces: the total of tensor 0 is not 3",
        ),
        (
            "overlap",
            "overlap_by_hand",
            "each = overlap_by_hand.all_reduce_each\n"
            "overlap_by_hand.all_reduce_each = lambda comm, compute, totals: each(comm, compute, totals[:-1])",
            NETWORK,
            "rank 1: by hand: the total of gradient 2 is off by ",
        ),
        (
            "step",
            "step_by_hand",
            "right = step_by_hand.StepByHand.step\n"
            "step_by_hand.StepByHand.step = lambda self, images, labels: right(self, images, labels, rate=0.11)",
            ["--repetitions", "1"],
            "rank 0: the programs differ: parameter 0 of by hand by up to",
        ),
        (
            "small",
            "small_by_hand",
            "right = small_by_hand.Sgd.apply\n"
            "small_by_hand.Sgd.apply = lambda self, gradients: right(self, gradients, rate=0.004)",
            ["--repetitions", "1", "--epochs", "1"],
            "rank 1: SGD, 6 variables: the result of by hand is not that of mpistrat",
        ),
    ],
)
def test_wrong_results_are_found(run_ranks, tmp_path, subject, module, patch, arguments, said):
    program = tmp_path / "wrong.py"
    path = program_of(subject)
    program.write_text(
        WRONG.format(folder=str(path.parent), module=module, patch=patch, path=str(path), arguments=list(arguments))
    )
    ended = run_ranks(2, program, limit=100)
    assert ended.status not in (0, None), str(ended)
    ended.shows(said)
    assert "mpistrat takes" not in ended.output


def test_rivals_use_nothing_of_the_library():
    files = sorted(FOLDER.rglob("*_by_hand.py"))
    assert len(files) >= 8
    for path in files:
        assert not re.search(r"(import|from) mpistrat", path.read_text()), path.name
