"""A text that only the ranks of one launch know, found without a message."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

from mpistrat.launch import proc
from mpistrat.launch.launchers import FLUX, HYDRA, JSRUN, PALS, PMIX, SRUN

_HYDRA_PORT = "--control-port"
_KEYS = tuple(launcher.launch for launcher in (PMIX, JSRUN, PALS, FLUX, SRUN))  # the innermost first


def key_of(environ: Mapping[str, str], *, one_node: bool, parent: int | None = None) -> str | None:
    """Return a text that only the ranks of this launch share, or None if it is not known.

    On ``one_node`` the process that started them tells launches apart. It is ``parent``, by default this one's.
    """
    parent = os.getppid() if parent is None else parent
    for names in _KEYS:
        if all(environ.get(name) for name in names):
            return " ".join(f"{name}={environ[name]}" for name in (*names, "SLURM_RESTART_COUNT") if name in environ)
    if all(environ.get(name) for name in HYDRA.size):
        process = parent
        while process > 1:  # a script may be between the launcher and this process
            words = proc.command(process)
            if _HYDRA_PORT in words[:-1]:  # where mpiexec listens, the same on all nodes
                return f"mpiexec {words[words.index(_HYDRA_PORT) + 1]}"
            process = proc.parent(process)
    if one_node:
        return f"{os.uname().nodename} {parent} {proc.started(parent)}"
    return None


def hashed(key: str) -> str:
    """Return a short text that stands for a key, as a part of the names of files."""
    return hashlib.sha256(key.encode()).hexdigest()[:16]
