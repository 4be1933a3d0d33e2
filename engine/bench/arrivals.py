"""When a load generator sends its requests."""

import math
import random


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
