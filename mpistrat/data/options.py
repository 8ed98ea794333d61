"""Options of distributed input, and the numbers that stand for something else."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

SHARD_HINT = -1
"""Placeholder of AutoShardPolicy.HINT for number and id of a replica: ``shard(SHARD_HINT, SHARD_HINT)``."""

AUTOTUNE = -1
"""Placeholder in ``dataset.prefetch(AUTOTUNE)``: the library chooses a number that suits the size of a batch."""

INFINITE_CARDINALITY = -1
"""What `Dataset.cardinality` returns for an endless dataset."""

UNKNOWN_CARDINALITY = -2
"""What `Dataset.cardinality` returns for a dataset whose length is unknown before its end."""

PREFETCH, MOST_PREFETCH = 2, 8192
"""Number of batches that AUTOTUNE reads ahead: usually, and at most (for small batches)."""


class InputReplicationMode(enum.Enum):
    """How often an input function is called: for each rank, or for each replica. With virtual replicas, the latter.

    Examples
    --------
    >>> import mpistrat
    >>> mpistrat.InputOptions().experimental_replication_mode
    <InputReplicationMode.PER_WORKER: 'PER_WORKER'>
    """

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


class AutoShardPolicy(enum.IntEnum):
    """How a dataset of global batches is divided over the replicas.

    Attributes
    ----------
    AUTO
        Shuffled files are read in *lanes*: batches are equal for any number of replicas, as under DATA, and a replica
        reads files of its own. DATA for a dataset that is not shuffled, or not made of several files. Also where
        transforms need another order: ``take``, ``skip`` and the like before ``shuffle``, ``shard`` or another
        shuffle after it, and ``shuffle(mode="exact")``.
    DATA
        Every global batch is cut into one contiguous piece per replica. The sizes of the pieces differ by at
        most one row. Each replica reads only the rows of its own piece.
    FILE
        Files are dealt round-robin. With ``balance``, the longest file comes first and each file goes to the
        replica that has the fewest rows. Each replica applies the whole pipeline (shuffle, take, ...) to the
        rows of its own files, in batches of its share of the global batch. All replicas make equally many steps:
        replicas whose files end early get empty batches. Batches and steps depend on the number of replicas, as in
        tf.distribute. Where a rank plays several devices that are not virtual replicas, files are dealt to ranks,
        which share batches out to their devices.
    HINT
        ``shard(SHARD_HINT, SHARD_HINT)`` becomes the shard of the input pipeline. Otherwise the same as OFF.
    OFF
        Every replica gets every row, in batches of the size of a replica's share. With R replicas, an epoch
        has R times as many steps. Devices of one rank take these batches in turn.

    Examples
    --------
    >>> import mpistrat
    >>> options = mpistrat.data.Options()
    >>> options.experimental_distribute.auto_shard_policy = AutoShardPolicy.OFF
    >>> dataset = mpistrat.data.Dataset.range(4).batch(2).with_options(options)
    >>> strategy = mpistrat.MultiWorkerMirroredStrategy()
    >>> sum(len(batch) for batch in strategy.experimental_distribute_dataset(dataset))
    4
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


@dataclass(frozen=True, slots=True)
class InputContext:
    """The argument of an input function: which of the input pipelines it makes.

    Parameters
    ----------
    num_input_pipelines : int
        Number of pipelines: one per rank, or one per replica with virtual replicas.
    input_pipeline_id : int
        Index of this pipeline.
    num_replicas_in_sync : int
        Number of replicas that take part in a step.

    Examples
    --------
    >>> context = InputContext(num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=2)
    >>> context.get_per_replica_batch_size(32)
    16
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the size of a replica's batch.

        Parameters
        ----------
        global_batch_size : int
            Number of rows of a batch of all replicas together.

        Raises
        ------
        ValueError
            If the global batch is not a multiple of the number of replicas.
        """
        size, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            raise ValueError(
                f"the global batch size {global_batch_size} is not a multiple of the "
                f"{self.num_replicas_in_sync} replicas: choose one that is"
            )
        return size


class _InputOptions(NamedTuple):
    experimental_fetch_to_device: bool
    experimental_replication_mode: InputReplicationMode
    experimental_place_dataset_on_device: bool
    experimental_per_replica_buffer_size: int


class InputOptions(_InputOptions):
    """Options of one distributed dataset.

    Parameters
    ----------
    experimental_fetch_to_device : bool, optional
        Whether batches are moved to the replica's device. To a GPU they are copied ahead of time. None means True.
    experimental_replication_mode : InputReplicationMode
        How often the input function is called.
    experimental_place_dataset_on_device : bool
        Whether the dataset itself lives on the device. It needs ``PER_REPLICA`` and
        ``experimental_fetch_to_device=False``, which is checked where the options are used.
    experimental_per_replica_buffer_size : int
        Number of batches that are kept ready.

    Examples
    --------
    >>> InputOptions().experimental_fetch_to_device
    True
    """

    __slots__ = ()

    def __new__(
        cls,
        experimental_fetch_to_device: bool | None = None,
        experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
        experimental_place_dataset_on_device: bool = False,
        experimental_per_replica_buffer_size: int = 1,
    ) -> InputOptions:
        return super().__new__(
            cls,
            True if experimental_fetch_to_device is None else experimental_fetch_to_device,
            experimental_replication_mode,
            experimental_place_dataset_on_device,
            experimental_per_replica_buffer_size,
        )


