"""The comparison with Gloo runs, and its results are right."""

import importlib.util
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "torch"
WAYS = {"mpistrat", "mpistrat, in place", "gloo"}
CASES = {
    "all_reduce, 4 KiB": WAYS,
    **{f"DDP, {network}": WAYS | {"alone"} for network in ("resnet_18", "resnet_50", "transformer")},
    "FSDP2, transformer": {"mpistrat", "gloo", "alone"},
}

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


def test_every_way_is_measured(run_ranks):
    arguments = ("--repetitions", "1", "--largest", "4096", "--width", "2")
    output = run_ranks(2, FOLDER / "against_gloo.py", *arguments).check().output
    for case, ways in CASES.items():
        found = re.findall(rf"{case}, ([^:]+): (\d+\.\d+) ms", output)
        assert {way for way, _ in found} == ways, output
        assert all(float(time) > 0 for _, time in found)


@pytest.mark.full  # it loads torch
def test_networks_have_the_published_sizes():
    import torch

    spec = importlib.util.spec_from_file_location("models", FOLDER / "models.py")
    models = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(models)
    with torch.device("meta"):
        networks = models.resnet_18(), models.resnet_50()
    assert [sum(each.numel() for each in network.parameters()) for network in networks] == [11_689_512, 25_557_032]
    assert models.resnet_18(2)(models.images(0)[0]).shape == (models.ROWS, models.CLASSES)
