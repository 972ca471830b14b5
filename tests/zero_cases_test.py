"""Known faults of sharded training, as inputs with known results, at every stage.

ZE, AMP, ST, AN: public bug reports; those about optimizers are in
`zero_optimizers_test.py`.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from tests import contract
from tests.helpers import assert_bit_equal
from tests.zero_helpers import (
    elements_per_device,
    in_parts,
    linear,
    over_stages,
    trained,
    whole_state,
)


@pytest.mark.parametrize("devices", [3, 5, 8])
@over_stages
def test_ze6_nothing_stays_whole_because_it_does_not_divide(stage, devices):
    """272 and 10 elements: ceil(272 / N) and ceil(10 / N) on every device."""
    params = {"a": contract.waves(17, 16), "b": contract.waves(10)}

    def loss_fn(params, batch):
        return jnp.mean((batch @ params["a"]) ** 2) + jnp.sum(params["b"] ** 2)

    batches = [contract.waves(120, 17)]
    train, state = trained(
        stage, loss_fn, optax.adam(0.1), params, batches, devices=devices
    )
    each = [-(-272 // devices), -(-10 // devices)]
    moments = in_parts(state.opt_state)
    assert [elements_per_device(shard) for shard in moments] == each * 2
    kept = in_parts(state.params)
    assert [elements_per_device(shard) for shard in kept] == each * (stage == 3)
    expected, _ = contract.on_one_device(loss_fn, optax.adam(0.1), params, batches)
    chex.assert_trees_all_close(train.params(state), expected[-1], rtol=0, atol=1e-5)


@over_stages
def test_ze8_micro_batches_are_averaged_once(stage):
    """Gradients 1, 2, 3, 4 on each of 2 devices: -2.5 every step, as of one batch."""
    rows = np.array([1, 2, 3, 4] * 2, "f")
    found = {}
    for accumulate in (1, 4):
        train, state = trained(
            stage,
            lambda w, x: jnp.mean(w * x),
            optax.sgd(1.0),
            np.float32(0),
            [],
            accumulate=accumulate,
        )
        found[accumulate] = []
        for _ in range(3):
            state, _ = train.step(state, rows)
            found[accumulate].append(float(train.params(state)))
    assert found[4] == found[1] == [-2.5, -5.0, -7.5]


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("shape", [(), (1,)], ids=["scalar", "one"])
@over_stages
def test_ze9_tiny_parameters(stage, shape, devices):
    params, optimizer = np.full(shape, 0.5, "f"), optax.adam(0.1)

    def loss_fn(log_scale, x):
        return jnp.mean(jnp.exp(jnp.sum(log_scale)) * x)

    batches = [contract.waves(8, start=step) + 2 for step in range(3)]
    train, state = trained(stage, loss_fn, optimizer, params, batches, devices=devices)
    expected, _ = contract.on_one_device(loss_fn, optimizer, params, batches)
    assert train.params(state).shape == shape
    np.testing.assert_allclose(train.params(state), expected[-1], rtol=0, atol=1e-6)
    assert np.abs(expected[-1] - params).max() > 0.2


@pytest.mark.parametrize(
    ("size", "devices", "padded"),
    [(19, 8, 24), (57, 2, 58), (2, 4, 4), (10, 3, 12), (1, 8, 8), (0, 8, 0)],
)
def test_ze10_padding_fills_up_to_a_multiple(size, devices, padded):
    """And a checkpoint has none of it."""
    params, ones = contract.waves(size), np.ones(size, "f")
    train, state = trained(
        3, linear(ones), optax.adam(0.1), params, [], devices=devices
    )
    (kept,) = in_parts(state.params)
    assert kept.data.size == padded
    assert_bit_equal(train.params(state), params)
    (_, mu, nu) = jax.tree.leaves(whole_state(state))
    assert mu.shape == nu.shape == (size,)
    state, _ = train.step(state, np.ones(devices, "f"))
    padding = np.asarray(in_parts(state.params)[0].data)[size:]
    assert not padding.any()
    np.testing.assert_allclose(train.params(state), params - 0.1, rtol=0, atol=1e-6)


@over_stages
def test_amp9_small_updates_are_not_lost(stage):
    """1 - 100 x 0.0006 = 0.94, which computes as 0.9414; in bfloat16 it stays 1."""

    def loss_fn(w, x):
        seen = w.astype(jnp.float32)
        return jnp.mean(x) * seen, jaxdp.Aux(metrics={"seen": seen})

    train, state = trained(
        stage,
        loss_fn,
        optax.sgd(6e-4),
        np.float32(1),
        [np.ones(2, "f")] * 100,
        precision=jaxdp.Precision("bf16"),
    )
    new = train.params(state)
    assert new.dtype == jnp.float32
    np.testing.assert_allclose(new, 0.94, rtol=1e-5)
    _, metrics = train.step(state, np.ones(2, "f"))
    assert metrics["seen"] == 0.94140625


@over_stages
def test_amp9_micro_batches_add_up_in_float32(stage):
    """1,000 ones; in bfloat16 they would stop at 256."""
    new, _ = contract.one_step(
        jaxdp.Zero(stage),
        linear(np.float32(1)),
        np.float32(0),
        np.ones(2000, "f"),
        accumulate=1000,
        precision=jaxdp.Precision("bf16"),
    )
    assert new == -1


@over_stages
def test_st4_one_array_in_two_leaves(stage):
    """Two leaves, apart from the first step on; the caller's array survives."""
    tied = jnp.array([1.0, 2.0, 3.0])
    train, state = trained(
        stage,
        lambda p, b: jnp.mean(b) * jnp.sum(2 * p["x"] + 3 * p["y"]),
        optax.sgd(1.0),
        {"x": tied, "y": tied},
        [np.array([0.5, 1.5], "f")] * 2,
    )
    new = train.params(state)
    assert new["x"].tolist() == [-3, -2, -1]
    assert new["y"].tolist() == [-5, -4, -3]
    assert tied.tolist() == [1, 2, 3]


