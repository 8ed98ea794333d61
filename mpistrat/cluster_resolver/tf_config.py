"""A resolver for the cluster in the environment variable TF_CONFIG."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Mapping
from typing import Any

from mpistrat.cluster_resolver.cluster_spec import ClusterSpec
from mpistrat.cluster_resolver.resolver import ClusterResolver, with_protocol


class TFConfigClusterResolver(ClusterResolver):
    """The cluster in ``TF_CONFIG``. Each call reads the variable again.

    The variable holds JSON: ``{"cluster": {"worker": ["a:8888", "b:8888"]}, "task": {"type": "worker", "index":
    1}}``, and may have ``rpc_layer`` and ``session_master``.

    Parameters
    ----------
    task_type, task_id, rpc_layer : optional
        Replace the values in the variable.
    environment : str, optional
        Name of the environment.
    environ : mapping, optional
        Environment to read; ``os.environ`` by default.

    Examples
    --------
    >>> environ = {"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'}
    >>> resolver = TFConfigClusterResolver(rpc_layer="grpc", environ=environ)
    >>> resolver.task_id, resolver.master()
    (1, 'grpc://b:1')
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ):
        self._environ = os.environ if environ is None else environ
        self._environment = environment
        self.rpc_layer = rpc_layer
        self.task_type = None if task_type is None else str(task_type)
        self.task_id = None if task_id is None else _index("task_id", task_id)

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster in the variable, or an empty one if it has no key ``cluster``.

        Raises
        ------
        ValueError
            If the variable is not a JSON object.
        """
        return ClusterSpec(config(self._environ).get("cluster", {}))

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of a task, by default this one; an empty string if the cluster has one task.

        If the variable has ``session_master``, return that.

        Raises
        ------
        ValueError
            If the cluster has no such task, or the task of this process is not known.
        """
        session_master = config(self._environ).get("session_master")
        if session_master is not None:
            return str(session_master)
        cluster = self.cluster_spec()
        if sum(map(cluster.num_tasks, cluster.jobs)) <= 1:
            return ""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            raise ValueError(
                f'TF_CONFIG has tasks of {cluster.jobs}, but no "task" with the type and index of this process; '
                "add it, or give task_type and task_id"
            )
        return with_protocol(
            cluster.task_address(task_type, task_id), self.rpc_layer if rpc_layer is None else rpc_layer
        )

    @property
    def environment(self) -> str | None:
        """Name of the environment."""
        return self._environment

    def _told(self, name: str) -> Any:
        given = super()._told(name)
        if given is not None:
            return given
        if name == "rpc_layer":
            return config(self._environ).get("rpc_layer")
        own = _task(self._environ).get("type" if name == "task_type" else "index")
        if own is None or name == "task_type":
            return own and str(own)
        return _index('"index" of "task" in TF_CONFIG', own)


def _index(name: str, value: Any) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = -1
    if number < 0 or (isinstance(value, float) and number != value):
        raise ValueError(f"{name} must be a number from 0 on, not {value!r}")
    return number


def config(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of ``TF_CONFIG``, or an empty dict if it is not set.

    Raise ValueError if the variable is not a JSON object.
    """
    text = environ.get("TF_CONFIG", "")
    if not text.strip():
        return {}
    # Python 3.14 reads a text that others refuse (RecursionError). An error about what it holds would show it whole.
    if max(itertools.accumulate(1 if each in "[{" else -1 for each in re.findall(r"[][{}]", text)), default=0) > 100:
        raise ValueError(f"TF_CONFIG is nested too deeply ({len(text)} characters)")
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise json.JSONDecodeError(f"TF_CONFIG={text!r} is not JSON: {error.msg}", error.doc, error.pos) from None
    if not isinstance(found, dict):
        raise ValueError(f"TF_CONFIG must be a JSON object with the keys 'cluster' and 'task', not {text!r}")
    return found


def _task(environ: Mapping[str, str]) -> dict[str, Any]:
    task = config(environ).get("task") or {}
    if not isinstance(task, dict):
        raise TypeError(f'"task" in TF_CONFIG must be an object with the keys "type" and "index", not {task!r}')
    return task
