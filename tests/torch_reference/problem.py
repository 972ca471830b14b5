"""What both libraries train: jobs, initial parameters and batches, in plain NumPy.

Every array is drawn once in float64, in JAX layout, from a fixed seed, and rounded to
the job's dtype, so both libraries start from the same bits. Parameters are a flat
dictionary, `"conv/kernel"` for the leaf `params["conv"]["kernel"]`.
"""

import dataclasses
import itertools
from typing import NamedTuple

import numpy as np

NUM_STEPS = 20
# Divisible by 2, 3 and 4 workers: equal slices make the mean of the local means the
# global mean.
GLOBAL_BATCH_SIZE = 12
# 3 is not a power of two. In float32 it would show nothing new, and compiling is slow.
WORLD_SIZES = {"float64": (2, 3, 4), "float32": (2, 4)}
MAX_WORLD_SIZE = 4
MODELS = ("mlp", "tiny_net")
# Adam nearly cancels a gradient that is N times too large; SGD shows it. Adam shows
# moments or a step count that differ between workers.
OPTIMIZERS = ("sgd", "adam")
HYPER_PARAMETERS = {
    "sgd": {"learning_rate": 0.05, "momentum": 0.9},
    "adam": {"learning_rate": 0.001, "b1": 0.9, "b2": 0.999, "eps": 1e-8},
}
TORCH_DESIGNS = ("ddp", "star", "ring")
JAX_DESIGNS = ("GatherToRoot", "RingAllReduce", "NativeAllReduce")
# The seed of tiny_net keeps every input of a ReLU away from 0, see the parity test:
# otherwise rounding in float32 could switch a unit on in one library only.
SEEDS = {"mlp": 0, "tiny_net": 155}
# One number of one batch is changed by this much at this step, to prove that the
# comparison can fail. Inputs have standard deviation 1.
PERTURBED_STEP = 7
PERTURBATION = 0.5

SHAPES = {
    # 13 hidden units: 53 parameters, which 2, 3 and 4 all fail to divide.
    "mlp": {
        "hidden/kernel": (2, 13),
        "hidden/bias": (13,),
        "out/kernel": (13, 1),
        "out/bias": (1,),
    },
    # 618 parameters; 4 does not divide them.
    "tiny_net": {
        "conv/kernel": (3, 3, 3, 16),  # height, width, in, out
        "conv/bias": (16,),
        "linear/kernel": (16, 10),
        "linear/bias": (10,),
    },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One training run of `NUM_STEPS` steps.

    `design` is one of `TORCH_DESIGNS` or `JAX_DESIGNS`, or `"single"`: one worker that
    sees the whole batch.
    """

    library: str  # "torch" or "jax"
    design: str
    world_size: int  # number of workers N
    optimizer: str
    dtype: str
    model: str
    perturbed: bool = False

    def __str__(self) -> str:
        """Return a name that can serve as test id and file name."""
        name = (
            f"{self.library}-{self.design}-n{self.world_size}-"
            f"{self.optimizer}-{self.dtype}-{self.model}"
        )
        return name + "-perturbed" * self.perturbed

    @property
    def inputs_name(self) -> str:
        """The name of the inputs, shared by all jobs that train on the same."""
        return self.model + "-perturbed" * self.perturbed


class Trajectory(NamedTuple):
    """What a job produced, in JAX layout.

    `params[name]` has shape `[NUM_STEPS, ...]` and holds the parameter after every
    step on the first worker, `losses` the global mean loss before every update, and
    `final[name]`, of shape `[N, ...]`, the last parameter of every worker.
    """

    params: dict[str, np.ndarray]
    losses: np.ndarray
    final: dict[str, np.ndarray]


class Inputs(NamedTuple):
    """Initial parameters, and batches of shape `[steps, GLOBAL_BATCH_SIZE, ...]`.

    Images are NHWC. Targets are class numbers for `tiny_net` and floats for `mlp`.
    """

    params: dict[str, np.ndarray]
    inputs: np.ndarray
    targets: np.ndarray


def all_jobs() -> tuple[Job, ...]:
    """Return every job that either library runs."""
    designs = {"torch": TORCH_DESIGNS, "jax": JAX_DESIGNS}
    runs = [
        (library, design, world_size, dtype)
        for library in designs
        for dtype, world_sizes in WORLD_SIZES.items()
        for design, world_size in [
            *itertools.product(designs[library], world_sizes),
            ("single", 1),
        ]
    ]
    jobs = [
        Job(
            library=library,
            design=design,
            world_size=world_size,
            optimizer=optimizer,
            dtype=dtype,
            model=model,
        )
        for library, design, world_size, dtype in runs
        for optimizer, model in itertools.product(OPTIMIZERS, MODELS)
    ]
    return (
        *jobs,
        *(
            dataclasses.replace(job, perturbed=True)
            for job in jobs
            if job.library == "torch" and job.design == "ring" and job.world_size == 2
        ),
    )


def make_inputs(
    model: str, perturbed: bool = False, num_steps: int = NUM_STEPS
) -> Inputs:
    """Draw the initial parameters and the batches of `model` from a fixed seed."""
    rng = np.random.default_rng(SEEDS[model])
    params = {
        name: rng.normal(size=shape) / np.sqrt(max(1, np.prod(shape[:-1])))
        for name, shape in SHAPES[model].items()
    }
    batches = (num_steps, GLOBAL_BATCH_SIZE)
    if model == "mlp":
        inputs = rng.normal(size=(*batches, 2))
        targets = rng.normal(size=(*batches, 1))
    else:
        inputs = rng.normal(size=(*batches, 8, 8, 3))
        targets = rng.integers(10, size=batches)
    if perturbed:
        inputs[PERTURBED_STEP].flat[-1] += PERTURBATION
    return Inputs(params, inputs, targets)
