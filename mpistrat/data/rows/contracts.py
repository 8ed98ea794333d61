"""What the parts of this package expect of each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from mpistrat.data.rows.blocks import Blocks


class Peers(Protocol):
    """The replicas that share a dataset. All methods are collective."""

    @property
    def size(self) -> int:
        """How many they are."""

    @property
    def rank(self) -> int:
        """Which of them this process is."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """The objects of all, in rank order."""

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """The object of one, on all."""

    def all_true(self, flag: Any) -> bool:
        """Whether a flag is true for all."""


class Source(Protocol):
    """Rows that can be read in any order. A new kind of source is a new file with a class derived from this.

    The defaults are those of rows that come from no file.
    """

    def __len__(self) -> int:
        """How many rows there are."""

    def element_spec(self) -> Any:
        """The structure of one row, with an ArraySpec for every array."""

    def read(self, rows: np.ndarray) -> Any:
        """The rows with these numbers (int64), stacked on axis 0, in arrays that the caller may change."""

    def fingerprint(self) -> Any:
        """What must be equal on all ranks before `agree`: a small object with ``==`` and a readable repr."""

    def agree(self, peers: Peers) -> None:
        """Find out together with the peers what there is to read. Collective."""
        return

    def identity(self) -> dict[str, Any]:
        """What must be equal, after `agree`, for a state of the input to have a meaning: small, for JSON."""
        return {"rows": len(self), "source": str(self.fingerprint())}

    def file_rows(self) -> Sequence[int]:
        """How many rows every file has, empty if the rows do not come from files."""
        return ()

    def of_files(self, which: Sequence[int]) -> Source:
        """The rows of some of the files only, by their positions in `file_rows`."""
        raise ValueError(f"{self} is not made of files")

    def blocks(self) -> Blocks | None:
        """Which rows are best read together, None if that makes no difference."""
        return None

    def at_once(self) -> int:
        """How many rows are best read in one call, 1 if that makes no difference."""
        return 1

    def advise(self, spans: np.ndarray) -> None:
        """These rows will soon be read, in another order: an array of (first, one past the last)."""
        return
