"""The base class of optimizers, which reduces gradients and updates variables."""

from __future__ import annotations

import contextlib
import itertools
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat import absent, context, representation
from mpistrat import strategy as strategies
from mpistrat.arrays.gpu.kernels import EachElement
from mpistrat.collectives import structures
from mpistrat.record import flight_record
from mpistrat.runtime.agreement.operation import MismatchError
from mpistrat.training.optimizers.exchange import GroupExchange
from mpistrat.training.optimizers.gradients import Clipping, Pairs, as_pair, checked, copy_overlapping, memory_spans
from mpistrat.training.optimizers.rule import (
    AVERAGE,
    LearningRate,
    MovingAverage,
    Rule,
    RuleWithOptions,
    after_calls,
    comparable_text,
    is_of_package,
    mro_position,
    options_of,
    spell_out_options,
)
from mpistrat.training.optimizers.state import Accumulation, State, cut, refuse_cut, require_shardable, unit_of
from mpistrat.training.optimizers.steps import PreparedSteps, ReplicasStep, SeparateStep, Step
from mpistrat.values import ArrayLike, IndexedSlices, ReduceOp
from mpistrat.variables import LocalVariable, Variable
from mpistrat.variables.on_server import ServerVariable

if TYPE_CHECKING:
    from mpistrat.strategy import Strategy, StrategyExtended

# Attributes that describe the `update` of the same class or of its bases.
_OF_UPDATE = ("elementwise", "update_consuming", "update_rows", "on_gpu")
_KEPT_BY_WORKERS = (
    "scheduled functions keep {} as it was: build a new optimizer, and schedule functions that capture it"
)


