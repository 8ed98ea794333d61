"""The Adam optimizer with decoupled weight decay."""

from __future__ import annotations

from collections.abc import Callable

from mpistrat.training.optimizers.adam import Adam


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019).

    Parameters
    ----------
    learning_rate : float or callable
    weight_decay : float
        Each step subtracts ``rate * weight_decay * w``.
    beta_1, beta_2, epsilon, amsgrad, name
        These and the remaining parameters are as for `Adam`.
    clipnorm, clipvalue, global_clipnorm, use_ema, ema_momentum, ema_overwrite_frequency
    gradient_accumulation_steps

    Raises
    ------
    ValueError
        If the weight decay is negative, or a decay of the moments is out of range.

    Examples
    --------
    >>> import mpistrat
    >>> strategy = mpistrat.MultiWorkerMirroredStrategy()
    >>> with strategy.scope():
    ...     v = mpistrat.Variable(1.0)
    >>> optimizer = AdamW(learning_rate=0.1, weight_decay=0.5)
    >>> strategy.run(lambda: optimizer.apply_gradients([(3.0, v)]))
    >>> round(float(v), 6)
    0.85
    """

    def __init__(
        self,
        learning_rate: float | Callable[[int], float] = 0.001,
        weight_decay: float = 0.004,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        name: str | None = None,
        *,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: int | None = None,
        gradient_accumulation_steps: int | None = None,
    ):
        super().__init__(
            learning_rate,
            beta_1,
            beta_2,
            epsilon,
            amsgrad,
            name,
            weight_decay=weight_decay,
            clipnorm=clipnorm,
            clipvalue=clipvalue,
            global_clipnorm=global_clipnorm,
            use_ema=use_ema,
            ema_momentum=ema_momentum,
            ema_overwrite_frequency=ema_overwrite_frequency,
            gradient_accumulation_steps=gradient_accumulation_steps,
        )
