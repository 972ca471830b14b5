"""What bfloat16 parameters lose: updates smaller than half a unit in the last place.

bfloat16 has 8 bits of precision: 1 - 0.0006 rounds to 1, and 256 + 1 to 256. So masters
of the weights, and sums of gradients, are float32.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import jaxdp
from experiments.harness.result import Rows
from experiments.parts import digits
from jaxdp.precision import Precision

UPDATE, UPDATES, TERMS = 6e-4, 100, 1000
LEARNING_RATE = 1e-3  # of plain SGD
WAYS = {
    "f32": Precision("f32"),
    "bf16, f32 masters": Precision("bf16"),
    "bf16, parameters too": Precision("bf16", params="bf16"),
}


def small_numbers(mesh: Mesh) -> Rows:
    """One weight and many small updates; one sum of many ones."""
    rows = []
    for name, precision in WAYS.items():
        weight = _moved(precision, mesh)
        train = jaxdp.data_parallel(
            *(_mean_product, optax.sgd(1.0), mesh),
            accumulate=TERMS,
            precision=precision,
        )
        ones = np.ones((TERMS * mesh.size, 1), np.float32)
        state, _ = train.step(train.init(jnp.zeros(1)), ones)
        mean = -float(train.params(state)[0])
        rows.append(
            {
                "way": name,
                f"1 after {UPDATES} updates of -{UPDATE}": weight,
                f"sum of {TERMS} ones over micro-batches": TERMS * mean,
            }
        )
    columns, ones = list(rows[0]), jnp.ones(TERMS, jnp.bfloat16)
    naive, _ = jax.lax.scan(lambda total, x: (total + x, None), 0 * ones[0], ones)
    values = "bf16, summed in bf16", None, float(naive)
    return [*rows, dict(zip(columns, values, strict=True))]


def _mean_product(params: jax.Array, batch: jax.Array) -> jax.Array:
    """A loss whose gradient is the mean of the batch."""
    return jnp.mean(params[None] * batch)


def _moved(precision: Precision, mesh: Mesh) -> float:
    """A weight of 1 after small updates."""
    train = jaxdp.data_parallel(
        _mean_product, optax.sgd(UPDATE), mesh, precision=precision
    )
    state = train.init(jnp.ones(1))
    for _ in range(UPDATES):
        state, metrics = train.step(state, np.ones((mesh.size, 1), np.float32))
        metrics["loss"].block_until_ready()  # many at once starve forced devices
    return float(train.params(state)[0])


def frozen(problem: digits.Problem, data: list, mesh: Mesh, on_step: Any) -> Rows:
    """The digits with small steps: what share of the parameters has not moved."""
    rows = []
    for name, precision in WAYS.items():
        train = jaxdp.data_parallel(
            problem.loss_fn, optax.sgd(LEARNING_RATE), mesh, precision=precision
        )
        state, losses = train.init(problem.params), []
        start = jax.device_get(state.params)
        for batch in data:
            state, metrics = train.step(state, jaxdp.shard_batch(batch, mesh))
            losses.append(float(metrics["loss"]))
            on_step()
        same = jax.tree.map(np.equal, jax.device_get(train.params(state)), start)
        still = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(same)])
        rows.append(
            {
                "way": name,
                "parameters that never moved (%)": 100 * float(still.mean()),
                "first loss": losses[0],
                "last loss": losses[-1],
            }
        )
    return rows
