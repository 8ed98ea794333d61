"""Files that appear complete or not at all."""

import os
import stat

import pytest

from mpistrat.runtime.atomic_file import appearing


@pytest.mark.parametrize("replace", [True, False])
def test_what_is_not_a_file_is_not_replaced(tmp_path, replace):
    """As /dev/null, of which root may remove the name."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(FileExistsError, match="it is a device, a pipe or a socket"), appearing(path, replace):
        pytest.fail("the block ran")
    assert stat.S_ISFIFO(path.stat().st_mode)
    assert os.listdir(tmp_path) == ["pipe"]


def test_a_file_is_replaced(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with appearing(path, replace=True) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
