"""`synchronize_gradients` in training loops that users wrote themselves."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxdp
from tests import contract
from tests.contract import BATCHES, PARAMS
from tests.helpers import assert_bit_equal, per_device

STEPS = 3


def chain(algorithm="ring"):
    return optax.chain(
        jaxdp.synchronize_gradients("data", algorithm=algorithm), optax.adam(0.01)
    )


def update(optimizer, params, opt_state, batch):
    """What users write: the gradient of their own rows, then the optimizer."""
    gradients = jax.grad(contract.loss_fn)(params, batch)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def in_pmap(mesh, optimizer):
    devices = list(mesh.devices.flat)
    step = jax.pmap(
        lambda *state: update(optimizer, *state), axis_name="data", devices=devices
    )

    def run(params, batches):
        copies = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (mesh.size, *jnp.shape(x))),
            (params, optimizer.init(params)),
        )
        for batch in batches:
            rows = jax.tree.map(lambda x: x.reshape(mesh.size, -1, x.shape[1]), batch)
            copies = step(*copies, rows)
        return jax.tree.map(lambda x: x[-1], copies[0])

    return run


def in_shard_map(mesh, optimizer, check_vma):
    def body(params, opt_state, batch):
        gradients_of = params
        if check_vma:
            gradients_of = lax.pcast(params, "data", to="varying")
        gradients = jax.grad(contract.loss_fn)(gradients_of, batch)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    step = jax.jit(
        jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(P(), P(), P("data")),
            out_specs=P(),
            check_vma=check_vma,
        )
    )

    def run(params, batches):
        state = params, optimizer.init(params)
        for batch in batches:
            state = step(*state, batch)
        return state[0]

    return run


LOOPS = {
    "pmap": in_pmap,
    "unchecked": lambda mesh, optimizer: in_shard_map(mesh, optimizer, False),
    "checked": lambda mesh, optimizer: in_shard_map(mesh, optimizer, True),
}


@functools.cache
def reference():
    return contract.on_one_device(
        contract.loss_fn, optax.adam(0.01), PARAMS, BATCHES[:STEPS]
    )


@pytest.mark.parametrize(
    ("loop", "algorithm", "devices"),
    [
        pytest.param(loop, algorithm, devices, id=f"{loop}-{algorithm}-n{devices}")
        for loop, algorithm, counts in (
            ("pmap", "ring", (1, 3)),
            ("unchecked", "ring", (2, 8)),
            ("checked", "ring", (1, 8)),
            ("checked", "star", (3,)),
        )
        for devices in counts
    ],
)
def test_equals_one_device(loop, algorithm, devices):
    run = LOOPS[loop](jaxdp.data_mesh(devices), chain(algorithm))
    final = run(jax.tree.map(jnp.asarray, PARAMS), BATCHES[:STEPS])
    # As BOUND in designs_test.py.
    chex.assert_trees_all_close(final, reference()[0][-1], rtol=0, atol=2e-6)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_gradient_that_jax_has_summed_is_refused(devices):
    """Under `check_vma=True`, without `pcast`; all leaves are named."""

    def body(params, batch):
        gradients = jax.grad(lambda p: jnp.mean(batch * p["a"]) + p["b"])(params)
        return jaxdp.synchronize_gradients("data").update(gradients, optax.EmptyState())

    step = jax.shard_map(
        body, mesh=jaxdp.data_mesh(devices), in_specs=(P(), P("data")), out_specs=P()
    )
    message = (
        r"already summed over axis 'data': \['a'\], \['b'\]\..*exactly once.*"
        r"jax\.lax\.pcast\(params, 'data', to='varying'\), or drop"
    )
    with pytest.raises(ValueError, match=message):
        step({"a": 1.0, "b": 2.0}, np.ones(2, "f"))


@pytest.mark.parametrize("mode", ["pmap", "unchecked", "checked"])
def test_leaves_without_a_gradient_pass_through(mode):
    mesh = jaxdp.data_mesh(3)
    link = jaxdp.synchronize_gradients("data")

    def body(tree):
        return link.update(tree, link.init(tree))[0]

    tree = {
        "bf16": np.arange(6.0).reshape(3, 2).astype("bfloat16"),
        "count": np.arange(3, dtype=np.int32),
        "float": np.array([1, 2, 6], "f"),
        "masked": optax.MaskedNode(),
        "none": None,
    }
    expected = {
        **tree,
        "bf16": np.tile(np.array([2.0, 3.0], "bfloat16"), (3, 1)),
        "float": np.full(3, 3, "f"),
    }
    assert_bit_equal(per_device(body, mesh, mode)(tree), expected)


def test_masked_synchronization_leaves_the_other_leaves_alone():
    mesh = jaxdp.data_mesh(2)
    link = optax.masked(
        jaxdp.synchronize_gradients("data"), {"shared": True, "own": False}
    )

    def body(tree):
        return link.update(tree, link.init(tree))[0]

    tree = {"shared": np.array([1, 3], "f"), "own": np.array([1, 3], "f")}
    result = per_device(body, mesh)(tree)
    assert_bit_equal(result, {**tree, "shared": np.array([2, 2], "f")})


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda update: update, id="outside"),
        pytest.param(
            lambda update: jax.shard_map(
                update,
                mesh=jaxdp.data_mesh(2, axis_name="batch"),
                in_specs=P(),
                out_specs=P(),
            ),
            id="other-axis",
        ),
    ],
)
def test_an_unknown_axis_is_refused(call):
    link = jaxdp.synchronize_gradients("data")

    def update(gradient):
        return link.update(gradient, optax.EmptyState())[0]

    with pytest.raises(ValueError, match=r"'data', and no axis of the name 'data' is"):
        call(update)(np.ones(2, "f"))


def test_an_unknown_algorithm_is_refused():
    with pytest.raises(ValueError, match=r"'rings'.*'ring'"):
        in_shard_map(jaxdp.data_mesh(2), chain("rings"), False)(PARAMS, BATCHES[:1])
