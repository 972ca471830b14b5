"""Late gradients: against the papers' formulas in NumPy, and what they are good for."""

from typing import Any, cast

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp.staleness import compensate_delay, scale_by_staleness
from tests.helpers import assert_bit_equal

UPDATES = {"w": np.array([-6.0, 0.5, 3.0], np.float32), "b": np.float32(-1.5)}
PARAMS = {"w": np.array([1.0, -2.0, 0.25], np.float32), "b": np.float32(0.5)}
STALE = {"w": np.array([0.75, 2.0, 1.25], np.float32), "b": np.float32(1.0)}
# Zero of either sign, the largest and the smallest normal number, and one between.
EXTREME = np.array([0.0, -0.0, 3.4e38, -1.2e-38, 1 / 3], np.float32)

both = pytest.mark.parametrize("decay", [None, 0.75], ids=["constant", "adaptive"])


def apply(transformation, updates, params=None, **extra_args) -> Any:
    """One update from a fresh state."""
    state = transformation.init(params)
    return transformation.update(updates, state, params, **extra_args)[0]


def bits(array) -> list[int]:
    return np.asarray(array).view(np.uint32).tolist()


# Dividing by staleness


@pytest.mark.parametrize(
    ("staleness", "divisor"), [(0, 1), (1, 1), (2, 2), (3, 3), (70_000, 70_000)]
)
def test_divides_by_staleness(staleness, divisor):
    updates = apply(scale_by_staleness(), UPDATES, staleness=staleness)
    chex.assert_trees_all_close(
        updates, jax.tree.map(lambda u: u / np.float32(divisor), UPDATES), rtol=1e-7
    )
    chex.assert_trees_all_equal_dtypes(updates, UPDATES)


@pytest.mark.parametrize("staleness", [0, 1, -3])
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_fresh_updates_keep_their_bits(staleness, jit):
    def scale(updates, staleness):
        return apply(scale_by_staleness(), updates, staleness=staleness)

    updates = [jnp.asarray(EXTREME), jax.lax.complex(*[jnp.asarray(EXTREME)] * 2)]
    real, complex_ = (jax.jit(scale) if jit else scale)(updates, staleness)
    assert bits(real) == bits(complex_.real) == bits(complex_.imag) == bits(EXTREME)


def test_one_compilation_serves_all_staleness():
    @jax.jit
    @chex.assert_max_traces(n=1)
    def scale(updates, staleness):
        return apply(scale_by_staleness(), updates, staleness=staleness)

    for staleness in range(5):
        scaled = scale(jnp.float32(12.0), jnp.int32(staleness))
        assert scaled == 12.0 / max(1, staleness)


def test_place_in_a_chain_decides_what_is_divided():
    """Gradients 8 and 8 of staleness 1 and 4; momentum 0.5; learning rate 1."""

    def second_step(*chain):
        optimizer = optax.chain(*chain)
        params, state = jnp.float32(0.0), optimizer.init(jnp.float32(0.0))
        for staleness in (1, 4):
            updates, state = optimizer.update(
                jnp.float32(8.0), state, params, staleness=staleness
            )
        return float(np.asarray(updates))

    momentum, scale = optax.sgd(1.0, momentum=0.5), scale_by_staleness()
    assert second_step(scale, optax.sgd(1.0)) == second_step(optax.sgd(1.0), scale)
    assert second_step(scale, momentum) == -(8 / 2 + 8 / 4)
    assert second_step(momentum, scale) == -(8 / 2 + 8) / 4
    adam = optax.adam(1.0)
    assert second_step(adam, scale) == pytest.approx(-1 / 4, rel=1e-4)
    assert second_step(scale, adam) == pytest.approx(-0.8, abs=0.05)


# Compensating for delay


def test_compensates_hand_computed_numbers():
    """1 + 0.25 * g * (now - stale): 0.625, 0.5, 0.25, and 1.1875 for b."""
    updates = apply(compensate_delay(0.25), UPDATES, PARAMS, stale_params=STALE)
    np.testing.assert_array_equal(updates["w"], [-3.75, 0.25, 0.75])
    np.testing.assert_array_equal(updates["b"], np.float32(-1.5 * 1.1875))


