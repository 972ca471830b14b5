"""What losses return beside a scalar, on every design: means, metrics, model state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from tests import contract
from tests.contract import over_kinds
from tests.helpers import as_numpy, assert_replicas_bit_equal


def token_mean(dtype):
    """The loss over valid tokens, with a count of the given dtype as its weight."""

    def loss_fn(w, batch):
        losses = jnp.where(batch["valid"], w * batch["loss"], 0)
        return jaxdp.Mean(jnp.sum(losses), jnp.sum(batch["valid"], dtype=dtype))

    return loss_fn


@pytest.mark.parametrize("dtype", ["int32", "float32", "bfloat16"])
@over_kinds
def test_mean_over_tokens(design, dtype):
    """ST-1: 1 token of loss 10 and 9 of loss 1 give 1.9, not the mean of means 5.5."""
    batch = {"loss": np.ones((2, 9), "f"), "valid": np.ones((2, 9), bool)}
    batch["loss"][0, 0] = 10
    batch["valid"][0, 1:] = False
    new, metrics = contract.one_step(design, token_mean(dtype), np.float32(1), batch)
    np.testing.assert_allclose(metrics["loss"], 1.9, rtol=1e-6)
    np.testing.assert_allclose(new, 1 - 1.9, rtol=1e-6)


@over_kinds
def test_static_weight(design):
    """A Python number as weight is as good as an array."""

    def loss_fn(w, x):
        return jaxdp.Mean(jnp.sum(w * x), x.size)

    x = np.arange(6.0, dtype="f")
    new, metrics = contract.one_step(design, loss_fn, np.float32(1), x)
    assert (new, metrics["loss"]) == (1 - 2.5, 2.5)


@over_kinds
def test_metrics_have_the_weight_of_the_loss(design):
    """DA-5: accuracies of 256, 256 and 10 rows; the mean of means would be 0.8."""

    def loss_fn(w, batch):
        (rows,), (accuracy,) = batch["rows"], batch["accuracy"]
        metrics = {
            "accuracy": accuracy,
            "share": jaxdp.Mean(rows, 3.0),  # an own weight
            "curve": jnp.stack([accuracy, 2 * accuracy]),
        }
        return jaxdp.Mean(rows * w, rows), jaxdp.Aux(metrics=metrics)

    batch = {
        "rows": np.array([256, 256, 10], "f"),
        "accuracy": np.array([0.7, 0.8, 0.9], "f"),
    }
    _, metrics = contract.one_step(design, loss_fn, np.float32(1), batch, devices=3)
    expected = (256 * 0.7 + 256 * 0.8 + 10 * 0.9) / 522
    assert metrics.keys() - {"refused_pushes"} == {"loss", "accuracy", "share", "curve"}
    np.testing.assert_allclose(metrics["accuracy"], expected, rtol=1e-6)
    np.testing.assert_allclose(metrics["curve"], [expected, 2 * expected], rtol=1e-6)
    np.testing.assert_allclose(metrics["share"], 522 / 9, rtol=1e-6)
    assert_replicas_bit_equal(metrics)


@over_kinds
def test_weights_of_an_uneven_batch(design):
    """DA-5: 39 rows on 2 devices count 20/39 and 19/39."""

    def loss_fn(w, x, mask):
        rank = jnp.full(x.shape, jax.lax.axis_index("data"), "f")
        loss = jaxdp.masked_mean(w * x, mask)
        return loss, jaxdp.Aux(metrics={"rank": jaxdp.masked_mean(rank, mask)})

    x = jaxdp.shard_batch(
        np.arange(39.0, dtype="f"), jaxdp.data_mesh(2), remainder="pad"
    )
    new, metrics = contract.one_step(design, loss_fn, np.float32(1), x)
    np.testing.assert_allclose(metrics["rank"], 19 / 39, rtol=1e-6)
    np.testing.assert_allclose(metrics["loss"], 19.0, rtol=1e-6)
    np.testing.assert_allclose(new, 1 - 19.0, rtol=1e-6)


@over_kinds
def test_counts_are_averaged_as_floats(design):
    """Integer, bool and Python metrics; silently rank 0's they would be 1, 0, no."""

    def loss_fn(w, x):
        metrics = {
            "correct": jaxdp.Mean(jnp.sum(x > 1), x.size),
            "count": jnp.sum(x > 1),
            "positive": x[0] > 1,
            "python": 1.5,
        }
        return jnp.mean(w * x), jaxdp.Aux(metrics=metrics)

    x = np.array([1, 1, 2, 1, 2, 2], "f")
    _, metrics = contract.one_step(design, loss_fn, np.float32(1), x, devices=3)
    expected = {"correct": 0.5, "count": 1.0, "positive": 2 / 3, "python": 1.5}
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-6)


