"""Epochs of a data set that nothing divides train as one device does on its rows."""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdp
from tests import contract
from tests.contract import over_kinds, waves
from tests.replicated_helpers import compilations

FEATURES, CLASSES = 3, 4
KERNEL_BIAS = ("kernel", "bias")


def data(rows):
    """Distinct inputs, and labels."""
    return {"x": waves(rows, FEATURES), "y": np.arange(rows) * 7 % CLASSES}


class Net(nnx.Module):
    """A layer, a BatchNorm and another layer."""

    def __init__(self, norm, rngs, **options):
        self.first = nnx.Linear(FEATURES, 5, rngs=rngs)
        self.norm = norm(5, momentum=0.8, epsilon=0.1, rngs=rngs, **options)
        self.last = nnx.Linear(5, CLASSES, rngs=rngs)

    def __call__(self, x, **keywords):
        return self.last(jnp.tanh(self.norm(self.first(x), **keywords)))


def model(norm: Any = jaxdp.BatchNorm, **options):
    """`apply(params, state, x, ...) -> (logits, state)`, parameters and state."""
    net = Net(norm, nnx.Rngs(0), **options)
    graphdef, *parts = nnx.split(net, nnx.Param, ...)
    params, state = map(nnx.to_pure_dict, parts)

    def apply(params, state, x, **keywords):
        merged = nnx.merge(graphdef, nnx.State(params), nnx.State(state))
        logits = merged(x, **keywords)
        return logits, nnx.to_pure_dict(nnx.state(merged, nnx.BatchStat))

    return apply, params, state


