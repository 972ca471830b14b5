"""What users of DistributedDataParallel train: options, parameters and batches.

Parameters have torch's layout in both libraries: PowerSGD factors matrices, and the
factors of a matrix are not those of its transpose.
"""

import dataclasses
from typing import Literal, NamedTuple

import numpy as np

from tests.torch_reference import problem

Arrays = dict[str, np.ndarray]

# It keeps gradients away from the middle between two bf16, where it matters that torch
# rounds float64 to float32 on the way, and jaxdp does not.
SEED = 1
NUM_STEPS = 12
# Rows of a step. 4 replicas x 3 micro-batches x 2 rows: BatchNorm needs two.
ROWS = 24
# The last layer of `mlp` has 21, and with jaxdp loss and weight travel in the first
# bucket. Torch closes a bucket that reaches its cap, jaxdp one that would pass it.
BUCKET_CAP_ELEMENTS = 23
# All matrices differ in shape. Factors of rank 2 make each smaller but the last, for
# which both have 18 elements.
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "mlp": {
        "first.weight": (16, 3),
        "first.bias": (16,),
        "second.weight": (6, 16),
        "second.bias": (6,),
        "third.weight": (3, 6),
        "third.bias": (3,),
    },
    # A bias before BatchNorm has no gradient but rounding, which Adam would scale up.
    "norm_net": {
        "first.weight": (16, 3),
        "norm.weight": (16,),
        "norm.bias": (16,),
        "third.weight": (3, 16),
        "third.bias": (3,),
    },
}
# PyTorch's momentum is what comes in, Flax's what stays.
BATCH_NORM_MOMENTUM = 0.1
BATCH_NORM_EPSILON = 1e-5
# How many steps each rank has rows for. Rank 0 is not the last; rank 1 is.
ENDS = {1: (12,), 2: (9, 12), 4: (3, 12, 9, 6)}
# Of `ROWS`. On 4 ranks they are 6, 6, 5 and none.
RAGGED_ROWS = 17
# Steps before PowerSGD or local SGD starts. It is torch's least for PowerSGD, since DDP
# rebuilds its buckets in step 1.
START_STEP = 2
# What GradScaler and Precision share. 2.0 ** 10 overflows in no step but those below.
LOSS_SCALE = {
    "init_scale": 1024.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.25,
    "growth_interval": 3,
}
# One target of the last replica is so large in these steps that the scaled gradient
# overflows, in the dtype in which it is computed, while the target itself does not.
OVERFLOWS = (0, 4, 5, 8)
TARGET_THAT_OVERFLOWS = {"f32": 3e38, "fp16": 6e4}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job(problem.Job):
    """One training run; the fields are the options of both libraries.

    Attributes:
        accumulate: Micro-batches per step.
        rows: What the loss averages over: `even`, all rows of a step; `tokens`, with
            weights; `join`, those of the ranks that still have some; `join_slots`, the
            same, divided by the rows that all ranks would have; `ragged`, the first
            `RAGGED_ROWS`.
        buffers: What happens to BatchNorm's: `broadcast`, `per_replica`, or
            `synchronized` statistics.
        power_rank: Of PowerSGD.
        sync_every: Steps between averages of parameters; 0 averages gradients instead.
        compute: The dtype of forward and backward pass, with a dynamic loss scale.
    """

    model: str = "mlp"
    dtype: str = "float64"
    optimizer: str = "sgd"
    accumulate: int = 1
    rows: Literal["even", "tokens", "join", "join_slots", "ragged"] = "even"
    buffers: Literal["", "broadcast", "per_replica", "synchronized"] = ""
    compression: Literal["", "bf16", "powersgd"] = ""
    power_rank: int = 0
    error_feedback: bool = False
    sync_every: int = 0
    compute: Literal["", "f32", "fp16"] = ""

    def __str__(self) -> str:
        """Return a name that can serve as test id and file name."""
        return "-".join(
            [
                super().__str__(),
                *([f"accumulate{self.accumulate}"] if self.accumulate > 1 else []),
                *([self.rows] if self.rows != "even" else []),
                *filter(None, [self.buffers, self.compression, self.compute]),
                *([f"rank{self.power_rank}"] if self.power_rank else []),
                *(["feedback"] if self.error_feedback else []),
                *([f"every{self.sync_every}"] if self.sync_every else []),
            ]
        )

    @property
    def bucket_cap_mb(self) -> float:
        """In MiB, exactly."""
        return BUCKET_CAP_ELEMENTS * np.dtype(self.dtype).itemsize / 2**20

    @property
    def is_weighted(self) -> bool:
        """Whether rows count differently, so that no mean of means will do."""
        return self.rows in ("tokens", "ragged")

    @property
    def recorder(self) -> int:
        """The rank whose parameters are recorded: one that has rows in every step."""
        return ENDS[self.world_size].index(NUM_STEPS)

    def num_steps(self, rank: int) -> int:
        """Return how many steps this rank has rows for."""
        return ENDS[self.world_size][rank] if "join" in self.rows else NUM_STEPS

    def micro_batches(self, rank: int) -> list[slice]:
        """Return this rank's rows of a step, by micro-batch."""
        size = ROWS // self.world_size // self.accumulate
        first = rank * self.accumulate
        return [
            slice(i * size, (i + 1) * size)
            for i in range(first, first + self.accumulate)
        ]


class Data(NamedTuple):
    """Where a job starts, and what it trains on.

    `inputs` and `targets` have shape `[NUM_STEPS, ROWS, 3]`; `weights`,
    `[NUM_STEPS, ROWS]`, are token counts, or 0 and 1 for rows to leave out and keep.
    """

    params: Arrays
    inputs: np.ndarray
    targets: np.ndarray
    weights: np.ndarray


def make_data(job: Job) -> Data:
    """Draw what `job` starts from and trains on, from one seed, in its dtype."""
    rng = np.random.default_rng(SEED)
    params = {
        name: rng.normal(size=shape) / np.sqrt(shape[-1])
        for name, shape in SHAPES[job.model].items()
    }
    inputs, targets = rng.normal(size=(2, NUM_STEPS, ROWS, 3))
    if job.compute:
        targets[list(OVERFLOWS), -1, -1] = TARGET_THAT_OVERFLOWS[job.compute]
    arrays = inputs, targets, _make_weights(job, rng)
    return Data(
        {name: array.astype(job.dtype) for name, array in params.items()},
        *(array.astype(job.dtype) for array in arrays),
    )


def _make_weights(job: Job, rng: np.random.Generator) -> np.ndarray:
    """Return the weight of every row, `[NUM_STEPS, ROWS]`."""
    weights = np.ones((NUM_STEPS, ROWS))
    if job.rows == "tokens":
        weights = rng.integers(6, size=weights.shape)
        weights[:, :4] = 0  # the first micro-batch of the first rank
    elif job.rows == "ragged":
        weights[:, RAGGED_ROWS:] = 0
    elif "join" in job.rows:
        ends = np.repeat(ENDS[job.world_size], ROWS // job.world_size)
        weights[:] = np.arange(NUM_STEPS)[:, None] < ends
    return weights


def power_seed(columns: int, power_rank: int) -> np.ndarray:
    """Draw the first Q of a matrix with so many columns, `[columns, power_rank]`."""
    return np.random.default_rng(columns).normal(size=(columns, power_rank))