def test_adaptive_strength_follows_the_moving_mean_square():
    strength, decay, eps = 0.5, 0.75, 0.125
    transformation = compensate_delay(strength, decay, eps)
    state, mean = transformation.init(PARAMS), jax.tree.map(np.zeros_like, UPDATES)
    for k in range(3):
        gradients = jax.tree.map(lambda g, k=k: g * np.float32(1 + k), UPDATES)
        updates, state = jax.jit(transformation.update)(
            gradients, state, PARAMS, stale_params=STALE
        )
        mean = jax.tree.map(lambda m, g: 0.75 * m + 0.25 * g**2, mean, gradients)
        expected = jax.tree.map(
            lambda g, m, now, stale: (
                g + strength / np.sqrt(m + eps) * g**2 * (now - stale)
            ),
            *(gradients, mean, PARAMS, STALE),
        )
        chex.assert_trees_all_close(state.mean_square, mean, rtol=1e-6)
        chex.assert_trees_all_close(updates, expected, rtol=1e-5)


@both
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_without_delay_gradients_keep_their_bits(decay, jit):
    transformation = compensate_delay(0.4, decay)

    def compensate(updates, params):
        return apply(transformation, updates, params, stale_params=params)

    updates = [jnp.asarray(EXTREME), jax.lax.complex(*[jnp.asarray(EXTREME)] * 2)]
    params = [u + 1 for u in updates]
    for _ in range(2):
        real, complex_ = (jax.jit(compensate) if jit else compensate)(updates, params)
        assert bits(real) == bits(complex_.real) == bits(complex_.imag) == bits(EXTREME)


@both
def test_a_gradient_whose_square_overflows_stays_finite(decay):
    transformation = compensate_delay(0.4, decay)
    params, huge = jnp.float32(2.0), jnp.float32(1e20)
    state = transformation.init(params)
    for g in (huge, jnp.float32(3.0)):
        updates, state = transformation.update(g, state, params, stale_params=params)
        assert updates == g


@both
def test_complex_leaves_are_pairs_of_real_ones(decay):
    rng = np.random.default_rng(7)
    trees = rng.normal(size=(3, 2, 5)).astype(np.float32)
    joined = [jax.lax.complex(*map(jnp.asarray, tree)) for tree in trees]
    pairs = [dict(zip(("real", "imag"), tree, strict=True)) for tree in trees]
    transformation = compensate_delay(0.7, decay)
    updates, params, stale = joined
    result = apply(transformation, updates, params, stale_params=stale)
    updates, params, stale = pairs
    expected = apply(transformation, updates, params, stale_params=stale)
    assert result.dtype == jnp.complex64
    np.testing.assert_array_equal(result.real, expected["real"])
    np.testing.assert_array_equal(result.imag, expected["imag"])