@over_stages
def test_st6_an_incomplete_window_waits(stage):
    """Gradients 1 to 6, four at a time: -2.5, and two pending with mean 5.5."""
    train, state = trained(
        stage,
        lambda w, x: jnp.mean(w * x),
        optax.MultiSteps(optax.sgd(1.0), 4),
        np.float32(0),
        [np.full(2, i, "f") for i in range(1, 7)],
    )
    assert train.params(state) == -2.5
    pending = whole_state(state)
    assert (pending.mini_step, pending.acc_grads) == (2, 5.5)


@over_stages
def test_st6_a_gradient_that_is_not_finite_does_not_count(stage):
    """1, NaN and 3, two at a time: -2."""
    skip = optax.transforms.skip_not_finite
    train, state = trained(
        stage,
        lambda w, x: jnp.mean(w * x),
        optax.MultiSteps(optax.sgd(1.0), 2, should_skip_update_fn=skip),
        np.zeros(3, "f"),
        [np.full(2, x, "f") for x in (1, np.nan, 3)],
    )
    np.testing.assert_allclose(train.params(state), [-2 / 3] * 3, rtol=1e-6)


@pytest.mark.parametrize("algorithm", ["native", "ring"])
@over_stages
def test_an5_reduce_scatter_is_no_all_reduce(stage, algorithm):
    """24 parameters on 4 devices: what is reduced to all is the loss alone."""
    train = jaxdp.data_parallel(
        lambda w, x: jnp.mean((jnp.tanh(x @ w) @ w.T) ** 2),
        optax.adam(0.1),
        jaxdp.data_mesh(4),
        jaxdp.Zero(stage, algorithm=algorithm),
    )
    state, batch = train.init(contract.waves(6, 4)), contract.waves(8, 6)
    report = jaxdp.analyze(train.lower(state, batch).compile())
    gathers = 2 if stage == 3 else 1
    phi, loss = 24 * 4 * 3 // 4, 2 * 3 * 4
    kinds = {op.kind for op in report.collectives}
    if algorithm == "native":
        assert kinds == {"reduce-scatter", "all-gather", "all-reduce"}
        assert report.count("reduce-scatter") == report.count("all-reduce") == 1
        assert report.count("all-gather") == gathers
    else:
        assert kinds == {"collective-permute"}
    assert report.sent_bytes == ((1 + gathers) * phi + loss,) * 4
