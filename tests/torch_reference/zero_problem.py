"""What ZeRO and its references train: jobs, clipping and Adam's hyper-parameters.

Models, parameters and batches are those of `problem`, in float64.
"""

import dataclasses
import itertools
from typing import Any, Literal

import numpy as np

from tests.torch_reference import problem

Arrays = dict[str, np.ndarray]

WORLD_SIZES = (2, 4)
STAGES = (1, 2, 3)
ADAM: dict[str, Any] = {"learning_rate": 0.01, "b1": 0.9, "b2": 0.999, "eps": 1e-8}
# Some steps clip and others do not.
MAX_NORM = {"mlp": 1.5, "tiny_net": 0.8}
# What torch adds to a norm before it divides by it; optax adds nothing.
TORCH_CLIP_EPSILON = 1e-6
# Torch's way at each stage: `fully_shard` keeps parameters after the forward pass, or
# frees them and gathers them again.
TORCH_DESIGNS = {1: "zero_redundancy", 2: "fully_shard_keeping", 3: "fully_shard"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job(problem.Job):
    """One training run, with Adam on gradients clipped by their global norm.

    Attributes:
        stage: Of `jaxdp.Zero`; in torch that of the design.
        clip: Whose formula: `"torch"`, or `"optax"` without torch's epsilon.
    """

    optimizer: str = "adam"
    dtype: str = "float64"
    stage: int
    clip: Literal["torch", "optax"] = "torch"

    def __str__(self) -> str:
        """Return a name that can serve as test id and file name."""
        return f"{super().__str__()}-stage{self.stage}-{self.clip}_clip"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The parameters' shapes, in JAX layout."""
        return problem.SHAPES[self.model]

    def data(self) -> problem.Inputs:
        """Initial parameters and batches."""
        return problem.make_inputs(self.model)


def all_jobs() -> tuple[Job, ...]:
    """Return every job of either library."""
    runs = [
        *itertools.product(WORLD_SIZES, ("mlp",), ("torch",)),
        (4, "tiny_net", "torch"),
        (4, "mlp", "optax"),
    ]
    ours = tuple(
        Job(
            library="jax",
            design="Zero",
            world_size=world_size,
            model=model,
            stage=stage,
            clip=clip,
        )
        for (world_size, model, clip), stage in itertools.product(runs, STAGES)
    )
    theirs = [torch_job(job, stage) for job in ours for stage in STAGES]
    return (*ours, *dict.fromkeys(theirs))


def torch_job(job: Job, stage: int) -> Job:
    """Return the torch job that trains what `job` does, at some stage."""
    return dataclasses.replace(
        job, library="torch", design=TORCH_DESIGNS[stage], stage=stage, clip="torch"
    )
