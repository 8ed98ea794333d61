"""What ``mpistrat info`` says of the options, and the site file that ``mpistrat check --site`` writes."""

import json
import os

import pytest

import mpistrat
from mpistrat.collectives.gpu import pointers


def test_values_and_what_set_them(run_ranks):
    environ = {"MPISTRAT_ALL_REDUCE": "ordered", "MPISTRAT_DEVISE": "cuda"}
    found = json.loads(run_ranks(2, "-m", "mpistrat", "info", "--json", **environ).check().output)["options"]
    assert found["all_reduce"] == "ordered (MPISTRAT_ALL_REDUCE)"
    assert found["debug"] == "none (default)"
    assert "MPISTRAT_DEVISE" in found["not options"].split()


def test_a_value_that_cannot_be_read_is_shown(run_ranks):
    found = json.loads(run_ranks(2, "-m", "mpistrat", "info", "--json", MPISTRAT_TUNED="2").check().output)
    text = "not usable: MPISTRAT_TUNED=2 cannot be read: use 1 or 0"
    assert found["options"]["tuned"] == text
    assert found["ranks"]["ranks"] == text.replace("usable: ", "usable: rank 0: ")


VERDICT = {"for": ["Open MPI v5", 12040, "a GPU", "one node", 1 << 26], "operations": {"Bcast": "fails: \\x é"}}


@pytest.mark.full
def test_site_file_that_is_written_says_the_same(run_alone, run_ranks, tmp_path, monkeypatch):
    folder = tmp_path / "mpistrat"
    folder.mkdir()
    (folder / "gpu-direct-1.json").write_text(json.dumps(VERDICT))
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh")
    srun.chmod(0o755)
    given = {"MPISTRAT_HANG_SECONDS": "300", "MPISTRAT_DEBUG": "data,gradients", "SCRATCH": "/x", "MPISTRAT_TRACE": "t"}
    environ = {**given, "XDG_CACHE_HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    site = tmp_path / "site.toml"
    site.write_text(run_alone("-m", "mpistrat", "check", "--site", **environ).check().output)
    ended = run_ranks(2, "-m", "mpistrat", "info", "--json", MPISTRAT_SITE=str(site), MPISTRAT_DEVICE="auto").check()
    found = json.loads(ended.output)["options"]
    expected = {"hang_seconds": "300.0", "debug": "data gradients", "launcher": "srun", "scratch": "$SCRATCH"}
    for name, value in expected.items():
        assert found[name] == f"{value} ({site})"
    assert found["srun_mpi"] in (f"pmix ({site})", f"pmi2 ({site})")
    assert (found["device"], found["trace"]) == ("auto (MPISTRAT_DEVICE)", "none (default)")
    # Written again from itself, it is the same: its verdicts, too.
    again = run_alone("-m", "mpistrat", "check", "--site", MPISTRAT_SITE=str(site), PATH=environ["PATH"]).check()
    assert again.output == site.read_text()
    mpistrat.rc.site = site
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    try:
        assert pointers.read_verdicts(VERDICT["for"]) == VERDICT["operations"]
        assert pointers.read_verdicts(["another"]) == {}
    finally:
        del mpistrat.rc.site


def test_wrong_site_file_raises_on_every_rank(run_ranks, tmp_path):
    site = tmp_path / "site.toml"
    site.write_text("hang_seconds = 'soon'")
    (tmp_path / "program.py").write_text("""
import mpistrat
try:
    mpistrat.MultiWorkerMirroredStrategy()
except ValueError as error:
    print(error)
""")
    lines = run_ranks(2, tmp_path / "program.py", MPISTRAT_SITE=str(site)).check().output.splitlines()
    assert lines == [f"rank 0: {site}: hang_seconds='soon' cannot be read: use seconds, or 0 for never"] * 2


def test_commands_name_a_wrong_site_file(run_alone, tmp_path):
    site = tmp_path / "site.toml"
    site.write_text("launcher =")
    for words in (("slurm", "write", "-m", "prog"), ("check", "--site")):
        ended = run_alone("-m", "mpistrat", *words, MPISTRAT_SITE=str(site))
        assert ended.status == 1
        assert f"MPISTRAT_SITE={str(site)[:80]} cannot be read: use a file of TOML (Invalid value" in ended.output
        assert "Traceback" not in ended.output
