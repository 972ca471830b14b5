"""Options together: each leaves the numbers of one device alone, and so do all."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from tests import contract
from tests.contract import BATCHES, PARAMS
from tests.helpers import assert_replicas_bit_equal

ROWS = 17  # of 24: on 3 replicas with 4 micro-batches, seven rows are padding
LABELS = {
    "hidden": {"kernel": "train", "bias": "freeze", "none": None},
    "output": ["train", "train"],
    "scale": "train",
}
OPTIMIZER = optax.partition(
    {
        "train": optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.01)),
        "freeze": optax.set_to_zero(),
    },
    LABELS,
)
DESIGNS = {
    "ring": jaxdp.RingAllReduce(bucket_cap_mb=64 / 2**20),
    "ring-late": jaxdp.RingAllReduce(bucket_cap_mb=64 / 2**20, overlap=False),
    "native": jaxdp.NativeAllReduce(bucket_cap_mb=64 / 2**20),
    "star": jaxdp.AllReduce("star"),
    "root": jaxdp.GatherToRoot(root=2),
    "not-yet-local": jaxdp.LocalSGD(2, start_step=10),
    "exact": jaxdp.RingAllReduce(compression=jaxdp.compression.TopK(1.0)),
}


def row_losses(params, batch):
    hidden = batch["x"] @ params["hidden"]["kernel"] + params["hidden"]["bias"][None]
    predicted = params["scale"] * jnp.tanh(hidden) @ params["output"][0]
    return jnp.mean((predicted - batch["y"]) ** 2, axis=1)


def masked_loss(params, batch, mask, model_state):
    loss = jaxdp.masked_mean(row_losses(params, batch), mask)
    seen = {
        "mean": jnp.sum(jnp.where(mask, batch["x"][:, 0], 0)) / jnp.sum(mask),
        "count": model_state["count"] + 1,
    }
    return loss, jaxdp.Aux(model_state=seen)


def mean_loss(params, batch):
    return row_losses(params, batch).mean()


@pytest.mark.parametrize("design", DESIGNS)
def test_everything_at_once_equals_one_device(design):
    mesh = jaxdp.data_mesh(3)
    train = jaxdp.data_parallel(
        masked_loss,
        OPTIMIZER,
        mesh,
        DESIGNS[design],
        accumulate=4,
        model_state="broadcast",
        precision=jaxdp.Precision("f32", loss_scale=2.0**10),
    )
    batches = [jax.tree.map(lambda x: x[:ROWS], b) for b in BATCHES[:3]]
    expected, losses = contract.on_one_device(mean_loss, OPTIMIZER, PARAMS, batches)
    start = {"mean": np.float32(0), "count": np.int32(0)}
    state = train.init(PARAMS, model_state=start)
    for batch, params, loss in zip(batches, expected, losses, strict=True):
        padded = jaxdp.shard_batch(batch, mesh, "pad", accumulate=4)
        state, metrics = train.step(state, padded)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=2e-6)
        chex.assert_trees_all_close(train.params(state), params, rtol=0, atol=3e-6)
    assert_replicas_bit_equal((train.params(state), state.model_state, metrics))
    assert not metrics["skipped"]
    assert train.step.__self__.jitted_step._cache_size() == 1
    # The first replica has rows 0 to 7; its last micro-batch is rows 6 and 7.
    kept = train.model_state(state)
    np.testing.assert_allclose(kept["mean"], batches[-1]["x"][6:8, 0].mean(), rtol=1e-6)
    assert kept["count"] == 12


@pytest.mark.parametrize(
    "design",
    [
        pytest.param(jaxdp.LocalSGD(3), id="local"),
        pytest.param(
            jaxdp.RingAllReduce(compression=jaxdp.compression.TopK(0.5)), id="topk"
        ),
        pytest.param(
            jaxdp.RingAllReduce(compression=jaxdp.compression.PowerSGD(1)),
            id="powersgd",
        ),
    ],
)
def test_an_overflow_on_one_replica_is_skipped_by_all_that_keep_something(design):
    """Residuals, seed matrices and local parameters stay as they were, too."""
    mesh = jaxdp.data_mesh(3)
    train = jaxdp.data_parallel(
        lambda p, b: mean_loss(p, b) * b["factor"][0],
        optax.adam(0.01),
        mesh,
        design,
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
    assert metrics["loss_scale"] == 65536
    after = jax.tree.map(np.asarray, state)
    kept = ("step", "params", "opt_state")
    for name in kept:
        chex.assert_trees_all_equal(getattr(after, name), getattr(before, name))
    assert (after.loss_scale.scale, after.loss_scale.skipped) == (32768, 1)
    state, metrics = step(state, [1, 1, 1])
    assert not metrics["skipped"]
    assert int(state.step) == 2
    assert jnp.isfinite(train.params(state)["scale"])


def test_a_loss_scale_needs_a_design_that_can_skip():
    message = r"loss scale and ParameterServer, which refuses single pushes"
    with pytest.raises(ValueError, match=message):
        jaxdp.data_parallel(
            contract.loss_fn,
            optax.sgd(0.1),
            jaxdp.data_mesh(2),
            jaxdp.ParameterServer(),
            precision=jaxdp.Precision("fp16", loss_scale="dynamic"),
        )
