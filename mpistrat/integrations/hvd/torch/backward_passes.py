"""The count of backward passes between two steps, by hooks of the parameters."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


class BackwardPasses:
    """How often a gradient was computed since the last step.

    Parameters
    ----------
    parameters : iterable of Tensor
        The parameters that get hooks.
    per_step : int
        How often it may be computed before each step.
    """

    def __init__(self, parameters: Iterable[Tensor], per_step: int):
        self.per_step = per_step
        self._counts: dict[Tensor, int] = {}
        for p in parameters:
            p.register_post_accumulate_grad_hook(self._count)

    def _count(self, p: Tensor) -> None:
        self._counts[p] = count = self._counts.get(p, 0) + 1
        if count > self.per_step:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                f"backward_passes_per_step (now {self.per_step}) to accumulate gradients locally."
            )

    def clear(self) -> None:
        """Begin a step."""
        self._counts.clear()
