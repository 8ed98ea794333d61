"""Division of rows whose number is unknown before their end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mpistrat import nest
from mpistrat.data.distribute.autoshard import Division, with_hints
from mpistrat.data.options import UNKNOWN_CARDINALITY, AutoShardPolicy
from mpistrat.data.pipeline.stream import StreamPlan
from mpistrat.data.pipeline.transforms import Transform
from mpistrat.data.rows import spec
from mpistrat.data.rows.split import piece
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
        self.plan: Any = StreamPlan(source, self._of_replica(transforms), shared=True)

    @property
    def cardinality(self) -> int:
        return UNKNOWN_CARDINALITY

    def rebuilt(self, transforms: Sequence[Transform], source: Any = None) -> _Streamed:
        """Return the same division with other transforms, and perhaps another source of the same rows."""
        return type(self)(self.source if source is None else source, transforms, self.replicas, self._ranks)

    def batch(self, step: int, iteration: int) -> Any:
        """Return this replica's batch of a step; raise StopIteration if no replica has a row.

        Collective: all ranks call it for the same step.
        """
        number, part = self._part(step)
        rows = self.plan.rows(number, iteration)
        if self._ranks.all_true(rows is None):
            raise StopIteration
        first, last = piece(len(rows or ()), self.replicas.size, part)
        return self.plan.read((rows or [])[first:last])

    def _part(self, step: int) -> tuple[int, int]:
        """Return the number of the global batch of a step, and the number of its piece."""
        raise NotImplementedError

    def _of_replica(self, transforms: Sequence[Transform]) -> Sequence[Transform]:
        return transforms


class _ByData(_Streamed):
    """The division that gives every replica its piece of every global batch."""

    name = "DATA"

    def _part(self, step: int) -> tuple[int, int]:
        return step, self.replicas.first


class _Everything(_Streamed):
    """The division that gives every replica all pieces of a global batch, then those of the next."""

    name = "OFF"

    def _part(self, step: int) -> tuple[int, int]:
        return divmod(step, self.replicas.size)


class _ByHint(_Everything):
    name = "HINT"

    def _of_replica(self, transforms: Sequence[Transform]) -> Sequence[Transform]:
        return with_hints(transforms, self.replicas.size, self.replicas.first)


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


class OwnUntilAllEnd(Division):
    """The division of datasets that the replicas made themselves, some of them of unknown length."""

    name = "its own"
    communicates = True
    steps = None

    def __init__(
        self,
        source: Any,
        transforms: Sequence[Transform],
        replicas: ReplicaGroup,
        ranks: Topology,
        plan: Any,
    ):
        super().__init__(source, transforms, replicas)
        self._ranks, self.plan = ranks, plan
        self._spec: Any = None

    @property
    def cardinality(self) -> int:
        return UNKNOWN_CARDINALITY

    def rebuilt(self, transforms: Sequence[Transform], source: Any = None) -> OwnUntilAllEnd:
        """Return the same division with other transforms, and perhaps another source of the same rows."""
        source = self.source if source is None else source
        plan = type(self.plan)(source, transforms)
        return OwnUntilAllEnd(source, transforms, self.replicas, self._ranks, plan)

    def batch(self, step: int, iteration: int) -> Any:
        """Return the next batch of this replica's dataset, an empty batch after the last one.

        Raises StopIteration on all replicas once all datasets have ended.
        """
        batch = self.plan.element_if_any(step, iteration)
        if self._spec is None:
            # A replica whose dataset has no rows at all learns the shape of an empty batch from the others.
            mine = None if batch is None else nest.map_structure(spec.of_array, batch)
            everyone = self._ranks.all_gather_object(mine)
            self._spec = next((each for each in everyone if each is not None), None)
            ended = self._spec is None
        else:
            ended = self._ranks.all_true(batch is None)
        if ended:
            raise StopIteration
        return spec.no_rows_of(self._spec) if batch is None else batch
