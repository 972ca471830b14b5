"""How long steps of many devices take to compile, for H100 that are not here.

A step of a model of 40 layers, each of which fills a bucket, so that 40 rings are
traced, lowered and compiled.
"""

import functools
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxdp
from benchmarks.case import Case
from benchmarks.rows import Row
from jaxdp import targets

BUCKETS, WIDTH = 40, 512
CAP_MB = (WIDTH * WIDTH + 16) * 4 / 2**20  # one layer's weights, and the loss
LIMIT_S = 60.0


def cases() -> Iterator[Case]:
    """Unrolled for 64 devices, rolled for 256."""
    for how, devices, unroll in (("unrolled", 64, True), ("rolled", 256, False)):
        yield Case(
            name=f"compile {BUCKETS} {how} rings, N = {devices}, H100",
            group="compiling",
            run=functools.partial(compiled, devices, unroll),
            missing=lambda: targets.missing("h100"),
            long=True,
        )


def compiled(devices: int, unroll: bool, name: str, seconds: float) -> Iterator[Row]:
    """Traces, lowers and compiles once: seconds of the CPU, over all its cores.

    The clock shows no more than that, unless others use the cores, too.

    Args:
        devices: N.
        unroll: As for `RingAllReduce`.
        name: Of the row.
        seconds: Not used: a compilation takes what it takes.
    """
    del seconds
    step, state, batch = training(devices, unroll)
    start = time.process_time()
    program = jaxdp.compile_for(step, state, batch, target="h100", devices=devices)
    taken = time.process_time() - start
    if "collective-permute" not in (program.as_text() or ""):
        raise RuntimeError(f"{name}: the compiled program has no ring. Was it removed?")
    yield Row(
        name=name,
        unit="s",
        value=taken,
        quartiles=(taken, taken),
        repeats=1,
        limit=LIMIT_S,
    )


def training(devices: int, unroll: bool) -> tuple[Any, Any, Any]:
    """A step, and the shapes of its parameters and batch."""
    design = jaxdp.RingAllReduce(CAP_MB, first_bucket_mb=None, unroll=unroll)
    mesh = jaxdp.data_mesh(1)  # the target's devices are others
    train = jaxdp.data_parallel(loss_fn, optax.sgd(1e-3), mesh, design)
    weight = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    rows = jax.ShapeDtypeStruct((devices * 8, WIDTH), jnp.float32)
    return train.step, [weight] * BUCKETS, {"x": rows, "y": rows}


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """Squared error of a deep network."""
    x = batch["x"]
    for weight in params:
        x = jnp.tanh(x @ weight)
    return jnp.mean((x - batch["y"]) ** 2)
