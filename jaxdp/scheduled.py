"""Collectives by the name of an algorithm, or by a schedule."""

import functools

from jaxdp import algorithms
from jaxdp.primitive import AxisName, Collective
from jaxdp.schedule import Schedule, verify

Algorithm = str | Schedule


@functools.lru_cache(maxsize=1024)
def scheduled(
    kind: str,
    algorithm: Algorithm,
    axis_name: AxisName,
    devices: int,
    root: int = 0,
    divisor: int = 1,
    unroll: bool | None = None,
    sizes: tuple[int, ...] | None = None,
) -> Collective:
    """Builds a collective from an algorithm's name or from a schedule.

    Args:
        kind: Such as "all_reduce".
        algorithm: A name that `kind` has, or a schedule that does what it promises.
        axis_name: As for `Collective`.
        devices: On all axes together.
        root: As for `Collective`, like all that follow.
        divisor: Of results.
        unroll: Whether rounds are written out.
        sizes: Devices on each axis, where there are several.

    Raises:
        ValueError: Unknown algorithm, root out of range, or a schedule that is for
            another number of devices or does not do what `kind` promises.
    """
    if isinstance(algorithm, Schedule):
        (standard, *_) = algorithms.SCHEDULES[kind]
        promised = algorithms.build(kind, standard, devices, root)
        schedule = _check_promise(kind, algorithm, promised)
    else:
        schedule = algorithms.build(kind, algorithm, devices, root, sizes)
    return Collective(kind, verify(schedule), axis_name, root, divisor, unroll)


def _check_promise(kind: str, given: Schedule, promised: Schedule) -> Schedule:
    """Checks that a user's schedule does what `kind` promises."""

    def placement(schedule):
        starts, ends = schedule.starts, schedule.ends
        if kind in ("all_reduce", "reduce", "broadcast"):
            starts, ends = {*starts}, {*ends}  # any number of chunks will do
        return schedule.devices, starts, ends

    if placement(given) != placement(promised):
        raise ValueError(
            f"{kind} got the schedule {given.name} for {given.devices} devices, which "
            f"starts on {given.starts} and ends on {given.ends}. On this axis it must "
            f"run on {promised.devices} devices, start on {promised.starts} and end "
            f"on {promised.ends}. Build it for this axis, or call the collective it "
            "is for."
        )
    return given
