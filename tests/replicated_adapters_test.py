"""Flax modules as replicas: parameters, buffers, keys, and what survives a step."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdp
from jaxdp.replicated import from_linen, from_nnx
from tests.contract import on_one_device, waves
from tests.helpers import assert_bit_equal

IDS = [2, 0, 1]


class Block(nnx.Module):
    def __init__(self, rows, columns, rngs):
        self.dense = nnx.Linear(rows, columns, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.dense(x))


class Net(nnx.Module):
    """Modules in a list and in a dictionary."""

    def __init__(self, rngs):
        self.blocks = nnx.List([Block(3, 5, rngs), Block(5, 4, rngs)])
        self.heads = nnx.Dict({"out": nnx.Linear(4, 2, rngs=rngs)})

    def __call__(self, x, scale=1.0):
        for block in self.blocks:
            x = block(x)
        return scale * self.heads["out"](x)


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x, scale=1.0):
        for features in (5, 4):
            x = jnp.tanh(nn.Dense(features)(x))
        return scale * nn.Dense(2, name="out")(x)


def f32(values):
    return np.array(values, np.float32)


def squares(output, targets):
    return jnp.mean((output - targets) ** 2)


def batch(rows, start=0.0):
    return waves(rows, 3, start=start), waves(rows, 2, start=start + 0.5)


def nnx_net():
    module = Net(nnx.Rngs(0))
    graphdef, params = nnx.split(module)

    def plain(params, x):
        return nnx.merge(graphdef, params)(x)

    return from_nnx(module, device_ids=IDS), plain, nnx.to_pure_dict(params)


def linen_net():
    module = LinenNet()
    variables = jax.jit(module.init)(jax.random.key(0), jnp.ones((1, 3)))

    def plain(params, x):
        return module.apply({"params": params}, x)

    return from_linen(module, variables, device_ids=IDS), plain, variables["params"]


over_nets = pytest.mark.parametrize("net", [nnx_net, linen_net], ids=["nnx", "linen"])


@over_nets
def test_nested_modules_train_as_on_one_device(net):
    model, plain, params = net()
    assert model.model_state is None
    assert_bit_equal(model.params, params)
    batches = [batch(7, start) for start in range(3)]
    x, _ = batches[0]
    np.testing.assert_allclose(model(x), plain(params, x), atol=1e-6)
    np.testing.assert_allclose(model(x, scale=3.0), 3 * plain(params, x), atol=3e-6)
    step = model.train_step(squares, optax.adam(0.01))
    state = step.init()
    history, losses = on_one_device(
        lambda params, xy: squares(plain(params, xy[0]), xy[1]),
        optax.adam(0.01),
        params,
        batches,
    )
    for (x, y), loss in zip(batches, losses, strict=True):
        state, metrics = step(state, x, y)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=2e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
        state.params,
        history[-1],
    )


def test_options_reach_the_model():
    model = from_nnx(Net(nnx.Rngs(0)), device_ids=[3, 1], output_device=5, dim=-2)
    assert [device.id for device in model.devices] == [3, 1]
    assert (model.output_device.id, model.dim) == (5, -2)
    module = LinenNet()
    variables = jax.jit(module.init)(jax.random.key(0), jnp.ones((1, 3)))
    model = from_linen(module, variables, device_ids=[3, 1], output_device=5, dim=-2)
    assert [device.id for device in model.devices] == [3, 1]
    assert (model.output_device.id, model.dim) == (5, -2)


# Batches whose halves have other statistics: replica 0 sees `HALVES[0]`.
HALVES = f32([[0], [0], [2], [2]])
FAR = f32([[1e4 - 1], [1e4 + 1], [1e4 - 1], [1e4 + 1]])


def nnx_norm(**options):
    options = {"momentum": 0.0, "rngs": nnx.Rngs(0)} | options
    return nnx.BatchNorm(1, **options)


def norm_after_a_step(kind, x, ids=(0, 1), **options):
    """Mean and variance that survive a step on two devices."""
    if kind == "nnx":
        model = from_nnx(nnx_norm(**options), device_ids=ids)
    else:
        module = nn.BatchNorm(use_running_average=False, momentum=0.0, **options)
        variables = jax.jit(module.init)(jax.random.key(0), x)
        model = from_linen(module, variables, device_ids=ids)
    step = model.train_step(lambda output, _: jnp.mean(output**2), optax.sgd(0.1))
    state, _ = step(step.init(), x, None)
    buffers = state.model_state
    buffers = buffers["batch_stats"] if kind == "linen" else buffers
    assert buffers["mean"].devices() == {jax.devices()[ids[0]]}
    return float(buffers["mean"][0]), float(buffers["var"][0])


over_kinds = pytest.mark.parametrize("kind", ["nnx", "linen"])


@over_kinds
def test_statistics_of_the_root_survive(kind):
    assert norm_after_a_step(kind, HALVES) == (0, 0)
    assert norm_after_a_step(kind, HALVES[::-1].copy()) == (2, 0)
    assert norm_after_a_step(kind, HALVES, ids=(1, 0)) == (0, 0)  # the first slice
    assert norm_after_a_step(kind, HALVES, ids=(6,)) == (1, 1)


def test_synchronized_statistics_are_those_of_the_batch():
    """What the module's text points to: one program, averaging over the axis."""
    graphdef, params, rest = nnx.split(nnx_norm(axis_name="data"), nnx.Param, ...)

    def loss_fn(params, x, model_state):
        merged = nnx.merge(graphdef, nnx.State(params), nnx.State(model_state))
        loss = jnp.mean(merged(x) ** 2)
        _, _, rest = nnx.split(merged, nnx.Param, ...)
        return loss, jaxdp.Aux(model_state=nnx.to_pure_dict(rest))

    train = jaxdp.data_parallel(loss_fn, optax.sgd(0.1), jaxdp.data_mesh(2))
    params, rest = nnx.to_pure_dict(params), nnx.to_pure_dict(rest)
    state, _ = train.step(train.init(params, model_state=rest), HALVES)
    buffers = state.model_state
    assert (float(buffers["mean"][0]), float(buffers["var"][0])) == (1, 1)


