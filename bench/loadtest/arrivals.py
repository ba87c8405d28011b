"""When requests are meant to be sent: times in seconds from the start of a stage. Pure; no clock.

An open loop sends by these times whatever the server does, as independent clients would: a server that stalls cannot
make the load wait for it.
"""

from __future__ import annotations

from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]
ArrivalKind = Literal["poisson", "constant"]

POISSON_SLACK: Final = 6  # standard deviations of a Poisson count


def arrivals(kind: ArrivalKind, rate: float, seconds: float, seed: int) -> Times:
    """Ascending times in [0, seconds): a Poisson process of `rate` a second, or one every 1 / rate.

    Raises:
        ValueError: the rate or the duration is not positive.
    """
    if rate <= 0 or seconds <= 0:
        raise ValueError(f"rate and seconds must be positive, found {rate:g} and {seconds:g}")
    if kind == "constant":
        return np.arange(0.0, seconds, 1 / rate)
    rng, expected = np.random.default_rng(seed), rate * seconds
    times = np.zeros(0)
    while not len(times) or times[-1] < seconds:
        last = times[-1] if len(times) else 0.0
        more = int(expected + POISSON_SLACK * np.sqrt(expected)) + 1
        times = np.append(times, last + np.cumsum(rng.exponential(1 / rate, more)))
    return times[times < seconds]


def share(times: Times, part: int, parts: int) -> slice:
    """The places of `times` that process `part` of `parts` sends: every parts-th one, so that all stay evenly busy."""
    if not 0 <= part < parts:
        raise ValueError(f"part {part} of {parts}")
    return slice(part, len(times), parts)
