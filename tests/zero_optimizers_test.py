"""Known faults of sharded optimizers, as inputs with known results, at every stage.

ZE: public bug reports.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from tests import contract
from tests.helpers import assert_bit_equal, assert_replicas_bit_equal
from tests.zero_helpers import in_parts, linear, over_stages, trained, whole_state


@over_stages
def test_ze1_norms_are_those_of_the_leaves(stage):
    """LAMB: 10 x 0.1 and 0.1 x 0.1; over one flat vector both are 0.7071."""
    params = {"a": np.full(4, 10, "f"), "b": np.full(4, 0.1, "f")}
    gradients = {"a": np.full(4, 0.1, "f"), "b": np.full(4, 5, "f")}
    new, _ = contract.one_step(
        jaxdp.Zero(stage),
        linear(gradients),
        params,
        np.ones(2, "f"),
        optimizer=optax.lamb(0.1),
    )
    moved = jax.tree.map(np.subtract, new, params)
    np.testing.assert_allclose(moved["a"], np.full(4, -1.0), rtol=1e-5)
    np.testing.assert_allclose(moved["b"], np.full(4, -0.01), rtol=1e-5)


@over_stages
def test_ze1_factored_statistics_stay_factored(stage):
    """Adafactor keeps 256 + 256 + 1 numbers and a counter, and trains as alone."""
    params, optimizer = contract.waves(256, 256), optax.adafactor(0.1)

    def loss_fn(w, batch):
        return jnp.mean((batch @ w) ** 2)

    batches = [contract.waves(4, 256, start=step) for step in range(2)]
    train, state = trained(stage, loss_fn, optimizer, params, batches)
    factored = optax.tree.get(whole_state(state), "FactoredState")
    assert sum(x.size for x in jax.tree.leaves(factored)) == 514
    expected, _ = contract.on_one_device(loss_fn, optimizer, params, batches)
    np.testing.assert_allclose(train.params(state), expected[-1], rtol=0, atol=1e-5)
    assert np.abs(expected[-1] - params).max() > 0.05


UNUSUAL = {
    "clip-masked-schedule": lambda: optax.chain(
        optax.clip(1.0),
        optax.masked(optax.scale_by_adam(), {"a": True, "b": False, "none": None}),
        optax.scale_by_schedule(optax.linear_schedule(-0.1, -0.2, 3)),
    ),
    "multi-steps": lambda: optax.MultiSteps(optax.adam(0.1), 2),
    "no-state": lambda: optax.sgd(0.1),
}


@pytest.mark.parametrize("optimizer", UNUSUAL)
@over_stages
def test_ze2_the_structure_of_a_state_stays(stage, optimizer):
    """Empty nodes, counters and schedules; what is like a parameter is in parts."""
    params = {"a": contract.waves(5), "b": contract.waves(2, 3), "none": None}
    made, batches = UNUSUAL[optimizer](), [np.array([0.5, 1.5], "f")] * 3
    ones = jax.tree.map(np.ones_like, params)
    train, state = trained(stage, linear(ones), made, params, batches)
    plain = made.init(jax.tree.map(jnp.asarray, params))
    chex.assert_trees_all_equal_shapes_and_dtypes(whole_state(state), plain)
    like_params = [x.shape for x in jax.tree.leaves(plain) if x.shape]
    assert [x.shape for x in in_parts(state.opt_state)] == like_params
    assert_replicas_bit_equal(state.opt_state.whole)
    expected, _ = contract.on_one_device(linear(ones), made, params, batches)
    chex.assert_trees_all_close(train.params(state), expected[-1], rtol=0, atol=2e-6)


@over_stages
def test_ze2_no_parameters(stage):
    new, metrics = contract.one_step(
        jaxdp.Zero(stage), lambda p, x: jnp.mean(x), {}, np.array([1.0, 2.0], "f")
    )
    assert (new, metrics["loss"]) == ({}, 1.5)


@over_stages
def test_ze3_a_norm_counts_every_element_once(stage):
    """0.8 is not clipped to 1; counted twice it would be 1.13, and became 0.7071."""
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    new, _ = contract.one_step(
        jaxdp.Zero(stage),
        linear(np.float32(0.8)),
        np.float32(0),
        np.ones(2, "f"),
        optimizer=clipped,
    )
    np.testing.assert_allclose(new, -0.8, rtol=1e-6)


@over_stages
def test_ze3_a_norm_of_leaves_that_some_devices_have_nothing_of(stage):
    """10 elements on 4 devices, and one: 10 x 3**2 + 1 = 91."""
    gradients = {"many": np.full(10, 3, "f"), "one": np.float32(1)}
    new, _ = contract.one_step(
        jaxdp.Zero(stage),
        linear(gradients),
        jax.tree.map(np.zeros_like, gradients),
        np.ones(4, "f"),
        devices=4,
        optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)),
    )
    np.testing.assert_allclose(new["many"], np.full(10, -3 / 91**0.5), rtol=1e-6)
    np.testing.assert_allclose(new["one"], -1 / 91**0.5, rtol=1e-6)


@over_stages
def test_ze4_clipping_knows_the_whole_gradient(stage):
    """Norm 5; with one of [3, 4] on each device, local norms would give [1, 1]."""
    new, _ = contract.one_step(
        jaxdp.Zero(stage),
        linear(np.array([3, 4], "f")),
        np.zeros(2, "f"),
        np.ones(2, "f"),
        optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)),
    )
    np.testing.assert_allclose(new, [-0.6, -0.8], rtol=1e-6)


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(optax.rmsprop(0.1, eps=0), id="rmsprop"),
        pytest.param(optax.lamb(0.1, eps=0), id="lamb"),
    ],
)
@over_stages
def test_ze5_padding_harms_nothing(stage, optimizer):
    """3 elements on 8 devices: the padding of five divides 0 by 0."""
    params, gradients = contract.waves(3, start=1), np.array([1, -2, 3], "f")
    batches = [np.ones(8, "f")] * 2
    train, state = trained(
        stage,
        linear(gradients),
        optimizer,
        params,
        batches,
        devices=8,
        precision=jaxdp.Precision("f32", loss_scale="dynamic"),
    )
    expected, _ = contract.on_one_device(linear(gradients), optimizer, params, batches)
    assert (int(state.step), int(state.loss_scale.skipped)) == (2, 0)
    for shard in in_parts((state.params, state.opt_state)):
        assert not np.asarray(shard.data)[shard.size :].any()
    np.testing.assert_allclose(train.params(state), expected[-1], rtol=1e-5)


@pytest.mark.parametrize("how", ["masked", "partition"])
@over_stages
def test_ze7_frozen_parameters_keep_their_bits(stage, how):
    """Without optimizer state; weight decay and momentum move the other."""
    params = {"f": contract.waves(7), "w": contract.waves(5, start=1)}
    adamw = optax.adamw(0.1, weight_decay=0.1)
    optimizer = {
        "masked": optax.chain(
            optax.masked(adamw, {"f": False, "w": True}),
            optax.masked(optax.set_to_zero(), {"f": True, "w": False}),
        ),
        "partition": optax.partition(
            {"train": adamw, "freeze": optax.set_to_zero()},
            {"f": "freeze", "w": "train"},
        ),
    }[how]

    def loss_fn(params, batch):
        frozen = jax.lax.stop_gradient(params["f"])
        return jnp.mean(batch) * jnp.sum(frozen[:5] * params["w"] ** 2)

    batches = [np.array([0.5, 1.0], "f") * (1 + i) for i in range(10)]
    train, state = trained(stage, loss_fn, optimizer, params, batches)
    new = train.params(state)
    assert_bit_equal(new["f"], params["f"])
    expected, _ = contract.on_one_device(loss_fn, optimizer, params, batches)
    np.testing.assert_allclose(new["w"], expected[-1]["w"], rtol=0, atol=2e-6)
    assert np.abs(new["w"] - params["w"]).min() > 0.05
    assert [shard.shape for shard in in_parts(state.opt_state)] == [(5,)] * 2
