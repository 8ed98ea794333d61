"""Division of rows whose number is unknown before their end."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mpistrat.data.distribute.autoshard import Division, Reading, with_hints
from mpistrat.data.options import UNKNOWN_CARDINALITY, AutoShardPolicy
from mpistrat.data.pipeline.stream import StreamPlan
from mpistrat.data.pipeline.transforms import Transform
from mpistrat.data.rows import elements
from mpistrat.data.rows.split import part_of
from mpistrat.replicas import ReplicaGroup

if TYPE_CHECKING:
    from mpistrat.runtime.topology import Topology


class _Streamed(Division):
    """The division that reads batches until no replica has any. The ranks exchange a flag at each step."""

    communicates = True
    steps = None

    def __init__(self, source: Any, transforms: Sequence[Transform], replicas: ReplicaGroup, ranks: Topology):
        super().__init__(source, transforms, replicas)
        self._ranks = ranks
        self.readings = self._made()

    @property
    def cardinality(self) -> int:
        return UNKNOWN_CARDINALITY

    def rebuilt(self, transforms: Sequence[Transform], source: Any = None) -> _Streamed:
        """Return the same division with other transforms, and perhaps another source of the same rows."""
        return type(self)(self.source if source is None else source, transforms, self.replicas, self._ranks)

    def batch(self, step: int, iteration: int) -> Any:
        """Return the batch of a step; raise StopIteration if no replica has a row.

        Collective: all ranks call it for the same step.
        """
        found = [(each.plan, rows) for each in self.readings for rows in each.of_step(step, iteration)]
        if self._ranks.all_true(all(rows is None for _, rows in found)):
            raise StopIteration
        return self.formed([plan.read(rows or []) for plan, rows in found])

    def _made(self) -> list[Reading]:
        plan = StreamPlan(self.source, self.transforms, shared=True)
        return self._read_by([plan] * len(self.local))  # one, as some iterables can be read only once


class _ByData(_Streamed):
    """The division that gives every replica its piece of every global batch."""

    name = "DATA"

    def _made(self) -> list[Reading]:
        plan = StreamPlan(self.source, self.transforms, shared=True)
        return [Reading(plan, self.replicas.count, partial(self._rows, plan, self.replicas.count))]

    def _rows(self, plan: StreamPlan, fed: int, k: int, iteration: int) -> list[Any] | None:
        rows = plan.rows(k // fed, iteration)
        return None if rows is None else part_of(rows, self.replicas.size, self.replicas.local[k % fed])


class _Everything(_Streamed):
    """The division that gives every pipeline all pieces of a global batch, then those of the next."""

    name = "OFF"

    def _rows(self, plan: StreamPlan, fed: int, k: int, iteration: int) -> list[Any] | None:
        number, part = divmod(k, self.replicas.size)
        rows = plan.rows(number, iteration)
        own = None if rows is None else part_of(rows, self.replicas.size, part)
        # Another replica of this rank gets the same rows, and a function of one may write to them.
        return [*map(elements.copied, own)] if own and self.replicas.count > 1 else own


class _ByHint(_Everything):
    name = "HINT"

    def _made(self) -> list[Reading]:
        number = len(self.pipelines)
        of_pipelines = [with_hints(self.transforms, number, each) for each, _ in self.local]
        return self._read_by(StreamPlan(self.source, each, shared=True) for each in of_pipelines)


_DIVISIONS: dict[AutoShardPolicy, type[_Streamed]] = {
    AutoShardPolicy.AUTO: _ByData,
    AutoShardPolicy.DATA: _ByData,
    AutoShardPolicy.HINT: _ByHint,
    AutoShardPolicy.OFF: _Everything,
}


def divide_until_all_end(
    policy: AutoShardPolicy,
    source: Any,
    transforms: Sequence[Transform],
    replicas: ReplicaGroup,
    ranks: Topology,
) -> Division:
    """Return the division of the rows of an iterable that all replicas go through."""
    return _DIVISIONS[policy](source, transforms, replicas, ranks)
