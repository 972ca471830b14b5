"""Known faults of data-parallel software, as inputs with known results.

ST, ER: public bug reports; see also `designs_loss_test.py` for what losses return.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxdp
from tests import contract
from tests.contract import KINDS, over_kinds, over_whole

ONE_TO_8 = np.arange(1.0, 9.0, dtype="f")


@pytest.mark.parametrize(
    ("loss_fn", "expected"),
    [
        pytest.param(lambda w, x: jnp.mean(w * x), 4.5, id="mean"),
        pytest.param(lambda w, x: lax.pmean(jnp.mean(w * x), "data"), 4.5, id="pmean"),
        pytest.param(
            lambda w, x: jaxdp.Mean(jnp.sum(w * x), 1 / lax.axis_size("data")),
            36.0,
            id="sum",
        ),
        pytest.param(lambda w, x: lax.psum(jnp.sum(w * x), "data"), 36.0, id="psum"),
    ],
)
@over_kinds
def test_gradient_of_mean_and_sum_losses(design, loss_fn, expected):
    """ST-2: neither N times too large nor local, with and without a sum inside."""
    w = np.float32(2)
    new, metrics = contract.one_step(design, loss_fn, w, ONE_TO_8, devices=8)
    assert metrics["loss"] == 2 * expected
    assert new == 2 - expected


@pytest.mark.parametrize("devices", [1, 2])  # 8: above
@over_kinds
def test_sum_losses_do_not_depend_on_the_number_of_devices(design, devices):
    """ST-10: the sum over all rows is asked for with a weight of 1 / N."""

    def loss_fn(w, x):
        return jaxdp.Mean(jnp.sum(w * x), 1 / lax.axis_size("data"))

    w = np.float32(2)
    new, metrics = contract.one_step(design, loss_fn, w, ONE_TO_8, devices=devices)
    assert (new, metrics["loss"]) == (2 - 36, 72)


def draw(params, batch, rng):
    """A loss whose gradient shows the mask that each replica draws, in its row."""
    mask = jax.random.bernoulli(rng, 0.5, (32,))
    return 4 * jnp.sum(batch[0] @ params * mask)  # batch[0] is a row of eye(4)


@functools.cache
def drawn(design, make_key=jax.random.key):
    """Masks of 3 steps on 4 replicas, in three runs, the last with another seed."""
    mesh, design = jaxdp.data_mesh(4), KINDS[design](4)
    train = jaxdp.data_parallel(draw, optax.sgd(-1.0), mesh, design)
    runs = []
    for seed in (0, 0, 1):
        state = train.init(np.zeros((4, 32), "f"), rng=make_key(seed))
        sums = [np.zeros((4, 32))]
        for _ in range(3):
            state, _ = train.step(state, np.eye(4, dtype="f"))
            sums.append(np.asarray(state.params))
        runs.append(np.diff(sums, axis=0))
    return runs


def test_replicas_and_steps_draw_different_numbers():
    """ST-5: and the same ones in the next run with this seed."""
    first, again, other = drawn("ring")
    assert set(first.ravel()) == {0, 1}
    assert len({mask.tobytes() for mask in first.reshape(-1, 32)}) == 3 * 4
    np.testing.assert_array_equal(first, again)
    assert (first != other).any(axis=(0, 2)).all()


@pytest.mark.parametrize(
    ("design", "make_key"),
    [
        pytest.param("root-last", jax.random.key, id="root-last"),
        pytest.param("native", jax.random.key, id="native"),
        pytest.param("ring", jax.random.PRNGKey, id="ring-legacy-key"),
    ],
)
def test_designs_draw_the_same_numbers(design, make_key):
    np.testing.assert_array_equal(drawn(design, make_key), drawn("ring"))


@over_whole
def test_clipping_sees_the_averaged_gradient(design):
    """ST-11: clipping before the average would give [0.45, 0.6]."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    batch = np.array([[3.0, 4.0], [0.3, 0.4]], "f")
    new, _ = contract.one_step(
        design,
        lambda w, x: jnp.sum(w * x[0]),
        np.zeros(2, "f"),
        batch,
        optimizer=optimizer,
    )
    np.testing.assert_allclose(new, [-0.6, -0.8], rtol=1e-6)


