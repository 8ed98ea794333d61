"""The error of a call that must fail."""


def raised(function, *args, **kwargs):
    """Return the exception that ``function(*args, **kwargs)`` raises."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return error
    raise AssertionError("no error was raised")
