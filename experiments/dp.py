"""What happens in one step of nn.DataParallel, stage by stage, and what does it move?

Command:   make experiment EXP=dp              ARGS="--devices 4 --batch-size 64"
Hardware:  any; without GPUs, 4 forced host devices.
Runtime:   about 20 s on two cores.

The model is TinyNet (convolution 3 to 16, ReLU, global average pool, linear 16 to 10;
618 parameters, Φ = 2,472 bytes) on 64 images of 32 x 32 x 3, SGD with momentum. Each of
the eight stages runs as a small program of its own; then all run as one program; then
the library's GatherToRoot step, whose batch the host has split and whose outputs stay
where they are.

Expected numbers, for N = 4 devices, on the root's link:
  parameters out, gradients in   (N - 1) Φ = 7,416 bytes each
  batch out                      3/4 of it: 589,824 bytes
  outputs in, gradients out      3/4 of 64 x 10 floats: 1,920 bytes each
  all stages in one program      their sum: 599,160 bytes sent, 9,336 received
  gradients                      their sum over replicas is the full batch's gradient,
                                 for 64 rows and for 66 = 17+17+17+15; the plain average
                                 of local means is not, for 66
  device ids [3, 1, 0, 2]        the first quarter of the batch lies on device 3
  ResNet-50                      25,557,032 parameters, 97.49 MiB in float32
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from flax import nnx

import jaxdp
from experiments import models
from experiments.harness import config as harness
from experiments.harness import devices, timing
from experiments.harness.result import Claim, Result, Rows
from experiments.parts import gradients, one_step
from experiments.parts.gantt import gantt

ORDER = (3, 1, 0, 2)  # device ids of claim CA10
EQUAL = 1e-5  # relative; sums of 10^5 float32 terms in another order differ by less


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(harness.Config):
    """Options of the experiment."""

    devices: int = 4  # how many, on the mesh axis
    batch_size: int = 64  # rows over all devices
    learning_rate: float = 0.1
    repeats: int = timing.REPEATS  # timed calls of each stage

    def check(self) -> None:
        """Checks the options."""
        super().check()
        self.check_repeats(self.repeats)
        self.check_divides(self.devices if self.tiny else self.batch_size)


def run(config: Config) -> Result:
    """Answers the question."""
    with jax.default_matmul_precision("highest"):  # GPUs would round float32 to TF32
        return _run(config)


def _run(config: Config) -> Result:
    batch_size = config.devices if config.tiny else config.batch_size
    mesh = jaxdp.data_mesh(config.devices)
    given = one_step.problem(batch_size, config.learning_rate)
    ways, ends = one_step.by_stages(given, mesh)
    design, params = one_step.by_design(given, mesh)
    ends["GatherToRoot"] = {"params": params}
    ways.append(design)
    rows = one_step.measure(ways, 2 if config.tiny else config.repeats)
    gradient, updated = one_step.on_one_device(given)
    reduced = gradients.difference(ends["stage by stage"]["gradient"], gradient)
    combined = combine(given, config.devices)
    placed = placement(config.devices, batch_size)
    counted = count_resnet()
    return Result(
        claims=[
            claim_sum(combined, reduced),
            claim_order(placed),
            claim_resnet(counted),
        ],
        tables={
            "stages": rows,
            "same_step_as_one_device": compare(ends, updated),
            "replica_gradients_against_full_batch": combined,
            "who_holds_which_rows": placed,
            "resnet_50": counted,
        },
        figures={
            "One step, stage by stage": gantt(
                "One step, stage by stage", rows, devices.label()
            )
        },
        programs={way.name: way.program for way in ways if way.program},
    )


def compare(ends: dict[str, Any], updated: Any) -> Rows:
    """Parameters after the step, next to a single device's."""
    return [
        {
            "run": name,
            "relative difference": gradients.difference(end["params"], updated),
        }
        for name, end in ends.items()
    ]


def combine(given: one_step.Problem, count: int) -> Rows:
    """Combines replicas' gradients, for the batch and for two rows more."""
    rows = []
    for size in (len(given.labels), len(given.labels) + 2):
        images, labels = one_step.random_batch(size)
        rows += gradients.combine(given.losses, given.params, images, labels, count)
    return rows


