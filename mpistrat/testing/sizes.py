"""The numbers of ranks under which a test can run."""

from __future__ import annotations

from typing import NamedTuple


class Sizes(NamedTuple):
    """Each of ``listed``, or any number from ``least`` to ``most`` if none is listed."""

    listed: tuple[int, ...] = ()
    least: int = 1
    most: int = 1 << 20

    def chosen(self, preferred: int) -> tuple[int, ...]:
        """Return the numbers of ranks to start: the listed ones, or the possible one nearest to ``preferred``."""
        return self.listed or (min(max(preferred, self.least), self.most),)

    def __contains__(self, size: object) -> bool:
        return isinstance(size, int) and (size in self.listed if self.listed else self.least <= size <= self.most)

    def __str__(self) -> str:
        if self.listed:
            text = " or ".join(map(str, self.listed))
        elif self.most == Sizes().most:
            text = f"at least {self.least}"
        else:
            text = f"{self.least} to {self.most}" if self.least < self.most else f"{self.least}"
        return f"{text} rank{'s' * (text != '1')}"
