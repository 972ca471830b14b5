"""The proof that a schedule is right."""

import functools

from jaxdp.schedule.data import Schedule
from jaxdp.schedule.holding import mask, masks, members


@functools.lru_cache(maxsize=1024)
def verify(schedule: Schedule) -> Schedule:
    """Proves that every device ends with every contribution exactly once.

    Returns:
        The schedule itself, so that a call can stand around an expression.

    Raises:
        ValueError: Names the round, the device, the chunk and the contribution.
    """
    for name in ("starts", "ends"):
        placement = getattr(schedule, name)
        if len(placement) != schedule.chunks:
            raise ValueError(
                f"{schedule.name} has {schedule.chunks} chunks but places "
                f"{len(placement)} in `{name}`. Give one tuple of devices per chunk."
            )
        strangers = {d for ds in placement for d in ds} - {*range(schedule.devices)}
        if strangers:
            raise ValueError(
                f"{schedule.name} places chunks on devices {sorted(strangers)} in "
                f"`{name}`; devices run from 0 to {schedule.devices - 1}. Choose those."
            )
    *_, held = masks(schedule)
    for chunk, (starts, ends) in enumerate(
        zip(schedule.starts, schedule.ends, strict=True)
    ):
        every = mask(starts)
        for device in ends:
            lacking = members(every & ~held[device][chunk])
            if lacking:
                raise ValueError(
                    f"{schedule.name}: after the last round ({len(schedule.rounds)} "
                    f"in all) device {device} lacks the contributions of devices "
                    f"{lacking} to chunk {chunk}; it must hold those of "
                    f"{sorted(starts)}. Add transfers that bring them, or remove the "
                    "one that overwrote them."
                )
    return schedule