@over_kinds
def test_variance_far_from_zero_needs_two_passes(kind):
    slow = norm_after_a_step(kind, FAR, use_fast_variance=False)
    assert slow == (1e4, 1)
    mean, var = norm_after_a_step(kind, FAR)
    assert mean == 1e4
    assert var >= 0  # cancelled, but never negative, so that nothing becomes NaN


def test_buffers_of_other_replicas_do_not_survive():
    x = f32([[3], [5], [100], [300], [-7000], [9000]])
    model = from_nnx(nnx_norm(momentum=0.75), device_ids=IDS)
    before = jax.tree.map(np.asarray, model.model_state)
    model(x)
    assert_bit_equal(model.model_state, before)
    step = model.train_step(lambda output, _: jnp.mean(output**2), optax.sgd(0.1))
    state, _ = step(step.init(), x, None)
    assert float(state.model_state["mean"][0]) == 0.25 * 4
    assert float(state.model_state["var"][0]) == 0.75 + 0.25 * 1
    state, _ = step(state, 2 * x, None)  # from what the first step left
    assert float(state.model_state["mean"][0]) == 0.75 * 1 + 0.25 * 8


def test_training_and_evaluation_are_modes_of_the_module():
    module = nnx_norm()
    module.eval()
    evaluating = from_nnx(module, device_ids=[0, 1])
    module.train()
    training = from_nnx(module, device_ids=[0, 1])
    # A variance of 1 and an epsilon of 1e-5 leave the running average nearly alone.
    np.testing.assert_allclose(evaluating(HALVES), HALVES, rtol=1e-4)
    np.testing.assert_allclose(training(HALVES), 0 * HALVES, atol=1e-6)
    _, new = evaluating.apply(
        evaluating.params, HALVES, model_state=evaluating.model_state
    )
    assert_bit_equal(new, evaluating.model_state)
    _, new = training.apply(training.params, HALVES, model_state=training.model_state)
    assert (float(new["mean"][0]), float(new["var"][0])) == (0, 0)


class Counting(nnx.Module):
    """Dropout and a counter of calls."""

    def __init__(self, rngs):
        self.dense = nnx.Linear(3, 3, use_bias=False, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.Variable(jnp.int32(7))

    def __call__(self, x):
        self.calls[...] += 1
        return self.drop(self.dense(x))


def differ(parts):
    return len({part.tobytes() for part in parts}) == len(parts)


class Wide(nnx.Module):
    """Dropout; of many entries, so that no two masks are equal by chance."""

    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.float32(1.0))
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.scale * x)


class LinenWide(nn.Module):
    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, ())
        return nn.Dropout(0.5, deterministic=False)(scale * x)


ONES = np.ones((6, 64), "f")


def test_dropout_differs_on_every_replica_and_in_every_step():
    model = from_nnx(Wide(nnx.Rngs(3)), device_ids=IDS)

    def run(steps):
        step = model.train_step(
            lambda output, _: (jnp.mean(output), jaxdp.Aux(metrics={"output": output})),
            optax.sgd(0.0),
        )
        state = step.init()
        for _ in range(steps):
            state, metrics = step(state, ONES, None)
            yield np.asarray(metrics["output"]).reshape(3, 2 * 64)

    outputs = list(run(3))
    assert differ([mask for output in outputs for mask in output])
    assert all(set(np.unique(output)) == {0, 2} for output in outputs)
    np.testing.assert_array_equal(outputs, list(run(3)))
    np.testing.assert_array_equal(model(ONES), model(ONES))  # its state stays
    assert differ(np.asarray(model(ONES)).reshape(3, 2 * 64))


