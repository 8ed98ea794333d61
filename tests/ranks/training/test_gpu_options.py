"""Options of optimizers on a GPU, as on the host and in one launch for all variables."""

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat.arrays.gpu import kernels
from mpistrat.optimizers import LARS, Adagrad, Adam, RMSprop

OPTIMIZERS = {
    "rmsprop": lambda: RMSprop(0.01),
    "rmsprop with all": lambda: RMSprop(
        0.01, momentum=0.5, centered=True, weight_decay=0.1, use_ema=True, ema_overwrite_frequency=2
    ),
    "adagrad": lambda: Adagrad(0.01, clipvalue=0.5),
    "adam": lambda: Adam(0.01, weight_decay=0.1, global_clipnorm=1.0, use_ema=True),
    "accumulation": lambda: Adam(0.01, gradient_accumulation_steps=2, clipnorm=1.0),
    "lars": lambda: LARS(0.01, weight_decay=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_as_on_the_host(cupy, monkeypatch, name):
    launches = []
    original = kernels.EachElement.launch
    monkeypatch.setattr(kernels.EachElement, "launch", lambda *args: (launches.append(args[0]), original(*args))[1])
    found = []
    for device, place in (("cuda:0", cupy.asarray), ("cpu", np.asarray)):
        strategy = mpistrat.MultiWorkerMirroredStrategy(device=device)
        random = np.random.default_rng(MPI.COMM_WORLD.rank)
        with strategy.scope():
            variables = [mpistrat.Variable(np.ones(shape)) for shape in ((3,), (90, 70), (1,), (0,))]
            optimizer = OPTIMIZERS[name]()
        for _ in range(4):
            gradients = [place(random.standard_normal(v.shape)) for v in variables]
            launches.clear()
            strategy.run(lambda o=optimizer, g=gradients, v=variables: o.apply_gradients(zip(g, v, strict=True)))
        if device == "cuda:0" and name not in ("lars", "accumulation"):
            assert len(launches) == 2  # to pack and to update
        found.append([np.asarray(v) for v in (*variables, *optimizer.variables)])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-11)
