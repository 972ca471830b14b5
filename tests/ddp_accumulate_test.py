"""Micro-batches: one gradient, that of the whole batch, and one exchange."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from tests import contract
from tests.contract import BATCHES, DESIGNS, KINDS, PARAMS, over_kinds
from tests.helpers import assert_bit_equal, assert_replicas_bit_equal

STEPS = 4
BOUND = 2e-6  # as in the contract of designs


@functools.cache
def reference():
    return contract.on_one_device(
        contract.loss_fn, optax.adam(0.01), PARAMS, BATCHES[:STEPS]
    )


@pytest.mark.parametrize(
    ("design", "accumulate"), [(name, 2) for name in KINDS] + [("ring-buckets", 8)]
)
def test_equals_one_device(design, accumulate):
    train = jaxdp.data_parallel(
        contract.loss_fn,
        optax.adam(0.01),
        jaxdp.data_mesh(3),
        DESIGNS[design](3),
        accumulate=accumulate,
    )
    state, (expected, losses) = train.init(PARAMS), reference()
    for batch, params, loss in zip(BATCHES[:STEPS], expected, losses, strict=True):
        state, metrics = train.step(state, batch)
        got = train.params(state)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=BOUND),
            got,
            params,
        )
        np.testing.assert_allclose(metrics["loss"], loss, rtol=0, atol=BOUND)
    assert_replicas_bit_equal(train.params(state))


def test_there_is_one_exchange_after_the_last_micro_batch():
    """As many bytes and collectives as without; the loop holds none."""

    def report(accumulate):
        train = jaxdp.data_parallel(
            contract.loss_fn,
            optax.adam(0.01),
            jaxdp.data_mesh(3),
            accumulate=accumulate,
        )
        program = train.lower(train.init(PARAMS), BATCHES[0]).compile()
        return jaxdp.analyze(program), program.as_text()

    alone, _ = report(1)
    many, text = report(8)
    assert many.sent_bytes == alone.sent_bytes
    assert len(many.collectives) == len(alone.collectives)
    assert text is not None
    assert " while(" in text


TOKENS = {  # ST-1: one token with loss 10, and nine with loss 1
    "loss": np.array([10.0] + [0.0] * 8 + [1.0] * 9, "f").reshape(2, 9),
    "counts": np.array([1.0] + [0.0] * 8 + [1.0] * 9, "f").reshape(2, 9),
}


def token_loss(w, batch):
    return jaxdp.Mean(jnp.sum(w * batch["loss"]), jnp.sum(batch["counts"]))


@pytest.mark.parametrize(("devices", "accumulate"), [(2, 1), (1, 2)])
@over_kinds
def test_tokens_weigh_alike_on_replicas_and_in_micro_batches(
    design, devices, accumulate
):
    """ST-1: 19 / 10, where a mean of means is 5.5."""
    new, metrics = contract.one_step(
        design,
        token_loss,
        np.float32(1),
        TOKENS,
        devices=devices,
        accumulate=accumulate,
    )
    np.testing.assert_allclose(metrics["loss"], 1.9, rtol=1e-6)
    np.testing.assert_allclose(new, 1 - 1.9, rtol=1e-6)


@over_kinds
def test_micro_batches_are_averaged_not_summed_or_lost(design):
    """ZE-8: gradients 1, 2, 3, 4."""
    x = np.array([1.0, 3.0, 2.0, 4.0], "f")  # each replica has two of them
    new, _ = contract.one_step(
        design, lambda w, x: jnp.sum(w * x), np.float32(0), x, accumulate=2
    )
    assert new == -2.5


@pytest.mark.parametrize("rows", [1, 5, 13, 23])
@over_kinds
def test_an_incomplete_last_window_weighs_its_rows(design, rows):
    """3 replicas of 4 micro-batches of 2: most slices are all padding."""
    x = contract.waves(rows, 3, start=rows)
    mesh = jaxdp.data_mesh(3)
    batch = jaxdp.shard_batch(x, mesh, "pad", accumulate=4)
    assert batch.batch.shape[0] == -(-rows // 12) * 12

    def loss_fn(w, x, mask):
        return jaxdp.masked_mean(jnp.square(x @ w), mask)

    w = np.array([1.0, -2.0, 0.5], "f")
    new, metrics = contract.one_step(design, loss_fn, w, batch, devices=3, accumulate=4)
    dots = x.astype("f8") @ w
    gradient = (2 * dots[:, None] * x).mean(axis=0)
    np.testing.assert_allclose(w - new, gradient, rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(metrics["loss"], (dots**2).mean(), rtol=2e-6)


def test_sums_are_kept_in_float32():
    """AMP-9: a sum of ones in bfloat16 would stop at 256."""

    def loss_fn(w, x):
        return jaxdp.Mean(jnp.sum(w * x.astype(w.dtype)).astype("f"), 1.0)

    new, _ = contract.one_step(
        jaxdp.RingAllReduce(),
        loss_fn,
        jnp.zeros((), jnp.bfloat16),
        np.ones(1000, "f"),
        devices=1,
        accumulate=1000,
    )
    assert new == -1


def test_optax_multi_steps_still_waits_for_its_window():
    """ST-6: 4 of 6 gradients are applied, two wait with mean 5.5."""
    optimizer = optax.MultiSteps(optax.sgd(1.0), 4).gradient_transformation()
    train = jaxdp.data_parallel(
        lambda w, x: jnp.mean(w * x), optimizer, jaxdp.data_mesh(2)
    )
    state = train.init(np.float32(0))
    for gradient in range(1, 7):  # mean of two replicas
        x = np.array([gradient - 0.5, gradient + 0.5], "f")
        state, _ = train.step(state, x)
    assert train.params(state) == -2.5
    assert (state.opt_state.acc_grads, state.opt_state.mini_step) == (5.5, 2)


def test_optax_multi_steps_skips_what_is_not_finite():
    """ST-6: 1, NaN and 3 in windows of two."""
    optimizer = optax.MultiSteps(
        optax.sgd(1.0), 2, should_skip_update_fn=optax.skip_not_finite
    ).gradient_transformation()
    train = jaxdp.data_parallel(
        lambda w, x: jnp.mean(w * x), optimizer, jaxdp.data_mesh(2)
    )
    state = train.init(np.float32(0))
    for gradient in (1, np.nan, 3):
        state, _ = train.step(state, np.array([1, gradient * 2 - 1], "f"))
    assert train.params(state) == -2


def test_every_micro_batch_draws_its_own_numbers():
    def draws(accumulate):
        new, _ = contract.one_step(
            jaxdp.RingAllReduce(),
            lambda w, x, rng: jnp.sum(x[0] @ w * jax.random.normal(rng, (4,))),
            np.zeros((4, 4), "f"),
            np.eye(4, dtype="f"),
            devices=2,
            accumulate=accumulate,
            init={"rng": jax.random.key(3)},
        )
        return -4 * np.asarray(new)

    rows = draws(2)
    assert len({row.tobytes() for row in rows}) == 4
    assert np.abs(rows).min() > 0
    assert_bit_equal(draws(2), rows)


def test_metrics_of_micro_batches_are_weighted():
    """A bare metric has the weight of the loss, a `Mean` its own."""

    def loss_fn(w, batch):
        rows = batch["rows"][0]
        metrics = {"bare": batch["x"][0], "own": jaxdp.Mean(batch["x"][0], 2.0)}
        return jaxdp.Mean(rows * w, rows), jaxdp.Aux(metrics=metrics)

    batch = {"rows": np.array([1, 2, 3, 4], "f"), "x": np.array([8, 4, 2, 1], "f")}
    _, metrics = contract.one_step(
        jaxdp.RingAllReduce(), loss_fn, np.float32(1), batch, accumulate=2
    )
    np.testing.assert_allclose(metrics["bare"], (8 + 8 + 6 + 4) / 10, rtol=1e-6)
    np.testing.assert_allclose(metrics["own"], 15 / 8, rtol=1e-6)


@pytest.mark.parametrize("accumulate", [0, -2, 1.5, "3"])
def test_counts_that_are_none_are_refused(accumulate):
    message = rf"accumulate={accumulate!r}\. It is a number of micro-batches"
    with pytest.raises(ValueError, match=message):
        jaxdp.data_parallel(
            contract.loss_fn,
            optax.sgd(1.0),
            jaxdp.data_mesh(2),
            accumulate=accumulate,
        )


def test_local_rows_that_it_does_not_divide_are_refused():
    message = (
        r"accumulate=5 and a batch of 12 rows per device\. .*12 = 5 x 2 \+ 2\. "
        r".*accumulate=5\)"
    )
    with pytest.raises(ValueError, match=message):
        contract.one_step(
            jaxdp.RingAllReduce(), contract.loss_fn, PARAMS, BATCHES[0], accumulate=5
        )


def test_shard_batch_names_devices_and_micro_batches():
    message = r"10 rows for 2 devices x 4 micro-batches = 8 .*10 = 8 x 1 \+ 2\. "
    with pytest.raises(ValueError, match=message):
        jaxdp.shard_batch(np.ones(10, "f"), jaxdp.data_mesh(2), accumulate=4)


def test_shard_batch_drops_down_to_whole_micro_batches():
    batch = jaxdp.shard_batch(np.arange(21.0), jaxdp.data_mesh(2), "drop", accumulate=4)
    np.testing.assert_array_equal(batch, np.arange(16.0))
