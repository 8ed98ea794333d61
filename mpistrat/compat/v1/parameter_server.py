"""Version 1's strategy of parameter servers: chief and workers all run the program."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mpistrat import cluster_resolver as resolvers
from mpistrat.cluster_resolver.roles import CHIEF, PARAMETER_SERVER, WORKER
from mpistrat.compat.v1.strategy import Strategy
from mpistrat.data import Dataset, InputContext, InputOptions
from mpistrat.messages import contact
from mpistrat.messages.contact import Contact, role_in_words
from mpistrat.process.waiting import Backoff
from mpistrat.replicas import random_stream
from mpistrat.runtime.environment import rc
from mpistrat.strategies.parameter_server import SentByNumber, number_of, refuse_to_serve, tasks_of_jobs
from mpistrat.strategies.placed import PlacingExtended
from mpistrat.strategy.extended import LocalExtended

if TYPE_CHECKING:
    import numpy as np

    from mpistrat.variables.on_server import ServerVariable

_CLIENTS = (CHIEF, WORKER)


class ParameterServerStrategy(SentByNumber, Strategy):
    """Asynchronous training in which chief and workers all run the program, each at its own pace.

    Variables are on parameter servers, which are in `mpistrat.Server.join`. The chief and all workers run the same
    program. The variables that they create in the same order are the same variables: they get the initial values of
    the chief, and the workers wait for it. Updates of one worker do not wait for another.

    The chief is the task of job ``chief``, or else worker 0. Each worker is one replica, so `run` and `reduce` do not
    communicate. Every worker reads all data of a dataset. An input function gets the number of workers and its
    own among them.

    Parameters
    ----------
    cluster_resolver : ClusterResolver, optional
        The rank of each task: workers or a chief, and at least one parameter server. By default the
        environment's (``MPISTRAT_ROLES`` or ``TF_CONFIG``). A single process without these, or an empty cluster, is one
        local worker with its own variables.

    Raises
    ------
    ValueError
        If the cluster has other jobs than chief, worker and ps, or not the tasks that are needed.
    RuntimeError
        On a parameter server. On every rank, if the ranks contradict each other about roles.
    TimeoutError
        If a rank is not there within ``mpistrat.rc.contact_seconds``.

    Examples
    --------
    >>> import mpistrat
    >>> strategy = ParameterServerStrategy()
    >>> with strategy.scope():
    ...     v = mpistrat.Variable([1.0, 2.0])
    >>> strategy.num_replicas_in_sync
    1
    """

    def __init__(self, cluster_resolver: resolvers.ClusterResolver | None = None):
        if cluster_resolver is None:
            cluster_resolver = resolvers.resolve()
            local = sum(map(len, cluster_resolver.tasks().values())) == 1
        elif isinstance(cluster_resolver, resolvers.ClusterResolver):
            local = not cluster_resolver.tasks()
        else:
            raise TypeError(f"cluster_resolver must be a ClusterResolver object, not {cluster_resolver!r}")
        self._resolver = cluster_resolver
        if local:
            self._workers, self._worker = 1, 0
            super().__init__(LocalExtended(self))
        else:
            reached = _reached(cluster_resolver)
            self._workers, self._worker = len(reached.clients), reached.clients.index(reached.mailbox.rank)
            super().__init__(_BetweenWorkersExtended(self, reached))
        self.number = number_of(self)

    @property
    def cluster_resolver(self) -> resolvers.ClusterResolver:
        """The resolver of the strategy."""
        return self._resolver

    @property
    def is_chief(self) -> bool:
        """Whether this rank is the chief, whose initial values count and which writes files."""
        return self._worker == 0

    def rng(self, seed: int | Sequence[int]) -> np.random.Generator:
        """Return a random generator of this worker, as `mpistrat.Strategy.rng` of that number of a replica."""
        return random_stream(seed, self._worker)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Dataset], options: InputOptions | None = None
    ) -> Any:
        """Return the dataset that ``dataset_fn(InputContext)`` makes for this worker.

        ``InputContext`` has a pipeline for each worker, the chief's first, and one replica.

        Raises
        ------
        TypeError
            If ``dataset_fn`` does not return a Dataset.
        RuntimeError
            In a replica context, or while another strategy is current.
        """
        own = InputContext(self._workers, self._worker, 1)
        return super().distribute_datasets_from_function(lambda _: dataset_fn(own), options)


class _BetweenWorkersExtended(PlacingExtended):
    @property
    def _chief(self) -> int:
        return self.contact.clients[0]

    @property
    def experimental_between_graph(self) -> bool:
        """Whether every worker runs the program itself: always True."""
        return True

    @property
    def experimental_should_init(self) -> bool:
        """Whether the initial values of this rank count: True on the chief."""
        return self.contact.mailbox.rank == self._chief

    should_checkpoint = should_save_summary = experimental_should_init

    def create(self, variable: ServerVariable, value: np.ndarray) -> None:
        """Put a new variable on its parameter server. The workers wait until the chief has done so.

        Raise ValueError if the chief has created a variable with another name, shape or dtype. Raise RuntimeError if
        the chief's program has ended, and TimeoutError if the chief does not create it within
        ``mpistrat.rc.contact_seconds``.
        """
        if self.experimental_should_init:
            users = len(self.contact.clients)
            self.servers.ask(variable.server, "create", (variable.key, users), (variable, value))
            return
        backoff, start = Backoff(), time.monotonic()
        while (created := self.servers.ask(variable.server, "meet", (variable.key, self._chief))) is None:
            if time.monotonic() > start + rc.contact_seconds:
                raise TimeoutError(
                    f"{self.contact.role} waited {rc.contact_seconds:g} s for variable {variable.name!r}, which "
                    f"{role_in_words(self.contact.roles, self._chief)} must create: create the same variables on all "
                    "workers, in the same order, or raise MPISTRAT_CONTACT_SECONDS"
                )
            backoff.pause()
        requested = variable.name, (value.shape, value.dtype)
        if requested != created:
            raise ValueError(
                f"{self.contact.role} creates variable {_in_words(requested)}, where "
                f"{role_in_words(self.contact.roles, self._chief)} has created {_in_words(created)}: create the same "
                "variables on all workers, in the same order"
            )


def _in_words(facts: tuple[str, tuple[tuple[int, ...], Any]]) -> str:
    name, (shape, dtype) = facts
    return f"{name!r} of shape {shape} and dtype {dtype}"


def _reached(resolver: resolvers.ClusterResolver) -> Contact:
    """Return the contact of chief and workers to the parameter servers. Collective over all ranks."""
    _check_jobs(resolver)
    if resolver.task_type == PARAMETER_SERVER:
        refuse_to_serve(resolver, "chief and workers")
    leads = resolver.task_type == CHIEF or (CHIEF not in resolver.tasks() and resolver.task_id == 0)
    if leads:
        return contact.reach_all(resolver, _CLIENTS)
    reached = contact.be_reached(resolver)
    if reached is None:
        raise RuntimeError(
            f"{resolver.task_type} {resolver.task_id} creates ParameterServerStrategy, and the chief's program has "
            "ended without one"
        )
    if reached.mailbox.rank not in reached.clients:
        raise RuntimeError(
            f"{reached.role} creates compat.v1's ParameterServerStrategy, and the chief that of version 2, whose "
            "workers are in mpistrat.Server.join()"
        )
    return reached


def _check_jobs(resolver: resolvers.ClusterResolver) -> None:
    tasks, text = tasks_of_jobs(resolver)
    if tasks.get(CHIEF, 0) > 1:
        raise ValueError(f"the cluster has {tasks[CHIEF]} chiefs: give it one, or workers only")
    if not (tasks.get(CHIEF) or tasks.get(WORKER)):
        raise ValueError(f"the cluster needs a worker; it has {text}")
    if not tasks.get(PARAMETER_SERVER):
        raise ValueError(
            f"the cluster needs a ps, a parameter server; it has {text}. Give a resolver with jobs, or set "
            "MPISTRAT_ROLES, as in MPISTRAT_ROLES=worker=3,ps=1"
        )
