"""When requests are sent."""

import math
import random

import pytest

from penstock.engine.commands.bench.serving import arrival_times


def gaps(rate: float, count: int = 20_000) -> list[float]:
    times = arrival_times(count, rate, random.Random(1))
    return [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]


def test_the_mean_rate_is_exact_and_time_never_goes_back() -> None:
    times = arrival_times(500, 25.0, random.Random(3))
    assert times[-1] == pytest.approx(20.0)
    assert times == sorted(times) and times[0] > 0


def test_arrivals_are_a_poisson_process() -> None:
    beyond = sum(gap > 0.1 for gap in gaps(10.0)) / 20_000
    assert beyond == pytest.approx(math.exp(-1), rel=0.05)


def test_a_seed_gives_the_same_times_again() -> None:
    assert arrival_times(9, 5, random.Random(7)) == arrival_times(9, 5, random.Random(7))
    assert arrival_times(9, 5, random.Random(7)) != arrival_times(9, 5, random.Random(8))
