"""Summaries in one process: what is in the files, and when nothing is recorded."""

import sys

import numpy as np
import pytest
from conformance.tensorboard_files import read

import mpistrat
from mpistrat import summary


@pytest.fixture
def writer(tmp_path):
    writer = summary.create_file_writer(tmp_path / "run")
    yield writer
    writer.close()


def numbers(writer, tmp_path):
    writer.close()
    return sorted(read(tmp_path / "run"))


def test_steps_and_conditions(writer, tmp_path):
    assert summary.scalar("without a writer", 1.0, step=1) is False
    with writer.as_default(step=3):
        assert summary.should_record_summaries()
        assert summary.scalar("loss", np.float32(0.5)) is True
        assert summary.scalar("loss", [[0.25]], step=4) is True
        with summary.record_if(False):
            assert summary.scalar("no", 1.0) is False
        with summary.record_if(lambda: summary.experimental.get_step() % 2 == 1):
            assert summary.scalar("odd", 1.0) is True
            summary.experimental.set_step(mpistrat.Variable(np.int64(8)))
            assert summary.scalar("even", 1.0) is False
        assert summary.scalar("variable", mpistrat.Variable(2.0)) is True
    assert not summary.should_record_summaries()
    summary.experimental.set_step(None)
    expected = [(3, "loss", 0.5), (3, "odd", 1.0), (4, "loss", 0.25), (8, "variable", 2.0)]
    assert numbers(writer, tmp_path) == expected


def test_nothing_is_made_before_the_first_summary(writer, tmp_path):
    with writer.as_default():
        summary.flush()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        (lambda: summary.scalar("x", 1.0), "'x' has no step"),
        (lambda: summary.scalar("x", [1.0, 2.0], step=1), r"one element, not the shape \(2,\)"),
        (lambda: summary.histogram("x", [1.0], step=1, buckets=0), "buckets must be at least 1"),
        (lambda: summary.image("x", np.zeros((2, 2)), step=1), r"not \(2, 2\)"),
        (lambda: summary.text("x", 1, step=1), "text is a str, not int"),
    ],
)
def test_wrong_arguments(writer, fails, message):
    with writer.as_default(), pytest.raises(ValueError, match=message):
        fails()


def test_needs_tensorboardX(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ImportError, match="create_file_writer needs tensorboardX: pip install tensorboardX"):
        summary.create_file_writer("runs")


def test_the_reader_of_tensorboard(writer, tmp_path):
    """What TensorBoard itself shows of each kind."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    images = np.zeros((4, 2, 3, 3))
    images[0] = 1.0
    with writer.as_default(step=7):
        assert summary.scalar("loss", 0.5)
        assert summary.histogram("weights", np.arange(100.0), buckets=10)
        assert summary.histogram("none", [])
        assert summary.image("digits", images, max_outputs=2)
        assert summary.text("note", "*begun*")
    writer.close()
    found = accumulators.EventAccumulator(str(tmp_path / "run")).Reload()
    (loss,), (weights,) = found.Scalars("loss"), found.Histograms("weights")
    assert (loss.step, loss.value) == (7, 0.5)
    values = weights.histogram_value
    assert (weights.step, values.num, values.min, values.max, values.sum) == (7, 100, 0, 99, 4950)
    assert found.Tags()["images"] == ["digits", "digits/1"]
    assert (found.Images("digits")[0].width, found.Images("digits")[0].height) == (3, 2)
    (note,) = found.Tensors("note/text_summary")
    assert note.tensor_proto.string_val == [b"*begun*"]
