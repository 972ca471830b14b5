"""Direct exchanges: every device sends to every other one, in a single round.

The reduce-scatter is an all-to-all whose results are added up, the all-gather a
broadcast of every chunk by its owner: the ring's bytes in one round each, but to N - 1
partners. What it takes depends on what joins them: through one link each, its N - 1
transfers follow one another and it is no quicker than the ring; where every pair has a
link of its own, or the runtime runs transfers at once, it waits for one latency.
"""

from jaxdp.algorithms.building import everywhere, for_any_devices, one_each, one_round
from jaxdp.schedule import Schedule, Transfer


@for_any_devices
def direct_reduce_scatter(devices: int) -> Schedule:
    """Every device sends chunk `r` of its own to device `r`, which adds them up.

    In transfer `t`, from 1 on, device `r` sends chunk `r + t` to its owner; so the
    owner adds what comes from `r - 1`, `r - 2` and so on to its own.

    Cost: 1 round of N - 1 transfers; (N - 1) K / N bytes sent and received per device.
    """
    sends = [_everybody(devices, t, t, "add") for t in range(1, devices)]
    name = f"direct_reduce_scatter({devices})"
    starts, ends = everywhere(devices, devices), one_each(devices)
    return Schedule(name, devices, devices, starts, ends, one_round(sends))


@for_any_devices
def direct_all_gather(devices: int) -> Schedule:
    """Device `r` sends chunk `r` to every other device.

    Cost: 1 round of N - 1 transfers; (N - 1) K / N bytes sent and received per device.
    """
    sends = [_everybody(devices, t, 0, "replace") for t in range(1, devices)]
    name = f"direct_all_gather({devices})"
    starts, ends = one_each(devices), everywhere(devices, devices)
    return Schedule(name, devices, devices, starts, ends, one_round(sends))


@for_any_devices
def direct(devices: int) -> Schedule:
    """Direct all-reduce: `direct_reduce_scatter`, then `direct_all_gather`.

    Cost: 2 rounds of N - 1 transfers; 2 (N - 1) K / N bytes sent and received per
    device.

    References:
        Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
        Operations in MPICH", IJHPCA 2005: the pairwise exchange for reduce-scatter.
    """
    scattered = direct_reduce_scatter(devices)
    return scattered.then(direct_all_gather(devices), f"direct({devices})")


def _everybody(devices: int, distance: int, ahead: int, op) -> Transfer:
    """Device `r` sends chunk `r + ahead` to device `r + distance`."""
    ranks = range(devices)
    pairs = tuple((r, (r + distance) % devices) for r in ranks)
    return Transfer(pairs, tuple((r + ahead) % devices for r in ranks), op)
