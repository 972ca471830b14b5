"""A step of replicas is the step of one device on the whole batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdp
from tests.contract import OPTIMIZERS, STEPS, on_one_device, over_optimizers, waves
from tests.helpers import assert_bit_equal

PARAMS = {
    "hidden": {"kernel": waves(5, 3), "bias": waves(3, start=0.3)},
    "output": [waves(3, 2, start=0.7), np.float32(1.1)],
}
IN_ORDER = {"device_ids": [0, 1, 2, 3]}
SHUFFLED = {"device_ids": [3, 1, 0, 2], "output_device": 5}
over_layouts = pytest.mark.parametrize(
    "layout", [IN_ORDER, SHUFFLED], ids=["in-order", "shuffled"]
)

# The gradient itself as the optimizer state: no arithmetic comes between.
RECORD = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda updates, state, params=None: (updates, updates),
)


def apply_fn(params, x):
    hidden = x @ params["hidden"]["kernel"] + params["hidden"]["bias"][None]
    kernel, scale = params["output"]
    return scale * jnp.tanh(hidden) @ kernel


def squares(output, targets):
    return jnp.mean((output - targets) ** 2)


def batch(rows, start=0.0):
    return waves(rows, 5, start=start), waves(rows, 2, start=start + 0.5)


def line(w, x):
    """A weight for every row: each row's slope is its own number."""
    return w * x


def line_step(loss_fn, rows=4, optimizer=None, start=1.0, **options):
    options.setdefault("device_ids", range(rows))
    model = jaxdp.DataParallel(line, jnp.float32(start), **options)
    return model.train_step(loss_fn, optimizer or optax.sgd(1.0))


def f32(values):
    return np.array(values, np.float32)


def devices_of(tree):
    return {device.id for leaf in jax.tree.leaves(tree) for device in leaf.devices()}


@over_optimizers
@pytest.mark.parametrize(
    ("rows", "layout"),
    [(64, SHUFFLED), (66, SHUFFLED), (10, SHUFFLED), (3, SHUFFLED), (66, IN_ORDER)],
    ids=["64", "66", "10", "3", "66-in-order"],
)
def test_ten_steps_are_those_of_one_device(rows, optimizer, layout):
    batches = [batch(rows, start=step) for step in range(STEPS)]
    history, losses = on_one_device(
        lambda params, xy: squares(apply_fn(params, xy[0]), xy[1]),
        optimizer(),
        PARAMS,
        batches,
    )
    model = jaxdp.DataParallel(apply_fn, PARAMS, **layout)
    step = model.train_step(squares, optimizer())
    state = step.init()
    for (x, y), params, loss in zip(batches, history, losses, strict=True):
        state, metrics = step(state, x, y)
        # Sums over rows are taken in another order: some last bits differ.
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
        jax.tree.map(
            lambda ours, one: np.testing.assert_allclose(ours, one, atol=5e-6),
            state.params,
            params,
        )
    root = layout["device_ids"][0]
    assert devices_of(state) == {root}
    assert devices_of(metrics) == {layout.get("output_device", root)}


@over_layouts
@pytest.mark.parametrize("rows", [10, 3])
def test_gradient_is_bit_for_bit_that_of_grad_through_the_model(rows, layout):
    x, y = batch(rows)
    model = jaxdp.DataParallel(apply_fn, PARAMS, **layout)
    compiled = jax.jit(squares)
    loss, gradient = jax.value_and_grad(
        lambda params: compiled(model.apply(params, x), jnp.asarray(y))
    )(model.params)
    step = model.train_step(squares, RECORD)
    state, metrics = step(step.init(), x, y)
    assert_bit_equal(state.opt_state, gradient)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=2**-22)


@over_optimizers
def test_params_follow_optax_on_that_gradient(optimizer):
    transformation = optimizer()
    model = jaxdp.DataParallel(apply_fn, PARAMS, **SHUFFLED)
    step = model.train_step(squares, transformation)
    state = step.init()
    params, opt_state = model.params, transformation.init(model.params)
    update = jax.jit(transformation.update)
    for start in range(3):
        x, y = batch(10, start)
        gradient = jax.grad(lambda p, x=x, y=y: squares(model.apply(p, x), y))(params)
        updates, opt_state = update(gradient, opt_state, params)
        params = optax.apply_updates(params, updates)
        state, _ = step(state, x, y)
    # One program instead of two: XLA contracts products and sums differently.
    ours, theirs = jax.tree.leaves(state.params), jax.tree.leaves(params)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7)


def token_mean(output, mask):
    return jaxdp.Mean(jnp.sum(output * mask), jnp.sum(mask))


