"""The variables of an optimizer: the number of completed steps, and what it keeps for each variable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from mpistrat.collectives import structures
from mpistrat.training.optimizers.parts import Ends, SharedOutVariable
from mpistrat.variables import CutVariable, Variable

Initial = Callable[[str, Variable], np.ndarray]
NameOf = Callable[[Variable], str]


class State:
    """The variables of an optimizer. They are created when a variable is first seen.

    ``name`` is a prefix of their names. ``iterations`` counts the completed steps. ``slots`` has, by the identity of a
    variable, the variable and its slots. ``ends`` has the parts of variables whose slots are shared out.
    """

    def __init__(self, name: str):
        self._name = name
        self.iterations: Variable | None = None
        self.slots: dict[int, tuple[Variable, tuple[Variable, ...]]] = {}
        self.ends: dict[int, Ends] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.slots = {id(variable): (variable, slots) for variable, slots in self.slots.values()}
        self.ends = dict(zip(self.slots, self.ends.values(), strict=False))  # all or none have parts

    @property
    def variables(self) -> list[Variable]:
        """The number of steps, then the slots of each variable."""
        own = [] if self.iterations is None else [self.iterations]
        return own + [slot for _, slots in self.slots.values() for slot in slots]

    def named(self, slots: Sequence[str], name_of: NameOf) -> dict[str, Variable]:
        """Return `variables` by slot and by the name of the variable that they belong to.

        Raise ValueError if two trained variables have one name.
        """
        named = {} if self.iterations is None else {"iterations": self.iterations}
        for variable, of_variable in self.slots.values():
            for slot, each in zip(slots, of_variable, strict=True):
                add_named(named, slot, variable, each, name_of)
        return named

    def create(
        self,
        variables: list[Variable],
        slots: Sequence[str],
        initial: Initial,
        are_equal: bool,
        parts: Callable[[list[Variable]], list[Ends]] | None = None,
    ) -> None:
        """Create the slots of new variables, with the values that ``initial`` returns. Collective for new ones.

        ``are_equal`` says that ``initial`` returns the same on all ranks. Then the values are not sent. With ``parts``,
        which cuts variables, the slots are shared out.
        """
        new = [*{id(each): each for each in variables if id(each) not in self.slots}.values()]
        if not new:
            return
        engine = new[0].distribute_strategy.extended.engine
        names = tuple(variable.name for variable in new)
        values = "not sent" if are_equal else "sent"
        what = "the state of an optimizer", self._name, tuple(slots), "for", names, values
        structures.agree(engine.topology, *what, *(() if parts is None else ["shared out"]))
        if parts is not None:
            self.ends |= zip(map(id, new), parts(new), strict=True)
        with engine.equal_initial_values() if are_equal else nullcontext():
            self._create(new, slots, initial)

    def _create(self, new: list[Variable], slots: Sequence[str], initial: Initial) -> None:
        if self.iterations is None:
            with new[0].distribute_strategy.extended.engine.variables_on_host():
                self.iterations = Variable(np.int64(0), trainable=False, name=f"{self._name}/iterations")
        # Slot by slot, so that the values of one slot lie side by side.
        made: dict[tuple[int, str], Variable] = {}
        for slot in slots:
            for variable in new:
                key, name = id(variable), f"{self._name}/{variable.name}/{slot}"
                if key in self.ends:
                    value = initial(slot, variable)
                    made[key, slot] = SharedOutVariable.of(variable, name, value, self.ends[key])
                    continue
                with variable.distribute_strategy.extended.colocate_vars_with(variable):
                    value = initial(slot, variable.part)
                    whole = variable.of_part(value) if isinstance(variable, CutVariable) else value
                    made[key, slot] = Variable(whole, trainable=False, name=name)
        for variable in new:
            self.slots[id(variable)] = variable, tuple(made[id(variable), slot] for slot in slots)


def add_named(named: dict[str, Variable], slot: str, variable: Variable, own: Variable, name_of: NameOf) -> None:
    """Add what an optimizer keeps in a slot for a variable, under the name that it has in a checkpoint.

    Raise ValueError if there is another variable of this name.
    """
    name = f"{slot}/{name_of(variable)}"
    if name in named:
        raise ValueError(
            f"an optimizer trains two variables of the name {variable.name!r}: give them to the checkpoint too, under "
            "names of their own"
        )
    named[name] = own