def check_input_options(options: InputOptions | None) -> None:
    """Raise TypeError if this is neither None nor an InputOptions, and ValueError if options contradict each other."""
    if options is None:
        return
    if not isinstance(options, InputOptions):
        raise TypeError(f"options must be an InputOptions, not {options!r}")
    if options.experimental_place_dataset_on_device:
        if options.experimental_replication_mode is not InputReplicationMode.PER_REPLICA:
            raise ValueError(
                "experimental_place_dataset_on_device=True needs "
                "experimental_replication_mode=InputReplicationMode.PER_REPLICA, "
                f"got {options.experimental_replication_mode}"
            )
        if options.experimental_fetch_to_device:
            raise ValueError(
                "experimental_place_dataset_on_device=True needs experimental_fetch_to_device=False: "
                "a dataset on the device is not fetched to it"
            )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)  # True is an int


class _Settable:
    """An object with options. ``_rules`` maps each name to a test of values, the error, and what the error asks for."""

    _rules: ClassVar[dict[str, tuple[Callable[[Any], bool], type[Exception], str]]]

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._rules:
            raise AttributeError(f"{type(self).__name__} has no option {name!r}")
        fits, error, needs = self._rules[name]
        if not fits(value):
            raise error(f"{name} must be {needs}, not {value!r}")
        # Only options that were set are kept: `merge` overrides those. None takes an option back.
        vars(self)[name] = value
        if value is None:
            del vars(self)[name]

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if isinstance(other, type(self)) else NotImplemented

    __hash__ = None  # type: ignore[assignment]


class DistributeOptions(_Settable):
    """The part of `Options` that concerns distribution.

    Attributes
    ----------
    auto_shard_policy : AutoShardPolicy
        How the dataset is divided over the replicas, AUTO by default.
    balance : bool
        Whether FILE deals the longest files first, instead of round-robin (the default).
    num_devices : int or None
        Accepted for programs written for tf.data, without effect: one process has one device.

    Examples
    --------
    >>> options = DistributeOptions()
    >>> options.auto_shard_policy = AutoShardPolicy.DATA
    >>> options.auto_shard_policy.name
    'DATA'
    """

    auto_shard_policy: AutoShardPolicy = AutoShardPolicy.AUTO
    balance: bool = False
    num_devices: int | None = None
    _rules = {
        "auto_shard_policy": (
            lambda value: isinstance(value, AutoShardPolicy),
            TypeError,
            "a member of AutoShardPolicy, for example AutoShardPolicy.DATA",
        ),
        "balance": (lambda value: isinstance(value, bool), TypeError, "True or False"),
        "num_devices": (lambda value: value is None or _is_int(value), TypeError, "an int or None"),
    }

    def __repr__(self) -> str:
        balance = "balance=True, " if self.balance else ""
        return (
            f"DistributeOptions(auto_shard_policy={self.auto_shard_policy.name}, {balance}"
            f"num_devices={self.num_devices})"
        )


class Options(_Settable):
    """Options of a dataset, given to `Dataset.with_options`.

    Attributes
    ----------
    experimental_distribute : DistributeOptions
        The options of distribution.
    prefetch : int or None
        Number of batches that are read ahead; see `Dataset.prefetch`. `AUTOTUNE` (-1) lets the library choose.
    shuffle_memory : int
        Bytes of memory on each node for a shuffle of small rows (less than 16 KiB) of files. If all rows fit, the
        node reads them once and keeps them, for each distributed dataset. Otherwise they are mixed in windows of
        this memory. The default is 1 GiB.

    Examples
    --------
    >>> options = Options()
    >>> options.experimental_distribute.auto_shard_policy = AutoShardPolicy.OFF
    """

    experimental_distribute: DistributeOptions
    prefetch: int | None = None
    shuffle_memory: int = 1 << 30
    _rules = {
        "experimental_distribute": (
            lambda value: isinstance(value, DistributeOptions),
            TypeError,
            "a DistributeOptions",
        ),
        "prefetch": (
            lambda value: value is None or (_is_int(value) and value >= AUTOTUNE),
            ValueError,
            "a number of batches, AUTOTUNE (-1) or None",
        ),
        "shuffle_memory": (lambda value: _is_int(value) and value >= 0, ValueError, "a number of bytes"),
    }

    def __init__(self) -> None:
        self.experimental_distribute = DistributeOptions()

    def merge(self, other: Options) -> Options:
        """Return these options, overridden by the options that are set in another object.

        Parameters
        ----------
        other : Options
            The object that takes precedence.

        Returns
        -------
        Options
            A new object.
        """
        merged = Options()
        for options in (self, other):
            distribute = merged.experimental_distribute
            vars(distribute).update(vars(options.experimental_distribute))
            vars(merged).update({**vars(options), "experimental_distribute": distribute})
        return merged

    def __repr__(self) -> str:
        return f"Options({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"
