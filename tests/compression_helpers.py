"""What the tests of compressions share: leaves, and a program that exchanges them.

Everywhere entry r of a leading axis of length N belongs to rank r.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxdp
from jaxdp.compression import BucketWire, Compression, exchange

# A matrix that neither 2 nor 3 devices divide, and a convolution.
SHAPES = [(11, 11), (2, 2, 4, 9)]


class Steps(NamedTuple):
    """What every step ended with, stacked over replicas; lists over leaves."""

    means: list[list[np.ndarray]]
    residuals: list[list[np.ndarray]]
    states: list


def gradients(devices, step=0, shapes=SHAPES, dtype: Any = np.float32):
    """Distinct normal numbers of several magnitudes, another set every step."""
    rng = np.random.default_rng(step)
    return [
        ((i + 1) ** 2 * rng.standard_normal((devices, *shape))).astype(dtype)
        for i, shape in enumerate(shapes)
    ]


@functools.cache
def program(
    compression: Compression,
    devices: int,
    buckets: tuple[tuple[int, ...], ...],
    algorithm: str = "star",
    check_vma: bool = False,
):
    """One exchange of all buckets, of step, leaves, residuals and states.

    Leaves of no bucket come back as they are, states too. The star's sums do not depend
    on where in a bucket a leaf stands, as the ring's do.
    """

    def body(step, leaves, residuals, states):
        leaves, residuals = jax.tree.map(lambda x: x[0], (leaves, residuals))
        states = list(states)
        for bucket in buckets:
            wire = BucketWire("data", step, jax.random.key(5), bucket, algorithm)
            some = [[x[i] for i in bucket] for x in (leaves, residuals, states)]
            kept = some[1] if compression.error_feedback else None
            made = exchange(compression, some[0], kept, some[2], wire)
            for x, new in zip((leaves, residuals, states), made, strict=True):
                for i, value in zip(bucket, new or (), strict=False):
                    x[i] = value
        if not check_vma:
            leaves = [x[None] for x in leaves]
        return leaves, [x[None] for x in residuals], states

    return jax.jit(
        jax.shard_map(
            body,
            mesh=jaxdp.data_mesh(devices),
            in_specs=(P(), P("data"), P("data"), P()),
            out_specs=(P() if check_vma else P("data"), P("data"), P()),
            check_vma=check_vma,
        )
    )


def start(compression, leaves):
    """Residuals and states before the first step."""
    residuals = [jnp.zeros_like(leaf) for leaf in leaves]
    return residuals, [compression.init(leaf[0]) for leaf in leaves]


def run(compression, steps, buckets=None, algorithm="star"):
    """Exchanges the leaves of every step, one step after another."""
    devices = len(steps[0][0])
    buckets = buckets or (tuple(range(len(steps[0]))),)
    step_fn = program(compression, devices, buckets, algorithm)
    residuals, states = start(compression, steps[0])
    found = Steps([], [], [])
    for step, leaves in enumerate(steps):
        means, residuals, states = step_fn(np.int32(step), leaves, residuals, states)
        made = jax.tree.map(np.asarray, (means, residuals, states))
        for kept, value in zip(found, made, strict=True):
            kept.append(value)
    return found


def exact_means(leaves):
    """The means over replicas, in float64."""
    return [leaf.astype(np.float64).mean(0) for leaf in leaves]


def sent_bytes(compression, leaves, algorithm="ring"):
    """Bytes that the first device sends in one exchange, from the compiled program."""
    buckets = (tuple(range(len(leaves))),)
    step_fn = program(compression, len(leaves[0]), buckets, algorithm)
    given = np.int32(0), leaves, *start(compression, leaves)
    (sent,) = set(jaxdp.analyze(step_fn.lower(*given).compile()).sent_bytes)
    return sent