def in_a_branch(w, used):
    return lax.cond(used[0] > 0, lambda w: w, jnp.zeros_like, w)


@over_kinds
def test_parameter_used_on_one_replica_of_four(design):
    """ST-12: its gradient is a quarter."""
    used = np.array([0.0, 0.0, 1.0, 0.0], "f")
    new, _ = contract.one_step(design, in_a_branch, np.float32(0), used, devices=4)
    assert new == -0.25


@over_kinds
def test_momentum_moves_a_parameter_without_gradient(design):
    """ST-12: as on one device, -0.1 and then -0.09."""
    optimizer = optax.sgd(0.1, momentum=0.9)
    train = jaxdp.data_parallel(in_a_branch, optimizer, jaxdp.data_mesh(2), design(2))
    state = train.init(np.float32(0))
    state, _ = train.step(state, np.ones(2, "f"))
    np.testing.assert_allclose(train.params(state), -0.1, rtol=1e-6)
    state, _ = train.step(state, np.zeros(2, "f"))
    np.testing.assert_allclose(train.params(state), -0.19, rtol=1e-6)


@pytest.mark.parametrize("design", KINDS)
def test_schedules_advance_once_a_step(design):
    """ST-13: after 2 steps on 8 devices the count is 2 and the next rate 0.2."""
    schedule = optax.linear_schedule(0.0, 1.0, 10)
    train = jaxdp.data_parallel(
        lambda w, x: jnp.mean(w * x),
        optax.sgd(schedule),
        jaxdp.data_mesh(8),
        KINDS[design](8),
    )
    state = train.init(np.float32(0))
    moved = []
    for _ in range(3):
        before = float(train.params(state))
        state, _ = train.step(state, ONE_TO_8)
        moved.append(float(train.params(state)) - before)
        if len(moved) == 2:
            count = np.asarray(jax.tree.leaves(state.opt_state)[0])
    # Only the entries of root and servers count; the others are stale copies.
    true_on = {"root-last": [0] * 7 + [2], "servers": [2, 2] + [0] * 6}
    assert count.tolist() == true_on.get(design, 2)
    np.testing.assert_allclose(moved, [0, -0.1 * 4.5, -0.2 * 4.5], rtol=1e-6)


@over_kinds
def test_masked_leaves_behave_as_in_plain_optax(design):
    """ER-4: `optax.masked` passes the raw gradient through, which is added."""
    params = {"a": np.float32(1), "b": np.float32(1)}
    new, _ = contract.one_step(
        design,
        lambda p, x: jnp.mean(x) * (p["a"] + p["b"]),
        params,
        np.array([0.5, 1.5], "f"),
        optimizer=optax.masked(optax.sgd(0.1), {"a": True, "b": False}),
    )
    chex.assert_trees_all_close(new, {"a": 0.9, "b": 2.0}, rtol=1e-6)


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(optax.MultiSteps(optax.adam(0.1), 2), id="multi-steps"),
        pytest.param(optax.apply_if_finite(optax.sgd(0.1), 3), id="apply-if-finite"),
        pytest.param(
            optax.contrib.schedule_free_sgd(0.1, warmup_steps=2), id="schedule-free"
        ),
        pytest.param(optax.lamb(0.1), id="lamb"),
        pytest.param(optax.chain(optax.add_noise(0.1, 0.1, 0)), id="key-in-state"),
    ],
)
@pytest.mark.parametrize("design", ["root-last", "ring"])
def test_optimizers_with_unusual_states(design, optimizer):
    """Conditionals, empty nodes, counters, keys, and copies of the parameters."""

    def loss_fn(params, x):
        return jnp.mean((x @ params["w"] + params["b"] - 1) ** 2)

    params = {"w": contract.waves(3), "b": np.float32(0.5)}
    batches = [contract.waves(6, 3, start=step) for step in range(4)]
    train = jaxdp.data_parallel(
        loss_fn, optimizer, jaxdp.data_mesh(3), KINDS[design](3)
    )
    state = train.init(params)
    for batch in batches:
        state, _ = train.step(state, batch)
    expected, _ = contract.on_one_device(loss_fn, optimizer, params, batches)
    # Values below 2 and 4 steps: see BOUND in designs_test.py.
    chex.assert_trees_all_close(train.params(state), expected[-1], rtol=0, atol=2e-6)
