"""Which devices replicas run on: ids in, devices out, and every check of them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

Device = Any  # jax.Device, which type checkers take for a variable


def resolve(device_ids: Sequence[Any] | None, caller: str) -> tuple[Device, ...]:
    """The devices of these ids, in this order.

    Args:
        device_ids: Ids (`device.id`) or devices of this process; None takes all of
            `jax.local_devices()`.
        caller: The public function, named in errors.

    Raises:
        TypeError: No sequence of ids.
        ValueError: No ids, an unknown one, or one twice.
    """
    if device_ids is None:
        return tuple(jax.local_devices())
    unordered = isinstance(device_ids, str | bytes | set | frozenset)
    if unordered or not isinstance(device_ids, Iterable):
        raise TypeError(
            f"{caller} got device_ids={device_ids!r}. It takes a sequence of ids, such "
            "as [0, 1], in the order of the slices. Put the ids into a list."
        )
    given = list(device_ids)
    if not given:
        raise ValueError(
            f"{caller} got device_ids=[]. It needs at least 1 device. Name some, or "
            "pass None to take all devices of this process."
        )
    devices = [
        resolve_one(each, f"device_ids[{i}]", caller) for i, each in enumerate(given)
    ]
    twice = [device.id for device, n in Counter(devices).items() if n > 1]
    if twice:
        raise ValueError(
            f"{caller} got device_ids={[d.id for d in devices]}, {len(devices)} ids "
            f"and {len(set(devices))} devices. Every replica needs a device of its "
            f"own. Given more than once: {', '.join(map(str, twice))}. Name each "
            "device once."
        )
    return tuple(devices)


def resolve_one(device: Any, argument: str, caller: str) -> Device:
    """The device of an id.

    Raises:
        TypeError: Neither an id nor a device.
        ValueError: No device of this process.
    """
    if isinstance(device, jax.Device):
        if device.process_index == jax.process_index():
            return device
        known = {}
    elif isinstance(device, int | np.integer) and not isinstance(device, bool):
        known = {each.id: each for each in jax.local_devices()}
    else:
        raise TypeError(
            f"{caller} got {argument}={device!r}. It must be a device id, an integer, "
            "or a jax.Device. Choose from jax.local_devices()."
        )
    if device in known:
        return known[int(device)]
    ids = [each.id for each in jax.local_devices()]
    raise ValueError(
        f"{caller} got {argument}={device}. It must be the id of one of the "
        f"{len(ids)} devices of this process, which are {ids}. Choose one of those; "
        "for more devices on one host, set jax.config.update('jax_num_cpu_devices', N) "
        "before JAX starts."
    )


def name(device: Device | None) -> str:
    """A short name, such as "cpu:3"; None is the host."""
    return "host" if device is None else f"{device.platform}:{device.id}"
