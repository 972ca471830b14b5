"""Local SGD against NumPy, replica by replica, and what it sends when."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.program.hlo import parse
from tests import contract
from tests.contract import BATCHES, PARAMS
from tests.helpers import assert_bit_equal, assert_replicas_bit_equal

RATE, MOMENTUM = 0.1, 0.9
TARGETS = np.arange(1.0, 17.0, dtype="f")  # one row per replica and step


def loss_fn(w, x):
    return jnp.mean((w - x) ** 2) / 2


def by_hand(devices, steps, sync_every, start_step):
    """Parameters of all replicas after every step; float64."""
    w, velocity, history = np.zeros(devices), np.zeros(devices), []
    for step in range(steps):
        rows = TARGETS[step * devices :][:devices]
        gradient = w - rows
        if step < start_step:
            gradient = np.full(devices, gradient.mean())
        velocity = MOMENTUM * velocity + gradient
        w = w - RATE * velocity
        if step >= start_step and (step + 1) % sync_every == 0:
            w = np.full(devices, w.mean())
        history.append(w)
    return history


@pytest.mark.parametrize(
    ("sync_every", "start_step"), [(1, 0), (2, 0), (3, 0), (2, 2), (3, 1), (4, 9)]
)
@pytest.mark.parametrize("devices", [2, 4])
def test_equals_numpy(devices, sync_every, start_step):
    steps = 16 // devices
    train = jaxdp.data_parallel(
        loss_fn,
        optax.sgd(RATE, momentum=MOMENTUM),
        jaxdp.data_mesh(devices),
        jaxdp.LocalSGD(sync_every, start_step),
    )
    state = train.init(np.float32(0))
    history = by_hand(devices, steps, sync_every, start_step)
    for step, expected in enumerate(history):
        rows = TARGETS[step * devices :][:devices]
        state, _ = train.step(state, rows)
        np.testing.assert_allclose(state.params, expected, rtol=1e-5)
        np.testing.assert_allclose(train.params(state), expected.mean(), rtol=1e-5)
    assert_replicas_bit_equal(train.params(state))
    assert train.step.__self__.jitted_step._cache_size() == 1


def test_the_mean_of_the_loss_is_that_of_all_replicas():
    _, metrics = contract.one_step(
        jaxdp.LocalSGD(4), loss_fn, np.float32(0), np.array([2, 4], "f")
    )
    assert metrics["loss"] == (4 + 16) / 4


def test_until_start_step_it_is_an_all_reduce():
    """Adam, whose average over replicas would be another update."""
    states = []
    for design in (jaxdp.LocalSGD(2, start_step=3), jaxdp.RingAllReduce()):
        mesh = jaxdp.data_mesh(3)
        train = jaxdp.data_parallel(contract.loss_fn, optax.adam(0.01), mesh, design)
        state = train.init(PARAMS)
        for batch in BATCHES[:3]:
            state, _ = train.step(state, batch)
        states.append(train.params(state))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), *states
    )


def test_replicas_differ_between_averages_and_only_there():
    mesh = jaxdp.data_mesh(3)
    train = jaxdp.data_parallel(
        contract.loss_fn, optax.adam(0.01), mesh, jaxdp.LocalSGD(2)
    )
    state = train.init(PARAMS)
    for step, batch in enumerate(BATCHES[:4]):
        state, _ = train.step(state, batch)
        kernel = np.asarray(state.params["hidden"]["kernel"])
        assert kernel.shape == (3, 5, 3)
        same = (kernel == kernel[0]).all()
        assert same == (step % 2 == 1)


def test_parameters_travel_inside_a_condition_and_the_loss_outside():
    devices = 4
    train = jaxdp.data_parallel(
        contract.loss_fn,
        optax.sgd(0.1),
        jaxdp.data_mesh(devices),
        jaxdp.LocalSGD(5),
    )
    program = train.lower(train.init(PARAMS), BATCHES[0]).compile()
    text = program.as_text()
    assert text is not None
    module = parse(text)
    entry = module.computations[module.entry].values()
    permutes = [i for i in entry if i.opcode.startswith("collective-permute")]
    assert len(permutes) == 2 * (devices - 1)  # a ring of one number
    assert any(i.opcode == "conditional" for i in entry)
    everywhere = sum(
        i.opcode.startswith("collective-permute")
        for computation in module.computations.values()
        for i in computation.values()
    )
    assert everywhere == 2 * 2 * (devices - 1)


def test_weighted_replicas_use_their_own_mean():
    """A replica without rows has no gradient; nobody is divided by zero."""

    def loss(w, x, mask):
        return jaxdp.masked_mean((w - x) ** 2 / 2, mask)

    mesh = jaxdp.data_mesh(4)
    train = jaxdp.data_parallel(loss, optax.sgd(0.5), mesh, jaxdp.LocalSGD(2))
    state = train.init(np.float32(1))
    batch = jaxdp.shard_batch(np.array([3.0, 5.0], "f"), mesh, "pad")
    state, metrics = train.step(state, batch)
    assert state.params.tolist() == [2, 3, 1, 1]
    assert metrics["loss"] == (4 + 16) / 4


def test_accumulation_and_dtypes():
    train = jaxdp.data_parallel(
        lambda w, x: jnp.mean(x) * jnp.sum(w.astype("f")),
        optax.sgd(1.0),
        jaxdp.data_mesh(2),
        jaxdp.LocalSGD(2),
        accumulate=2,
    )
    state = train.init(jnp.zeros(2, jnp.bfloat16))
    first = state.params.dtype
    for _ in range(2):
        state, _ = train.step(state, np.array([1, 2, 3, 4], "f"))
    got = train.params(state)
    assert first == got.dtype == jnp.bfloat16
    assert_bit_equal(got, jnp.full(2, -5, jnp.bfloat16))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sync_every": 0}, r"sync_every=0\. It is a number of steps, at least 1"),
        ({"sync_every": 1.5}, r"sync_every=1\.5\. "),
        ({"sync_every": 2, "start_step": -1}, r"start_step=-1\. .* at least 0"),
        ({"sync_every": 2, "bucket_cap_mb": 0}, r"LocalSGD got bucket_cap_mb=0\. "),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        jaxdp.data_parallel(
            loss_fn, optax.sgd(1.0), jaxdp.data_mesh(2), jaxdp.LocalSGD(**options)
        )