@over_kinds
def test_model_state_is_averaged(design):
    """Floats with the weight of the loss; counters, keys and bools pass through."""

    def loss_fn(w, batch, model_state):
        (rows,), (mean,) = batch["rows"], batch["mean"]
        new = {**model_state, "mean": mean, "half": mean.astype("bfloat16")}
        new["count"] = model_state["count"] + 1
        return jaxdp.Mean(rows * w, rows), jaxdp.Aux(model_state=new)

    train = jaxdp.data_parallel(
        loss_fn, optax.sgd(1.0), jaxdp.data_mesh(2), design(2), model_state="mean"
    )
    state = train.init(
        np.float32(1),
        model_state={
            "count": 3,
            "flag": True,
            "half": jnp.bfloat16(0),
            "key": jax.random.key(5),
            "mean": 0.0,
            "none": None,
        },
    )
    given = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state.model_state)
    batch = {"rows": np.array([1, 3], "f"), "mean": np.array([4, 8], "f")}
    for _ in range(2):
        state, _ = train.step(state, batch)
    new = state.model_state
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), new) == given
    assert (new["mean"], new["half"], new["count"], new["flag"]) == (7, 7, 5, True)
    np.testing.assert_array_equal(
        jax.random.key_data(new["key"]), jax.random.key_data(jax.random.key(5))
    )
    assert_replicas_bit_equal(new)


@over_kinds
def test_model_state_that_is_only_read_keeps_its_bits(design):
    """Three equal replicas: averaging would change a third of these numbers."""
    statistics = contract.waves(100)
    train = jaxdp.data_parallel(
        lambda w, x, model_state: jnp.mean(w * x) * model_state[0],
        optax.sgd(1.0),
        jaxdp.data_mesh(3),
        design(3),
    )
    state = train.init(np.float32(1), model_state=statistics)
    state, _ = train.step(state, np.ones(3, "f"))
    np.testing.assert_array_equal(as_numpy(state.model_state), statistics)


@over_kinds
def test_keys_and_counters_of_a_model_state_go_on(design):
    def loss_fn(w, x, model_state):
        key, seen = model_state["key"], model_state["seen"] + 1
        key = jax.random.fold_in(key, 7)
        return jnp.mean(w * x), jaxdp.Aux(model_state={"key": key, "seen": seen})

    start = {"key": jax.random.key(3), "seen": np.int32(16777216)}
    train = jaxdp.data_parallel(loss_fn, optax.sgd(1.0), jaxdp.data_mesh(3), design(3))
    state = train.init(np.float32(1), model_state=start)
    state, _ = train.step(state, np.ones(3, "f"))
    expected = jax.random.key_data(jax.random.fold_in(start["key"], 7))
    key_data = jax.random.key_data(state.model_state["key"])
    np.testing.assert_array_equal(key_data, expected)
    assert int(state.model_state["seen"]) == 16777217


@over_kinds
def test_integer_model_state_that_differs_between_replicas_is_refused(design):
    def loss_fn(w, x, model_state):
        return jnp.mean(w * x), jaxdp.Aux(model_state={"seen": jnp.sum(x > 1)})

    message = r"model_state\['seen'\] may differ .*Integers.* not averaged"
    with pytest.raises(ValueError, match=message):
        contract.one_step(
            design,
            loss_fn,
            np.float32(1),
            np.ones(2, "f"),
            init={"model_state": {"seen": 0}},
            model_state="mean",
        )