TOKENS = np.array([[10.0] + [77.0] * 8, [1.0] * 9], "f")
MASK = np.array([[1] + [0] * 8, [1] * 9], np.int32)


@pytest.mark.parametrize("output_device", [None, 1, 6])
def test_mean_weighs_tokens_and_not_replicas(output_device):
    step = line_step(token_mean, 2, output_device=output_device)
    state, metrics = step(step.init(), TOKENS, MASK)
    assert float(metrics["loss"]) == pytest.approx(1.9)  # not 5.5
    assert float(state.params) == pytest.approx(1 - 1.9)
    assert devices_of(state) == {0}
    assert devices_of(metrics) == {output_device or 0}


def test_rounds_weigh_tokens_alike():
    step = line_step(token_mean, 1)
    state = step.init()
    first, second = (step.run(state, TOKENS[[i]], MASK[[i]], {}) for i in range(2))
    state, metrics = step.update(state, first.summed().plus(second))
    assert float(metrics["loss"]) == pytest.approx(1.9)
    assert float(state.params) == pytest.approx(1 - 1.9)


@pytest.mark.parametrize("with_metric", [False, True], ids=["loss", "metric"])
def test_rounds_with_their_rows_are_one_step(with_metric):
    def loss_fn(output, y):
        metrics = {"size": jnp.mean(output, axis=0)} if with_metric else {}
        return squares(output, y), jaxdp.Aux(metrics=metrics)

    x, y = batch(17)
    model = jaxdp.DataParallel(apply_fn, PARAMS, **SHUFFLED)
    step = model.train_step(loss_fn, RECORD)
    whole, expected = step(step.init(), x, y)
    state = step.init()
    bounds = [(0, 2), (2, 13), (13, 17)]
    parts = [step.run(state, x[a:b], y[a:b], {}, rows=b - a) for a, b in bounds]
    done = parts[0].summed().plus(parts[1]).plus(parts[2])
    state, metrics = step.update(state, done)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-7),
        (state.opt_state, metrics),
        (whole.opt_state, expected),
    )


def test_metrics_weigh_as_the_loss_or_as_they_say():
    def loss_fn(output, targets):
        metrics = {
            "largest": jnp.max(output),
            "rows": jnp.stack([output[0], output[-1]]),
            "of_mine": jaxdp.Mean(jnp.sum(targets), 8),
            "count": jnp.sum(targets > 2),
        }
        return jaxdp.Mean(jnp.sum(output), 5), jaxdp.Aux(metrics=metrics)

    x = np.array([2.0, 3.0, 5.0, 7.0, 11.0], "f")
    step = line_step(loss_fn, start=2.0, device_ids=[1, 2])
    _, metrics = step(step.init(), x, np.array([1.0, 2.0, 3.0, 4.0, 6.0], "f"))
    assert jax.tree.map(lambda x: np.asarray(x).tolist(), metrics) == {
        "loss": pytest.approx(2 * 28 / 5),
        "largest": 22.0,
        "rows": [4.0, 22.0],
        "of_mine": 2.0,
        "count": 3.0,
    }


@pytest.mark.parametrize(
    ("inputs", "keywords"),
    [
        pytest.param(lambda x, s: (x, s, 3.0, "up"), {}, id="tuple"),
        pytest.param(lambda x, s: (x, s), {"power": 3.0, "way": "up"}, id="static"),
        pytest.param(lambda x, s: (x,), {"s": 1, "power": 3.0, "way": "up"}, id="key"),
        pytest.param(lambda x, s: x, {"s": 1, "power": 3.0, "way": "up"}, id="bare"),
    ],
)
def test_inputs_come_as_a_tuple_or_by_keyword(inputs, keywords):
    def apply_fn(w, x, s, power=1.0, way="down"):
        assert isinstance(power, float)
        return w * x["a"] * s**power * (1 if way == "up" else -1)

    x, s = {"a": np.arange(1.0, 7.0, dtype="f")}, np.arange(2.0, 8.0, dtype="f")
    keywords = {k: s if k == "s" else v for k, v in keywords.items()}
    model = jaxdp.DataParallel(apply_fn, jnp.float32(1.0), device_ids=[2, 0, 1])
    step = model.train_step(lambda output, _: jnp.sum(output), optax.sgd(1.0))
    state, metrics = step(step.init(), inputs(x, s), None, **keywords)
    expected = sum(i * (i + 1) ** 3 for i in range(1, 7))
    assert float(metrics["loss"]) == expected
    assert float(state.params) == 1 - expected


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(lambda y: y, id="host"),
        pytest.param(lambda y: jax.device_put(y, jax.devices()[6]), id="another"),
        pytest.param(lambda y: jax.device_put(y, jax.devices()[5]), id="there"),
        pytest.param(jnp.asarray, id="uncommitted"),
    ],
)
def test_targets_lie_anywhere_and_in_trees(place):
    targets = {"a": place(f32([2, 3, 5])), "b": [np.float32(7.0)]}
    step = line_step(
        lambda output, y: jnp.sum(output * y["a"]) + y["b"][0], 3, output_device=5
    )
    state, metrics = step(step.init(), f32([11, 13, 17]), targets)
    assert float(metrics["loss"]) == 22 + 39 + 85 + 7
    assert float(state.params) == 1 - 146


