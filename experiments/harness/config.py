"""The options that every experiment has, and the precision that many ask for."""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable
from typing import Literal, ParamSpec, TypeVar

import jax

from experiments.harness import devices

Parameters = ParamSpec("Parameters")
Found = TypeVar("Found")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Base of every experiment's `Config`, and so of its command line."""

    devices: int = 8  # how many, on the mesh axis
    platform: Literal["auto", "cpu", "gpu"] = "auto"  # auto: GPUs if there are enough
    tiny: bool = False  # the smallest sizes, to see that everything runs
    output: pathlib.Path = pathlib.Path("results")  # results go to OUTPUT/NAME

    def where(self) -> str:
        """Says what it ran on, and what its timings are worth."""
        return devices.describe(self.devices)

    def check(self) -> None:
        """Checks what types cannot say; called before JAX starts.

        Raises:
            ValueError: An option that does not fit.
        """
        if self.devices < 1:
            raise ValueError(
                f"--devices got {self.devices}. An experiment needs at least 1 device: "
                "give a positive number."
            )

    def start(self) -> None:
        """Starts JAX with the devices that are asked for.

        Raises:
            ValueError: Not so many devices.
        """
        devices.start(self.devices, self.platform, quick=self.tiny)

    def check_divides(self, batch_size: int) -> None:
        """Checks that every device gets equally many rows."""
        rest = batch_size % self.devices
        if batch_size < 1 or rest:
            up = (max(batch_size, 0) // self.devices + 1) * self.devices
            raise ValueError(
                f"--batch-size got {batch_size} for {self.devices} devices. Each takes "
                f"equally many rows, and at least 1. Use --batch-size {up}, or another "
                "--devices."
            )

    def check_repeats(self, repeats: int) -> None:
        """Checks that repeats have quartiles."""
        if repeats < 2:
            raise ValueError(
                f"--repeats got {repeats}. A median with quartiles needs at least 2, "
                "and 20 to mean much: give more."
            )

    def check_size_mb(self, size_mb: float, least: float, reason: str) -> None:
        """Checks the MiB of the largest buffer that is timed.

        Args:
            size_mb: What was given.
            least: What it must have.
            reason: Why, as the end of a sentence.
        """
        if not least <= size_mb < math.inf:
            raise ValueError(
                f"--size-mb got {size_mb}. The largest buffer must have at least "
                f"{least:g} MiB, since {reason}. Use --size-mb 4, for example."
            )


def full_precision(
    function: Callable[Parameters, Found],
) -> Callable[Parameters, Found]:
    """Runs a function whose matrix products GPUs would round from float32 to TF32."""

    @functools.wraps(function)
    def precise(*args: Parameters.args, **keywords: Parameters.kwargs) -> Found:
        with jax.default_matmul_precision("highest"):
            return function(*args, **keywords)

    return precise
