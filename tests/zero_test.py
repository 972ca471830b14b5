"""Options at every stage, and hybrid sharding.

That stages train as one device does, whatever the number of devices, is in
`designs_test.py`; known faults are in `zero_cases_test.py`.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from tests.contract import BATCHES, PARAMS
from tests.helpers import assert_replicas_bit_equal
from tests.zero_helpers import CAP, hybrid, in_parts, over_stages

ROWS = 17  # of 24: three replicas with two micro-batches pad one row
STEPS = 3
MODEL_STATE = {"mean": np.float32(0), "count": np.int32(0)}

# Options of a training, or of a design. Largest difference of a parameter after 3 steps
# of Adam: float32 rounds sums in another order; 16 bits round gradients to 2**-8 or
# 2**-11, and a step moves parameters by 0.01.
OPTIONS = {
    "accumulate": dict(accumulate=2),
    "bf16": dict(precision=jaxdp.Precision("bf16")),
    "fp16-dynamic": dict(precision=jaxdp.Precision("fp16", loss_scale="dynamic")),
    "bf16-accumulate": dict(precision=jaxdp.Precision("bf16"), accumulate=2),
    "int8": dict(compression=jaxdp.compression.Int8(block=16)),
    "topk-accumulate": dict(compression=jaxdp.compression.TopK(0.5), accumulate=2),
    "mean": dict(model_state="mean"),
    "broadcast-accumulate": dict(model_state="broadcast", accumulate=2),
    "per-replica": dict(model_state="per_replica"),
    "padded": dict(padded=True),
    "padded-accumulate": dict(padded=True, accumulate=2),
    "rng-accumulate": dict(rng=True, accumulate=2),
    "all": dict(
        padded=True,
        rng=True,
        accumulate=2,
        model_state="mean",
        precision=jaxdp.Precision("bf16", loss_scale=2.0**10),
        compression=jaxdp.compression.Bf16(),
    ),
}
BOUND = {"bf16": 1e-3, "fp16": 2e-4, "f32": 3e-6}


def loss_fn(params, batch, mask=None, rng=None, model_state=None):
    """The problem of all designs, with whatever else a loss may be given."""
    hidden = batch["x"] @ params["hidden"]["kernel"] + params["hidden"]["bias"][None]
    if rng is not None:
        hidden = hidden * jax.random.bernoulli(rng, 0.8, hidden.shape)
    predicted = params["scale"] * jnp.tanh(hidden) @ params["output"][0]
    rows = jnp.mean((predicted - batch["y"]) ** 2, axis=1).astype(jnp.float32)
    loss = rows.mean() if mask is None else jaxdp.masked_mean(rows, mask)
    if model_state is None:
        return loss
    seen = {"mean": jnp.mean(batch["x"]).astype(jnp.float32)}
    count = model_state["count"] + 1
    return loss, jaxdp.Aux(model_state=seen | {"count": count})


def after_steps(design, mesh, padded=False, rng=False, **options):
    """Training, state and metrics after `STEPS` steps."""
    train = jaxdp.data_parallel(loss_fn, optax.adam(0.01), mesh, design, **options)
    state = train.init(
        PARAMS,
        rng=jax.random.key(3) if rng else None,
        model_state=MODEL_STATE if options.get("model_state") else None,
    )
    metrics = {}
    for batch in BATCHES[:STEPS]:
        if padded:
            batch = jax.tree.map(lambda x: x[:ROWS], batch)
            accumulate = options.get("accumulate", 1)
            batch = jaxdp.shard_batch(batch, mesh, "pad", accumulate=accumulate)
        state, metrics = train.step(state, batch)
    return train, state, metrics


@functools.cache
def without_parts(name):
    """The same options where every device keeps everything."""
    options = dict(OPTIONS[name])
    design = jaxdp.RingAllReduce(
        bucket_cap_mb=CAP, compression=options.pop("compression", None)
    )
    train, state, metrics = after_steps(design, jaxdp.data_mesh(3), **options)
    params, kept = train.params(state), train.model_state(state)
    return jax.tree.map(np.asarray, (params, kept, state.loss_scale, metrics))


@pytest.mark.parametrize("name", OPTIONS)
@over_stages
def test_options_mean_what_they_mean_without_parts(stage, name):
    options = dict(OPTIONS[name])
    design = jaxdp.Zero(
        stage, bucket_cap_mb=CAP, compression=options.pop("compression", None)
    )
    train, state, metrics = after_steps(design, jaxdp.data_mesh(3), **options)
    params, kept, scale, expected_metrics = without_parts(name)
    precision = options.get("precision")
    bound = BOUND[precision.compute if precision else "f32"]
    chex.assert_trees_all_close(train.params(state), params, rtol=0, atol=bound)
    chex.assert_trees_all_equal_shapes_and_dtypes(train.params(state), params)
    chex.assert_trees_all_close(train.model_state(state), kept, rtol=1e-6)
    chex.assert_trees_all_equal(state.loss_scale, scale)
    chex.assert_trees_all_close(metrics, expected_metrics, rtol=0, atol=bound)
    assert_replicas_bit_equal((train.params(state), metrics, state.step))
    moved = np.abs(params["output"][0] - PARAMS["output"][0])
    assert moved.max() > 0.02  # more than any bound


@over_stages
def test_an_overflow_on_one_replica_is_skipped_by_all(stage):
    """Parts of parameters, moments and residuals keep their bits."""
    train = jaxdp.data_parallel(
        lambda p, b: loss_fn(p, b) * b["factor"][0],
        optax.adam(0.01),
        jaxdp.data_mesh(3),
        jaxdp.Zero(stage, compression=jaxdp.compression.TopK(0.5)),
        precision=jaxdp.Precision("f32", loss_scale="dynamic"),
    )
    state = train.init(PARAMS)

    def step(state, factors):
        batch = BATCHES[0] | {"factor": np.repeat(np.asarray(factors, "f"), 8)}
        return train.step(state, batch)

    state, metrics = step(state, [1, 1, 1])
    assert not metrics["skipped"]
    before = jax.tree.map(np.asarray, state)
    state, metrics = step(state, [1, np.inf, 1])
    assert metrics["skipped"]
    after = jax.tree.map(np.asarray, state)
    for name in ("step", "params", "opt_state"):
        chex.assert_trees_all_equal(getattr(after, name), getattr(before, name))
    assert (after.loss_scale.scale, after.loss_scale.skipped) == (32768, 1)


@over_stages
def test_shards_in_hosts_train_as_shards_over_all(stage):
    """HSDP: 8 devices as 2 hosts of 4."""
    design = jaxdp.Zero(stage, bucket_cap_mb=CAP)
    train, state, metrics = after_steps(design, hybrid(), accumulate=3)
    flat, other, expected = after_steps(design, jaxdp.data_mesh(8), accumulate=3)
    chex.assert_trees_all_close(
        train.params(state), flat.params(other), rtol=0, atol=BOUND["f32"]
    )
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-6)
    assert_replicas_bit_equal((train.params(state), metrics))
    for shard in in_parts(state):
        copies: dict[str, set] = {}
        for each in shard.data.addressable_shards:
            copies.setdefault(str(each.index), set()).add(each.data.tobytes())
        assert len(copies) == (4 if shard.size else 1)
        assert all(len(bits) == 1 for bits in copies.values())