def test_loss_sees_integer_outputs_in_the_order_of_rows():
    def apply_fn(w, x):
        return {"class": jnp.argmax(x, axis=1), "score": w * jnp.max(x, axis=1)}

    def loss_fn(output, targets):
        right = output["class"] == targets
        loss = jnp.sum(jnp.where(right, output["score"], 0.0))
        return loss, jaxdp.Aux(metrics={"right": jnp.sum(right)})

    x = f32([[2, 1, 0], [0, 3, 1], [5, 1, 2], [0, 1, 7], [1, 11, 0]])
    model = jaxdp.DataParallel(apply_fn, jnp.float32(1.0), device_ids=[1, 0, 2])
    step = model.train_step(loss_fn, optax.sgd(1.0))
    state, metrics = step(step.init(), x, np.array([0, 1, 2, 2, 0]))
    assert float(metrics["loss"]) == 2 + 3 + 7
    assert float(metrics["right"]) == 3
    assert float(state.params) == 1 - 12


def test_bfloat16_gradients_are_summed_in_float32():
    x = jnp.array([256, 1, 1, 1], jnp.bfloat16)
    model = jaxdp.DataParallel(line, jnp.bfloat16(1), device_ids=range(4))
    step = model.train_step(lambda output, _: jnp.sum(output), RECORD)
    state, _ = step(step.init(), x, None)
    assert state.params.dtype == state.opt_state.dtype == jnp.bfloat16
    assert float(state.opt_state) == 260  # 259, rounded once; 256 if at each addition


def test_init_starts_anywhere_and_leaves_its_params_alone():
    model = jaxdp.DataParallel(apply_fn, PARAMS, device_ids=[2, 0])
    step = model.train_step(squares, OPTIMIZERS["adam"]())
    others = jax.tree.map(lambda x: 2 * x, model.params)
    for given in (None, others, jax.tree.map(np.asarray, others)):
        started = step.init(given)
        scale = 1.0 if given is None else 2.0
        assert float(started.params["output"][1]) == pytest.approx(scale * 1.1)
        assert devices_of(started) == {2}
        step(started, *batch(6))
    for leaf, start in zip(*map(jax.tree.leaves, (model.params, PARAMS)), strict=True):
        np.testing.assert_array_equal(leaf, start)
    for leaf, start in zip(*map(jax.tree.leaves, (others, PARAMS)), strict=True):
        np.testing.assert_array_equal(leaf, 2 * start)


@pytest.mark.parametrize(
    "move",
    [
        pytest.param(np.asarray, id="host"),
        pytest.param(lambda x: jax.device_put(x, jax.devices()[3]), id="another"),
        pytest.param(
            lambda x: jax.device_put(x, NamedSharding(jaxdp.data_mesh(8), P())),
            id="everywhere",
        ),
    ],
)
def test_a_state_from_elsewhere_comes_to_the_root(move):
    step = line_step(lambda output, y: jnp.sum(output * y), 3, output_device=5)
    there, _ = step(step.init(), f32([11, 13, 17]), f32([2, 3, 5]))
    moved = jax.tree.map(move, step.init())
    state, metrics = step(moved, f32([11, 13, 17]), f32([2, 3, 5]))
    assert float(metrics["loss"]) == 22 + 39 + 85
    assert float(state.params) == float(there.params) == 1 - 146
    assert devices_of(state) == devices_of(there)


def test_an_error_of_the_loss_says_what_it_got():
    step = line_step(lambda output, y: jnp.mean(output - y), 3, output_device=5)
    with pytest.raises(TypeError) as caught:
        step(step.init(), f32([11, 13, 17]), f32([2, 3]))
    note = "\n".join(caught.value.__notes__)  # JAX adds one too
    assert "stage 6 loss on cpu:5" in note
    assert "[[(1,)], [(1,)], [(1,)]]" in note and "targets of shapes (2,)" in note
