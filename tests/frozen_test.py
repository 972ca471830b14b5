"""Frozen and unused parameters: no gradient of theirs travels, and none moves them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdp
from tests import contract
from tests.contract import DESIGNS, over_kinds
from tests.helpers import as_numpy

PARAMS = {"f": contract.waves(5, 7), "w": contract.waves(7, 3, start=0.6)}
ROWS = contract.waves(6, 5, start=0.2)
MASK = {"f": False, "w": True}


def loss_fn(params, x):
    return jnp.mean(jnp.tanh(x @ params["f"]) @ params["w"])


def stopped(params, x):
    return loss_fn({**params, "f": jax.lax.stop_gradient(params["f"])}, x)


def adamw(mask=None):
    return optax.adamw(0.1, weight_decay=0.1, mask=mask)


def frozen(filter_):
    """What `filter_` selects of a Flax model stays as it is."""
    trains = nnx.filterlib.to_predicate(filter_)
    return lambda params: jax.tree_util.tree_map_with_path(
        lambda path, leaf: (
            "freeze" if trains(tuple(key.key for key in path), leaf) else "train"
        ),
        params,
    )


FREEZING = {
    "partition": lambda: optax.partition(
        {"train": adamw(), "freeze": optax.set_to_zero()},
        {"f": "freeze", "w": "train"},
    ),
    "masked": lambda: optax.chain(
        optax.masked(adamw(), MASK),
        optax.masked(optax.set_to_zero(), {"f": True, "w": False}),
    ),
    "freeze": lambda: optax.chain(
        optax.masked(adamw(), MASK), optax.transforms.freeze({"f": True, "w": False})
    ),
    "nnx-filter": lambda: optax.partition(
        {"train": adamw(), "freeze": optax.set_to_zero()},
        frozen(nnx.filterlib.PathContains("f")),
    ),
}


def bytes_of(design, optimizer, loss_fn=loss_fn, params=PARAMS):
    mesh = jaxdp.data_mesh(2)
    train = jaxdp.data_parallel(loss_fn, optimizer, mesh, DESIGNS[design](2))
    state = train.init(params)
    program = train.lower(state, ROWS).compile()
    names = {name for b in train.buckets(state, ROWS) for name in b.names}
    return jaxdp.analyze(program).sent_bytes, names


@functools.cache
def bytes_of_w_alone(design):
    def loss(params, x):
        return loss_fn({"f": PARAMS["f"], **params}, x)

    return bytes_of(design, adamw(), loss, {"w": PARAMS["w"]})[0]


@pytest.mark.parametrize("design", ["ring", "ring-buckets", "native", "doubling"])
@pytest.mark.parametrize("freezing", FREEZING)
def test_frozen_leaves_stay_off_the_wire(design, freezing):
    sent, names = bytes_of(design, FREEZING[freezing]())
    assert sent == bytes_of_w_alone(design)
    assert names == {"params['w']", "loss.total"}


@pytest.mark.parametrize("design", ["ring", "native"])
def test_gradients_that_are_zero_by_construction_stay_off_the_wire(design):
    sent, names = bytes_of(design, adamw(), stopped)
    assert sent == bytes_of_w_alone(design)
    assert names == {"params['w']", "loss.total"}


def test_the_root_gets_no_frozen_gradients():
    """Parameters go out whole; gradients come in without the frozen ones."""
    whole, _ = bytes_of("root-first", adamw())
    pruned, _ = bytes_of("root-first", FREEZING["partition"]())
    assert whole[1] - pruned[1] == PARAMS["f"].nbytes  # the other device's
    assert whole[0] == pruned[0]


@pytest.mark.parametrize("freezing", ["partition", "masked"])
@over_kinds
def test_frozen_leaves_keep_their_bits(design, freezing):
    """ZE-7: ten steps; no optimizer state for `f`; `w` as on one device."""
    optimizer = FREEZING[freezing]()
    mesh = jaxdp.data_mesh(2)
    train = jaxdp.data_parallel(loss_fn, optimizer, mesh, design(2))
    state = train.init(PARAMS)
    batches = [ROWS * (1 + i) for i in range(10)]
    history, _ = contract.on_one_device(loss_fn, optimizer, PARAMS, batches)
    for batch in batches:
        state, _ = train.step(state, batch)
    got = train.params(state)
    np.testing.assert_array_equal(got["f"], PARAMS["f"])
    np.testing.assert_allclose(got["w"], history[-1]["w"], rtol=0, atol=2e-6)
    assert np.abs(np.asarray(got["w"]) - PARAMS["w"]).min() > 0.1
    kept = {leaf.shape[-2:] for leaf in jax.tree.leaves(state.opt_state)}
    assert not kept & {(5, 7), (1, 18)}  # whole, or a server's half


@over_kinds
def test_masked_alone_passes_gradients_on_as_plain_optax_does(design):
    """ER-4: b goes up by its gradient; only a is trained."""
    optimizer = optax.masked(optax.sgd(0.1), {"a": True, "b": False})
    new, _ = contract.one_step(
        design,
        lambda p, x: jnp.mean(x) * (p["a"] + p["b"]),
        {"a": np.float32(1), "b": np.float32(1)},
        np.array([0.5, 1.5], "f"),
        optimizer=optimizer,
    )
    assert as_numpy(new) == {"a": np.float32(0.9), "b": np.float32(2)}


@over_kinds
def test_a_zero_gradient_still_moves_by_momentum(design):
    """ST-12: gradient 1, then 0 because the second batch does not use it."""
    optimizer = optax.sgd(0.1, momentum=0.9)
    train = jaxdp.data_parallel(
        lambda w, x: jnp.mean(w * x), optimizer, jaxdp.data_mesh(2), design(2)
    )
    state = train.init(np.float32(0))
    state, _ = train.step(state, np.array([0.5, 1.5], "f"))
    state, _ = train.step(state, np.zeros(2, "f"))
    np.testing.assert_allclose(train.params(state), -0.1 - 0.09, rtol=1e-6)


def test_unused_parameters_are_treated_as_having_a_zero_gradient():
    """Weight decay moves them, on one device as here."""
    new, _ = contract.one_step(
        jaxdp.RingAllReduce(),
        lambda p, x: jnp.mean(x) * p["used"],
        {"unused": np.float32(2), "used": np.float32(1)},
        np.ones(2, "f"),
        optimizer=optax.chain(optax.add_decayed_weights(0.5), optax.sgd(1.0)),
    )
    assert as_numpy(new) == {"unused": np.float32(1), "used": np.float32(-0.5)}


def test_compression_leaves_frozen_leaves_alone():
    design = jaxdp.RingAllReduce(compression=jaxdp.compression.TopK(0.5))
    mesh = jaxdp.data_mesh(2)
    train = jaxdp.data_parallel(loss_fn, FREEZING["partition"](), mesh, design)
    state = train.init(PARAMS)
    for _ in range(3):
        state, _ = train.step(state, ROWS)
    assert not np.asarray(state.opt_state.residuals["f"]).any()
    assert np.asarray(state.opt_state.residuals["w"]).any()
    np.testing.assert_array_equal(train.params(state)["f"], PARAMS["f"])
