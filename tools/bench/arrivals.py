"""When requests are sent: seconds since the start of the measurement, decided before it begins."""

import random

BURST = float("inf")


def arrival_times(count: int, rate: float, burstiness: float, draw: random.Random) -> list[float]:
    """Arrival times of so many requests, the first at 0.

    rate: requests a second; BURST for all at once. burstiness: shape of the gamma distribution of the gaps, whose mean
    is 1 / rate: 1 is a Poisson process, less is burstier, more is steadier.
    """
    if rate == BURST:
        return [0.0] * count
    times, at = [], 0.0
    for _ in range(count):
        times.append(at)
        at += draw.gammavariate(burstiness, 1 / (rate * burstiness))
    return times
