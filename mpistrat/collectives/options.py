"""The options of a collective."""

from __future__ import annotations

import enum
import warnings
from dataclasses import dataclass, field

from mpistrat.collectives.algorithms.choose import ALGORITHMS, GPU_ROUTES
from mpistrat.representation import require
from mpistrat.runtime.environment import RuntimeOptions, rc

_NAMES = tuple(dict.fromkeys([*ALGORITHMS, *GPU_ROUTES]))


class CommunicationImplementation(enum.Enum):
    """The families of algorithms.

    Attributes
    ----------
    AUTO
        The algorithm that is predicted to be the fastest for these values on these ranks.
    RING
        MPI on host memory, by the algorithm predicted to be the fastest; arrays of GPUs are copied there.
    NCCL
        NCCL, which needs one GPU per rank.

    Examples
    --------
    >>> CommunicationImplementation("RING").name
    'RING'
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclass(unsafe_hash=True, repr=False, slots=True)
class CommunicationOptions:
    """Options of a collective.

    Parameters
    ----------
    bytes_per_pack : int
        Size of the messages that many small arrays are packed into; 0 leaves it to the library.
    timeout_seconds : float, optional
        How long to wait for the other ranks, in every call of the strategy that communicates. After this time a
        TimeoutError names the operation and the ranks that did not arrive, and the strategy rejects further work.
        All ranks must set it. Each operation then costs a message from every rank to rank 0 and back.
    implementation : CommunicationImplementation or str
        The family of algorithms, or the name of one algorithm, the same on all ranks: ``"mpi"``,
        ``"mpi_nonblocking"``, ``"hierarchical"``, ``"leader"``, ``"hierarchical_copy"``, ``"ordered"``, ``"exact"``,
        ``"tree"``. For arrays on GPUs also ``"nccl"``, ``"gpu_direct"``, ``"pinned"``. With AUTO,
        ``mpistrat.rc.all_reduce`` (MPISTRAT_ALL_REDUCE) may name an algorithm for the host; strategies with
        ``virtual_replicas`` else use ``"tree"``, but for the text ``"auto"`` the fastest algorithm.

    Raises
    ------
    ValueError
        If ``bytes_per_pack`` is negative, the time is not positive or the implementation unknown.

    Examples
    --------
    >>> CommunicationOptions(bytes_per_pack=1 << 20, implementation="ring")
    CommunicationOptions(bytes_per_pack=1048576, timeout_seconds=None, implementation=RING)
    >>> CommunicationOptions(implementation="ordered").algorithm
    'ordered'
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO
    algorithm: str | None = field(init=False, compare=False)

    def __post_init__(self) -> None:
        require(self.bytes_per_pack >= 0, "bytes_per_pack must not be negative", self.bytes_per_pack)
        if self.timeout_seconds is not None and not self.timeout_seconds > 0:  # rejects NaN too
            raise ValueError(f"timeout_seconds must be positive or None, not {self.timeout_seconds}")
        self.bytes_per_pack = int(self.bytes_per_pack)
        self.implementation = _implementation(self.implementation)
        self.algorithm = _algorithm(self.implementation)

    def merge(self, options: CommunicationOptions | None) -> CommunicationOptions:
        """Return these options, replaced by the values of ``options`` that differ from the defaults.

        Raises
        ------
        TypeError
            If ``options`` is neither a `CommunicationOptions` nor None.

        Examples
        --------
        >>> CommunicationOptions(bytes_per_pack=8).merge(CommunicationOptions(timeout_seconds=3.0))
        CommunicationOptions(bytes_per_pack=8, timeout_seconds=3.0, implementation=AUTO)
        """
        if options is None:
            return self
        if not isinstance(options, CommunicationOptions):
            raise TypeError(f"options must be CommunicationOptions or None, not {options!r}")
        auto = CommunicationImplementation.AUTO
        return CommunicationOptions(
            options.bytes_per_pack or self.bytes_per_pack,
            self.timeout_seconds if options.timeout_seconds is None else options.timeout_seconds,
            self.implementation if options.implementation is auto else options.implementation,
        )

    def __repr__(self) -> str:
        return (
            f"CommunicationOptions(bytes_per_pack={self.bytes_per_pack}, "
            f"timeout_seconds={self.timeout_seconds}, "
            f"implementation={getattr(self.implementation, 'name', self.implementation)})"
        )


def _implementation(value: CommunicationImplementation | str) -> CommunicationImplementation | str:
    if isinstance(value, CommunicationImplementation):
        return value
    if not isinstance(value, str):
        raise ValueError(f"implementation must be a CommunicationImplementation or an algorithm's name, not {value!r}")
    if value.lower() == "auto":
        return "auto"
    if value.upper() in CommunicationImplementation.__members__:
        return CommunicationImplementation[value.upper()]
    if value.lower() in _NAMES:
        return value.lower()
    names = ", ".join([*CommunicationImplementation.__members__, *_NAMES])
    raise ValueError(f"{value!r} is not an implementation: use one of {names}")


def _algorithm(implementation: CommunicationImplementation | str) -> str | None:
    """Return the name of the algorithm to use; None if the table chooses it."""
    if isinstance(implementation, str) and implementation != "auto":
        return implementation
    if implementation is CommunicationImplementation.NCCL:
        return "nccl"
    named = rc.all_reduce
    if implementation is CommunicationImplementation.RING or named == "auto":
        return None
    if named not in ALGORITHMS:
        raise RuntimeOptions.all_reduce.refusal(rc, f"auto, {', '.join(ALGORITHMS)}")
    return named


class CollectiveHints:
    """The former name of `CommunicationOptions`. A call returns a `CommunicationOptions`.

    Parameters
    ----------
    bytes_per_pack : int
    timeout_seconds : float, optional

    Warns
    -----
    DeprecationWarning
        Always: use `CommunicationOptions`.

    Examples
    --------
    >>> import warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     CollectiveHints(bytes_per_pack=4)
    CommunicationOptions(bytes_per_pack=4, timeout_seconds=None, implementation=AUTO)
    """

    def __new__(  # type: ignore[misc]  # as in tf.distribute, the old name returns the new class
        cls, bytes_per_pack: int = 0, timeout_seconds: float | None = None
    ) -> CommunicationOptions:
        warnings.warn(
            "CollectiveHints is deprecated: use mpistrat.experimental.CommunicationOptions",
            DeprecationWarning,
            stacklevel=2,
        )
        return CommunicationOptions(bytes_per_pack=bytes_per_pack, timeout_seconds=timeout_seconds)
