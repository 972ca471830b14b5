"""Micro-batches: what one reduction for `k` of them saves, and that it changes nothing.

The same rows are trained on as one micro-batch, and as `k`. For PyTorch this is
`no_sync` around all backward passes but the last.
"""

import jax
import numpy as np

import jaxdp
from experiments.harness.result import Rows
from experiments.parts import ddp_buckets as problem
from experiments.parts import gradients
from jaxdp.program import analyze

COUNTS = (1, 2, 4, 8)


def rows(mesh: jax.sharding.Mesh, sizes: problem.Sizes) -> Rows:
    """One row for each number of micro-batches `k`, of `sizes.rows` rows a device."""
    return [_row(mesh, sizes, count) for count in COUNTS]


def _row(mesh: jax.sharding.Mesh, sizes: problem.Sizes, count: int):
    params, batch = problem.make(sizes, mesh.size * count)
    train = problem.training(mesh, jaxdp.RingAllReduce(), accumulate=count)
    state, placed = train.init(params), jaxdp.shard_batch(batch, mesh)
    program = train.lower(state, placed).compile()
    sent = max(analyze(program).sent_bytes)
    state, _ = program(state, placed)
    samples = len(batch["x"])
    # Plain SGD with a learning rate of 1 moves by the gradient.
    gradient = jax.tree.map(np.subtract, params, jax.device_get(train.params(state)))
    full = jax.jit(jax.grad(problem.loss_fn))(params, batch)
    return {
        "micro-batches k": count,
        "rows of a step": samples,
        "rings": problem.rings(program),
        "each device sends_bytes": sent,
        "sent per row_bytes": sent / samples,
        "gradient's relative difference": gradients.difference(gradient, full),
    }
