"""When a load generator sends its requests."""

import math
import random
from typing import Literal, NamedTuple


def arrival_times(count: int, rate: float, burstiness: float, rng: random.Random) -> list[float]:
    """Seconds from the start for each of `count` requests, at `rate` per second on average.

    The gaps follow a gamma distribution: burstiness 1 is a Poisson process, less comes in bursts, more is
    more even, infinity is a metronome. An infinite rate sends all at once. The times are scaled so that
    the last one falls on count / rate, so that two seeds put the same load on a server.
    """
    if math.isinf(rate):
        return [0.0] * count
    if math.isinf(burstiness):
        return [(index + 1) / rate for index in range(count)]
    times: list[float] = []
    now = 0.0
    for _ in range(count):
        now += rng.gammavariate(burstiness, 1.0)
        times.append(now)
    return [time * count / (rate * now) for time in times]


class Ramp(NamedTuple):
    """A rate that changes from the first request to the last: by as much each time, or by the same factor."""

    strategy: Literal["linear", "exponential"]
    start: float  # requests per second
    end: float

    def rate(self, progress: float) -> float:
        """At 0 … 1 of the requests."""
        if self.strategy == "linear":
            return self.start + (self.end - self.start) * progress
        return self.start * math.exp(progress * math.log(self.end / self.start))


def ramp_times(count: int, ramp: Ramp, burstiness: float, rng: random.Random) -> list[float]:
    """Seconds from the start for each of `count` requests; gaps as in `arrival_times`, around the ramp's."""
    times: list[float] = []
    now = 0.0
    for index in range(count):
        draw = 1.0 if math.isinf(burstiness) else rng.gammavariate(burstiness, 1 / burstiness)
        now += draw / ramp.rate(index / max(1, count - 1))
        times.append(now)
    return times
