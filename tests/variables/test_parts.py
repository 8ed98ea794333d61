"""Which slices are about to be written, as the byte code tells."""

import sys

import pytest

from mpistrat.variables.parts import _known, assign_follows


class Sliced:
    def __getitem__(self, key):
        return Assigned() if assign_follows(sys._getframe(1)) else key


class Assigned:
    def assign(self, value):
        return value


SLICED = Sliced()


def test_only_what_is_followed_by_assign():
    def both(sliced, other):
        other.assign(1)
        read = sliced[1]
        return read, sliced[2].assign(3), sliced[4], [sliced[each].assign(each) for each in (5, 6)], other

    for _ in range(1000):  # until Python has specialised the instructions
        assert both(SLICED, Assigned())[:4] == (1, 3, 4, [5, 6])
    # Not in an assert: pytest would put the slice into a name first.
    several = SLICED[1, ...].assign(4)
    nested = SLICED[SLICED[3]].assign(8)
    assert (several, nested) == (4, 8)
    assert eval("v[1].assign(7)", {"v": SLICED}) == 7
    assert (lambda sliced: sliced[1].assign(9))(SLICED) == 9


def test_the_attribute_alone_and_names_beyond_255():
    take = SLICED[0].assign
    assert take(1) == 1
    names = "".join(f"n{i} = v.n{i} if False else {i}\n" for i in range(300))
    scope = {"v": SLICED}
    exec(f"{names}got = v[1].assign(5)\nread = v[1]", scope)
    assert (scope["got"], scope["read"]) == (5, 1)


def test_another_attribute_is_that_of_an_array():
    with pytest.raises(AttributeError):
        SLICED[1].assigned  # noqa: B018
    part = SLICED[1]
    with pytest.raises(AttributeError, match="'int' object has no attribute 'assign'"):
        part.assign(1)


def test_code_that_is_made_without_end_is_forgotten():
    for value in range(5000):
        assert eval("v[1].assign(value)", {"v": SLICED, "value": value}) == value
    assert len(_known) <= 4096
