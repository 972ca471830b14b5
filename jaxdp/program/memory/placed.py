"""What every device really holds, measured from the shards of arrays.

The numbers of a compiled program are the same for all devices. These are not: arrays
may be on one device only, be divided over all, or be held by devices that never read
them. An SPMD program gives every device a buffer of the same size, so `GatherToRoot`
keeps an optimizer state on each, and the root alone uses its own.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from jaxdp.buckets import is_key
from jaxdp.designs import GatherToRoot, ParameterServer
from jaxdp.state import TrainState

PyTree = Any
Device = Any  # a jax.Device
# Fields of a `TrainState` by what they are called elsewhere.
KIND_OF_FIELD = {
    "params": "parameters",
    "opt_state": "optimizer state",
    "model_state": "model state",
}


class Placement(NamedTuple):
    """What one device holds of a train state, in bytes by kind.

    Attributes:
        held: What is in its memory.
        used: What of that a step reads there.
    """

    held: Mapping[str, int]
    used: Mapping[str, int]


def placed(tree: PyTree) -> dict[Device, int]:
    """Bytes that a tree of arrays takes on each device that holds some of it.

    Args:
        tree: Arrays; one that is in it twice counts once, and what is no `jax.Array` is
            on no device.

    Returns:
        Bytes by device, of the devices of this process.

    Example:
        >>> import jax.numpy as jnp
        >>> placed([jnp.zeros(3), jnp.zeros(2, jnp.int8)])
        {CpuDevice(id=0): 14}
    """
    total: dict[Device, int] = defaultdict(int)
    arrays = {id(x): x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)}
    for array in arrays.values():
        data = jax.random.key_data(array) if is_key(array) else array
        for shard in data.addressable_shards:
            total[shard.device] += shard.data.nbytes
    return dict(total)


def placed_by_kind(state: TrainState) -> dict[Device, Placement]:
    """Bytes of a train state on each device, by kind, and which of them it uses.

    Kinds are "parameters", "optimizer state", "model state" and "other": the step, the
    key and the loss scale.

    Args:
        state: What `train.init` or `train.step` gave.

    Returns:
        Of each device a `Placement`: what it holds and what it uses, by kind.

    Raises:
        TypeError: `state` is no `TrainState`.
    """
    if not isinstance(state, TrainState):
        raise TypeError(
            f"placed_by_kind got a {type(state).__name__}. It tells kinds apart by the "
            "fields of a jaxdp.TrainState. For other trees of arrays use "
            "jaxdp.program.placed, one call a kind."
        )
    parts = {kind: placed(getattr(state, name)) for name, kind in KIND_OF_FIELD.items()}
    parts["other"] = placed((state.step, state.rng, state.loss_scale))
    devices = list(state.step.sharding.mesh.devices.flat)
    found = {}
    for rank, device in enumerate(devices):
        held = {kind: sizes.get(device, 0) for kind, sizes in parts.items()}
        used = dict(held)
        if not _reads_opt_state(state, rank, len(devices)):
            used["optimizer state"] = 0
        found[device] = Placement(held, used)
    return found


def _reads_opt_state(state: TrainState, rank: int, devices: int) -> bool:
    """Whether the optimizer runs on a device, with the state that is there."""
    design = state.design
    if isinstance(design, GatherToRoot):
        return rank == design.root
    if isinstance(design, ParameterServer) and design.update_on == "server":
        inner = devices // state.step.sharding.mesh.devices.shape[0]
        return rank // inner < design.servers
    return True
