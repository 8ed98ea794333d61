"""The training of one model of Keras on several ranks."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from operator import attrgetter
from types import MethodType
from typing import Any, ClassVar

import keras
import numpy as np

from mpistrat.collectives.movement import moves
from mpistrat.collectives.movement.moves import broadcast
from mpistrat.integrations.keras import hooks, step
from mpistrat.integrations.keras.hooks import BACKEND
from mpistrat.integrations.keras.parts import BatchesOfRank, PartsOfRank, cut, is_dataset
from mpistrat.integrations.keras.ranks import OTHER_BATCHES, TrainingRanks
from mpistrat.integrations.keras.step import LastCallback, RankStep, applied_over_ranks, computing, is_chief_only
from mpistrat.runtime.agreement.collective_lock import collective_call

_FUNCTIONS = ("train_function", "test_function", "jit_compile")
_BETWEEN_SEEDS = 1_000_003  # distance between the seeds of two ranks
_SAME = (
    *("batch_size", "epochs", "initial_epoch", "steps_per_epoch", "steps", "shuffle", "class_weight"),
    *("validation_split", "validation_steps", "validation_batch_size", "validation_freq"),
)  # arguments that must be equal on all ranks
_NEAR = 1e-4  # relative to the largest weight of a variable: float32 has 7 digits, and sums of a long epoch lose two


class DistributedTraining:
    """The training of one model on several ranks.

    Its compiled steps belong to ``compiled``, an object that the model's last `compile` has created. ``alone`` counts
    the running methods of callbacks that only the chief calls, of any model: such a callback may use another model.
    """

    alone = 0
    busy: ClassVar[list[Any]] = []  # the models in `fit` or `evaluate`

    def __init__(self, model: Any, engine: Any, compiled: Any):
        self.model, self.compiled = model, compiled
        self.ranks = TrainingRanks(engine)
        self.topology = engine.topology
        self._functions: dict[str, Any] = {"train_function": None, "test_function": None}
        self._depth = 0
        self._fitting = self._has_checked_losses = False
        self._batches = 0  # calls for one batch since `fit`
        self._inputs: list[PartsOfRank] = []  # of the calls that are running

    @collective_call(attrgetter("topology"), "training by Keras")
    def call(self, method: Any, name: str, values: dict[str, Any], gather: str) -> Any:
        """Call a method of the model. Raise the error of a collective itself, not the backend's error for it."""
        self.ranks.error = None
        inputs, rows = len(self._inputs), self.ranks.rows
        on_batch = name.endswith("_on_batch")
        self._batches = 0 if name == "fit" else self._batches + on_batch
        if not on_batch:
            self._require_same(name, values)
        try:
            if name == "predict":
                return self._predict(method, values, gather)
            if not self.model.compiled:
                return method(**values)  # raises what Keras says of it
            if on_batch:
                return self._on_batch(method, values, fitting=name == "train_on_batch")
            return getattr(self, name)(method, values)
        except Exception:
            if self.ranks.error is None:
                raise
            error, self.ranks.error = self.ranks.error, None
            raise error from None
        finally:
            del self._inputs[inputs:]
            self.ranks.rows = rows  # of the batch of `fit`, one of whose callbacks may have evaluated

    def fit(self, method: Any, values: dict[str, Any]) -> Any:
        """Call the model's `fit`."""
        values = {**split(values)}
        begin = functools.partial(hooks.begin, self.model, values)
        parts = self._parts(values, values.get("steps_per_epoch"), values.get("shuffle", True), begin=begin)
        if (held := values.get("validation_data")) is not None:
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(held)
            size = values.get("validation_batch_size") or values.get("batch_size")
            held = {"x": x, "y": y, "sample_weight": sample_weight, "batch_size": size}
            values["validation_data"] = self._parts(held, values.get("validation_steps"))
        callbacks, chief_has_more = self._callbacks(values)
        chief_has_more = self.topology.broadcast_object(chief_has_more)  # the list may be the chief's alone
        agreement = LastCallback(self.ranks, self._send_restored if chief_has_more else None, self._require_alike)
        arguments = {**with_input(values, parts), **self._quiet(values), "callbacks": [*callbacks, agreement]}
        with self._over_ranks(parts, fitting=True), self._counting_alone(callbacks):
            history = method(**arguments)
        self._require_alike("after fit")
        return history

    def evaluate(self, method: Any, values: dict[str, Any]) -> Any:
        """Call the model's `evaluate`."""
        parts = self._parts(values, values.get("steps"))
        callbacks, _ = self._callbacks(values)
        arguments = {**with_input(values, parts), **self._quiet(values), "callbacks": callbacks}
        nested = self._depth > 0
        with self._over_ranks(parts), self._counting_alone(callbacks):
            logs = method(**arguments)
        # A callback of `fit` evaluates within an epoch: Keras adds the rest of the epoch to these totals, and the ranks
        # add them up at its end. They must count once.
        for variable in self.model.metrics_variables if nested and self.topology.rank > 0 else ():
            variable.assign(keras.ops.zeros_like(variable.value))
        return logs

    def _on_batch(self, method: Any, values: dict[str, Any], fitting: bool) -> Any:
        """Call the model's `train_on_batch` or `test_on_batch`."""
        rows = len(keras.tree.flatten(values["x"])[0])
        parts = self._with_parts(source_of({**values, "batch_size": rows}, None, self.ranks.engine), marked=True)
        ((part, info),) = parts.batches()
        # The 1st, 2nd, 4th, 8th ... call compares weights, as their digests take 14 to 47 % of the time of a batch.
        with self._over_ranks(parts, fitting, compare=self._batches & (self._batches - 1) == 0):
            logs = self._logs(method(x=part, y=info, return_dict=True))
        logs = hooks.pythonify_logs(logs)
        return logs if values.get("return_dict") else hooks.flattened(self.model, logs)

    def _predict(self, method: Any, values: dict[str, Any], gather: str) -> Any:
        """Call the model's `predict`. Return its rows in the order of the input."""
        if gather not in ("all", "chief"):
            raise ValueError(f"gather must be 'all' or 'chief', not {gather!r}")
        hooks.require_supported(self.model)
        parts = self._parts(values, values.get("steps"), with_info=False)
        callbacks, _ = self._callbacks(values)
        if not self._depth:  # else the ranks agree since `fit` began
            hooks.build_to_predict(self.model, parts.first())
            self._agree_on_weights(fitting=False)
        with self._counting_alone(callbacks):
            outputs = method(**{**with_input(values, parts), **self._quiet(values), "callbacks": callbacks})
        if len({*self.topology.all_gather_object((len(parts.rows), parts.seen))}) > 1:
            raise ValueError(OTHER_BATCHES)
        rows = moves.all_gather(self.topology, np.array(parts.rows), 0).reshape(self.topology.size, -1).T
        starts = np.cumsum(rows).reshape(rows.shape) - rows
        real = np.concatenate([np.full(max(own, 1), own > 0) for own in rows[:, self.topology.rank]])
        order = np.concatenate([np.arange(own) + start for own, start in zip(rows.T.flat, starts.T.flat, strict=True)])

        def in_order(output: Any) -> Any:
            if not isinstance(output, np.ndarray) or output.shape[:1] != real.shape:
                raise TypeError(
                    "predict needs outputs that are arrays of as many rows as the input; this is a "
                    f"{type(output).__name__} of shape {getattr(output, 'shape', None)} for {len(real)} rows"
                )
            total = self.ranks.gathered(output[real], gather == "chief")
            if total is None:
                return None
            out = np.empty_like(total)
            out[order] = total
            return out

        return keras.tree.map_structure(in_order, outputs)

    # --- arguments -----------------------------------------------------------------------

    def _with_parts(self, source: Any, **more: Any) -> PartsOfRank:
        note = functools.partial(setattr, self.ranks, "rows")
        parts = PartsOfRank(source, self.topology.rank, self.topology.size, note=note, **more)
        self._inputs.append(parts)
        return parts

    def _parts(self, values: dict[str, Any], steps: int | None, shuffle: Any = False, **more: Any) -> PartsOfRank:
        """Return this rank's parts of the input of a call. All ranks must be given the same arrays."""
        seed = self.topology.broadcast_object(hooks.draw_seed()) if shuffle else 0
        source = source_of(values, steps, self.ranks.engine, shuffle)
        parts = self._with_parts(source, seed=seed, **more)
        arrays = [array for array in parts.arrays if not array.dtype.hasobject]
        for number, rank in self.ranks.different([f"array {n}" for n in range(len(arrays))], arrays).items():
            raise ValueError(
                f"the input of rank {rank} is not that of rank 0: array {number} differs; each rank takes its rows of "
                "the whole arrays, so give the same to all ranks"
            )
        return parts

    def _callbacks(self, values: dict[str, Any]) -> tuple[list[Any], bool]:
        """Return the callbacks of this rank, and whether the chief has some that others lack."""
        callbacks = values.get("callbacks")
        if isinstance(callbacks, keras.callbacks.CallbackList):
            raise TypeError("give the callbacks as a list, not as a CallbackList: each rank calls its own of them")
        callbacks = keras.tree.flatten(callbacks) if callbacks is not None else []
        own = [callback for callback in callbacks if self.topology.rank == 0 or not is_chief_only(callback)]
        for callback in own if self.topology.rank else ():  # the chief speaks for all
            if type(callback).__module__.startswith("keras.") and getattr(callback, "verbose", False):
                callback.verbose = 0
        return own, any(map(is_chief_only, callbacks))

    @contextmanager
    def _counting_alone(self, callbacks: list[Any]) -> Iterator[None]:
        """Context in which `alone` counts the running methods of callbacks that only the chief calls."""

        def noting(method: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(method)
            def call(*args: Any, **kwargs: Any) -> Any:
                DistributedTraining.alone += 1
                try:
                    return method(*args, **kwargs)
                finally:
                    DistributedTraining.alone -= 1

            return call

        chiefs = [*{id(callback): callback for callback in callbacks if is_chief_only(callback)}.values()]  # each once
        before = [dict(vars(callback)) for callback in chiefs]
        names = [[name for name in dir(callback) if name.startswith("on_")] for callback in chiefs]
        for callback, method_names in zip(chiefs, names, strict=True):
            for name in method_names:
                setattr(callback, name, noting(getattr(callback, name)))
        try:
            yield
        finally:
            for callback, method_names, attributes in zip(chiefs, names, before, strict=True):
                for name in method_names:
                    vars(callback).pop(name)
                    if name in attributes:
                        setattr(callback, name, attributes[name])

    def _require_same(self, name: str, values: dict[str, Any]) -> None:
        """Raise ValueError on all ranks if a number among the arguments, or the name of a loss, differs."""
        own = {argument: repr(values.get(argument)) for argument in _SAME}
        losses = keras.tree.flatten(getattr(self.model, "loss", None))
        own["loss"] = ", ".join(str(getattr(loss, "name", getattr(loss, "__name__", loss))) for loss in losses)
        first, *others = self.topology.all_gather_object(own)
        for rank, theirs in enumerate(others, 1):
            for key in first:
                if theirs[key] != first[key]:
                    raise ValueError(
                        f"{name} was given {key}={theirs[key]} on rank {rank}, but {key}={first[key]} on rank 0: "
                        "arguments are those of all ranks together, so give the same to each"
                    )

    def _quiet(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the argument that lets only the chief report."""
        return {"verbose": values.get("verbose", "auto") if self.topology.rank == 0 else 0}

    # --- weights -------------------------------------------------------------------------

    def _with_optimizers(self, variables: list[Any]) -> list[Any]:
        listed = [*variables, *[v for optimizer in hooks.optimizers_of(self.model) for v in optimizer.variables]]
        return [*{id(variable): variable for variable in listed}.values()]

    def _send(self, variables: list[Any]) -> None:
        """Give variables the values of the chief."""
        for variable, value in zip(variables, broadcast(self.topology, _values(variables)), strict=True):
            variable.assign(value)

    def _send_restored(self) -> None:
        self._send(self._with_optimizers(self.model.variables))
        hooks.finish_restoring(self.model)
        self._move_seeds(1)

    def _require_alike(self, when: str) -> None:
        """Raise ValueError on all ranks if they have trained other weights.

        Processors of several kinds round differently: then the chief's weights are sent, and a warning says so.
        """
        weights = self.model.trainable_variables
        # Zeros for NaN, which has many bit patterns: they are not a difference.
        ends = [np.where(value == value, value, np.zeros_like(value)) for value in _values(weights)]
        differing = self.ranks.different([variable.path for variable in weights], ends)
        for number, rank in differing.items():
            (first,) = broadcast(self.topology, [ends[number]])
            deviation = np.max(np.abs(ends[number].astype(np.float64) - first.astype(np.float64)), initial=0.0)
            if not self.topology.all_true(bool(deviation <= _NEAR * np.max(np.abs(first), initial=0.0))):
                raise ValueError(
                    f"{when}, {weights[number].path} of rank {rank} is not that of rank 0: only optimizers of Keras "
                    "combine gradients over ranks; let a train_step of your own update weights by "
                    "model.optimizer.apply, and callbacks change weights and rates on all ranks alike"
                )
        if differing:
            self._send(self._with_optimizers(weights))
            if self.topology.rank == 0:
                warnings.warn(
                    f"{when}, weights of {self.model.name} differ between ranks in their last digits, as by processors "
                    "of several kinds, or by rates of learning: those of rank 0 are sent to all",
                    stacklevel=2,
                )

    def _agree_on_weights(self, fitting: bool) -> None:
        """Let all ranks start from the same weights: initial values are the chief's.

        Variables of the optimizer are included only for training. On JAX, moving averages share memory with the weights
        after `fit`, and Keras' `evaluate` donates it: they cannot be read then.

        Raise ValueError on all ranks if a weight differs that was set, loaded or trained on a rank.
        """
        seeds = hooks.seed_states(self.model)
        candidates = self._with_optimizers(self.model.variables) if fitting else self.model.variables
        # Variables of a model in `fit`, whose layers a callback uses, are a rank's own until the end of the epoch.
        own = [v for model in self.busy for v in (*hooks.seed_states(model), *hooks.moving_statistics(model))]
        variables = [variable for variable in candidates if not any(variable is other for other in (*seeds, *own))]
        seeds = [state for state in seeds if not any(state is other for other in own)]
        differing = self.ranks.different([variable.path for variable in variables], _values(variables))
        if differing:
            optimizer = getattr(self.model, "optimizer", None)
            trained = optimizer is not None and int(keras.ops.convert_to_numpy(optimizer.iterations)) > 0
            changed = [trained or hooks.assigned(variable) for variable in variables]
            anywhere = [any(flags) for flags in zip(*self.topology.all_gather_object(changed), strict=True)]
            for number, rank in differing.items():
                if anywhere[number]:
                    raise ValueError(
                        f"{self.model.name} differs between ranks: {variables[number].path} of rank {rank} is not that "
                        "of rank 0; make the model, and load or set its weights, on all ranks alike"
                    )
            self._send(variables)
        self._send(seeds)
        hooks.note_assigned(variables)

    def _move_seeds(self, sign: int) -> None:
        """Give each rank random numbers of its own, for dropout, or take them back."""
        for state in hooks.seed_states(self.model):
            moved = np.array(keras.ops.convert_to_numpy(state.value))
            moved[0] += np.array(sign * self.topology.rank * _BETWEEN_SEEDS).astype(moved.dtype)
            state.assign(moved)

    def _check_losses(self, parts: PartsOfRank, batch: Any) -> None:
        """Warn, on the chief, of losses of the program that are not means over rows. Errors are left to the step."""
        self._has_checked_losses, rows, losses_of_parts = True, 0, []
        with suppress(Exception):
            losses, own_rows = hooks.losses_of_program(self.model), parts.own_rows(batch)
            rows = keras.tree.flatten(own_rows)[0].shape[0] if losses else 0
        if not self.topology.all_true(rows > 1):  # a loss may communicate: all ranks compute it, or none
            return
        with suppress(Exception), keras.StatelessScope():  # variables stay as they are; NumPy drops masks of Keras
            x, y, _ = keras.utils.unpack_x_y_sample_weight(own_rows)
            outputs = keras.tree.map_structure(keras.ops.convert_to_numpy, self.model(x, training=False))
            for first, last in ((0, half := rows // 2), (half, rows), (0, rows), (0, rows)):
                with computing(RankStep(self.ranks, np.array([last - first, rows, 0], np.float32))) as step:
                    step.held = []  # raises where a mask that the loss makes would add up over ranks
                    losses_of_parts.append([_number(loss(*cut((y, outputs), first, last))).item() for loss in losses])
        if self.topology.rank == 0 and len(losses_of_parts) == 4:
            for loss, *of_parts, whole, again in zip(losses, *losses_of_parts, strict=True):
                mean = np.average(of_parts, weights=(half, rows - half))
                near = (1e-2 if "16" in loss.dtype else 1e-3) * max(map(abs, (whole, *of_parts)))
                if whole == again and abs(whole - mean) > near:  # not of random losses, or NaN
                    warnings.warn(
                        f"the loss {loss.name} of {self.model.name} is not a mean over rows: of {rows} rows it is "
                        f"{whole:.6g}, but the mean of its two halves is {mean:.6g}. Ranks are averaged, so gradients "
                        "are not those of one process: write a mean over rows; see docs/keras.md, What works",
                        stacklevel=2,
                    )

    # --- steps ---------------------------------------------------------------------------

    @contextmanager
    def _over_ranks(self, parts: PartsOfRank, fitting: bool = False, compare: bool = True) -> Iterator[None]:
        """Context in which the model's steps compute over several ranks. Collective."""
        if self._depth:  # a callback of `fit` evaluates
            yield
            return
        model = self.model
        hooks.require_supported(model)
        hooks.require_losses_of_rows(model)
        hooks.build(model, first := parts.first())
        if compare:
            self._agree_on_weights(fitting)
        if fitting and not self._has_checked_losses:
            self._check_losses(parts, first)
        steps = [self._step(model.train_step), self._step(model.test_step)]
        alone = {name: getattr(model, name) for name in _FUNCTIONS}
        if BACKEND == "tensorflow":
            model.jit_compile = False  # of the step as a whole, since XLA cannot call a function on the host
        for name, function in self._functions.items():
            setattr(model, name, function)
        overridden = [o for o in hooks.optimizers_of(model) if BACKEND != "jax" and hooks.is_overridden("apply", o)]
        for optimizer in overridden:  # its `apply` must get the gradients of the whole batch
            object.__setattr__(optimizer, "apply", MethodType(applied_over_ranks(type(optimizer).apply), optimizer))
        hooks.set_methods(model, *steps, lambda iterator=None, data_batch=None: None, self._logs)
        self._move_seeds(1)
        self._depth, self._fitting = 1, fitting
        self.busy.append(model)
        try:
            yield
        finally:
            self.busy.remove(model)
            self._depth, self._fitting = 0, False
            hooks.restore_methods(model)
            for optimizer in overridden:
                object.__delattr__(optimizer, "apply")
            self._functions = {name: getattr(model, name) for name in self._functions}
            for name, function in alone.items():
                setattr(model, name, function)
            self._move_seeds(-1)

    def _step(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``train_step`` or ``test_step`` for data of `PartsOfRank`: a batch and its ``info``.

        A rank without rows computes with a row of another rank, and undoes the updates of its state.
        """

        model = self.model
        by_xla = BACKEND == "tensorflow" and model.jit_compile and not hooks.is_overridden("train_step", model)

        def with_state(state: Any, data: Any) -> Any:
            batch, info, *_ = data
            moving = {id(v) for v in hooks.moving_statistics(model)}
            with computing(RankStep(self.ranks, info)) as step:
                logs, after = method(state, batch)
                fixed = [
                    step.if_rows(new, old) if id(variable) in moving else new
                    for variable, new, old in zip(model.non_trainable_variables, after[1], state[1], strict=True)
                ]
                metrics = [step.if_rows(*pair) for pair in zip(after[-1], state[-1], strict=True)]
                return logs, (after[0], fixed, *after[2:-1], metrics)

        def on_variables(data: Any) -> Any:
            batch, info, *_ = data
            with computing(RankStep(self.ranks, info)) as step:
                if BACKEND == "torch" and step.own:
                    return method(batch)

                def compute() -> Any:
                    learned = [*model.metrics_variables, *hooks.moving_statistics(model)]
                    before = [v.value + 0 for v in learned]
                    logs = method(batch)
                    for variable, value in zip(learned, before, strict=True):
                        variable.assign(step.if_rows(variable.value, value))
                    return logs

                return step.compiled(compute) if by_xla else compute()

        return with_state if BACKEND == "jax" else on_variables

    def _logs(self, logs: Any) -> Any:
        """Return the results of the metrics over all ranks, and average moving statistics. Collective."""
        step.wait_for_host()
        metrics = self.model.metrics_variables
        for variable in metrics:
            if variable.aggregation != "sum":
                raise ValueError(
                    f"metric variable {variable.path} has aggregation={variable.aggregation!r}: metrics over several "
                    "ranks add their variables, so write the metric with sums"
                )
        moving = hooks.moving_statistics(self.model) if self._fitting else []
        size = self.topology.size
        own = [*_values(metrics), *[statistic.astype(np.float64) / size for statistic in _values(moving)]]
        marks = [parts.seen for parts in self._inputs]
        own_step = hooks.is_overridden("train_step", self.model) or hooks.is_overridden("test_step", self.model)
        local = self.model.get_metrics_result() if own_step else {}
        for variable, total in zip([*metrics, *moving], self.ranks.sums(own, marks), strict=True):
            variable.assign(total.astype(variable.dtype))
        result = hooks.metrics_result(self.model, logs)
        if result is logs and logs:  # from a step of the program, with other names than the metrics
            result = self._own_logs(logs, local)
        return result

    def _own_logs(self, logs: dict[str, Any], local: dict[str, Any]) -> dict[str, Any]:
        """Return the logs of a step of the program over all ranks: metrics, and else means over the last batch's rows.

        ``local`` has the results of this rank's metrics: a log of the same value is such a result.
        """
        names, own = sorted(logs), self.ranks.rows
        numbers = [_number(logs[name]) for name in names]
        others = [
            own > 0 and not (name in local and np.allclose(_number(local[name]), number, equal_nan=True))
            for name, number in zip(names, numbers, strict=True)
        ]
        parts = [own * number if own else np.zeros_like(number) for number in numbers]
        (rows, *others), *total = self.ranks.sums([np.array([own, *others], np.float64), *parts])
        results = self.model.get_metrics_result()
        return {
            name: value / rows if other else results[name]
            for name, value, other in zip(names, total, others, strict=True)
        }


def _number(value: Any) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(value), np.float64)


def _values(variables: list[Any]) -> list[np.ndarray]:
    return [np.asarray(keras.ops.convert_to_numpy(variable.value)) for variable in variables]


def split(values: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `fit` with ``validation_data`` instead of ``validation_split``."""
    fraction = values.get("validation_split")
    if not fraction or values.get("validation_data") is not None:
        return values
    arrays = (values.get("x"), values.get("y"), values.get("sample_weight"))
    (x, y, sample_weight), held = hooks.train_validation_split(arrays, validation_split=fraction)
    more = {"x": x, "y": y, "sample_weight": sample_weight, "validation_data": held, "validation_split": 0.0}
    return {**values, **more}


def source_of(values: dict[str, Any], steps: int | None, engine: Any, shuffle: Any = False) -> Any:
    """Return Keras' adapter for the input of a call, or the batches of this rank of a dataset."""
    if is_dataset(values.get("x")):
        return BatchesOfRank(values, steps, engine)
    arguments = {name: values.get(name) for name in ("x", "y", "sample_weight", "batch_size", "class_weight")}
    return hooks.get_data_adapter(**arguments, steps_per_epoch=steps, shuffle=shuffle)


def with_input(values: dict[str, Any], parts: PartsOfRank) -> dict[str, Any]:
    """Return the arguments of a call with ``parts`` as its input."""
    replaced = ("y", "sample_weight", "class_weight", "batch_size", "shuffle")
    return {**{name: value for name, value in values.items() if name not in replaced}, "x": parts}
