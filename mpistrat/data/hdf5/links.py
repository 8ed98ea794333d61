"""Links in HDF5 files that HDF5 would follow to other files."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator

import h5py

from mpistrat.data import limits
from mpistrat.data.errors import DataFileError
from mpistrat.data.hdf5.open_file import opened

_MOST_LINKS = 16  # that HDF5 follows


def check(file: h5py.File, name: str, where: str, left: int = _MOST_LINKS) -> None:
    """Check the files to which the links of a name lead, as `limits.check_path`, before HDF5 opens them."""
    group, parts = file, _parts(name)
    while parts and left:
        part = parts.popleft()
        link = group.get(part, getlink=True)
        if isinstance(link, h5py.SoftLink):
            left -= 1
            group = file if link.path.startswith("/") else group
            parts.extendleft(reversed(_parts(link.path)))
        elif isinstance(link, h5py.ExternalLink):
            for path in _candidates(group.file.filename, link.filename):
                limits.check_path(path, where)
                with contextlib.suppress(DataFileError), opened(path) as other:
                    check(other, "/".join([link.path, *parts]), where, left - 1)
            return
        else:
            group = group.get(part) if parts and link is not None else None
            if not isinstance(group, h5py.Group):
                return


def is_plain(file: h5py.File, name: str) -> bool:
    """Return whether a name leads to nothing but objects of this file, without soft and external links."""
    group, parts = file, _parts(name)
    while parts and isinstance(group, h5py.Group):
        part = parts.popleft()
        if isinstance(group.get(part, getlink=True), (h5py.SoftLink, h5py.ExternalLink)):
            return False
        group = group.get(part) if parts else None
    return True


def _parts(name: str) -> deque[str]:
    return deque(part for part in name.split("/") if part not in ("", "."))


def _candidates(home: str, name: str) -> Iterator[str]:
    """Yield the paths at which HDF5 looks for the file of an external link, as `H5Lcreate_external` documents them."""
    if os.path.isabs(name):
        yield name
        name = os.path.basename(name)
    prefixes = os.environ.get("HDF5_EXT_PREFIX", "").split(":")
    folder = os.path.dirname(os.path.abspath(home))
    for prefix in (*filter(None, prefixes), folder, "", os.path.dirname(os.path.realpath(home))):
        yield os.path.join(prefix.replace("${ORIGIN}", folder), name)