@both
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_leaves_are_computed_in_32_bits(dtype, decay):
    """The squares, 1e6 and 1e-8, are out of float16's range."""
    g, now, stale = (
        jnp.array(values, dtype)
        for values in ([1000.0, -1e-4], [2.0, 3.0], [1.75, 5.0])
    )
    transformation = compensate_delay(2e-3, decay)
    state = transformation.init(now)
    updates, new = transformation.update(g, state, now, stale_params=stale)
    updates, new = jnp.asarray(updates), cast(Any, new)
    wide = apply(
        compensate_delay(2e-3, decay),
        g.astype("float32"),
        now.astype("float32"),
        stale_params=stale.astype("float32"),
    )
    assert updates.dtype == dtype
    np.testing.assert_array_equal(updates, wide.astype(dtype))
    if decay is not None:
        squares = np.asarray(g, np.float32) ** 2
        assert new.mean_square.dtype == jnp.float32
        np.testing.assert_allclose(new.mean_square, 0.25 * squares, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_leaves_are_divided_in_32_bits(dtype):
    updates = apply(
        scale_by_staleness(), jnp.array([60_000.0, -3.0], dtype), staleness=70_000
    )
    expected = np.array(jnp.array([60_000.0, -3.0], dtype), np.float32) / 70_000
    assert updates.dtype == dtype
    np.testing.assert_array_equal(updates, jnp.asarray(expected).astype(dtype))


@both
def test_leaves_without_an_update_stay_as_they_are(decay):
    """None, integers, and what the gradient of integers is."""
    params = PARAMS | {"frozen": jnp.ones(3), "step": jnp.int32(7), "id": jnp.arange(2)}
    float0 = np.zeros(2, jax.dtypes.float0)
    updates = UPDATES | {"frozen": None, "step": jnp.int32(5), "id": float0}
    stale = params | STALE | {"frozen": jnp.zeros(3)}
    for transformation in (compensate_delay(0.25, decay), scale_by_staleness()):
        late: Any = {"stale_params": stale, "staleness": 2}
        state = transformation.init(params)
        result, new_state = transformation.update(updates, state, params, **late)
        result: Any
        expected = apply(
            transformation, UPDATES, PARAMS, stale_params=STALE, staleness=2
        )
        assert result["frozen"] is None
        assert result["step"] == 5
        assert result["id"] is float0
        assert_bit_equal({key: result[key] for key in UPDATES}, expected)
        assert jax.tree.structure(new_state) == jax.tree.structure(state)


@both
def test_masked_leaves_stay_as_they_are(decay):
    mask = {"w": True, "b": False}
    for inner in (compensate_delay(0.25, decay), scale_by_staleness()):
        masked = optax.masked(inner, mask)
        result = apply(masked, UPDATES, PARAMS, stale_params=STALE, staleness=2)
        every = apply(inner, UPDATES, PARAMS, stale_params=STALE, staleness=2)
        np.testing.assert_array_equal(result["w"], every["w"])
        assert result["b"] == UPDATES["b"] != every["b"]


def test_each_label_of_a_partition_gets_its_own():
    optimizer = optax.partition(
        {"late": compensate_delay(0.25), "rest": optax.scale(10.0)},
        {"w": "late", "b": "rest"},
    )
    result = apply(optimizer, UPDATES, PARAMS, stale_params=STALE)
    np.testing.assert_array_equal(result["w"], [-3.75, 0.25, 0.75])
    assert result["b"] == -15.0


def test_strength_can_be_injected():
    optimizer = optax.inject_hyperparams(compensate_delay)(strength=0.25)
    state = optimizer.init(PARAMS)
    update = jax.jit(optimizer.update)
    first, state = update(UPDATES, state, PARAMS, stale_params=STALE)
    np.testing.assert_array_equal(first["w"], [-3.75, 0.25, 0.75])
    state.hyperparams["strength"] = jnp.float32(0.0)
    second, _ = update(UPDATES, state, PARAMS, stale_params=STALE)
    chex.assert_trees_all_equal(second, UPDATES)


# In training


@pytest.mark.parametrize(
    "optimizer",
    [optax.sgd(0.1), optax.sgd(0.1, momentum=0.9), optax.adam(0.1)],
    ids=["sgd", "momentum", "adam"],
)
def test_without_delay_a_chain_is_its_optimizer(optimizer):
    chained = optax.chain(compensate_delay(0.5), scale_by_staleness(), optimizer)

    def train(optimizer, **extra_args):
        def step(params, state):  # eager: XLA rounds a fused program by other rules
            gradients = jax.tree.map(lambda p, u: p * p - u, params, UPDATES)
            stale = {"stale_params": params} if extra_args else {}
            updates, state = optimizer.update(
                gradients, state, params, **extra_args, **stale
            )
            return optax.apply_updates(params, updates), state

        params, state = PARAMS, optimizer.init(PARAMS)
        for _ in range(4):
            params, state = step(params, state)
        return params

    assert_bit_equal(train(chained, staleness=0), train(optimizer))


def test_compensation_brings_delayed_training_nearer_to_undelayed():
    """Least squares with g gᵀ near the Hessian: both are 1 on average at the start."""
    curvature = np.array([1.0, 0.5, 2.0])
    start = np.array([1.2, -1.5, 0.8])

    def train(delay, optimizer, steps=20):
        trajectory = [jnp.asarray(start, jnp.float32)]
        state = optimizer.init(trajectory[0])
        for t in range(steps):
            stale = trajectory[max(0, t - delay)]
            updates, state = optimizer.update(
                curvature * stale, state, trajectory[-1], stale_params=stale
            )
            trajectory.append(jnp.asarray(trajectory[-1] + updates))
        return np.array(trajectory)

    sgd = optax.with_extra_args_support(optax.sgd(0.1))
    undelayed = train(0, sgd)
    np.testing.assert_allclose(
        undelayed[5], start * (1 - 0.1 * curvature) ** 5, rtol=1e-5
    )
    plain = np.abs(train(3, sgd) - undelayed).max()
    for compensation in (compensate_delay(0.5), compensate_delay(1.0, decay=0.9)):
        compensated = train(3, optax.chain(compensation, optax.sgd(0.1)))
        distance = np.abs(compensated - undelayed).max()
        assert distance < 0.6 * plain


# Bad input


@pytest.mark.parametrize(
    ("extra_args", "message"),
    [
        ({}, r"scale_by_staleness got no staleness\..*staleness=s"),
        ({"staleness": None}, r"got no staleness\."),
        ({"staleness": np.arange(3)}, r"got \(3,\) values of staleness\..*one number"),
    ],
    ids=["missing", "none", "vector"],
)
def test_staleness_is_required(extra_args, message):
    with pytest.raises(ValueError, match=message):
        apply(scale_by_staleness(), UPDATES, PARAMS, **extra_args)


@both
@pytest.mark.parametrize(
    ("params", "stale_params", "message"),
    [
        (PARAMS, None, r"got no stale_params\..*stale_params=pulled"),
        (None, STALE, r"got no params\..*optimizer\.update"),
        (
            *(PARAMS, STALE | {"w": np.ones(2, np.float32)}),
            r"got stale_params unlike.*\['w'\] has shape \(2,\) instead of \(3,\)\.",
        ),
        (
            *(PARAMS | {"b": np.ones(1, np.float32)}, STALE),
            r"got params unlike.*\['b'\] has shape \(1,\) instead of \(\)\.",
        ),
        (PARAMS, {"w": STALE["w"]}, r"got stale_params unlike.*structure PyTreeDef"),
        (PARAMS, STALE | {"b": {"c": 1}}, r"got stale_params unlike.*structure PyTree"),
    ],
    ids=["no stale", "no params", "shape", "scalar", "key", "node"],
)
def test_both_weights_are_required_and_must_fit(decay, params, stale_params, message):
    transformation = compensate_delay(0.5, decay)
    state = transformation.init(PARAMS)
    with pytest.raises(ValueError, match=message):
        transformation.update(UPDATES, state, params, stale_params=stale_params)


def test_a_tree_that_is_one_leaf_is_named():
    transformation = compensate_delay(0.5)
    with pytest.raises(ValueError, match=r"the only leaf has shape \(3,\) instead of"):
        transformation.update(
            jnp.ones(2), optax.EmptyState(), jnp.ones(2), stale_params=jnp.ones(3)
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-0.5,), r"got strength=-0\.5\. It must be at least 0 and finite"),
        ((float("nan"),), r"got strength=nan\."),
        ((float("inf"),), r"got strength=inf\."),
        ((2.0, 1.0), r"got decay=1\.0\. It must be at least 0 and less than 1\."),
        ((2.0, -0.1), r"got decay=-0\.1\."),
    ],
    ids=str,
)
def test_numbers_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        compensate_delay(*arguments)
