"""Joining the other processes: thin over `jax.distributed.initialize`."""

import importlib.metadata
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jaxdp.processes import board, failures, roll_call

# Clusters whose coordinator is known before JAX connects; TPUs meet by themselves.
MEETING = ("K8sCluster", "ompi", "slurm")

BIND = "JAX_COORDINATOR_BIND_ADDRESS"


class Place(NamedTuple):
    """Which process this is, and where it finds the others."""

    coordinator: str
    bind: str
    count: int
    rank: int


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: int | Sequence[int] | None = None,
    coordinator_bind_address: str | None = None,
    timeout_s: float = 60.0,
    heartbeat_timeout_s: float = 10.0,
) -> None:
    """Joins the other processes, so that `jax.devices()` are those of all.

    Call it first, before anything uses JAX. What is not given comes from the
    environment, as `python -m jaxdp.launch` sets it (`JAX_COORDINATOR_ADDRESS`,
    `JAX_NUM_PROCESSES`, `JAX_PROCESS_ID`), or from what JAX detects: Slurm, Open MPI,
    Kubernetes. With neither, this is the only process and nothing happens.

    From then on a process that fails says so to the others and ends at once, and a
    process that vanishes or stops ends the others: no one waits for ever.

    Args:
        coordinator_address: `HOST:PORT` of process 0, the same for all.
        num_processes: How many there are.
        process_id: Which one this is, from 0: its rank, `jax.process_index()`.
        local_device_ids: The accelerators of this process; None for all of its host,
            or what the launcher says.
        coordinator_bind_address: `HOST:PORT` where process 0 listens; None for
            `coordinator_address`, so that a loopback address stays on this host.
        timeout_s: How long to wait for the others to start and to end, in seconds.
        heartbeat_timeout_s: How long a process may give no sign of life, in seconds,
            before all others are ended with an error that names it.

    Raises:
        RuntimeError: JAX is in use already, the port is taken, the coordinator cannot
            be reached, or processes are missing, double, or of another count, software
            or cluster.
        ValueError: An address, count or rank that is none, or only some of the three.

    Example:
        >>> import jaxdp
        >>> jaxdp.initialize()  # alone: nothing happens
        >>> jaxdp.process_zero()
        True
    """
    place = _given(
        coordinator_address, num_processes, process_id, coordinator_bind_address
    )
    found = None if place else board.cluster()
    if found in MEETING:
        address, count, rank = board.place_in_cluster(timeout_s)
        everywhere = f"[::]:{roll_call.split(address)[1]}"  # as JAX itself binds there
        bind = coordinator_bind_address or os.environ.get(BIND) or everywhere
        place = Place(address, bind, count, rank)
    if (place is None and found is None) or (place and place.count == 1):
        return
    if board.jax_is_in_use():
        raise RuntimeError(
            f"jaxdp.initialize was called after JAX had started with "
            f"{jax.device_count()} device(s) of this process alone. Processes can only "
            "join before that. Call it first: before jax.devices(), jax.device_put, "
            "jax.random.key and any computation, also in modules that are imported."
        )
    arguments: dict[str, Any] = {
        "initialization_timeout": round(timeout_s),
        "shutdown_timeout_seconds": round(timeout_s),
        "heartbeat_timeout_seconds": round(heartbeat_timeout_s),
        "local_device_ids": local_device_ids,
    }
    if place:
        roll_call.hold(*place, _versions(), timeout_s)
        arguments |= {
            "coordinator_address": place.coordinator,
            "coordinator_bind_address": place.bind,
            "num_processes": place.count,
            "process_id": place.rank,
        }
    jax.distributed.initialize(**arguments)
    failures.install(heartbeat_timeout_s)
    _check_joined(place.count if place else None)


def _given(
    address: str | None, count: int | None, rank: int | None, bind: str | None
) -> Place | None:
    """What was given, completed from the environment; None if nothing was."""
    is_told = address is not None and board.cluster() is None
    address = address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    bind = bind or os.environ.get(BIND)
    count = _number("num_processes", count, "JAX_NUM_PROCESSES")
    rank = _number("process_id", rank, "JAX_PROCESS_ID")
    given = {
        "coordinator_address": address,
        "num_processes": count,
        "process_id": rank,
    }
    if count is rank is None and not is_told:
        return None
    if count == 1 and not rank:
        return Place(address or "", bind or "", 1, 0)
    if address is None or count is None or rank is None:
        missing = ", ".join(name for name, value in given.items() if value is None)
        raise ValueError(
            f"jaxdp.initialize got {given} and no {missing}. A process that is told "
            "where it belongs needs all three. Give the rest, or leave all to the "
            "launcher or the cluster."
        )
    if not 0 <= rank < count:
        raise ValueError(
            f"jaxdp.initialize got process_id={rank} of num_processes={count}. Ranks "
            f"go from 0 to {count - 1}. Give each process another one of those."
        )
    for checked in filter(None, (address, bind)):
        roll_call.split(checked)
    return Place(address, bind or address, count, rank)


def _number(name: str, given: int | None, variable: str) -> int | None:
    """A number that was given, or is in the environment."""
    text = os.environ.get(variable) if given is None else str(given)
    if text is None or text.isdecimal():
        return None if text is None else int(text)
    raise ValueError(
        f"jaxdp.initialize got {name}={text!r}. It is a whole number, of processes or "
        f"from 0 on. Correct the argument, or {variable} in the environment."
    )


def _versions() -> dict[str, str]:
    """What must be the same for all: other versions compile other programs."""
    return {
        "jax version": jax.__version__,
        "jaxdp version": importlib.metadata.version("jax-data-parallel"),
    }


def _check_joined(count: int | None) -> None:
    """Starts the devices, and checks that they are those of all processes."""
    devices, joined = jax.device_count(), jax.process_count()
    if joined != (count or joined):
        raise RuntimeError(
            f"jaxdp.initialize connected {count} processes, and JAX sees {joined} with "
            f"{devices} device(s). Its platform {jax.default_backend()!r} does not "
            "span processes. Check JAX_PLATFORMS, and on CPUs that "
            "JAX_CPU_COLLECTIVES_IMPLEMENTATION is 'gloo'."
        )
