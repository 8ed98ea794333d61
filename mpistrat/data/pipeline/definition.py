"""What a dataset is made of: a source of rows, transforms and options, and the seeds of its shuffles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mpistrat.data.options import Options
from mpistrat.data.pipeline.mapping import generators_of
from mpistrat.data.pipeline.plan import PipelinePlan, StreamPlan
from mpistrat.data.pipeline.transforms import Batch, Map, Seeded, Shard, Shuffle, Transform, before_batch, length_of
from mpistrat.data.rows.contracts import Seed, warn_together
from mpistrat.runtime.topology import Topology

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, eq=False)
class Definition:
    """A source of rows, the transforms of its rows and batches, and the options of a dataset."""

    source: Any
    transforms: tuple[Transform, ...] = ()
    options: Options = field(default_factory=Options)

    @property
    def streamed(self) -> bool:
        """Whether rows are read in order, and their number is unknown."""
        return bool(self.source.streamed)

    @property
    def batch_size(self) -> int | None:
        """Number of rows of a batch. None if the elements are single rows."""
        return next((transform.size for transform in self.transforms if isinstance(transform, Batch)), None)

    @property
    def length(self) -> int | None:
        """Number of elements. None if they are endless, or their number is unknown."""
        return None if self.streamed else length_of(self.source.length, self.transforms)

    @cached_property
    def plan(self) -> Any:
        """The plan by which the rows of the source, as it is, are read and transformed."""
        return (StreamPlan if self.streamed else PipelinePlan)(self.source, self.transforms)

    @cached_property
    def shared_plan(self) -> Any:
        """The same for a source that several replicas read."""
        if self.streamed:
            return StreamPlan(self.source, self.transforms, shared=True)
        return PipelinePlan(self.source, self.transforms, self.source)

    def seeds(self) -> list[Seed]:
        """Return the seeds of all shuffles, those inside the source first."""
        shuffles = [shuffle for shuffle in self.transforms if isinstance(shuffle, Seeded)]
        return [*self.source.seeds(), *(Seed(shuffle.seed, shuffle.seeded) for shuffle in shuffles)]

    def transforms_in_words(self) -> list[str]:
        """Return the transforms as texts, equal on all ranks that give the same."""
        return [*map(_in_words, self.transforms)]

    def warnings_of_generators(self) -> list[str]:
        """Return warnings of functions of ``map`` that draw from a generator of the program: each rank has its own."""
        inner = [text for part in getattr(self.source, "parts", ()) for text in part.warnings_of_generators()]
        draws = [(step.fn, generators_of(step.fn)) for step in self.transforms if isinstance(step, Map)]
        return inner + [
            f"the function {getattr(fn, '__qualname__', fn)} of map() draws from the random generator "
            f"{', '.join(map(repr, names))} of the program: each rank has a copy, so with one seed rows of other "
            "ranks get the same numbers, and a resume gives others; take map(fn, seed=...)"
            for fn, names in draws
            if names
        ]

    def with_seeds(self, seeds: Sequence[int]) -> Self:
        """Return the definition with other seeds, in the order of `seeds`."""
        inside = len(self.source.seeds())
        remaining = iter(seeds[inside:])
        changed = tuple(
            replace(step, seed=next(remaining)) if isinstance(step, Seeded) else step for step in self.transforms
        )
        source = self.source.with_seeds(seeds[:inside]) if inside else self.source
        return replace(self, source=source, transforms=changed)

    def with_drawn(self, seeds: Sequence[Seed]) -> Self:
        """Return the definition with the seeds of another rank where the program gave none."""
        # Seeds that the program gave stay, and are not taken from the other rank.
        remaining = iter([seed.value for seed in seeds if not seed.given])
        return self.with_seeds([seed.value if seed.given else next(remaining, seed.value) for seed in self.seeds()])

    def agree(self, ranks: Topology) -> None:
        """Describe the rows together with the other ranks. Collective."""
        self.source.agree(ranks)
        for transform in self.transforms:
            transform.agree(ranks)

    def described(self) -> dict[str, Any]:
        """Return the entries of a state that describe the dataset."""
        return {
            "batch": self.batch_size,
            "pipeline": [transform.without_numbers() for transform in self.transforms],
            "seeds": self.seeds(),
            "source": self.source.identity(),
        }

    def ready(self, sharing: int | None = None, ranks: Topology | None = None, memory: int | None = None) -> Self:
        """Return the definition with a source that is ready for its shuffles. With ``ranks`` it is collective.

        ``memory`` is `Options.shuffle_memory` by default. ``sharing`` is the number of ranks that share it, if known.
        """
        memory = self.options.shuffle_memory if memory is None else memory
        source = self.source.ready(memory, sharing, ranks)
        of_rows = before_batch(self.transforms)
        if not self.streamed and any(isinstance(step, Seeded) for step in of_rows):
            if ranks is not None:  # which together read all shards
                of_rows = [step for step in of_rows if not (isinstance(step, Shard) and step.is_hint)]
            source = source.for_shuffle(memory, length_of(source.length, of_rows), sharing, ranks)
            exact = next((step for step in of_rows if isinstance(step, Seeded) and step.by_row), None)
            if exact:
                method = "shuffle(mode='exact')" if isinstance(exact, Shuffle) else "sample()"
                text = (
                    f"{method} takes the rows of {source} one by one, and decodes nearly all chunks again "
                    "for each batch: use mode='block', or give Options.shuffle_memory the bytes of all rows"
                )
                # All ranks take the answer of rank 0, as `warn_together` needs equal texts.
                again = source.decodes_again if ranks is None else ranks.all_gather_object(source.decodes_again)[0]
                warn_together(ranks, [text] * again)
        return self if source is self.source else replace(self, source=source)

    def __str__(self) -> str:
        return "<Dataset: " + ", ".join(map(str, (self.source, *self.transforms))) + ">"


def _in_words(transform: Transform) -> str:
    if isinstance(transform, Map):
        return str(transform)
    if isinstance(transform, Seeded) and not transform.seeded:
        # A drawn seed differs on each rank, until all take the seed of rank 0.
        return repr(replace(transform, seed=0))
    return repr(transform)
