"""Protocols of this package: sources of rows, which the ranks describe together."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np

from mpistrat import nest
from mpistrat.data.rows import spec
from mpistrat.data.rows.blocks import Blocks
from mpistrat.data.rows.elements import rows_of
from mpistrat.data.rows.lanes import MOST_LANES
from mpistrat.process.own_files import level_of_program
from mpistrat.runtime.topology import Topology

if TYPE_CHECKING:
    from typing_extensions import Self


IN_MEMORY_AT_ONCE = 512 << 10
"""Bytes of rows in memory that are best taken in two calls."""


class Seed(NamedTuple):
    """The seed of a shuffle, and whether the program gave it."""

    value: int
    given: bool


def ranks_of_node(ranks: Topology) -> int:
    """Return how many of the ranks are on this node; all of them if that is not known."""
    # Stand-ins for a topology, as in the examples, have no node.
    node = getattr(ranks, "node", None)
    return int(ranks.size if node is None else node.size)


def warn_together(ranks: Topology | None, texts: Sequence[str]) -> None:
    """Warn on rank 0. All ranks have the texts, and raise alike where the program makes errors of warnings."""

    def warn() -> None:
        for text in texts:
            warnings.warn(text, stacklevel=level_of_program())

    if ranks is None:
        warn()
    elif texts:  # with ``-W error`` rank 0 raises: the others must not wait for it in the next collective
        ranks.on_first(warn)


class AnySource(Protocol):
    """A source of rows, which may have datasets with shuffles inside. A new kind is a new file with a subclass."""

    def element_spec(self) -> Any:
        """Return the structure of one row, with an ArraySpec for every array."""

    def seeds(self) -> list[Seed]:
        """Return the seeds of all shuffles inside the source."""
        return []

    def with_seeds(self, seeds: Sequence[int]) -> Self:
        """Return the source with other seeds for its shuffles."""
        return self

    def ready(self, memory: int, sharing: int | None = None, ranks: Topology | None = None) -> Self:
        """Return the source whose shuffles inside may take ``memory`` bytes; see `Source.for_shuffle`."""
        return self

    def fingerprint(self) -> Any:
        """Return what must be equal on all ranks before `agree`: a small object with ``==`` and a clear repr."""
        return str(self)

    def agree(self, ranks: Topology) -> None:
        """Describe the rows together with the other ranks. Collective."""
        return

    def versions(self) -> dict[str, list[int]]:
        """Return size and time of the last change of each file that is read. Called after `agree`."""
        return {}

    def identity(self) -> dict[str, Any]:
        """Return what must be equal to restore a state: a small dict that JSON can hold. Called after `agree`."""
        return {"source": str(self)}


class Source(AnySource, Protocol):
    """Rows that can be read in any order. The defaults are for rows that do not come from files."""

    streamed: ClassVar[bool] = False
    """Whether rows can be read only from the first one on."""

    @property
    def in_memory(self) -> bool:
        """Whether the rows lie in memory. Then a small batch is made faster than it is handed over."""
        return False

    @property
    def decodes_again(self) -> bool:
        """Whether rows in any order are read by decoding whole chunks, of which not all can be kept."""
        return False

    def __len__(self) -> int:
        """Return the number of rows."""

    @property
    def length(self) -> int | None:
        """Number of rows. None if they are endless."""
        return len(self)

    def numbers(self, ks: np.ndarray, iteration: int) -> np.ndarray:
        """Return the numbers by which `read` knows the rows ``ks`` of an iteration.

        A source of other datasets has several numbers for each row, on axis 1.
        """
        return ks

    def numbers_of_all(self, ks: np.ndarray) -> np.ndarray:
        """Return the numbers of rows among all rows, where `of_files` has returned a source of some of them."""
        return ks

    def read(self, rows: np.ndarray) -> Any:
        """Return the rows with these numbers (int64), stacked on axis 0, in arrays that the caller may change."""

    def read_list(self, rows: np.ndarray) -> list[Any]:
        """Return the rows with these numbers one by one. Their shapes may differ."""
        return [*rows_of(self.read(rows))]

    def checksum(self) -> int:
        """Return a checksum of rows in memory, 0 for others."""
        return 0

    def identity(self) -> dict[str, Any]:
        return {"rows": len(self), "source": str(self.fingerprint())}

    def file_rows(self) -> Sequence[int]:
        """Return the number of rows of every file; empty if the rows do not come from files."""
        return ()

    def of_files(self, which: Sequence[int]) -> Source:
        """Return a source of the rows of some files, given by their positions in `file_rows`."""
        raise ValueError(f"{self} is not made of files")

    def of_column(self, name: Any) -> Source:
        """Return a source of the same rows that reads one column, and others only where it must."""
        return self

    def by_file(self) -> Source:
        """Return the source that reads only those files of which a row is requested."""
        return self

    def side_by_side(self) -> int:
        """Return the most files from which one batch may take rows without reading any file repeatedly."""
        return MOST_LANES

    def blocks(self) -> Blocks | None:
        """Return which rows are best read together, or None if that makes no difference."""
        return None

    def rows_in_two_reads(self, share: float) -> int:
        """Return how many rows to fetch by two reads, of which ``share`` of each batch is wanted.

        It is 1 if the number does not matter. While the program uses the rows of one read, a thread makes the other.
        """
        return 1

    def for_shuffle(
        self, nbytes: int, wanted: int | None, sharing: int | None = None, ranks: Topology | None = None
    ) -> Source:
        """Return the source of the same rows for a shuffle that may take ``nbytes`` of memory on each node.

        An epoch has ``wanted`` rows, None if it is endless. For ``sharing`` and ``ranks`` see `Definition.ready`.
        """
        return self

    def announced(self) -> bool:
        """Return whether `advise` is of use."""
        return self.blocks() is not None

    def advise(self, spans: np.ndarray) -> None:
        """Start read-ahead of rows, given as an array of (first, one past the last), read in any order later."""
        return


class StreamSource(AnySource, Protocol):
    """Rows that are read from the first one on. Their number is unknown before their end."""

    streamed: ClassVar[bool] = True

    def open(self, iteration: int) -> Iterator[Any]:
        """Return an iterator over the elements of an iteration, with leaves as NumPy arrays or scalars."""

    def first(self) -> Any:
        """Return an element, from which the structure of all is known. Raise ValueError for no elements."""

    def element_spec(self) -> Any:
        """Return the structure of an element; of the first one, if nothing else is known."""
        return nest.map_structure(spec.of_array, self.first())
