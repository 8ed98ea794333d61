"""What a program sets for its thread, in PyTorch and JAX, holds in all replicas of a rank."""

import threading

import pytest

import mpistrat

pytestmark = pytest.mark.ranks(max=1)
V = 3


def seen_by_all(look, change):
    """Return what each replica sees: at its beginning, and after a call, before which it has changed it."""

    def fn():
        before = look()
        with change():
            mpistrat.get_replica_context().all_reduce("SUM", 1.0)
        mpistrat.get_replica_context().all_reduce("SUM", 1.0)
        threads.add(threading.get_ident())
        return [before, look()]

    threads = set()
    strategy = mpistrat.MultiWorkerMirroredStrategy(virtual_replicas=V)
    first, last = strategy.run(fn)
    assert len(threads) == V
    return [*strategy.experimental_local_results(first), *strategy.experimental_local_results(last)]


def test_torch():
    torch = pytest.importorskip("torch")

    def look():
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), dtype

    assert seen_by_all(look, torch.no_grad) == [(True, False, None)] * (2 * V)
    with torch.no_grad():
        assert seen_by_all(look, torch.enable_grad) == [(False, False, None)] * (2 * V)
    with torch.inference_mode():
        assert seen_by_all(look, torch.no_grad) == [(False, True, None)] * (2 * V)
    with torch.autocast("cpu", torch.bfloat16):
        assert seen_by_all(look, torch.no_grad) == [(True, False, torch.bfloat16)] * (2 * V)
    assert seen_by_all(look, torch.no_grad) == [(True, False, None)] * (2 * V)  # in the same, kept threads


def test_jax():
    jax = pytest.importorskip("jax")

    def look():
        return (jax.numpy.arange(3.0).dtype.name, jax.config.jax_default_matmul_precision, jax.config.jax_debug_nans)

    def change():
        return jax.debug_nans(True)

    assert seen_by_all(look, change) == [("float32", None, False)] * (2 * V)
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        assert seen_by_all(look, change) == [("float64", "highest", False)] * (2 * V)
    with jax.disable_jit():
        assert seen_by_all(lambda: jax.config.jax_disable_jit, change) == [True] * (2 * V)
    assert seen_by_all(look, change) == [("float32", None, False)] * (2 * V)
