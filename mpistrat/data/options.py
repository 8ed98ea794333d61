"""Options of distributed input, and the numbers that stand for something else."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

SHARD_HINT = -1
"""Placeholder of AutoShardPolicy.HINT for number and id of a replica: ``shard(SHARD_HINT, SHARD_HINT)``."""

AUTOTUNE = -1
"""Placeholder in ``dataset.prefetch(AUTOTUNE)``: the library chooses a number that suits the size of a batch."""

INFINITE_CARDINALITY = -1
"""What `Dataset.cardinality` returns for an endless dataset."""

UNKNOWN_CARDINALITY = -2
"""What `Dataset.cardinality` returns for a dataset whose length is unknown before its end."""

_SHUFFLE_MEMORY = 1 << 30

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
        FILE if each replica can have a file and the longest share of files has at most 5 % more rows than the
        mean. Otherwise DATA, with a warning. DATA without a warning for one replica and for datasets that are not
        made of files. The same holds where ``take``, ``skip`` or ``shard`` would have another meaning under FILE.
    DATA
        Every global batch is cut into one contiguous piece per replica. The sizes of the pieces differ by at
        most one row. Each replica reads only the rows of its own piece.
    FILE
        Files are dealt round-robin. With ``balance``, the longest file comes first and each file goes to the
        replica that has the fewest rows. Each replica applies the whole pipeline (shuffle, take, ...) to the
        rows of its own files, in batches of its share of the global batch. All replicas make as many steps as
        the one with the most steps. The others get empty batches at the end. Where a rank plays several devices
        that are not virtual replicas, files are dealt to ranks, which share batches out to their devices.
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

    __slots__ = ("_input_pipeline_id", "_num_input_pipelines", "_num_replicas_in_sync")

    def __init__(
        self, num_input_pipelines: int = 1, input_pipeline_id: int = 0, num_replicas_in_sync: int = 1
    ):
        self._num_input_pipelines = num_input_pipelines
        self._input_pipeline_id = input_pipeline_id
        self._num_replicas_in_sync = num_replicas_in_sync

    @property
    def num_input_pipelines(self) -> int:
        """Number of input pipelines."""
        return self._num_input_pipelines

    @property
    def input_pipeline_id(self) -> int:
        """Index of this input pipeline."""
        return self._input_pipeline_id

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas that take part in a step."""
        return self._num_replicas_in_sync

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the size of a replica's batch.

        Parameters
        ----------
        global_batch_size : int
            Number of rows of a global batch, that of all replicas together.

        Returns
        -------
        int

        Raises
        ------
        ValueError
            If the global batch is not a multiple of the number of replicas.
        """
        size, rest = divmod(global_batch_size, self._num_replicas_in_sync)
        if rest:
            raise ValueError(
                f"the global batch size {global_batch_size} is not a multiple of the "
                f"{self._num_replicas_in_sync} replicas: choose one that is"
            )
        return size

    def __repr__(self) -> str:
        return (
            f"InputContext(num_input_pipelines={self._num_input_pipelines}, "
            f"input_pipeline_id={self._input_pipeline_id}, "
            f"num_replicas_in_sync={self._num_replicas_in_sync})"
        )


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
    """Raise if input options contradict each other.

    Raises
    ------
    TypeError
        If ``options`` is neither None nor an InputOptions.
    ValueError
        If a dataset on the device is combined with PER_WORKER or with fetching to the device.
    """
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


class DistributeOptions:
    """The part of `Options` that concerns distribution.

    Attributes
    ----------
    auto_shard_policy : AutoShardPolicy
        How the dataset is divided over the replicas.
    balance : bool
        Whether FILE deals the longest files first, instead of round-robin.
    num_devices : int or None
        Accepted for programs written for tf.data, without effect: one process has one device.

    Examples
    --------
    >>> options = DistributeOptions()
    >>> options.auto_shard_policy = AutoShardPolicy.DATA
    >>> options.auto_shard_policy.name
    'DATA'
    """

    __slots__ = ("_auto_shard_policy", "_balance", "_num_devices")

    def __init__(self) -> None:
        self._auto_shard_policy: AutoShardPolicy | None = None
        self._balance: bool | None = None
        self._num_devices: int | None = None

    @property
    def auto_shard_policy(self) -> AutoShardPolicy:
        """How the dataset is divided over the replicas. The default is AUTO."""
        return AutoShardPolicy.AUTO if self._auto_shard_policy is None else self._auto_shard_policy

    @auto_shard_policy.setter
    def auto_shard_policy(self, policy: AutoShardPolicy) -> None:
        if not isinstance(policy, AutoShardPolicy):
            raise TypeError(
                f"auto_shard_policy must be a member of AutoShardPolicy, for example AutoShardPolicy.DATA, "
                f"not {policy!r}"
            )
        self._auto_shard_policy = policy

    @property
    def balance(self) -> bool:
        """Whether FILE deals the longest files first. The default is False."""
        return bool(self._balance)

    @balance.setter
    def balance(self, value: bool) -> None:
        if not isinstance(value, bool):
            raise TypeError(f"balance must be True or False, not {value!r}")
        self._balance = value

    @property
    def num_devices(self) -> int | None:
        """Number of devices that was set, None by default."""
        return self._num_devices

    @num_devices.setter
    def num_devices(self, value: int | None) -> None:
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise TypeError(f"num_devices must be an int or None, not {value!r}")
        self._num_devices = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DistributeOptions):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self.__slots__)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        balance = "balance=True, " if self.balance else ""
        return (
            f"DistributeOptions(auto_shard_policy={self.auto_shard_policy.name}, {balance}"
            f"num_devices={self._num_devices})"
        )


class Options:
    """Options of a dataset, given to `Dataset.with_options`.

    Attributes
    ----------
    experimental_distribute : DistributeOptions
        The options of distribution.
    prefetch : int or None
        Number of batches that are read ahead. `AUTOTUNE` (-1) lets the library choose.
    shuffle_memory : int
        Bytes of memory on each node for a shuffle of small rows (less than 16 KiB) of files. If all rows fit, the
        node reads them once and keeps them, for each distributed dataset. Otherwise they are mixed in windows of
        this memory. The default is 1 GiB.

    Examples
    --------
    >>> options = Options()
    >>> options.experimental_distribute.auto_shard_policy = AutoShardPolicy.OFF
    """

    __slots__ = ("_distribute", "_prefetch", "_shuffle_memory")

    def __init__(self) -> None:
        self._distribute = DistributeOptions()
        self._prefetch: int | None = None
        self._shuffle_memory: int | None = None

    @property
    def experimental_distribute(self) -> DistributeOptions:
        """The options of distribution."""
        return self._distribute

    @experimental_distribute.setter
    def experimental_distribute(self, value: DistributeOptions) -> None:
        if not isinstance(value, DistributeOptions):
            raise TypeError(f"experimental_distribute must be a DistributeOptions, not {value!r}")
        self._distribute = value

    @property
    def prefetch(self) -> int | None:
        """Number of batches that are read ahead; see `Dataset.prefetch`. None by default."""
        return self._prefetch

    @prefetch.setter
    def prefetch(self, value: int | None) -> None:
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < AUTOTUNE):
            raise ValueError(f"prefetch must be a number of batches, AUTOTUNE (-1) or None, not {value!r}")
        self._prefetch = value

    @property
    def shuffle_memory(self) -> int:
        """Bytes of memory on each node for a shuffle of small rows of files. The default is 1 GiB."""
        return _SHUFFLE_MEMORY if self._shuffle_memory is None else self._shuffle_memory

    @shuffle_memory.setter
    def shuffle_memory(self, value: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"shuffle_memory must be a number of bytes, not {value!r}")
        self._shuffle_memory = value

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
        for each in (self, other):
            for name in ("_prefetch", "_shuffle_memory"):
                if getattr(each, name) is not None:
                    setattr(merged, name, getattr(each, name))
            for name in DistributeOptions.__slots__:
                value: Any = getattr(each._distribute, name)
                if value is not None:
                    setattr(merged._distribute, name, value)
        return merged

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Options):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self.__slots__)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        prefetch = "" if self._prefetch is None else f", prefetch={self._prefetch}"
        memory = "" if self._shuffle_memory is None else f", shuffle_memory={self._shuffle_memory}"
        return f"Options(experimental_distribute={self._distribute!r}{prefetch}{memory})"
