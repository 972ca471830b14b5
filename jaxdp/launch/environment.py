"""What each process finds in its environment, and how many GPUs there are to share."""

import os
import socket
import subprocess
from collections.abc import Iterator
from typing import Literal, NamedTuple

from jaxdp.launch.sweep import COOKIE

Platform = Literal["auto", "cpu", "gpu"]
LOOPBACK = "127.0.0.1"
GPU_PLATFORMS = "cuda,cpu"  # so that JAX refuses to go on without CUDA


class Shape(NamedTuple):
    """Of a group of processes.

    Attributes:
        processes: How many.
        devices: Of each process; None if it takes what JAX gives it.
        platform: "cpu" or "gpu" to insist on it; "auto" takes what JAX finds.
        gpus: Whether `devices` counts GPUs.
    """

    processes: int
    devices: int | None
    platform: Platform
    gpus: bool


def shape(processes: int, devices: int | None, platform: Platform) -> Shape:
    """Checks what is asked for against this machine.

    Args:
        processes: How many, at least 1.
        devices: Of each process, at least 1; None for one GPU, or one CPU device.
        platform: "auto" takes GPUs if this machine has any.

    Raises:
        ValueError: Numbers below 1, or more devices than GPUs.
    """
    for option, given in (("-n", processes), ("--devices-per-process", devices)):
        if given is not None and given < 1:
            raise ValueError(
                f"launch got {option} {given}. It starts processes with devices, so "
                f"each number must be at least 1. Use {option} 2, for example."
            )
    if platform == "cpu":
        return Shape(processes, devices, platform, False)
    there = count_gpus()
    if platform == "auto" and not there:
        return Shape(processes, devices, platform, False)
    each = devices or 1
    if processes * each > there:
        raise ValueError(
            f"launch got -n {processes} with {each} devices per process and --platform "
            f"{platform}. That makes {processes} x {each} = {processes * each} GPUs, "
            f"and this machine has {there}. Ask for fewer, or use --platform cpu, "
            "which splits the host."
        )
    return Shape(processes, each, platform, True)


def count_gpus() -> int:
    """GPUs that processes started here may use: those of NVIDIA's own list."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return sum(name.strip() not in ("", "-1") for name in visible.split(","))
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, check=False
        )
    except OSError:  # no driver
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def environments(
    shape: Shape, attempt: int, cookie: str, port: int
) -> Iterator[dict[str, str]]:
    """The environment of each process, by rank.

    Args:
        shape: Of the group.
        attempt: 0, and 1 more for each restart.
        cookie: Unlike that of any other launcher.
        port: Where rank 0 coordinates.
    """
    address = f"{LOOPBACK}:{port}"
    common = {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(shape.processes),
        "JAXDP_RESTART": str(attempt),
        "PYTHONUNBUFFERED": "1",
        # Launchers inside launchers: the outer one finds the processes of the inner.
        COOKIE: ":".join(filter(None, [os.environ.get(COOKIE), cookie])),
    }
    if shape.platform == "cpu":
        common["JAX_PLATFORMS"] = "cpu"
    elif shape.platform == "gpu":
        common["JAX_PLATFORMS"] = GPU_PLATFORMS
    if not shape.gpus:
        common["JAX_NUM_CPU_DEVICES"] = str(shape.devices or 1)
    for rank in range(shape.processes):
        own = {"JAX_PROCESS_ID": str(rank)}
        if shape.gpus:
            each = shape.devices or 1
            ids = range(rank * each, (rank + 1) * each)
            own["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, ids))
        yield os.environ | common | own


def free_port() -> int:
    """A port of the loopback address that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]