def test_keys_of_a_call_differ_on_every_replica():
    variables = {"params": {"scale": jnp.float32(1.0)}}
    model = from_linen(LinenWide(), variables, device_ids=IDS)
    first = model(ONES, rngs={"dropout": jax.random.key(1)})
    assert differ(np.asarray(first).reshape(3, 2 * 64))
    again = model(ONES, rngs={"dropout": jax.random.key(1)})
    np.testing.assert_array_equal(first, again)
    other = model(ONES, rngs={"dropout": jax.random.key(2)})
    assert differ([*np.asarray(first), *np.asarray(other)])


def test_counters_stay_integers_and_values_go_back_into_the_module():
    module = Counting(nnx.Rngs(0))
    before = jax.tree.map(jnp.copy, nnx.to_pure_dict(nnx.state(module)))
    model = from_nnx(module, device_ids=IDS)
    x, y = waves(6, 3), waves(6, 3, start=0.5)
    step = model.train_step(squares, optax.sgd(0.1))
    state = step.init()
    for _ in range(3):
        state, _ = step(state, x, y)
    calls = state.model_state["calls"]
    assert (calls.dtype, int(calls)) == (jnp.int32, 10)
    model(x)
    assert int(model.model_state["calls"]) == 7
    assert_bit_equal(nnx.to_pure_dict(nnx.state(module)), before)
    nnx.update(module, state.params, state.model_state)
    assert int(module.calls[...]) == 10
    assert_bit_equal(module.dense.kernel[...], state.params["dense"]["kernel"])
    again = from_nnx(module, device_ids=IDS)
    assert_bit_equal(again.params, state.params)
    assert_bit_equal(again.model_state, state.model_state)


class Sowing(nn.Module):
    @nn.compact
    def __call__(self, x):
        calls = self.variable("counters", "calls", lambda: jnp.int32(0))
        calls.value += 1
        x = nn.BatchNorm(use_running_average=False, momentum=0.0)(x)
        self.sow("intermediates", "x", x)
        return nn.Dense(2)(x)


def test_all_collections_of_a_linen_module_are_kept_and_no_others():
    module = Sowing()
    x = waves(6, 3)
    variables = jax.jit(module.init)(jax.random.key(0), x)
    variables = {
        name: variables[name] for name in ("params", "batch_stats", "counters")
    }
    kept = jax.tree.map(jnp.copy, variables)
    model = from_linen(module, variables, device_ids=IDS)
    step = model.train_step(squares, optax.sgd(0.1))
    state, _ = step(step.init(), x, waves(6, 2))
    assert set(state.model_state) == {"batch_stats", "counters"}
    assert int(state.model_state["counters"]["calls"]) == 2
    np.testing.assert_allclose(
        state.model_state["batch_stats"]["BatchNorm_0"]["mean"],
        x[:2].mean(0),
        rtol=1e-5,
    )
    assert_bit_equal(variables, kept)


def test_given_collections_may_be_updated_by_a_call():
    module = Sowing()
    x = waves(6, 3)
    variables = jax.jit(module.init)(jax.random.key(0), x)
    model = from_linen(module, variables, device_ids=IDS)
    buffers = {
        "batch_stats": variables["batch_stats"],
        "counters": {"calls": jnp.int32(40)},
    }
    _, new = model.apply(model.params, x, model_state=buffers)
    assert int(new["counters"]["calls"]) == 41


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        pytest.param(
            lambda: from_nnx(LinenNet()),
            TypeError,
            r"^from_nnx got LinenNet\. .*flax\.nnx\.Module\. Use from_linen",
            id="linen-as-nnx",
        ),
        pytest.param(
            lambda: from_nnx(Net),
            TypeError,
            r"^from_nnx got \w+\. .*instance of flax\.nnx\.Module",
            id="class-as-nnx",
        ),
        pytest.param(
            lambda: from_linen(Net(nnx.Rngs(0)), {"params": {}}),
            TypeError,
            r"^from_linen got Net\. .*flax\.linen\.Module\. Use from_nnx",
            id="nnx-as-linen",
        ),
        pytest.param(
            lambda: from_linen(LinenNet(), {"b": 1, "a": 2}),
            ValueError,
            r"^from_linen got variables with the collections \['a', 'b'\]\. It needs "
            r"'params' among them\. Pass what module\.init returned, whole\.$",
            id="no-params",
        ),
        pytest.param(
            lambda: from_nnx(Net(nnx.Rngs(0)), device_ids=[0, 0]),
            ValueError,
            r"DataParallel got device_ids=\[0, 0\]",
            id="options",
        ),
    ],
)
def test_refuses_what_is_no_module(make, error, message):
    with pytest.raises(error) as caught:
        make()
    assert re.search(message, str(caught.value))
