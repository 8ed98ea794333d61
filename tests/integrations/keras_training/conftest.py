"""What all tests of Keras' training need."""

import os

import pytest


@pytest.fixture(autouse=True)
def quick_to_compile(monkeypatch):
    """Let XLA compile without optimizations, but for the whole: programs on JAX take a quarter less processor time."""
    if os.environ.get("MPISTRAT_TEST_KERAS") != "all":
        flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
        monkeypatch.setenv("XLA_FLAGS", flags)
