"""Objects with ``state_dict()`` and ``load_state_dict(state)``: modules, optimizers and schedulers of PyTorch."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mpistrat.arrays import arrays
from mpistrat.training.checkpoint.format import dtype_of

_ARRAY, _ITEMS = ("\0array at", "\0items")  # keys: of an array, and of a dict whose keys are not texts


class StateDict:
    """The state of such an object, as arrays beside a structure that JSON keeps.

    The arrays of the object itself are read and filled in place. Buffers of a module, such as statistics of batches,
    stay in the structure, since they may differ between ranks.
    """

    def __init__(self, thing: Any):
        self._thing = thing
        self._grown = False

    def arrays(self) -> dict[str, Any]:
        """Return the arrays of the object, by their paths."""
        return self._described()[1]

    def get(self) -> Any:
        """Return the structure."""
        return self._described()[0]

    def set(self, structure: Any) -> None:
        """Load a structure into the object, with its own arrays. Arrays that it lacks are created as zeros."""
        before = self.arrays()
        self._thing.load_state_dict(_taken(structure, before, self._thing.state_dict()))
        self._grown = not before.keys() >= self.arrays().keys()

    def when_grown(self, function: Callable[[], object]) -> None:
        """Call a function if the last structure has made new arrays."""
        if self._grown:
            self._grown = False
            function()

    def _described(self) -> tuple[Any, dict[str, Any]]:
        """Return the structure, and the arrays by their paths."""
        states: dict[str, Any] = {}
        named_buffers = getattr(self._thing, "named_buffers", None)
        buffers = {name for name, _ in named_buffers()} if named_buffers is not None else set()

        def described(state: Any, path: str) -> Any:
            if path not in buffers and arrays.can_be_filled(state):
                # A DTensor, of which this rank has only a part.
                if hasattr(state, "to_local"):
                    raise TypeError(f"{path} is cut over ranks, as by fully_shard: use torch.distributed.checkpoint")
                states[path] = state
                dtype, shape = arrays.dtype_and_shape(state)
                return {_ARRAY: path, "dtype": dtype.name, "shape": [*shape], "torch": type(state) is not np.ndarray}
            if isinstance(state, Mapping):
                below = {key: described(value, f"{path}/{key}" if path else str(key)) for key, value in state.items()}
                # JSON has texts as keys alone. A PyTorch optimizer numbers its parameters.
                return below if all(isinstance(key, str) for key in below) else {_ITEMS: [*map(list, below.items())]}
            if isinstance(state, (list, tuple)):
                parts = [described(value, f"{path}/{number}") for number, value in enumerate(state)]
                return tuple(parts) if isinstance(state, tuple) else parts
            return state

        return described(self._thing.state_dict(), ""), states


def _taken(structure: Any, known: Mapping[str, Any], like: Any) -> Any:
    """Return a state of a structure, with ``known`` arrays by path, or zeros, and dicts of the kinds of ``like``."""
    if isinstance(structure, (list, tuple)):
        likes = like if isinstance(like, (list, tuple)) and len(like) == len(structure) else (None,) * len(structure)
        parts = [_taken(value, known, like_value) for value, like_value in zip(structure, likes, strict=True)]
        return tuple(parts) if isinstance(structure, tuple) else parts
    if not isinstance(structure, dict):
        return structure
    if _ARRAY in structure:
        if structure[_ARRAY] in known:
            return known[structure[_ARRAY]]
        zeros = np.zeros(structure["shape"], dtype_of(structure["dtype"]))
        # An object that takes tensors has imported torch.
        return arrays.from_host(zeros, sys.modules["torch"].empty(0)) if structure["torch"] else zeros
    result = copy.copy(like) if isinstance(like, dict) else {}  # a Counter or an OrderedDict, with its attributes
    items = {key: _taken(value, known, result.get(key)) for key, value in structure.get(_ITEMS, structure.items())}
    result.clear()
    result.update(items)
    return result
