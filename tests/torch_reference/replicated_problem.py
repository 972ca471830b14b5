"""What `DataParallel` and its references train: runs, parameters, buffers and batches.

Arrays are drawn once in float64, in JAX layout, from a fixed seed, and rounded to the
run's dtype, so both libraries start from the same bits.
"""

import dataclasses
import itertools
from typing import NamedTuple

import numpy as np

from tests.torch_reference import problem

Arrays = dict[str, np.ndarray]

NUM_DEVICES = 4
# Rows of the batch of every step. On 4 devices, 66 are 17, 17, 17, 15; 10 are 3, 3, 3,
# 1; 3 are 1, 1, 1. The last one has two shapes, a short batch at the end of each epoch.
SCHEDULES = {
    "64": (64,) * 10,
    "66": (66,) * 10,
    "10": (10,) * 10,
    "3": (3,) * 10,
    "66-10": ((66,) * 4 + (10,)) * 2,
}
TAIL = "66-10"
# In float32 other shapes would show nothing new, and compiling them is slow.
CASES = {
    "mlp": {"float64": tuple(SCHEDULES), "float32": (TAIL,)},
    "conv_net": {"float64": ("10",)},
    "norm_net": {"float64": tuple(SCHEDULES), "float32": (TAIL,)},
}
DESIGNS = {
    "mlp": [("torch", "replicas"), ("torch", "full"), ("jax", "function")],
    "conv_net": [("torch", "replicas"), ("torch", "full"), ("jax", "linen")],
    # Full batches are a contrast here: BatchNorm makes another model of each slice.
    "norm_net": [
        ("torch", "replicas"),
        ("torch", "full"),
        ("jax", "nnx"),
        ("jax", "linen"),
    ],
}
HAS_BUFFERS = {"mlp": False, "conv_net": False, "norm_net": True}
# A bias before BatchNorm has no gradient but rounding, which Adam would scale up to
# whole steps, so `norm_net` has none there.
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "mlp": problem.SHAPES["mlp"],
    "conv_net": {
        "conv/kernel": (3, 3, 2, 4),  # height, width, in, out
        "conv/bias": (4,),
        "linear/kernel": (36, 3),  # 3 x 3 places and 4 channels, in this order
        "linear/bias": (3,),
    },
    "norm_net": {
        "conv/kernel": (3, 3, 2, 4),
        "norm/scale": (4,),
        "norm/bias": (4,),
        "linear/kernel": (36, 3),
        "linear/bias": (3,),
    },
}
IMAGE_SHAPE = (6, 6, 2)
NUM_CLASSES = 3
PER_ROW = ("outputs", "hidden")
# Flax's momentum is what stays, PyTorch's what comes in.
BATCH_NORM_MOMENTUM = 0.9
BATCH_NORM_EPSILON = 1e-5
# The seed of norm_net keeps every input of a ReLU away from 0, see the parity test.
SEEDS = {"mlp": 0, "conv_net": 0, "norm_net": 47}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(problem.Job):
    """One training run, a step for every entry of its schedule.

    In torch `design` says what a step computes on: `full`, the whole batch at once, or
    `replicas`, by hand. In JAX it says where the model comes from: `function`, `nnx` or
    `linen`.
    """

    world_size: int = NUM_DEVICES
    schedule: str

    def __str__(self) -> str:
        """Return a name that can serve as test id and file name."""
        return f"{super().__str__()}-{self.schedule}"


class Data(NamedTuple):
    """Where a run starts, and `(inputs, targets)` for every step; images are NHWC."""

    params: Arrays
    buffers: Arrays
    batches: list[tuple[np.ndarray, np.ndarray]]


def all_runs() -> tuple[Run, ...]:
    """Return every run of either library."""
    return tuple(
        Run(
            library=library,
            design=design,
            model=model,
            schedule=schedule,
            optimizer=optimizer,
            dtype=dtype,
        )
        for model, dtypes in CASES.items()
        for dtype, schedules in dtypes.items()
        for library, design in DESIGNS[model]
        for schedule, optimizer in itertools.product(schedules, problem.OPTIMIZERS)
        if design != "linen" or (schedule, dtype) == ("10", "float64")
    )


def make_state(model: str, dtype: str) -> tuple[Arrays, Arrays]:
    """Draw the initial parameters and buffers of a model, the same for all its runs."""
    rng = np.random.default_rng(0)
    params = {
        name: rng.normal(size=shape) / np.sqrt(max(1, np.prod(shape[:-1])))
        for name, shape in SHAPES[model].items()
    }
    buffers = {}
    if HAS_BUFFERS[model]:
        params["norm/scale"] = rng.uniform(0.5, 1.5, size=4)
        buffers["norm/mean"] = rng.normal(size=4)
        buffers["norm/var"] = rng.uniform(0.5, 2, size=4)
    return (
        {name: array.astype(dtype) for name, array in params.items()},
        {name: array.astype(dtype) for name, array in buffers.items()},
    )


def make_data(run: Run) -> Data:
    """Draw what `run` starts from and trains on, rounded to its dtype."""
    rng = np.random.default_rng([SEEDS[run.model], 1])
    batches = [_make_batch(rng, run, rows) for rows in SCHEDULES[run.schedule]]
    return Data(*make_state(run.model, run.dtype), batches)


def _make_batch(
    rng: np.random.Generator, run: Run, rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draw inputs and targets: numbers for `mlp`, classes of images otherwise."""
    if run.model == "mlp":
        inputs, targets = rng.normal(size=(rows, 2)), rng.normal(size=(rows, 1))
        return inputs.astype(run.dtype), targets.astype(run.dtype)
    images = rng.normal(size=(rows, *IMAGE_SHAPE)).astype(run.dtype)
    return images, rng.integers(NUM_CLASSES, size=rows)


def joined(steps: list[Arrays]) -> Arrays:
    """Join what the steps made: what has rows along them, anything else stacked."""
    return {
        name: (np.concatenate if name in PER_ROW else np.stack)(
            [step[name] for step in steps]
        )
        for name in steps[0]
    }
