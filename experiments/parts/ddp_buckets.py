"""Buckets of an MLP's gradients: as they are planned, and as they are compiled.

`L` layers of equal width with biases. The forward pass multiplies `L` times; the
backward pass twice a layer, but for the first, whose input needs no gradient.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from experiments.harness.result import Rows
from jaxdp.buckets import Buckets
from jaxdp.program import analyze
from jaxdp.program.dependence import dependence
from jaxdp.training import DataParallel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of the network, and of the batch of one device."""

    layers: int
    width: int
    rows: int

    @property
    def layer_mb(self) -> float:
        """One layer's gradients, in MiB."""
        return 4 * self.width * (self.width + 1) / 2**20

    @property
    def backward_matmuls(self) -> int:
        """How often the backward pass multiplies matrices."""
        return 2 * self.layers - 1


class Step(NamedTuple):
    """A step with some design: what was asked for, and what was compiled."""

    design: jaxdp.RingAllReduce
    buckets: Buckets
    program: jax.stages.Compiled


def make(sizes: Sizes, devices: int) -> tuple[Any, Any]:
    """Parameters, and a batch for all devices."""
    random = np.random.default_rng(0)
    shape = (sizes.width, sizes.width)
    params = {
        f"layer{i}": {
            "w": random.normal(0, sizes.width**-0.5, shape).astype(np.float32),
            "b": np.zeros(sizes.width, np.float32),
        }
        for i in range(sizes.layers)
    }
    x = random.normal(size=(devices * sizes.rows, sizes.width)).astype(np.float32)
    return params, {"x": x, "y": np.sin(x)}


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """The mean squared error."""
    hidden = batch["x"]
    for layer in params.values():
        hidden = jax.nn.relu(hidden @ layer["w"] + layer["b"][None])
    return jnp.mean((hidden - batch["y"]) ** 2)


def training(
    mesh: jax.sharding.Mesh, design: jaxdp.Design, accumulate: int = 1
) -> DataParallel:
    """Plain SGD, whose update is the gradient."""
    return jaxdp.data_parallel(
        loss_fn, optax.sgd(1.0), mesh, design, accumulate=accumulate
    )


def step(
    mesh: jax.sharding.Mesh, sizes: Sizes, cap_mb: float | None, overlap: bool = True
) -> Step:
    """The compiled step with buckets of that cap, of which none waits for another."""
    params, batch = make(sizes, mesh.size)
    caps = {"bucket_cap_mb": cap_mb, "first_bucket_mb": None}
    design = jaxdp.RingAllReduce(**caps, overlap=overlap, in_flight=None)
    train = training(mesh, design)
    state, batch = train.init(params), jaxdp.shard_batch(batch, mesh)
    return Step(
        design, train.buckets(state, batch), train.lower(state, batch).compile()
    )


def planned(one: Step) -> Rows:
    """The buckets, as `train.buckets` prints them."""
    return [
        {
            "bucket": i,
            "dtype": str(bucket.dtype),
            "bucket_bytes": bucket.nbytes,
            "leaves": ", ".join(bucket.names),
        }
        for i, bucket in enumerate(one.buckets, start=1)
    ]


def compiled(one: Step, devices: int) -> dict[str, Any]:
    """What became of them in the program."""
    report = analyze(one.program)
    cap = one.design.bucket_cap_mb
    return {
        "bucket cap_mb": "none" if cap is None else round(cap, 3),
        "overlap": one.design.overlap,
        "buckets planned": len(one.buckets),
        "rings compiled": rings(one.program),
        "permutes": report.permutes,
        "expected permutes": 2 * (devices - 1) * len(one.buckets),
        "largest bucket_bytes": max(bucket.nbytes for bucket in one.buckets),
        "each device sends_bytes": max(report.sent_bytes),
    }


def rings(program: jax.stages.Compiled) -> int:
    """How many rings run in a program: permutes that wait for no other."""
    return len(_first_permutes(program))


def waiting(one: Step, sizes: Sizes) -> list[int]:
    """For each bucket, how many multiplications of the backward pass it waits for.

    Counted at the first permute of its ring. All wait for the whole forward pass, since
    the loss does.
    """
    found = dependence(one.program)
    waits = [
        len(found.waits_for[name] & found.matmuls)
        for name in _first_permutes(one.program)
    ]
    return [count - sizes.layers for count in sorted(waits)]


def _first_permutes(program: jax.stages.Compiled) -> list[str]:
    found = dependence(program)
    return [
        name
        for name in found.collectives
        if found.waits_for[name].isdisjoint(found.collectives)
    ]
