"""Which ranks are slower than the others."""

import numpy as np
import pytest

from mpistrat.monitor.stragglers import RankSteps, compare


def steps(seconds, slowest, count=50, noise=0.0, seed=0):
    """Steps that take so long outside collectives, and then wait for the slowest rank."""
    random = np.random.default_rng(seed)
    outside = seconds * (1 + noise * random.standard_normal(count))
    return [(max(slowest, each), max(slowest, each) - each, 0.0, 0.0) for each in outside]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_a_slower_rank_is_named_with_its_cost(ranks, noise):
    slow = ranks - 1
    times = [steps(1.15 if rank == slow else 1.0, 1.15, noise=noise, seed=rank) for rank in range(ranks)]
    measured = [RankSteps(rank, "h", times[rank]) for rank in range(ranks)]
    found = compare(measured)
    assert [each.rank for each in found if each.slow] == [slow]
    assert abs(found[slow].cost - 0.15 / 1.15) < 0.03
    assert "costs 13%" in str(compare(measured)[slow]) or noise


def test_noise_is_not_slowness():
    measured = [RankSteps(rank, "h", steps(1.0, 1.3, noise=0.1, seed=rank)) for rank in range(4)]
    measured.append(RankSteps(4, "h", steps(1.15, 1.3, noise=0.1, seed=4)))
    assert not any(each.slow for each in compare(measured))


def test_few_steps_say_nothing():
    measured = [RankSteps(0, "h", steps(1.0, 2.0, count=5)), RankSteps(1, "h", steps(2.0, 2.0, count=5))]
    assert not any(each.slow for each in compare(measured))
    assert [each.steps for each in compare([RankSteps(0, "h", ())])] == [0]


def test_where_the_time_goes():
    (found,) = compare([RankSteps(0, "h", [(1.0, 0.2, 0.5, 0.1)] * 30)])
    assert (found.step, found.outside, found.input, found.saving) == pytest.approx((1.0, 0.8, 0.5, 0.1))
    assert found.compute == pytest.approx(0.2)
