"""What the system says of a GPU's link; the GPU's own words are in tests/gpu."""

import pytest
from fakes.install import stand_in

from mpistrat.arrays import device as device_bounds
from mpistrat.arrays.device import Bounds


@pytest.fixture
def link(tmp_path, monkeypatch):
    """``link(speed, width)``: a system with one device."""
    monkeypatch.setattr(device_bounds, "_SYSTEM", tmp_path)

    def write(speed, width):
        folder = tmp_path / "0000:3b:00.0"
        folder.mkdir(exist_ok=True)
        (folder / "max_link_speed").write_text(speed)
        (folder / "current_link_width").write_text(width)
        return device_bounds._link("0000:3b:00.0")

    return write


@pytest.mark.parametrize(
    ("speed", "width", "gigabytes", "name"),
    [
        ("16.0 GT/s PCIe\n", "16\n", 31.5, "PCIe 16 GT/s x16"),
        ("32.0 GT/s PCIe\n", "16\n", 63.0, "PCIe 32 GT/s x16"),
        ("2.5 GT/s\n", "4\n", 1.0, "PCIe 2.5 GT/s x4"),
    ],
)
def test_link(link, speed, width, gigabytes, name):
    bandwidth, found = link(speed, width)
    assert bandwidth / 1e9 == pytest.approx(gigabytes, rel=1e-2)
    assert found == name


@pytest.mark.parametrize(("speed", "width"), [("Unknown\n", "16\n"), ("16.0 GT/s PCIe\n", "0\n"), ("", "")])
def test_a_link_that_nothing_says(link, speed, width):
    assert link(speed, width) == (None, "")
    assert device_bounds._link("0000:00:00.0") == (None, "")


@pytest.mark.parametrize(("text", "cores"), [("0-2,8\n", {0, 1, 2, 8}), ("5\n", {5}), ("\n", set()), (None, set())])
def test_cores_next_to_a_gpu(tmp_path, monkeypatch, text, cores):
    stand_in(monkeypatch)
    monkeypatch.setattr(device_bounds, "_SYSTEM", tmp_path)
    if text is not None:
        (tmp_path / "0000:01:00.0").mkdir()
        (tmp_path / "0000:01:00.0" / "local_cpulist").write_text(text)
    assert device_bounds.near_cores(1) == cores


def test_in_words():
    assert str(Bounds(4.9e12, 63e9, "PCIe 32 GT/s x16")) == ("memory 4900 GB/s, PCIe 32 GT/s x16 63 GB/s each way")
    assert str(Bounds(None, None, "")) == "bounds unknown"