def placement(count: int, batch_size: int) -> Rows:
    """Splits a batch over devices in another order, and reads back who holds what."""
    order = ORDER if count >= len(ORDER) else tuple(reversed(range(count)))
    by_id = {device.id: device for device in jax.devices()}
    mesh = jaxdp.data_mesh([by_id[i] for i in order])
    batch = jaxdp.shard_batch(np.arange(batch_size), mesh)
    held = {
        shard.device.id: np.asarray(shard.data) for shard in batch.addressable_shards
    }
    size = batch_size // len(order)
    return [
        {
            "slice": i,
            "rows": f"{i * size} to {(i + 1) * size - 1}",
            "expected on device": device,
            "lies on device": next(k for k, v in held.items() if v[0] == i * size),
        }
        for i, device in enumerate(order)
    ]


def count_resnet() -> Rows:
    """Parameters and buffers of ResNet-50, from shapes alone."""
    model = nnx.eval_shape(lambda: models.ResNet50(nnx.Rngs(0)))
    rows = []
    for name, kind in (
        ("parameters", nnx.Param),
        ("BatchNorm statistics", nnx.BatchStat),
    ):
        leaves = jax.tree.leaves(nnx.state(model, kind))
        count = sum(math.prod(leaf.shape) for leaf in leaves)
        size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
        row = {"part": name, "arrays": len(leaves), "numbers": count}
        rows.append(row | {"size_bytes": size, "size_mb": size / 2**20})
    return rows


def claim_sum(combined: Rows, reduced: float) -> Claim:
    """CA1."""
    found = {
        (row["rows"], row["combination"]): row["relative difference"]
        for row in combined
    }
    sums = [v for (_, name), v in found.items() if name == gradients.SUM]
    plain = [v for (_, name), v in found.items() if name == gradients.PLAIN]
    worst = max(*sums, reduced)
    return Claim(
        id="CA1",
        claim="Gradients are averaged with weights on the main device (one passage); "
        "summed, not averaged (another)",
        expected=0.0,
        measured=worst,
        unit="relative difference of the sum",
        verdict="partly" if worst < EQUAL else "refuted",
        why="The second passage holds: what the root reduces is a plain sum of the "
        "replicas' gradients of the global mean loss, equal to the full batch's "
        f"gradient up to rounding ({reduced:.1e} in the executed reduction). The first "
        "is right as arithmetic only: local means must be weighted by their rows. "
        f"Their plain average is off by {plain[-1]:.1e} for {combined[-1]['rows']}.",
    )


def claim_order(placed: Rows) -> Claim:
    """CA10."""
    holds = all(row["expected on device"] == row["lies on device"] for row in placed)
    order, found = (
        ", ".join(str(row[column]) for row in placed)
        for column in ("expected on device", "lies on device")
    )
    return Claim(
        id="CA10",
        claim="device_ids=[3,1,0,2] sends the first quarter to device 3",
        expected=f"slices on devices {order}",
        measured=f"slices on devices {found}",
        unit="",
        verdict="holds" if holds else "refuted",
        why="A mesh over the devices in this order, a batch split by shard_batch, and "
        "each device's addressable shard read back: slice i lies on the i-th device.",
    )


def claim_resnet(counted: Rows) -> Claim:
    """CA15."""
    size_mb, size_bytes = counted[0]["size_mb"], counted[0]["size_bytes"]
    return Claim(
        id="CA15",
        claim="ResNet-50's parameters are 98 MB",
        expected=97.5,
        measured=round(size_mb, 2),
        unit="MiB in float32",
        verdict="holds" if abs(size_mb - 97.5) < 0.05 else "refuted",
        why=f"{counted[0]['numbers']:,} parameters x 4 bytes, counted in a Flax "
        f"definition: 98 MB if MB means 2^20 bytes, {size_bytes / 1e6:.1f} MB if it "
        f"means 10^6. BatchNorm's statistics add {counted[1]['size_mb']:.1f} MiB.",
    )
