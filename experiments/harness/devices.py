"""Which devices an experiment runs on; decided before JAX starts, fixed afterwards.

A laptop has one CPU device, so JAX is told to split the host into as many as are asked
for. JAX takes that number only before it starts, and looking for GPUs starts it: so the
question whether there are enough GPUs goes to a process of its own.
"""

import glob
import os
import subprocess
import sys
from typing import Literal

import jax

from experiments.harness import fast, show
from jaxdp import targets
from jaxdp.targets.quiet import quietly

FORCED = "forced host devices share cores: not a bandwidth measurement"
GPU_FILES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd")  # NVIDIA, in WSL too, AMD
COUNT_GPUS = "import jax; print(len(jax.devices('gpu')))"


def start(
    count: int, platform: Literal["auto", "cpu", "gpu"], quick: bool = False
) -> None:
    """Starts JAX with at least `count` devices.

    Args:
        count: How many are needed.
        platform: `"auto"` takes GPUs if there are enough, else forced host devices.
        quick: Whether host devices are to start quickly, rather than run quickly.

    Raises:
        ValueError: Not so many devices.
    """
    if platform == "cpu" or (platform == "auto" and count_gpus() < count):
        if quick:
            fast.compile_quickly()
        _force_host_devices(count)
    with quietly():  # compilers for devices that are not here say that they are not
        found = jax.devices()
    if platform == "gpu" and found[0].platform != "gpu":
        found = []
    if len(found) < count:
        fewer = f"Ask for at most {len(found)}, or use" if found else "Use"
        raise ValueError(
            f"--devices got {count} with --platform {platform}, and JAX has "
            f"{len(found)}. Each rank needs a device of its own. {fewer} --platform "
            "cpu in a fresh process, which splits the host."
        )


def describe(count: int) -> str:
    """Says what runs, and what its timings are worth."""
    if forced():
        return f"{count} forced host devices ({os.cpu_count()} cores); {FORCED}"
    return f"{count} x {jax.devices()[0].device_kind}"


def elsewhere(name: str) -> str:
    """Says that programs are for devices that are not here."""
    return (
        f"{name} that are not here: programs are compiled for them and read, and "
        "nothing is timed"
    )


def compiler(target: str) -> str | None:
    """What steps are compiled for; None, with a remedy, for the devices at hand."""
    problem = targets.missing(target)
    if not problem:
        return target
    instead = "Steps are compiled for the devices at hand instead."
    show.console.print(f"{problem} {instead}", markup=False)  # it has brackets
    return None


def forced() -> bool:
    """Whether the devices are parts of one host."""
    return jax.devices()[0].platform == "cpu"


def label() -> str:
    """What stands beside every timing."""
    return FORCED if forced() else jax.devices()[0].device_kind


def count_gpus() -> int:
    """How many GPUs JAX could use, without starting JAX in this process."""
    if not any(glob.glob(pattern) for pattern in GPU_FILES):
        return 0
    command = [sys.executable, "-c", COUNT_GPUS]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    # JAX raises where it has none.
    return int(asked.stdout) if asked.returncode == 0 else 0


def _force_host_devices(count: int) -> None:
    """Splits the host, unless JAX has started: then what it has must do."""
    try:
        jax.config.update("jax_platforms", "cpu")
        already = jax.config.values["jax_num_cpu_devices"]
        jax.config.update("jax_num_cpu_devices", max(count, already))
    except RuntimeError:
        pass  # `start` counts the devices next
