"""How long things take in virtual time: computing, stopping, sending.

Durations of computing are drawn per worker from a seed. A link takes `alpha + B * beta`
for a message of `B` bytes (Hockney's model) and serves one message after another.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np


@dataclasses.dataclass(frozen=True)
class Constant:
    """Every computation takes as long.

    Attributes:
        seconds: How long, more than 0.
    """

    seconds: float

    def __post_init__(self) -> None:
        """Refuses what lets no time pass."""
        _check("Constant", "seconds", self.seconds, positive=True)

    def sample(self, random: np.random.Generator) -> float:
        """Seconds of the next computation."""
        del random
        return self.seconds


@dataclasses.dataclass(frozen=True)
class LogNormal:
    """Most computations are alike, a few take much longer.

    Attributes:
        median_s: Half of them take longer than this.
        sigma: Standard deviation of the logarithm; 0 is constant.
    """

    median_s: float
    sigma: float

    def __post_init__(self) -> None:
        """Refuses what lets no time pass."""
        _check("LogNormal", "median_s", self.median_s, positive=True)
        _check("LogNormal", "sigma", self.sigma)

    def sample(self, random: np.random.Generator) -> float:
        """Seconds of the next computation."""
        return self.median_s * math.exp(self.sigma * random.standard_normal())


@dataclasses.dataclass(frozen=True)
class Stops:
    """A worker that stops computing, and returns or not.

    What it has pushed before still arrives; what it was computing goes on when it
    returns. Several stops are nested.

    Attributes:
        times: How long it computes, without the stop.
        at_s: When it stops, in seconds since the run began.
        until_s: When it returns; None or infinity is never.
    """

    times: "ComputeTime"
    at_s: float
    until_s: float | None = None

    def __post_init__(self) -> None:
        """Refuses a stop that ends before it begins."""
        _check("Stops", "at_s", self.at_s)
        if self.until_s is not None and not self.until_s > self.at_s:
            raise ValueError(
                f"Stops got at_s={self.at_s} and until_s={self.until_s}. The worker "
                "must return after it has stopped. Pass until_s > at_s, or None."
            )

    def sample(self, random: np.random.Generator) -> float:
        """Seconds of the next computation, without the stop."""
        return self.times.sample(random)


ComputeTime = Constant | LogNormal | Stops
Interval = tuple[Literal["compute", "stopped"], float, float]  # from and to, in seconds


def intervals(
    times: ComputeTime, start_s: float, random: np.random.Generator
) -> Iterator[Interval]:
    """When one computation computes, and when it has stopped.

    Args:
        times: How long it takes.
        start_s: When it starts.
        random: The worker's generator; one sample is drawn.

    Yields:
        Intervals without gaps from `start_s`; the last one ends at infinity if the
        worker never returns.
    """
    now, left = start_s, times.sample(random)
    for at_s, until_s in sorted(_stops(times)):
        if at_s >= now + left or until_s <= now:
            continue
        if at_s > now:
            yield "compute", now, at_s
            left -= at_s - now
        now = max(now, at_s)
        yield "stopped", now, until_s
        now = until_s
    if now < math.inf:
        yield "compute", now, now + left


def _stops(times: ComputeTime) -> Iterator[tuple[float, float]]:
    """When the worker stops and returns."""
    while isinstance(times, Stops):
        yield times.at_s, math.inf if times.until_s is None else times.until_s
        times = times.times


@dataclasses.dataclass(frozen=True)
class Link:
    """A server's link, full duplex.

    Attributes:
        alpha_s: Seconds that every message takes.
        beta_s_per_byte: Seconds that each of its bytes adds.
    """

    alpha_s: float = 0.0
    beta_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        """Refuses a link that sends into the past."""
        _check("Link", "alpha_s", self.alpha_s)
        _check("Link", "beta_s_per_byte", self.beta_s_per_byte)


class Direction:
    """One direction of the links of all servers: each serves messages in turn."""

    def __init__(self, links: Sequence[Link], message_bytes: float):
        """Makes idle links; each carries an equal part of every message."""
        part_bytes = message_bytes / len(links)
        self._part_s = [
            link.alpha_s + part_bytes * link.beta_s_per_byte for link in links
        ]
        self._free_s = [0.0] * len(links)

    def send(self, now_s: float) -> float:
        """When the last part of a message arrives that is sent now."""
        self._free_s = [
            max(now_s, free_s) + part_s
            for free_s, part_s in zip(self._free_s, self._part_s, strict=True)
        ]
        return max(self._free_s)


def _check(caller: str, name: str, value: float, positive: bool = False) -> None:
    """Refuses what is no finite duration."""
    if not 0 <= value < math.inf or (positive and value == 0):
        required = "more than 0" if positive else "0 or more"
        raise ValueError(
            f"{caller} got {name}={value}. It must be finite and {required}, so that "
            f"virtual time goes on. Pass such a {name}."
        )
