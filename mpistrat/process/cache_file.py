"""Small files of results that later programs of this user read, one for each key."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from mpistrat.process.atomic_file import appearing


def path_of(kind: str, key: Sequence[object]) -> Path:
    """Return the path of the file for a key, which JSON can hold, in XDG_CACHE_HOME or ``~/.cache``."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    return cache / "mpistrat" / f"{kind}-{name}.json"


def write(path: Path, text: str) -> None:
    """Write a file, which is replaced as a whole, and make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with appearing(path, replace=True) as temporary:
        temporary.write_text(text)
