"""The source of a program whose file system may not answer."""

import os

from mpistrat.monitor import source


def test_a_file_system_that_does_not_answer_is_given_up(tmp_path, monkeypatch):
    """A pipe without a writer stands for it: to open one waits."""
    monkeypatch.setattr(source, "_PATIENCE", 0.05)
    pipe = tmp_path / "train.py"
    os.mkfifo(pipe)
    try:
        assert source.line(str(pipe), 1) == ""
        (tmp_path / "other.py").write_text("answers = True\n")
        assert source.lines(str(tmp_path / "other.py")) == []  # it is not asked again
        assert source.line(__file__, 1).startswith('"""The source')
        assert source.line(__file__, 9999) == ""
    finally:
        os.close(os.open(pipe, os.O_WRONLY))  # the thread that waits ends
