"""What all sources that are made of other datasets have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mpistrat.data.combine.dataset_part import DatasetPart
from mpistrat.data.rows.contracts import Peers, Seed

if TYPE_CHECKING:
    from typing_extensions import Self


class OfParts:
    """The methods of a source that let its parts do the same. It stands before `Source` or `StreamSource`.

    Parameters
    ----------
    parts : sequence of DatasetPart

    Attributes
    ----------
    word : str
        The kind of combination.
    """

    word: str

    def __init__(self, parts: Sequence[DatasetPart]):
        self.parts = parts

    def of_parts(self, parts: Sequence[DatasetPart]) -> Self:
        """Return the same combination of other parts."""
        return type(self)(parts)

    def fingerprint(self) -> Any:
        """Return the kind of combination, and the fingerprints of its parts."""
        return f"{self.word}({'; '.join(part.fingerprint() for part in self.parts)})"

    def identity(self) -> dict[str, Any]:
        """Return the kind of combination, and the identities of its parts."""
        return {"source": self.word, "parts": [part.identity() for part in self.parts]}

    def agree(self, peers: Peers) -> None:
        """Let every part agree with the peers. Collective."""
        for part in self.parts:
            part.source.agree(peers)

    def seeds(self) -> list[Seed]:
        """Return the seeds of the parts, one part after another."""
        return [seed for part in self.parts for seed in part.seeds()]

    def with_seeds(self, seeds: Sequence[int]) -> Self:
        """Return the source with other seeds for the shuffles of its parts."""
        left = iter(seeds)
        return self.of_parts([part.with_seeds([next(left) for _ in part.seeds()]) for part in self.parts])

    def ready(self, memory: int, ranks: int | None = None, peers: Peers | None = None) -> Self:
        """Return the source with parts that are ready for their shuffles."""
        parts = [part.ready(memory, ranks, peers) for part in self.parts]
        if all(a is b for a, b in zip(parts, self.parts, strict=True)):
            return self  # with the rows that it keeps
        return self.of_parts(parts)

    def __repr__(self) -> str:
        return f"{self.word}({'; '.join(map(repr, self.parts))})"
