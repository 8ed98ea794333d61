"""What ``mpistrat info`` says of the options."""

import json


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
