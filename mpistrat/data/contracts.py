"""What the parts of this package expect of each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np


class Peers(Protocol):
    """The replicas that share a dataset. Both methods are collective."""

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


class Source(Protocol):
    """Rows that can be read in any order. A new kind of source is a new file with such a class."""

    def __len__(self) -> int:
        """How many rows there are."""

    def element_spec(self) -> Any:
        """The structure of one row, with an ArraySpec for every array."""

    def read(self, rows: np.ndarray) -> Any:
        """The rows with these numbers (int64), stacked on axis 0, in arrays that the caller may change."""

    def file_rows(self) -> Sequence[int]:
        """How many rows every file has, empty if the rows do not come from files."""

    def of_files(self, which: Sequence[int]) -> Source:
        """The rows of some of the files only, by their positions in `file_rows`."""

    def agree(self, peers: Peers) -> None:
        """Find out together with the peers what there is to read. Collective."""

    def fingerprint(self) -> Any:
        """What must be equal on all ranks before `agree`: a small object with ``==`` and a readable repr."""