def losses(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


APPLY, PARAMS, STATE = model(axis_name="data")
ALONE, _, _ = model(nnx.BatchNorm, use_fast_variance=False)


def loss_fn(params, batch, mask, model_state):
    logits, model_state = APPLY(params, model_state, batch["x"], mask=mask)
    correct = (jnp.argmax(logits, -1) == batch["y"]).astype("f")
    return jaxdp.masked_mean(losses(logits, batch["y"]), mask), jaxdp.Aux(
        {"accuracy": jaxdp.masked_mean(correct, mask)}, model_state
    )


@jax.jit
def alone(params, state, batch):
    """Loss, accuracy and gradient of one device, with nothing of jaxdp."""

    def loss_fn(params):
        logits, _ = ALONE(params, state, batch["x"])
        correct = jnp.argmax(logits, -1) == batch["y"]
        return losses(logits, batch["y"]).mean(), correct.mean()

    (loss, accuracy), gradient = jax.value_and_grad(loss_fn, has_aux=True)(params)
    return loss, accuracy, gradient


def moved(batch):
    """The running averages after one batch: 0.8 of the old, 0.2 of the new."""
    kernel, bias = (np.asarray(PARAMS["first"][name], "d") for name in KERNEL_BIAS)
    hidden = batch["x"] @ kernel + bias
    return {"mean": 0.2 * hidden.mean(0), "var": 0.8 + 0.2 * hidden.var(0)}


def record():
    """An optimizer whose update makes `gradient` of parameters."""
    return optax.GradientTransformation(
        lambda params: optax.EmptyState(),
        lambda updates, state, params=None: (
            jax.tree.map(lambda g, p: g - p, updates, params),
            state,
        ),
    )


@functools.cache
def program(design, devices, accumulate):
    mesh = jaxdp.data_mesh(devices)
    return jaxdp.data_parallel(loss_fn, record(), mesh, design, accumulate=accumulate)


def gradients(padded, design, devices, accumulate=1):
    """The gradient, metrics and model state of one step."""
    train = program(design, devices, accumulate)
    state, metrics = train.step(train.init(PARAMS, model_state=STATE), padded)
    return train.params(state), metrics, state.model_state


def take(tree, rows):
    return jax.tree.map(lambda leaf: leaf[rows], tree)


def assert_close(tree, expected, tolerance):
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for got, wanted in zip(
        jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("devices", [4, 8])
@pytest.mark.parametrize("length", [1, 3, 66])
def test_steps_are_those_of_one_device_on_the_real_rows(length, devices):
    """DA-1, DA-2: gradient, metrics and BatchNorm, with replicas without rows."""
    sampler = jaxdp.Sampler(length, 64, seed=3)
    epoch = jaxdp.epoch_batches(data(length), sampler, jaxdp.data_mesh(devices))
    chosen = jaxdp.Sampler(length, 64, seed=3).epoch(0)
    for padded, rows in zip(epoch, chosen, strict=True):
        batch = take(data(length), rows.indices[rows.mask])
        gradient, metrics, model_state = gradients(
            padded, jaxdp.RingAllReduce(), devices
        )
        loss, accuracy, expected = alone(PARAMS, STATE, batch)
        assert_close(gradient, expected, 1e-6)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
        np.testing.assert_allclose(metrics["accuracy"], accuracy, rtol=1e-6)
        assert_close(model_state["norm"], moved(batch), 1e-6)


@over_kinds
def test_all_designs_count_real_rows_only(design):
    """DA-1: ten rows on four devices; masked and synchronized BatchNorm."""
    mesh = jaxdp.data_mesh(4)
    sampler = jaxdp.Sampler(10, 64, shuffle=False)
    (padded,) = jaxdp.epoch_batches(data(10), sampler, mesh)
    gradient, metrics, model_state = gradients(padded, design(4), 4)
    loss, _, expected = alone(PARAMS, STATE, data(10))
    assert_close(gradient, expected, 1e-6)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    assert_close(model_state["norm"], moved(data(10)), 1e-6)


def test_gradients_in_double_precision():
    """What is left in single precision is rounding."""
    with jax.enable_x64(True):
        params, state, whole = jax.tree.map(
            lambda leaf: np.asarray(leaf, np.float64 if leaf.dtype == "f" else None),
            (PARAMS, STATE, data(10)),
        )
        mesh = jaxdp.data_mesh(8)
        (padded,) = jaxdp.epoch_batches(whole, jaxdp.Sampler(10, 24, seed=1), mesh)
        train = jaxdp.data_parallel(loss_fn, record(), mesh)
        new, _ = train.step(train.init(params, model_state=state), padded)
        *_, expected = alone(params, state, whole)
        assert_close(train.params(new), expected, 1e-14)


@pytest.mark.parametrize("real", [10, 2], ids=["10-real", "2-real"])
def test_micro_batches_are_normalized_one_after_the_other(real):
    """Four rows a device, two micro-batches; of 2 real rows the second has none."""
    mesh = jaxdp.data_mesh(4)
    sampler = jaxdp.Sampler(real, 16, shuffle=False)
    (padded,) = jaxdp.epoch_batches(data(real), sampler, mesh, accumulate=2)
    ring = jaxdp.RingAllReduce()
    found, _, statistics = gradients(padded, ring, 4, accumulate=2)
    parts = [[i for i in range(real) if i % 4 // 2 == micro] for micro in (0, 1)]
    model_state, gradient = STATE, jax.tree.map(np.zeros_like, PARAMS)
    for part in filter(None, parts):
        batch = take(data(real), np.array(part))
        *_, of_mean = alone(PARAMS, STATE, batch)
        weight = np.float32(len(part) / real)
        share = jax.tree.map(functools.partial(np.multiply, weight), of_mean)
        gradient = jax.tree.map(np.add, gradient, share)
        _, model_state = ALONE(PARAMS, model_state, batch["x"])
    assert_close(found, gradient, 1e-6)
    assert_close(statistics, model_state, 1e-6)


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("steps", [3, 5, 7])
def test_resumed_runs_see_the_same_rows(steps, devices):
    """DA-3: 5 batches an epoch; saved inside an epoch and between two."""
    mesh = jaxdp.data_mesh(devices)
    ids = {"id": np.arange(20)}

    def run(sampler, count):
        epochs = (jaxdp.epoch_batches(ids, sampler, mesh) for _ in range(3))
        batches = itertools.islice(itertools.chain.from_iterable(epochs), count)
        return [padded.batch["id"].tolist() for padded in batches]

    whole = run(jaxdp.Sampler(20, 4, seed=2), 10)
    assert sorted(itertools.chain(*whole[5:])) == list(range(20))
    saved, resumed = (jaxdp.Sampler(20, 4, seed=2) for _ in range(2))
    before = run(saved, steps)
    resumed.restore(saved.state())
    assert before + run(resumed, 10 - steps) == whole


def evaluate(length, devices, is_correct):
    """Accuracy and number of rows, over the batches of an epoch, each row once."""
    mesh = jaxdp.data_mesh(devices)
    sampler = jaxdp.Sampler(length, 2 * devices, shuffle=False)
    correct = {"correct": is_correct.astype("f")}
    count = jax.jit(
        lambda padded: jaxdp.masked_mean(padded.batch["correct"], padded.mask)
    )
    means = [
        count(padded) for padded in jaxdp.epoch_batches(correct, sampler, mesh, epoch=0)
    ]
    total = jax.tree.map(lambda *parts: sum(map(float, parts)), *means)
    return total.total / total.weight, total.weight


@pytest.mark.parametrize(
    ("length", "devices", "accuracy"), [(10, 4, 0.2), (21, 2, 2 / 21), (1, 8, 1.0)]
)
def test_evaluation_counts_every_row_once(length, devices, accuracy):
    """DA-6: wrapped rows would make 0.333 of the first, and count 22 in the second."""
    found, rows = evaluate(length, devices, np.arange(length) < 2)
    assert rows == length
    assert found == pytest.approx(accuracy)


def test_metrics_of_an_epoch_weigh_batches_by_their_rows():
    """DA-5: 0.7, 0.8 and 0.9 of 256, 256 and 10 rows are no mean of 0.8."""
    shares = np.array([0.7, 0.8, 0.9])
    sizes = np.array([256, 256, 10])
    batch = np.repeat(np.arange(3), sizes)
    place = np.arange(len(batch)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    right = {"right": (place < np.round(shares * sizes)[batch]).astype("f")}

    def loss_fn(params, batch, mask):
        accuracy = jaxdp.masked_mean(batch["right"], mask)
        return accuracy._replace(total=params * accuracy.total), jaxdp.Aux(
            {"accuracy": accuracy}
        )

    mesh = jaxdp.data_mesh(4)
    train = jaxdp.data_parallel(loss_fn, optax.sgd(0.0), mesh)
    state = train.init(np.float32(1))
    means = []
    sampler = jaxdp.Sampler(len(batch), 256, shuffle=False)
    for padded in jaxdp.epoch_batches(right, sampler, mesh):
        rows = int(padded.mask.sum())
        state, metrics = train.step(state, padded)
        means.append(jaxdp.Mean(float(metrics["accuracy"]) * rows, rows))
    assert [mean.weight for mean in means] == sizes.tolist()
    epoch = jax.tree.map(lambda *parts: sum(parts), *means)
    exact = np.round(shares * sizes).sum() / 522
    assert epoch.total / epoch.weight == pytest.approx(exact, rel=1e-6)
    assert exact == pytest.approx(0.7529, abs=1e-4)


def test_replicas_with_unequal_rows_weigh_by_them():
    """DA-5: 39 rows on 2 devices are 20 and 19, and weigh 20/39 and 19/39."""
    values = np.arange(39.0, dtype="f") ** 2
    mesh = jaxdp.data_mesh(2)
    (padded,) = jaxdp.epoch_batches(values, jaxdp.Sampler(39, 39), mesh)
    assert np.asarray(padded.mask).reshape(2, 20).sum(1).tolist() == [20, 19]
    _, metrics = contract.one_step(
        jaxdp.RingAllReduce(),
        lambda params, batch, mask: jaxdp.masked_mean(params * batch, mask),
        np.float32(1),
        padded,
    )
    np.testing.assert_allclose(metrics["loss"], values.mean(), rtol=1e-6)


def test_one_compilation_for_all_lengths_and_epochs():
    """DA-4: batches have one shape, and every process equally many."""
    mesh = jaxdp.data_mesh(8)
    train = jaxdp.data_parallel(loss_fn, optax.sgd(0.1), mesh)
    state = train.init(PARAMS, model_state=STATE)
    used = []
    with compilations() as names:
        for length in (1, 3, 66, 1797):
            sampler = jaxdp.Sampler(length, 128, seed=1)
            for _ in range(2):
                seen = []
                for padded in jaxdp.epoch_batches(data(length), sampler, mesh):
                    seen.append(int(np.asarray(padded.mask).sum()))
                    state, _ = train.step(state, padded)
                assert len(seen) == len(sampler) == math.ceil(length / 128)
                used.append(sum(seen))
    assert names == ["_step"]
    assert used == [1, 1, 3, 3, 66, 66, 1797, 1797]
