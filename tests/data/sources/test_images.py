"""Images of a folder: their order, classes, sizes and errors."""

import numpy as np
import pytest

from mpistrat.data import DataFileError, Dataset

image = pytest.importorskip("PIL.Image")


@pytest.fixture
def folder(tmp_path):
    for name, sizes in {"dog": (3, 5), "cat": (4,), "bird/small": (2,)}.items():
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "notes.txt").write_text("no image")
        for number, size in enumerate(sizes):
            image.new("L", (size, 2), 10 * size).save(tmp_path / name / f"{number}.png")
    return tmp_path


def test_classes_are_numbered_by_name(folder):
    rows = Dataset.from_images(folder, mode="L")
    assert [(x.shape, int(x[0, 0]), int(y)) for x, y in rows] == [
        ((2, 2), 20, 0),
        ((2, 4), 40, 1),
        ((2, 3), 30, 2),
        ((2, 5), 50, 2),
    ]
    assert rows.element_spec[0].dtype == np.uint8
    images, labels = next(iter(Dataset.from_images(folder, size=(6, 7)).batch(4)))
    assert images.shape == (4, 6, 7, 3)
    assert labels.tolist() == [0, 1, 2, 2]
    assert next(iter(rows.padded_batch(4)))[0].shape == (4, 2, 5)


def test_classes_are_known_without_the_images(folder, monkeypatch):
    rows = Dataset.from_images(folder, mode="L")
    assert len(rows.element_spec) == 2  # reads one
    monkeypatch.setattr(type(rows.definition.source), "read_list", None)
    assert len(rows.filter(lambda label: label == 2, by=1)) == 2
    assert [len(part) for part in rows.split([0.5, 0.5], seed=1, by=1)] == [2, 2]


def test_errors_name_the_file(folder):
    rows = Dataset.from_images(folder, mode="L")
    with pytest.raises(ValueError, match=r"size=.*padded_batch"):
        next(iter(rows.batch(4)))
    deep = np.array([[0, 300]], np.uint16)
    image.fromarray(deep).save(folder / "cat" / "0.png")
    with pytest.raises(DataFileError, match=r"cat/0\.png.*mode='I'"):
        rows[1]
    assert Dataset.from_images(folder, mode="I")[1][0].tolist() == deep.tolist()
    (folder / "cat" / "0.png").write_bytes(b"")
    with pytest.raises(DataFileError, match=r"cat/0\.png"):
        rows[1]
    with pytest.raises(FileNotFoundError, match="each class needs a folder"):
        Dataset.from_images(folder / "cat")
    with pytest.raises(FileNotFoundError):
        Dataset.from_images(folder / "no")
