"""Two streams in one process: pairs, programs, delay, and what is refused."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxdp
import jaxdp.streams
from tests.helpers import assert_bit_equal, assert_replicas_bit_equal, permutes
from tests.replicated_helpers import compilations
from tests.streams_problems import PROBLEMS, mlp_loss, rows, run, trainings

COLLECTIVE = re.compile(r"(all|collective|reduce-scatter)[\w-]*\(")
MLP = PROBLEMS["mlp-n2"]


def streams(replicas=2):
    return jaxdp.streams.two_streams(jax.devices()[: 2 * replicas])


def training(loss_fn=mlp_loss, optimizer=None, **options):
    optimizer = optax.sgd(0.1) if optimizer is None else optimizer
    return jaxdp.streams.data_parallel(loss_fn, optimizer, streams(), **options)


def test_even_devices_compute_and_odd_ones_communicate():
    devices = jax.devices()
    made = jaxdp.streams.two_streams([devices[i] for i in (4, 1, 3, 6)], "rank")
    assert [d.id for d in made.compute.devices.flat] == [4, 3]
    assert [d.id for d in made.communicate.devices.flat] == [1, 6]
    assert made.compute.axis_names == made.communicate.axis_names == ("rank",)
    assert [mesh.size for mesh in jaxdp.streams.two_streams()] == [4, 4]


def test_an_odd_number_of_devices():
    with pytest.raises(ValueError, match=r"3 device.* process 0.*3 = 2 x 1 \+ 1.*=4"):
        jaxdp.streams.two_streams(jax.devices()[:3])


@pytest.mark.parametrize("algorithm", ["ring", "native"])
def test_only_exchanges_communicate(algorithm):
    train, _ = trainings(MLP._replace(devices=4, algorithm=algorithm))
    state = train.init(MLP.params)
    lowered = train.lower(state, MLP.batch(0))
    texts = {name: low.compile().as_text() for name, low in lowered.items()}
    exchanged = 0
    for name, text in texts.items():
        found = COLLECTIVE.findall(text)
        if not name.startswith("exchange"):
            assert not found, name
            assert ("dot(" in text) == name.startswith("segment"), name
        elif algorithm == "ring":
            assert len(found) == len(permutes(text)) == 2 * (4 - 1)
            exchanged += sum(permute.nbytes for permute in permutes(text))
        else:
            assert found == ["all"]
            assert "dot(" not in text
    if algorithm == "ring":
        sizes = [x.size for x in jax.tree.leaves(MLP.params)]
        least = 2 * 3 / 4 * 4 * (sum(sizes) + 1)  # and the loss
        assert least <= exchanged <= least + 4 * 6 * 3 * len(sizes)


def test_one_program_and_two_streams_agree_within_rounding():
    results = [run(train, MLP, 4) for train in trainings(MLP)]
    (state, metrics), (expected, wanted) = results
    for a, b in zip(
        *map(jax.tree.leaves, [(state.params, metrics), (expected.params, wanted)]),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
    assert_replicas_bit_equal(state.params)
    assert int(state.step) == 4


@pytest.mark.parametrize("delay", [0, 1])
def test_each_segment_compiles_once(delay):
    calls = []

    def loss_fn(params, batch):
        calls.append(None)
        return mlp_loss(params, batch)

    train = training(loss_fn, delay=delay, bucket_cap_mb=0.0005)
    state = train.init(MLP.params)
    for step in range(2):  # with a delay the first step applies nothing
        state, _ = train.step(state, MLP.batch(step))
    traced = len(calls)
    with compilations() as compiled:
        for step in range(4):
            state, _ = train.step(state, MLP.batch(step))
    assert compiled == []
    assert len(calls) == traced
    state, _ = train.step(state, rows(9, 12, 6, 3))
    assert len(calls) > traced


class Reference:
    """Stochastic gradient descent in NumPy whose gradients wait for a step."""

    def __init__(self, weights):
        self.weights, self.waiting = weights.astype(np.float64), []

    def step(self, batch):
        error = batch["x"] @ self.weights - batch["y"]
        self.waiting.append(2 / error.size * batch["x"].T @ error)
        if len(self.waiting) == 2:
            self.apply()
        return np.mean(error**2)

    def apply(self):
        self.weights = self.weights - 0.1 * self.waiting.pop(0)


def linear_loss(params, batch):
    return jnp.mean((batch["x"] @ params - batch["y"]) ** 2)


def linear_batch(step):
    rng = np.random.default_rng([7, step])
    return {"x": rng.normal(size=(6, 5)), "y": rng.normal(size=(6, 3))}


def test_a_delayed_gradient_is_applied_before_the_step_after_next():
    with jax.enable_x64(True):
        start = np.random.default_rng(1).normal(size=(5, 3))
        train, reference = training(linear_loss, delay=1), Reference(start)
        state = train.init(start)
        for step in range(5):
            state, metrics = train.step(state, linear_batch(step))
            loss = reference.step(linear_batch(step))
            np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-12)
            np.testing.assert_allclose(
                train.params(state), reference.weights, rtol=1e-12
            )
        assert len(reference.waiting) == 1
        state = train.flush(state)
        reference.apply()
        np.testing.assert_allclose(train.params(state), reference.weights, rtol=1e-12)
        assert int(state.step) == 5
        assert_bit_equal(train.params(train.flush(state)), train.params(state))


def enlarged_by_staleness():
    def update(updates, state, params=None, *, staleness=0):
        return jax.tree.map(lambda u: u * (1 + 5 * staleness), updates), state

    return optax.GradientTransformationExtraArgs(lambda params: (), update)


def test_a_delay_is_that_of_the_parameter_server():
    optimizer = optax.chain(optax.adam(0.01), enlarged_by_staleness())
    problem = PROBLEMS["weighted-n4"]._replace(optimizer=lambda: optimizer)
    train, _ = trainings(problem, delay=1)
    mesh = streams(problem.devices).compute
    design = jaxdp.ParameterServer(max_staleness=1, policy="sliding")
    server = jaxdp.data_parallel(problem.loss_fn, optimizer, mesh, design)
    states = [train.init(problem.params), server.init(problem.params)]
    for step in range(6):
        if step == 3:
            states = [train.flush(states[0]), server.flush(states[1])]
        (states[0], found), (states[1], expected) = (
            each.step(state, problem.batch(step))
            for each, state in zip((train, server), states, strict=True)
        )
        for metric in found:
            np.testing.assert_allclose(found[metric], expected[metric], rtol=1e-5)
        for a, b in zip(
            *map(jax.tree.leaves, (states[0].params, states[1].params)), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_delayed_state_knows_what_is_in_flight():
    train = training(delay=1, bucket_cap_mb=0.0005)
    state, _ = run(train, MLP, 3)
    leaves, structure = jax.tree.flatten(state)
    saved = structure.unflatten([np.asarray(leaf) for leaf in leaves])
    restored = jax.device_put(saved, train.params(state)[0]["w"].sharding)
    expected = train.params(train.flush(state))
    again = training(delay=1, bucket_cap_mb=0.0005)  # no step has run here
    assert_bit_equal(again.params(again.flush(restored)), expected)


def test_without_a_delay_nothing_is_in_flight():
    train = training()
    state, _ = run(train, MLP, 1)
    assert train.flush(state) is state
    late = training(delay=1)
    state = late.flush(late.init(MLP.params))
    assert_bit_equal(late.params(state), jax.tree.map(np.asarray, MLP.params))


def test_a_state_serves_one_step():
    train = training(delay=1)
    state = train.init(MLP.params)
    kept = train.params(state)
    train.step(state, MLP.batch(0))
    with pytest.raises(RuntimeError, match="donates"):
        train.step(state, MLP.batch(0))
    assert_bit_equal(kept, jax.tree.map(np.asarray, MLP.params))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(delay=2), r"delay=2.*0 .*or 1"),
        (dict(delay=True), "delay=True"),
        (dict(algorithm="circle"), "circle"),
        (dict(bucket_cap_mb=0), "bucket_cap_mb=0"),
    ],
)
def test_options_that_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        training(**options)


def test_streams_that_are_refused():
    mesh = jaxdp.data_mesh(2)
    no_streams: Any = mesh
    with pytest.raises(TypeError, match="two_streams"):
        jaxdp.streams.data_parallel(mlp_loss, optax.sgd(0.1), no_streams)
    for other in (mesh, jaxdp.data_mesh(jax.devices()[2:5])):
        pair = jaxdp.streams.Streams(mesh, other)
        with pytest.raises(ValueError, match=rf"2 and {other.size} devices"):
            jaxdp.streams.data_parallel(mlp_loss, optax.sgd(0.1), pair)


def test_a_loss_that_communicates():
    def loss_fn(params, batch):
        return mlp_loss(params, batch) - lax.pmean(batch["y"].mean(), "data")

    train = training(loss_fn)
    with pytest.raises(ValueError, match=r"loss_fn that communicates.*'data'.*BatchN"):
        train.step(train.init(MLP.params), MLP.batch(0))


def test_an_optimizer_that_communicates():
    summed = optax.chain(jaxdp.synchronize_gradients("data"), optax.sgd(0.1))
    train = training(optimizer=summed)
    with pytest.raises(ValueError, match=r"optimizer that communicates.*'data'.*Drop"):
        train.step(train.init(MLP.params), MLP.batch(0))


def test_a_model_state():
    with pytest.raises(ValueError, match=r"model_state.*jaxdp\.data_parallel"):
        training().init(MLP.params, model_state={"mean": jnp.zeros(3)})


def test_a_state_of_another_delay():
    late, prompt = training(delay=1), training()
    with pytest.raises(ValueError, match=r"delay=0, and this program has delay=1"):
        late.step(prompt.init(MLP.params), MLP.batch(0))
    with pytest.raises(ValueError, match=r"delay=1, and this program has delay=0"):
        prompt.step(late.init(MLP.params), MLP.batch(0))
