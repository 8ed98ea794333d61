"""Division of datasets that a function made, one for each pipeline: they say themselves which rows they have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from mpistrat import nest
from mpistrat.data.distribute.autoshard import Division, own_rows
from mpistrat.data.pipeline.definition import Definition
from mpistrat.data.rows import spec
from mpistrat.data.rows.contracts import Seed
from mpistrat.replicas import ReplicaGroup

if TYPE_CHECKING:
    from mpistrat.runtime.topology import Topology


class OwnDatasets(Division):
    """The division of datasets that the pipelines made themselves, each in batches of its own size.

    ``datasets`` are those of the pipelines of this rank. ``shared`` is what a state says of the datasets of all
    pipelines, if it must not depend on the rank.
    """

    name = "its own"
    _spec: Any = None

    def __init__(
        self,
        datasets: Sequence[Definition],
        replicas: ReplicaGroup,
        pipelines: list[range],
        steps: int | None,
        shared: Mapping[str, Any] | None,
        ranks: Topology | None = None,
    ):
        self.datasets, self.steps, self.shared = datasets, steps, shared
        super().__init__(datasets[0], replicas, ranks)
        self.pipelines = pipelines
        self.readings = self._read_by(each.plan for each in datasets)

    def _begin(self) -> None:
        pass

    def _rows(self, plan: Any, fed: int, k: int, iteration: int) -> Any:
        """Return the rows of the next batch of a pipeline's dataset; where it communicates, the batch or None."""
        return plan.element_if_any(k, iteration) if self.communicates else own_rows(plan, k, iteration)

    def described(self) -> dict[str, Any]:
        """Return what a state says of the dataset: of the first pipeline, if the state is that of all ranks."""
        return super().described() if self.shared is None else dict(self.shared)

    def with_seeds(self, seeds: Sequence[int]) -> OwnDatasets:
        """Return the same division with other seeds where the program gave none."""
        given = self.described()["seeds"]
        drawn = [Seed(seed, each.given) for seed, each in zip(seeds, given, strict=True)]
        shared = None if self.shared is None else {**self.shared, "seeds": drawn}
        datasets = [each.with_drawn(drawn) for each in self.datasets]
        return OwnDatasets(datasets, self.replicas, self.pipelines, self.steps, shared, self.ranks)

    def batch(self, step: int, iteration: int) -> Any:
        """Return the batch of a step. A dataset that has ended gives empty batches until all have."""
        if self.ranks is None:
            return super().batch(step, iteration)
        batches = [*chain.from_iterable(each.of_step(step, iteration) for each in self.readings)]
        first = next((each for each in batches if each is not None), None)
        if self._spec is None:
            # A replica whose dataset has no rows at all learns the shape of an empty batch from the others.
            mine = None if first is None else nest.map_structure(spec.of_array, first)
            everyone = self.ranks.all_gather_object(mine)
            self._spec = next((each for each in everyone if each is not None), None)
            ended = self._spec is None
        else:
            ended = self.ranks.all_true(first is None)
        if ended:
            raise StopIteration
        return self.formed([spec.no_rows_of(self._spec) if each is None else each for each in batches])