class Optimizer(ABC):
    """The base class of optimizers.

    A subclass names the state it keeps for each variable in `slots`, and changes a variable in `update`. If it changes
    each element by itself, it may set `elementwise`. Numbers and texts that it keeps by the names of its constructor's
    arguments are options: the ranks compare them when state is created and after a change. No checkpoint has them.

    Parameters
    ----------
    learning_rate : float or callable
        A number, or a function that takes the number of completed steps and returns a number.
    name : str, optional
        Prefix of the names of the optimizer's variables.
    weight_decay : float, optional
        Each step first subtracts ``rate * weight_decay * w`` from the weights.
    clipnorm : float, optional
        Limit of the norm of each variable's gradient: a longer one is scaled.
    clipvalue : float, optional
        Limit of the absolute value of each element of the gradients.
    global_clipnorm : float, optional
        Limit of the norm of all gradients of a step together.
    use_ema : bool
        Keep an exponential moving average of each variable: ``average = ema_momentum * average + (1 - ema_momentum) *
        w`` after each call. `finalize_variable_values` sets the variables to their averages.
    ema_momentum : float
        In [0, 1].
    ema_overwrite_frequency : int, optional
        After so many steps each, the variables are set to their averages.
    gradient_accumulation_steps : int, optional
        Calls of `apply_gradients` for each step. The gradients of these calls are averaged. Variables of
        `CentralStorageStrategy` and `ParameterServerStrategy` have one copy for all replicas, and are refused.
    shard_state : bool
        Each of ``n`` ranks keeps and updates ``1 / n`` of the optimizer's state (ZeRO-1), in place of all of it. All
        ranks must set it. A step gives the same weights as without it: to the bit with the implementations
        ``"ordered"``, ``"exact"`` and ``"tree"``. Files of `mpistrat.training.save` are the same, and are loaded on any
        number of ranks, with it or without. Sparse rows, GPUs, and variables with one copy for all replicas are
        refused.

    Raises
    ------
    ValueError
        If an argument is out of range, or more than one of ``clipnorm``, ``clipvalue`` and ``global_clipnorm`` is set.

    Notes
    -----
    The gradients of a step are averaged over accumulated calls, summed over the replicas, and then clipped: a step does
    not depend on the number of replicas that share a batch. Weight decay, the step and the moving average follow. The
    decay and `iterations` see steps. Schedules and moving averages see calls, as in Keras.

    Until the last call of a step the replicas keep their sums without communication, if each has a copy of the
    variables. The sums are in `variables`, so a checkpoint may be made between two calls.

    Examples
    --------
    >>> import mpistrat
    >>> class Sign(Optimizer):
    ...     def update(self, weights, gradient, step, rate, *state):
    ...         weights -= rate * np.sign(gradient)
    >>> strategy = mpistrat.MultiWorkerMirroredStrategy()
    >>> with strategy.scope():
    ...     v = mpistrat.Variable([1.0, 2.0])
    >>> optimizer = Sign(0.5)
    >>> strategy.run(lambda: optimizer.apply_gradients([(np.array([3.0, -4.0]), v)]))
    >>> v.read_value()
    array([0.5, 2.5])
    """

    if not TYPE_CHECKING:  # a type checker must find wrong names itself

        def __getattr__(self, name: str) -> Any:
            return absent.of_object(self, name, absent.OF_OPTIMIZER)

    slots: tuple[str, ...] = ()
    #: Whether `update` changes each element of its arrays without looking at others. Small variables are then updated
    #: together, as flat arrays. Set it in the class that defines `update`, or in a subclass.
    elementwise: bool = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__init__" in vars(cls):
            spell_out_options(cls.__init__, Optimizer.__init__)
            cls.__init__ = absent.explain_arguments(  # type: ignore[method-assign]
                cls.__init__, absent.OF_OPTIMIZER_ARGUMENTS
            )
        for name in _OF_UPDATE:
            if mro_position(cls, name) > mro_position(cls, "update"):  # describes an `update` that is overridden
                setattr(cls, name, vars(Optimizer)[name])

    def __init__(
        self,
        learning_rate: float | Callable[[int], float],
        name: str | None = None,
        *,
        weight_decay: float | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: int | None = None,
        gradient_accumulation_steps: int | None = None,
        shard_state: bool = False,
    ):
        self._name = name or type(self).__name__
        self._config: dict[str, Any] = {
            "name": self._name,
            "weight_decay": weight_decay,
            "clipnorm": clipnorm,
            "clipvalue": clipvalue,
            "global_clipnorm": global_clipnorm,
            "use_ema": use_ema,
            "ema_momentum": ema_momentum,
            "ema_overwrite_frequency": ema_overwrite_frequency,
            "gradient_accumulation_steps": gradient_accumulation_steps,
            "shard_state": bool(shard_state),
        }
        clipping = Clipping(clipnorm, clipvalue, global_clipnorm)
        self._clipping = clipping if clipping.limits else None
        self._accumulation: Accumulation | None = None
        if gradient_accumulation_steps is not None:
            self._accumulation = Accumulation(gradient_accumulation_steps, self._name)
        how = ema_momentum, ema_overwrite_frequency, gradient_accumulation_steps or 1
        self._average = average = MovingAverage(*how) if use_ema else None
        is_plain = weight_decay is None and average is None
        self._rule: Rule = self if is_plain else RuleWithOptions(self, weight_decay, average)
        self._shard_state = bool(shard_state)
        self._state = State(self._name)
        self._steps = PreparedSteps()
        self._schedule: Callable[[int], float] | None = None
        self._is_rate_new = False  # whether the ranks have not compared it since it was set
        self.learning_rate = learning_rate
        self._when_grown: Callable[[], object] | None = None
        #: What this rank keeps to exchange with other groups. None without groups, or before a step or `build`.
        self.exchange: GroupExchange | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy is below no checkpoint, and keeps no errors and anchors: copy it after an exchange.
        return {**self.__dict__, "_when_grown": None, "exchange": None}

    def __setattr__(self, name: str, value: Any) -> None:
        # Steps would go on with the first value, without a word. A rule of the program may use such a name itself.
        if name in vars(self).get("_config", ()) and not hasattr(type(self), name) and is_of_package(self.update):
            raise AttributeError(
                f"{type(self).__name__} keeps {name}={self._config[name]!r} from its start, and only learning_rate can "
                f"be set: make a new optimizer with {name}={value!r}"
            )
        super().__setattr__(name, value)
        if name == "update":  # on this object: the attributes describe the `update` of its class
            for attribute in {*_OF_UPDATE}.difference(vars(self)):
                base = vars(Optimizer)[attribute]
                super().__setattr__(attribute, types.MethodType(base, self) if callable(base) else base)
        if name == "update" or name in _OF_UPDATE:
            self._steps = PreparedSteps()  # the prepared ones are for another `update`
        elif name in options_of(self) and "_state" in vars(self):
            self._is_rate_new = self._state.iterations is not None
            if isinstance(self._state.iterations, ServerVariable):
                raise AttributeError(f"{self._name}: {_KEPT_BY_WORKERS.format(name)}")

    @property
    def learning_rate(self) -> LearningRate:
        """The learning rate of the next step, a float with a method ``assign``.

        Set it to a number or to a function of the number of completed steps, to the same on all ranks: at the next step
        they compare it. A number is one of the `variables`, as in Keras: it is saved, restored, and sent to workers.
        """
        rate = LearningRate(self.rate_after(self.iterations))
        rate.optimizer = self
        return rate

    @learning_rate.setter
    def learning_rate(self, value: float | Callable[[int], float]) -> None:
        if isinstance(value, ArrayLike):
            raise TypeError(
                f"learning_rate is {value!r}, whose changes no step would see: give float(v), and set "
                "optimizer.learning_rate later; or lambda step: float(v)"
            )
        if not callable(value) and not value >= 0:
            raise ValueError(f"learning_rate must not be negative, not {value!r}")
        state, held = self._state, self._state.learning_rate
        if isinstance(state.iterations, ServerVariable) and (callable(value) or self._schedule is not None):
            raise ValueError(f"{self._name}: {_KEPT_BY_WORKERS.format('a learning rate that is a function')}")
        if callable(value):
            calls = 1 if self._accumulation is None else self._accumulation.calls
            self._schedule = value if calls == 1 else partial(after_calls, value, calls)
            state.first_rate, self._is_rate_new = None, state.iterations is not None
        elif held is None or self._schedule is not None or held.own_copy().item() != value:
            self._schedule, state.first_rate = None, np.array(float(value))
            self._is_rate_new = True
            if held is not None and held.each_replica_writes:
                held.own_copy().fill(value)
            elif held is not None:
                held.assign(float(value))
        if held is None:
            self._steps = PreparedSteps()  # the steps of a schedule hold no variable of the rate
        self._config["learning_rate"] = value

    def rate_after(self, steps: int) -> float:
        """Return the learning rate of the step that follows ``steps`` steps."""
        held = self._state.learning_rate
        if self._schedule is not None:
            return float(self._schedule(steps))
        return (self._state.first_rate if held is None else held.own_copy()).item()  # type: ignore[union-attr]

    @property
    def iterations(self) -> int:
        """The number of completed steps."""
        return 0 if self._state.iterations is None else self._state.iterations.own_copy().item()

    @property
    def variables(self) -> list[Variable]:
        """The optimizer's state, to be saved with the weights. Empty before the first step or `build`.

        As in Keras, it begins with the number of steps and the learning rate, if that is a number.
        """
        return self._state.variables + ([] if self._accumulation is None else self._accumulation.variables)

    def named_variables(self, name_of: Callable[[Variable], str]) -> dict[str, Variable]:
        """Return `variables` by the names that they have below this optimizer in a `Checkpoint`.

        ``name_of`` returns the name of a variable that is trained. `exchange` has what differs between groups. Raise
        ValueError if two have one name.
        """
        named = self._state.named((*self.slots, AVERAGE) if self._average else self.slots, name_of)
        if self.exchange is not None and not self.exchange.of_gradients:
            return {name: named[name] for name in ("iterations", "learning_rate") if name in named}
        return named if self._accumulation is None else named | self._accumulation.named(name_of)

    def when_grown(self, function: Callable[[], object]) -> None:
        """Call a function after each creation of state, in cross-replica context on all ranks.

        Only the last function is called: the one of the checkpoint that was restored last.
        """
        self._when_grown = function

    @property
    def name(self) -> str:
        """The prefix of the names of the optimizer's variables."""
        return self._name

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that make this optimizer again, by name."""
        rate = self._config["learning_rate"] if self._schedule is not None else float(self.learning_rate)
        return {**self._config, "learning_rate": rate}

    def _facts(self) -> dict[str, Any]:
        config = self.get_config()
        shown = {"learning_rate": config.pop("learning_rate"), **representation.other_than_default(type(self), config)}
        if self._name == type(self).__name__:
            del shown["name"]
        return {**shown, "steps": self.iterations, "variables": len(self._state.slots)}

    def __repr__(self) -> str:
        return representation.text(type(self).__name__, self._facts())

    def _repr_html_(self) -> str:
        return representation.table(type(self).__name__, self._facts())

    def build(self, variables: Iterable[Variable]) -> None:
        """Create the state of variables now, not at the first step: for example before a `load`.

        Collective.
        """
        variables = list(variables)
        if not variables:
            raise ValueError("there are no variables")
        strategy = variables[0].distribute_strategy
        for variable in variables:
            strategy.extended.check_variable(variable, f"{self._name}.build")
        with contextlib.nullcontext() if strategies.get_strategy() is strategy else strategy.scope():
            self._create(variables)

    def finalize_variable_values(self, variables: Iterable[Variable]) -> None:
        """Set variables to their moving averages, at the end of a training with ``use_ema``.

        With groups, first exchange weights, or raise MismatchError if groups, after their first step, are at different
        ones. Call it on every replica, in cross-replica context. It does nothing else without ``use_ema``, and for
        variables that were not trained.
        """
        variables, ema = list(variables), self._average
        if self.exchange is not None:
            self.exchange.finish(self.iterations)
        calls = self._accumulation.calls_of_this_step() if self._accumulation and self.iterations else 0
        for variable in variables:
            if ema is not None and id(variable) in self._state.slots:
                average = self._state.slots[id(variable)][1][-1].read_value()
                if calls:
                    average = ema.within(average, variable.read_value(), self.iterations, calls)
                variable.assign(average)

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Variable]],
        name: str | None = None,
        experimental_aggregate_gradients: bool = True,
        skip_gradients_aggregation: bool = False,
    ) -> None:
        """Sum the gradients over the replicas and update the variables. Call it in a replica context.

        All gradients travel in one reduction. The variables are changed in place. The gradients are *summed*:
        compute each replica's gradient from the sum of its losses divided by the global batch size. The step
        is then the step of the mean loss over all examples.

        Parameters
        ----------
        grads_and_vars : iterable of (gradient, Variable)
            This replica's gradients, in the same order on all replicas. None leaves its variable unchanged;
            IndexedSlices hold rows of a gradient.
        name : str, optional
            Ignored. Accepted for programs written for Keras.
        experimental_aggregate_gradients : bool
            Whether to sum over the replicas. Give False if the gradients are already reduced.
        skip_gradients_aggregation : bool
            The opposite, by Keras' later name.

        Raises
        ------
        RuntimeError
            In cross-replica context.
        ValueError
            If there are no gradients, one does not fit its variable, or a variable belongs to another strategy.
            On every replica, if the replicas give gradients of different variables, kinds, shapes or dtypes.
        """
        # A function costs 3 us, cold: from here on, `merge_call` and the search of a step are written out.
        modes = context.local.stack
        mode = modes[-1] if modes else context.current()
        if skip_gradients_aggregation:
            experimental_aggregate_gradients = False
        if mode.replica_context is None:
            raise RuntimeError("apply_gradients() adds up the gradients of replicas: call it inside of strategy.run")
        if mode.replica_context.meeting is not None:
            self._apply_in_replica(mode, list(grads_and_vars), experimental_aggregate_gradients)
            return
        extended = mode.strategy.extended
        engine = extended.engine
        topology = engine.topology
        sequence = topology.lock.sequence
        depth = len(modes)
        try:  # as `collective_call`, without its cost
            aggregate = experimental_aggregate_gradients
            if self._accumulation is not None:
                all_pairs = list(grads_and_vars)
                grads_and_vars = self._accumulation.step_of(mode.replica_context, all_pairs, aggregate, self._create)
                if not grads_and_vars:
                    return
                aggregate = False
            try:
                # Fast path: the variables, dtypes and shapes of the last step. One loop looks at each object once.
                rest, gradients = iter(grads_and_vars), []
                step: Step | None = None
                last = self._steps.last if self._steps.owner is extended else None
                if last is not None:
                    for known, dtype, shape, (gradient, variable) in zip(
                        last.variables, last.dtypes, last.shapes, rest, strict=False
                    ):
                        if (
                            variable is not known
                            or type(gradient) is not np.ndarray
                            or (gradient.dtype is not dtype and gradient.dtype != dtype)
                            or gradient.shape != shape
                        ):
                            # The pair was taken from the iterator: the slow path below begins with it.
                            rest = itertools.chain([(gradient, variable)], rest)
                            break
                        gradients.append(gradient)
                    step = last if len(gradients) == len(last.variables) else None
                others = [*rest]
                if step is None or others or (engine.arenas and engine.holds_buffer(gradients)):
                    pairs = [] if last is None else [*zip(gradients, last.variables, strict=False)]
                    pairs += [as_pair(pair) for pair in others]
                    step, gradients = self._prepared(extended, pairs)
                if "gradients" in topology.checks:
                    replicas, number = engine.replicas, self.iterations + 1
                    checked(step.variables, gradients, replicas.first, replicas.size, number, aggregate)
            except (TypeError, ValueError, NotImplementedError, FloatingPointError):
                if not aggregate:
                    raise
                with structures.refusals("all_reduce", topology):
                    raise
            modes.append(extended.cross_replica_mode)
            # Without aggregation the ranks need not call this together.
            if self._is_rate_new and experimental_aggregate_gradients:
                self._compare_rate(extended)
            self._take(extended, step, gradients, engine if aggregate else None)
        except MismatchError:
            raise
        except BaseException as error:
            # Noted, so that the next meeting tells the other ranks that this one has left the call.
            topology.lock.left_call("apply_gradients", error, sequence)
            raise
        finally:
            del modes[depth:]

    def _apply_in_replica(self, mode: context.Mode, pairs: Pairs, aggregate: bool) -> None:
        """Do `apply_gradients` together with the other replicas of this rank."""
        replica, strategy = mode.replica_context, mode.strategy
        begin = partial(
            ReplicasStep,
            partial(self._step_of_rank, strategy, aggregate),
            strategy.extended,
            lambda: self.iterations + 1,
        )
        if self._accumulation is not None:
            pairs, aggregate = self._accumulation.step_of(replica, pairs, aggregate, self._create), False
            if not pairs:
                return
        replica.meet("apply_gradients", begin, (pairs, aggregate))

    def _step_of_rank(self, strategy: Strategy, compares_rate: bool, pairs: Pairs) -> None:
        """Update the variables by gradients that are equal on all replicas. In cross-replica context."""
        if self._is_rate_new and compares_rate:
            self._compare_rate(strategy.extended)
        self._take(strategy.extended, *self._prepared(strategy.extended, pairs), None)

    def _take(self, extended: StrategyExtended, step: Step, gradients: list[Any], summing: Any) -> None:
        """Update the variables of a step. The engine ``summing`` sums the gradients first; None if that is done."""
        exchange = None
        if extended.engine.between_groups is not None:
            self._create(step.variables)
            exchange = self.exchange
            assert exchange is not None
            exchange.before_step()
            if exchange.of_gradients:
                number, rate = self.iterations + 1, self.rate_after(self.iterations)
                gradients, summing = exchange.gradients(step, gradients, summing, number, rate), None
                step, gradients = self._prepared(extended, [*zip(gradients, step.variables, strict=True)])
        if isinstance(step, SeparateStep):
            self._apply(extended, step, gradients, aggregate=summing is not None)
        else:
            step.take(self._rule, gradients, self._schedule, summing, self._clipping)
        if self._accumulation is not None:
            self._accumulation.clear(extended)
        if exchange is not None:
            exchange.after_step(self.iterations)
        flight_record.step(flight_record.UPDATE)

    def _compare_rate(self, extended: StrategyExtended) -> None:
        """Raise MismatchError on every rank if some have set another rate or option since the last step. Collective."""
        if self._state.iterations is not None and self._state.iterations.each_replica_writes:
            rate = comparable_text(self.get_config()["learning_rate"])
            options = [f"{name} set to {value!r}" for name, value in options_of(self).items()]
            topology = extended.engine.topology
            structures.agree(topology, "apply_gradients", self._name, f"learning_rate set to {rate}", *options)
        self._is_rate_new = False

    def _prepared(self, extended: StrategyExtended, pairs: Pairs) -> tuple[Step, list[Any]]:
        create = self._create if self._shards(extended) else None
        return self._steps.step_for(extended, pairs, self._state, self.elementwise, create)

    def _shards(self, extended: StrategyExtended) -> bool:
        return self._shard_state and extended.engine.topology.size > 1

    def _apply(self, extended: StrategyExtended, step: SeparateStep, gradients: list[Any], aggregate: bool) -> None:
        """Update the variables one by one. Sum the gradients first if asked to."""
        number = self.iterations
        rate = self.rate_after(number)  # may fail, so before the first collective
        if aggregate:
            gradients = extended.engine.all_reduce(ReduceOp.SUM, gradients, None, step.form)
        self._create(step.variables)
        if self.iterations != number or self._schedule is None:  # a checkpoint that waited for the state had both
            number = self.iterations
            rate = self.rate_after(number)
        if not aggregate:
            # A gradient may be a view of a variable. With the reduction it is a result of its own.
            gradients = copy_overlapping(gradients, memory_spans(step.changed()))
        if self._clipping is not None:
            gradients = self._clipping(gradients)
        step.update(self._rule, gradients, number + 1, rate)
        extended.update(self._state.iterations, LocalVariable.assign_add, (1,), group=False)

    def _create(self, variables: list[Variable]) -> None:
        slots = (*self.slots, AVERAGE) if self._average else self.slots
        function = getattr(self.initial_state, "__func__", None)  # of the class, or set on this object
        known = len(self._state.slots)
        extended = variables[0].distribute_strategy.extended
        unit = partial(unit_of, elementwise=self.elementwise, clipping=self._clipping)
        by_parts = not (self._accumulation or self._shard_state or (self._clipping and self._clipping.by_norm))
        refuse_cut(variables, self._name, self.elementwise, by_parts)
        if shards := self._shards(extended):
            require_shardable(extended.engine, variables)
        parts = partial(cut, ranks=extended.engine.topology.size, unit=unit) if shards else None
        # Zeros need not be sent. Values of a function of the program, and averages of weights, may differ.
        zeros = function is Optimizer.initial_state and self._average is None
        numbers = {name: value for name, value in vars(self).items() if name[0] != "_" and isinstance(value, float)}
        options = numbers | options_of(self) | self._config
        self._state.create(variables, slots, self._initial_state, zeros, options, parts)
        if self._accumulation is not None:
            self._accumulation.create(variables)
        if extended.engine.between_groups is not None:
            if self._average and extended.engine.between_groups.sync_every > 1:
                raise ValueError("use_ema: the averages of groups that exchange weights differ: leave it out")
            self.exchange = self.exchange or GroupExchange(
                extended.engine.between_groups,
                lambda: self._state.all_slots + ([] if self._accumulation is None else self._accumulation.variables),
            )
            self.exchange.create(variables)
        if self._when_grown is not None and len(self._state.slots) > known:
            self._when_grown()

    def _initial_state(self, slot: str, variable: Variable) -> np.ndarray:
        if slot == AVERAGE and self._average:
            return variable.read_value()
        return self.initial_state(slot, variable)

    def initial_state(self, slot: str, variable: Variable) -> np.ndarray:
        """Return the initial content of a slot of a variable: zeros."""
        return np.zeros(variable.shape, variable.dtype)

    def on_gpu(self, step: int, rate: float) -> tuple[EachElement, tuple[float, ...]] | None:
        """Return the GPU kernel of `update` and its numbers, or None if only `update` exists.

        The lists of the kernel are the gradients, the weights, and the state of each of `slots`.
        """
        return None

    @abstractmethod
    def update(self, weights: np.ndarray, gradient: np.ndarray, step: int, rate: float, *state: np.ndarray) -> None:
        """Change ``weights`` and ``state`` in place.

        A class that overrides it has the `update_consuming`, `update_rows`, `on_gpu` and `elementwise` of `Optimizer`,
        unless it sets them, too. So has a class that gets it from a mixin, and an object on which it is set.

        Parameters
        ----------
        weights, gradient : numpy.ndarray
            Contiguous arrays of one shape. Their dtypes are equal too, except that the gradient of a variable of 16
            bits may be wider. Do not change the gradient.
        step : int
            Number of this step, counted from 1.
        rate : float
            The learning rate.
        *state : numpy.ndarray
            The state of this variable, one array for each of `slots`.
        """

    def update_consuming(
        self, weights: np.ndarray, gradient: np.ndarray, step: int, rate: float, *state: np.ndarray
    ) -> None:
        """Do what `update` does for short flat arrays, and change the gradient too if that saves memory.

        The arrays have at most 65,536 elements, which stay in a cache.
        """
        self.update(weights, gradient, step, rate, *state)

    def update_rows(self, weights: np.ndarray, rows: IndexedSlices, step: int, rate: float, *state: np.ndarray) -> None:
        """Change ``weights`` and ``state`` in place for a gradient that is zero outside ``rows``."""
        dense = np.zeros_like(weights)
        np.add.at(dense, rows.indices, rows.values)
        self.update(weights, dense, step, rate, *state)
