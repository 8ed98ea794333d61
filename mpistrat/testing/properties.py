"""Property tests of Hypothesis under several ranks: equal examples, which end alike on every rank."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest

from mpistrat.testing.in_step import InStep, Outcome, merge
from mpistrat.testing.requirements import needs_ranks

_PHASES = (hypothesis.Phase.explicit, hypothesis.Phase.generate, hypothesis.Phase.shrink)


class InStepProperties:
    """Lets all ranks draw equal examples: nothing random, nothing remembered, nothing that depends on time."""

    def __init__(self, in_step: InStep):
        self._in_step = in_step

    @pytest.hookimpl(trylast=True)  # markers may be added until then
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            test: Any = getattr(item, "obj", None)
            if not hypothesis.is_hypothesis_test(test) or not needs_ranks(item):
                continue
            test = getattr(test, "__func__", test)
            settings: hypothesis.settings = test._hypothesis_internal_use_settings
            test._hypothesis_internal_use_settings = hypothesis.settings(
                settings,
                derandomize=True,
                database=None,
                deadline=None,
                phases=[phase for phase in settings.phases if phase in _PHASES],
                suppress_health_check=list(hypothesis.HealthCheck),
            )
            if not hasattr(test.hypothesis.inner_test, "in_step"):  # items of a parametrized test share the function
                fixtures = frozenset(getattr(item, "fixturenames", ()))
                test.hypothesis.inner_test = self._of_all_ranks(test.hypothesis.inner_test, fixtures)

    def _of_all_ranks(self, test: Callable[..., Any], fixtures: frozenset[str]) -> Callable[..., None]:
        """Return a property test that ends alike on every rank, with the same error at the same place.

        Otherwise the rank that failed would go on to shrink its example, alone.
        """

        @functools.wraps(test)
        def example(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True
            drawn = {name: value for name, value in kwargs.items() if name not in fixtures}
            own = Outcome(text=repr(drawn))
            outcomes = self._in_step.exchange(f"example of {test.__qualname__}", own)
            if any(outcome.comparable != own.comparable for outcome in outcomes):
                raise RuntimeError("The ranks drew different examples:\n" + merge(outcomes).text)
            own, rejected = Outcome(), None
            try:
                test(*args, **kwargs)
            except (hypothesis.errors.UnsatisfiedAssumption, hypothesis.errors.StopTest) as error:
                own, rejected = Outcome("rejected"), error
            except (Exception, pytest.fail.Exception) as error:
                message = traceback.format_exception_only(error)[-1].strip()
                own = Outcome("failed", message, "".join(traceback.format_exception(error)))
            outcomes = self._in_step.exchange(f"end of an example of {test.__qualname__}", own)
            if rejected is not None and all(outcome.verdict == "rejected" for outcome in outcomes):
                raise rejected
            if any(outcome.verdict != "passed" for outcome in outcomes):
                merged = merge(outcomes)
                raise AssertionError(f"{merged.message}\n{merged.text}")

        example.in_step = True  # type: ignore[attr-defined]
        return example
