"""The jobs of a cluster and the addresses of their tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ClusterSpec:
    """The tasks of a cluster: for each job, the addresses of its tasks.

    Parameters
    ----------
    cluster : mapping or ClusterSpec
        The addresses of every job, as a list. If task numbers are missing, a dict from the number of a task to its
        address. Another specification and the result of `as_cluster_def` are accepted too.

    Raises
    ------
    TypeError
        If ``cluster`` or the tasks of a job have another type, or an address is not a string.
    ValueError
        If the number of a task is negative or not a number.

    Examples
    --------
    >>> spec = ClusterSpec({"worker": ["a:8888", "b:8888"], "ps": {3: "c:8888"}})
    >>> spec.num_tasks("worker"), spec.task_indices("ps"), spec.task_address("ps", 3)
    (2, [3], 'c:8888')
    >>> spec.as_dict()
    {'worker': ['a:8888', 'b:8888'], 'ps': {3: 'c:8888'}}
    """

    def __init__(self, cluster: Mapping[str, Any] | ClusterSpec):
        self._jobs: dict[str, dict[int, str]] = {}
        if isinstance(cluster, ClusterSpec):
            self._jobs = {job: dict(tasks) for job, tasks in cluster._jobs.items()}
            return
        if not isinstance(cluster, Mapping):
            raise TypeError(f"a cluster is a dict from names of jobs to addresses, or a ClusterSpec, not {cluster!r}")
        listed = _jobs_of_cluster_def(cluster)
        for job, tasks in cluster.items() if listed is None else listed:
            if not isinstance(job, str):
                raise TypeError(f"the name of a job is a string, not {job!r}")
            self._jobs[job] = _tasks(job, tasks)

    @property
    def jobs(self) -> list[str]:
        """Names of the jobs."""
        return list(self._jobs)

    def num_tasks(self, job_name: str) -> int:
        """Return the number of tasks of a job.

        Raises
        ------
        ValueError
            If the cluster has no job of this name.
        """
        return len(self._tasks_of(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Return the numbers of the tasks of a job, in order.

        Raises
        ------
        ValueError
            If the cluster has no job of this name.
        """
        return sorted(self._tasks_of(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Return the address of a task.

        Raises
        ------
        ValueError
            If the cluster has no job of this name, or the job has no task of this number.
        """
        tasks = self._tasks_of(job_name)
        if task_index not in tasks:
            raise ValueError(f"job {job_name!r} has no task {task_index!r}: it has {sorted(tasks)}")
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Return the addresses of a job, indexed by task number; None where a number is missing.

        Raises
        ------
        ValueError
            If the cluster has no job of this name.

        Examples
        --------
        >>> ClusterSpec({"ps": {1: "b:8888"}}).job_tasks("ps")
        [None, 'b:8888']
        """
        tasks = self._tasks_of(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Return the jobs as a dict: a list for a job that has all numbers from 0, else a dict."""
        return {
            job: [tasks[index] for index in range(len(tasks))] if _dense(tasks) else dict(tasks)
            for job, tasks in self._jobs.items()
        }

    def as_cluster_def(self) -> dict[str, list[dict[str, Any]]]:
        """Return the specification as plain values that JSON can hold, jobs sorted by name.

        This is the JSON form of the protocol buffer ``ClusterDef`` of tf.distribute.

        Examples
        --------
        >>> ClusterSpec({"worker": ["a:1"], "ps": ["b:1"]}).as_cluster_def()
        {'job': [{'name': 'ps', 'tasks': {'0': 'b:1'}}, {'name': 'worker', 'tasks': {'0': 'a:1'}}]}
        """
        return {
            "job": [
                {"name": job, "tasks": {str(index): tasks[index] for index in sorted(tasks)}}
                for job, tasks in sorted(self._jobs.items())
            ]
        }

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ClusterSpec):
            return self._jobs == other._jobs
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as in tf.distribute

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()!r})"

    def _tasks_of(self, job: str) -> dict[int, str]:
        if job not in self._jobs:
            raise ValueError(f"the cluster has no job {job!r}: it has {self.jobs}")
        return self._jobs[job]


def _jobs_of_cluster_def(cluster: Mapping[str, Any]) -> list[tuple[str, Any]] | None:
    """Return the jobs of a result of `ClusterSpec.as_cluster_def`, or None for anything else."""
    jobs = cluster.get("job")
    if set(cluster) != {"job"} or not isinstance(jobs, list):
        return None
    if not all(isinstance(job, Mapping) and set(job) == {"name", "tasks"} for job in jobs):
        return None
    return [(job["name"], job["tasks"]) for job in jobs]


def _tasks(job: str, tasks: Any) -> dict[int, str]:
    if isinstance(tasks, (list, tuple)):
        numbered = dict(enumerate(tasks))
    elif isinstance(tasks, Mapping):
        numbered = {
            task_number(index, f"the tasks of job {job!r} are numbered 0, 1, ..."): address
            for index, address in tasks.items()
        }
    else:
        raise TypeError(f"the tasks of job {job!r} are addresses in a list, or in a dict by number, not {tasks!r}")
    for index, address in numbered.items():
        if not isinstance(address, str):
            raise TypeError(
                f"the address of task {index} of job {job!r} is a string such as 'host:8888', not {address!r}"
            )
    return numbered


def task_number(value: Any, rule: str) -> int:
    """Return the number of a task. Raise ValueError, whose text begins with ``rule``, for another value."""
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = -1
    if number < 0 or (isinstance(value, float) and number != value):
        raise ValueError(f"{rule}, not {value!r}")
    return number


def _dense(tasks: Mapping[int, str]) -> bool:
    return set(tasks) == set(range(len(tasks)))
