"""Errors that travel to another rank."""

from mpistrat.messages.pickling import failure_of


def test_the_traceback_shows_the_error_that_was_being_handled():
    try:
        try:
            raise ValueError("the first")
        except ValueError:
            raise KeyError("the second")  # noqa: B904 - without a cause
    except KeyError as raised:
        back = failure_of(raised, "rank 3").error()
    assert isinstance(back, KeyError)
    assert "ValueError: the first" in str(back.__cause__)
    assert "rank 3" in str(back.__cause__)
