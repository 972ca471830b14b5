"""Known faults of sharded training, as inputs with known results, at every stage.

ZE, AMP, ST, AN: public bug reports.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.zero.shards import is_shard
from tests import contract
from tests.helpers import assert_bit_equal, assert_replicas_bit_equal

over_stages = pytest.mark.parametrize("stage", [1, 2, 3])


def linear(gradients):
    """A loss whose gradient with respect to each parameter is a given constant."""

    def loss_fn(params, batch):
        products = jax.tree.map(lambda p, g: jnp.sum(p * g), params, gradients)
        return jnp.mean(batch) * sum(jax.tree.leaves(products))

    return loss_fn


def trained(stage, loss_fn, optimizer, params, batches, devices=2, **options):
    """The training, and its state after these batches."""
    train = jaxdp.data_parallel(
        loss_fn, optimizer, jaxdp.data_mesh(devices), jaxdp.Zero(stage), **options
    )
    state = train.init(params)
    for batch in batches:
        state, _ = train.step(state, batch)
    return train, state


def whole_state(state):
    """The optimizer state without parts, as a checkpoint keeps it."""
    return state.design.portable(state.params, state.opt_state).opt_state


def in_parts(tree):
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_shard) if is_shard(leaf)]


def elements_per_device(shard):
    """Of the first device; all have as many."""
    sizes = {each.data.size for each in shard.data.addressable_shards}
    assert len(sizes) == 1
    return sizes.pop()


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
