"""The contract of every design: the same numbers as one device, on any device count."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import FrozenDict
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdp
from tests import contract
from tests.contract import BATCHES, DESIGNS, PARAMS, over_designs
from tests.helpers import assert_bit_equal, assert_replicas_bit_equal

OPTIMIZERS = {"momentum": optax.sgd(0.1, momentum=0.9), "adam": optax.adam(0.01)}

# Largest absolute difference of any parameter or loss after any of the 10 steps. All
# stay below 2, where one rounding costs at most 1.2e-7; the replicas' sums are rounded
# in another order than one device's, once a step. Measured: 1.8e-7 for parameters and
# 2.4e-7 for losses. A gradient that is wrong by a factor moves them by 0.01 and more.
BOUND = 2e-6

over_runs = pytest.mark.parametrize(
    ("design", "optimizer", "devices"),
    [
        pytest.param(design, optimizer, devices, id=f"{design}-{optimizer}-n{devices}")
        for optimizer, counts in (("momentum", (1, 2, 3, 8)), ("adam", (1, 3)))
        for devices in counts
        for design in DESIGNS
    ],
)


@functools.cache
def reference(optimizer):
    return contract.on_one_device(
        contract.loss_fn, OPTIMIZERS[optimizer], PARAMS, BATCHES
    )


@functools.cache
def trained(design, optimizer, devices):
    """Copies of step count and parameters after every step, and the losses."""
    mesh, design = jaxdp.data_mesh(devices), DESIGNS[design](devices)
    optimizer = OPTIMIZERS[optimizer]
    train = jaxdp.data_parallel(contract.loss_fn, optimizer, mesh, design)
    state = train.init(PARAMS)
    kept, losses = [], []
    for batch in BATCHES:
        state, metrics = train.step(state, batch)
        kept.append((jnp.copy(state.step), train.params(state)))
        losses.append(float(metrics["loss"]))
    return kept, losses


def test_there_are_eight_devices():
    assert jax.device_count() == 8


@over_runs
def test_equals_one_device(design, optimizer, devices):
    kept, losses = trained(design, optimizer, devices)
    expected, expected_losses = reference(optimizer)
    for (_, found), params in zip(kept, expected, strict=True):
        chex.assert_trees_all_close(found, params, rtol=0, atol=BOUND)
        chex.assert_trees_all_equal_shapes_and_dtypes(found, params)
    np.testing.assert_allclose(losses, expected_losses, rtol=0, atol=BOUND)
    assert losses[-1] < losses[0] - 0.1  # it did train
    assert int(kept[-1][0]) == len(BATCHES)


@over_runs
def test_replicas_hold_the_same_bits_after_every_step(design, optimizer, devices):
    for step, params in trained(design, optimizer, devices)[0]:
        assert step.sharding.num_devices == devices
        assert_replicas_bit_equal((step, params))


@over_designs
def test_16_bit_leaves_are_averaged_and_keep_their_dtype(design):
    """Local means 0.5, 2.5, 4.5 and all gradients are exact in 16 bits."""
    params = {
        "bf16": jnp.zeros((5,), jnp.bfloat16),
        "f16": jnp.zeros((), jnp.float16),
        "f32": jnp.zeros((2,), jnp.float32),
    }

    def loss_fn(params, batch):
        weights = jnp.arange(1.0, 6.0, dtype=jnp.bfloat16)
        half = jnp.sum(params["bf16"] * weights).astype(jnp.float32)
        return jnp.mean(batch) * (half + params["f16"] + jnp.sum(params["f32"]))

    optimizer = optax.sgd(1.0, momentum=0.9)
    train = jaxdp.data_parallel(loss_fn, optimizer, jaxdp.data_mesh(3), design(3))
    first = train.init(params)
    state, metrics = train.step(first, np.arange(6.0, dtype="f"))
    expected = {
        "bf16": -2.5 * jnp.arange(1.0, 6.0, dtype=jnp.bfloat16),
        "f16": jnp.float16(-2.5),
        "f32": jnp.full((2,), -2.5),
    }
    assert_bit_equal(train.params(state), expected)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, first)
    assert metrics["loss"] == 0


@over_designs
def test_complex_leaves_keep_their_imaginary_part(design):
    """CO-6: 20 steps towards 1+1j, the mean of four targets; JAX gives conjugates."""
    targets = np.array([1, 1j, 2 + 1j, 1 + 2j], np.complex64)
    conjugate = optax.stateless(lambda updates, params: jax.tree.map(jnp.conj, updates))
    train = jaxdp.data_parallel(
        lambda w, batch: jnp.mean(jnp.abs(w - batch) ** 2),
        optax.chain(conjugate, optax.sgd(0.1)),
        jaxdp.data_mesh(4),
        design(4),
    )
    state = train.init(np.complex64(0))
    for _ in range(20):
        state, _ = train.step(state, targets)
    params = train.params(state)
    assert params.dtype == np.complex64
    np.testing.assert_allclose(params, 0.98847 + 0.98847j, atol=1e-5)


@over_designs
def test_compiles_once(design, caplog):
    """ST-3: whatever weak types and foreign shardings the first state is made of."""
    chex.clear_trace_counter()

    @chex.assert_max_traces(n=1)
    def loss_fn(params, batch, rng, model_state):
        noise = jax.random.uniform(rng)
        state = {**model_state, "count": model_state["count"] + 1}
        return jnp.mean(params * batch) + noise, jaxdp.Aux(model_state=state)

    optimizer = optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0, 1, 10))
    train = jaxdp.data_parallel(loss_fn, optimizer, jaxdp.data_mesh(2), design(2))
    with jax.log_compiles():
        state = train.init(
            jax.device_put(jnp.array(1.0), jax.devices()[5]),
            rng=jax.random.key(0),
            model_state={"count": 0, "mean": 0.5},
        )
        for step in range(4):
            state, _ = train.step(state, np.arange(4.0, dtype="f") + step)
    compilations = [r for r in caplog.messages if "XLA compilation of jit(_step)" in r]
    assert len(compilations) == 1
    assert state.model_state["count"] == 4


def on_all(mesh, array):
    """Placed as a state is, so that nothing but a copy protects it from donation."""
    return jax.device_put(array, NamedSharding(mesh, P()))


@over_designs
def test_callers_arrays_survive_and_the_state_is_donated(design):
    mesh = jaxdp.data_mesh(2)
    params, statistics = on_all(mesh, jnp.arange(3.0)), on_all(mesh, jnp.ones(2))
    train = jaxdp.data_parallel(
        lambda p, b, model_state: jnp.mean(b) * jnp.sum(p),
        optax.adam(0.1),
        mesh,
        design(2),
    )
    batch = jaxdp.shard_batch(np.ones(2, "f"), mesh)
    first = train.init(params, model_state=statistics)
    kept = train.params(first)
    second, _ = train.step(first, batch)
    train.step(second, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((first, second)))
    np.testing.assert_array_equal(kept, params)
    np.testing.assert_array_equal(params, [0, 1, 2])
    np.testing.assert_array_equal((statistics, batch), np.ones((2, 2)))


@over_designs
def test_one_buffer_in_several_leaves(design):
    """ST-4: tied weights, and an optimizer whose state starts as the parameters."""
    mesh = jaxdp.data_mesh(2)
    tied = on_all(mesh, jnp.array([1.0, 2.0]))
    average = optax.GradientTransformation(
        lambda params: {"ema": params, "start": params},
        lambda updates, state, params=None: (updates, state),
    )
    train = jaxdp.data_parallel(
        lambda p, b: jnp.mean(b) * jnp.sum(2 * p["x"] + 3 * p["y"]),
        optax.chain(average, optax.sgd(1.0)),
        mesh,
        design(2),
    )
    state = train.init({"x": tied, "y": tied})
    for _ in range(2):
        state, _ = train.step(state, np.array([0.5, 1.5], "f"))
    expected = {"x": [-3.0, -2.0], "y": [-5.0, -4.0]}  # two leaves, apart from now on
    chex.assert_trees_all_equal(
        train.params(state), jax.tree.map(np.float32, expected, is_leaf=_is_list)
    )
    np.testing.assert_array_equal(tied, [1, 2])


def _is_list(x):
    return isinstance(x, list)


class Box:
    """A container that compares by identity, as many classes of users do."""

    def __init__(self, value):
        self.value = value


jax.tree_util.register_pytree_node(
    Box, lambda box: ((box.value,), None), lambda _, children: Box(*children)
)


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda a, b: {"a": a, "b": b}, id="dict"),
        pytest.param(lambda a, b: {"b": b, "a": a}, id="other-order"),
        pytest.param(lambda a, b: FrozenDict(a=a, b=b), id="frozen-dict"),
        pytest.param(lambda a, b: [a, (None, b)], id="list-tuple-none"),
        pytest.param(lambda a, b: jaxdp.Mean(a, b), id="named-tuple"),
        pytest.param(lambda a, b: Box((a, b)), id="class"),
    ],
)
@pytest.mark.parametrize("design", ["root-first", "ring-buckets"])
def test_containers_come_back_as_they_went_in(design, wrap):
    """ER-2: with momentum, so that the optimizer state has the container too."""
    params = wrap(np.float32(1), np.ones(3, "f"))
    momentum = optax.sgd(1.0, momentum=0.9)

    def loss_fn(params, batch):
        first, second = jax.tree.leaves(params)
        return jnp.mean(batch) * (first + jnp.sum(second))

    batch = np.array([1.0, 2.0], "f")
    new, _ = contract.one_step(
        DESIGNS[design], loss_fn, params, batch, optimizer=momentum
    )
    assert jax.tree.structure(new) == jax.tree.structure(params)
    chex.assert_trees_all_equal(
        jax.tree.leaves(new), [np.float32(-0.5), np.full(3, -0.5, "f")]
    )


def test_key_order_does_not_change_the_program():
    def text(params):
        train = jaxdp.data_parallel(
            lambda p, b: jnp.mean(b * p["a"]) + jnp.sum(p["b"]),
            optax.adam(0.1),
            jaxdp.data_mesh(2),
        )
        return train.lower(train.init(params), np.ones(2, "f")).as_text()

    a, b = np.float32(1), np.ones(3, "f")
    assert text({"a": a, "b": b}) == text({"b": b, "a": a})


def test_keys_that_cannot_be_sorted_are_refused():
    train = jaxdp.data_parallel(lambda p, b: p["a"], optax.sgd(1.0), jaxdp.data_mesh(2))
    with pytest.raises(ValueError, match="sorting pytree dictionary keys"):
        train.init({1: np.float32(1), "a": np.float32(1)})
