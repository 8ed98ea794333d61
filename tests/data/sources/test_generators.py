"""Tests of from_tensors and from_generator."""

import numpy as np
import pytest

from mpistrat import nest
from mpistrat.data import ArraySpec, Dataset


def lists(dataset):
    return [nest.map_structure(lambda x: np.asarray(x).tolist(), each) for each in dataset]


def test_one_element():
    assert lists(Dataset.from_tensors(([1, 2], 3))) == [([1, 2], 3)]
    whole = Dataset.from_tensors({"a": [[1, 2], [3, 4]]})
    assert (len(whole), whole.element_spec) == (1, {"a": ArraySpec((2, 2), "i8")})
    assert lists(whole.repeat(2).batch(2)) == [{"a": [[[1, 2], [3, 4]]] * 2}]


def test_signatures_give_dtypes():
    def pairs(n):
        for i in range(n):
            yield i, [float(i)] * i

    signature = (ArraySpec((), "i4"), ArraySpec((None,), "f4"))
    made = Dataset.from_generator(pairs, args=(3,), output_signature=signature)
    assert made.element_spec == (ArraySpec((), "i4"), ArraySpec((None,), "f4"))
    assert lists(made) == [(0, []), (1, [1]), (2, [2, 2])]
    number, padded = next(iter(made.padded_batch(3)))
    assert (number.dtype, padded.dtype, padded.shape) == ("i4", "f4", (3, 2))
    former = Dataset.from_generator(pairs, ("i4", "f4"), ((), (None,)), args=(3,))
    assert [lists(former) for epoch in range(2)] == [lists(made)] * 2
    assert lists(Dataset.from_generator(lambda: iter([[1, 2]]), np.float32)) == [[1.0, 2.0]]
    assert lists(Dataset.from_generator(lambda: iter([{"a": 1}]))) == [{"a": 1}]


def test_elements_that_do_not_fit():
    for element, signature, kind in (
        (1.5, ArraySpec((), "i4"), TypeError),
        (np.float64(1), ArraySpec((), "f4"), TypeError),
        ([1], ArraySpec((), "i4"), ValueError),
        ([1, 2], ArraySpec((3,), "i4"), ValueError),
        (1, (ArraySpec((), "i4"),), TypeError),
        ({"a": 1}, {"b": ArraySpec((), "i4")}, TypeError),
    ):
        yielded = [fitting(signature), element]
        made = Dataset.from_generator(iter, args=(yielded,), output_signature=signature)
        with pytest.raises(kind, match="element 1"):
            lists(made)


def fitting(signature):
    return nest.map_structure(lambda each: np.zeros(each.shape, each.dtype), signature)


def test_arguments_that_are_wrong():
    with pytest.raises(TypeError, match="function"):
        Dataset.from_generator(iter([1]))
    with pytest.raises(TypeError, match="ArraySpec"):
        Dataset.from_generator(list, output_signature="f4")
    with pytest.raises(TypeError, match="not both"):
        Dataset.from_generator(list, "f4", output_signature=ArraySpec((), "f4"))


def test_signatures_are_the_structure():
    empty = Dataset.from_generator(lambda: iter(()), output_signature={"x": ArraySpec((None, 2), "f4")})
    assert empty.element_spec == {"x": ArraySpec((None, 2), "f4")}
    assert empty.padded_batch(3).element_spec == {"x": ArraySpec((None, None, None), "f4")}
    assert lists(empty) == []
    for wrong in ({"output_types": [int]}, {"output_signature": [ArraySpec((), int)]}):
        with pytest.raises(TypeError, match="tuple or dict"):
            Dataset.from_generator(lambda: iter(()), **wrong)


def test_a_generator_may_fill_one_array_again_and_again():
    def filled():
        row = np.zeros(2)
        for number in range(6):
            row[:] = number
            yield {"x": row}

    for dataset in (Dataset.from_generator(filled), Dataset.from_iterable(filled)):
        rows = [number for batch in dataset.shuffle(3, seed=1).batch(4) for number in batch["x"][:, 0]]
        assert sorted(rows) == [0, 1, 2, 3, 4, 5]
        assert [batch["x"][:, 1].tolist() for batch in dataset.cache().batch(4)] == [[0, 1, 2, 3], [4, 5]]
