"""The guard refuses gradients summed twice or never, and nothing that is right.

Every loss that it accepts is also compared with one device, by `vmap`.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxdp
from jaxdp import guard, marks
from tests import contract
from tests.contract import over_kinds, over_whole

PARAMS = {"w": contract.waves(3), "b": np.float32(0.4)}
BATCH = contract.waves(6, 3, start=0.2)


def local_mean(params, x):
    return jnp.mean((x @ params["w"] + params["b"]) ** 2)


@dataclasses.dataclass(frozen=True)
class Custom(jaxdp.Design):
    """A design that averages as `average(gradients)` says; the rest is right."""

    average: Callable

    def exchange(self, contribution, params, opt_state, update, axis_name):
        mean = jaxdp.all_reduce(contribution, axis_name, mean=True)
        gradients = self.average(contribution.gradients)
        return update(dataclasses.replace(mean, gradients=gradients), params, opt_state)


def averaged(gradients):
    return jaxdp.all_reduce(gradients, "data", mean=True)


def scattered(gradients):
    """As ZeRO does, with JAX's own collectives."""

    def mean(leaf):
        flat = jnp.pad(leaf.reshape(-1), (0, -leaf.size % 2))
        shard = lax.psum_scatter(flat, "data", tiled=True) / 2
        return lax.all_gather(shard, "data", tiled=True)[: leaf.size].reshape(
            leaf.shape
        )

    return jax.tree.map(mean, gradients)


@pytest.mark.parametrize(
    "average",
    [
        pytest.param(averaged, id="all-reduce"),
        pytest.param(lambda g: lax.pmean(g, "data"), id="pmean"),
        pytest.param(scattered, id="psum-scatter"),
        pytest.param(
            lambda g: jaxdp.all_gather(
                jaxdp.reduce_scatter(g, "data", mean=True), "data", like=g
            ),
            id="reduce-scatter",
        ),
        pytest.param(
            lambda g: jaxdp.broadcast(jaxdp.reduce(g, "data", mean=True), "data"),
            id="reduce-broadcast",
        ),
    ],
)
def test_right_designs_are_accepted(average):
    gradient = contract.gradient(Custom(average), local_mean, PARAMS, BATCH)
    for leaf, expected in zip(
        jax.tree.leaves(gradient),
        jax.tree.leaves(jax.grad(local_mean)(PARAMS, BATCH)),
        strict=True,
    ):
        np.testing.assert_allclose(leaf, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("average", "message"),
    [
        pytest.param(
            lambda g: {**averaged(g), "b": g["b"]},
            r"new params\['b'\] depends on the gradient of params\['b'\] of one "
            r"replica only.* 'data'.*Sum it in `exchange`",
            id="one-forgotten",
        ),
        pytest.param(
            lambda g: {**averaged(g), "w": g["w"]},
            r"new params\['w'\] depends on the gradient of params\['w'\]",
            id="another-forgotten",
        ),
        pytest.param(
            lambda g: g, r"params\['b'\] depends on the gradient", id="all-forgotten"
        ),
        pytest.param(
            lambda g: jaxdp.broadcast(g, "data"),
            r"params\['b'\] depends on the gradient of params\['b'\] of one replica",
            id="that-of-the-root",
        ),
        pytest.param(
            lambda g: averaged(averaged(g)),
            r"params\['b'\] is summed over axis 'data' twice, the second time by "
            r"jaxdp\.all_reduce",
            id="twice",
        ),
        pytest.param(
            lambda g: lax.psum(averaged(g), "data"),
            r"twice, the second time by jax\.lax\.psum",
            id="twice-by-psum",
        ),
        pytest.param(
            lambda g: lax.scan(lambda c, _: (averaged(c), None), g, None, 3)[0],
            r"twice, the second time by jaxdp\.all_reduce",
            id="twice-in-a-loop",
        ),
        pytest.param(
            lambda g: jaxdp.reduce(g, "data"),
            r"new params\['b'\] may differ between the replicas on axis 'data'",
            id="on-the-root-only",
        ),
        pytest.param(
            lambda g: jax.tree.map(
                lambda leaf: leaf + lax.axis_index("data"), averaged(g)
            ),
            r"new params\['b'\] may differ .*keep the rank out of the optimizer",
            id="with-the-rank",
        ),
        pytest.param(
            lambda g: lax.cond(
                lax.axis_index("data") == 0,
                lambda g: g,
                optax.tree.zeros_like,
                averaged(g),
            ),
            r"new params\['b'\] may differ",
            id="behind-the-rank",
        ),
    ],
)
def test_wrong_designs_are_refused(average, message):
    with pytest.raises(ValueError, match=f"data_parallel: .*{message}"):
        contract.one_step(Custom(average), local_mean, PARAMS, BATCH)


def test_a_single_forgotten_leaf_is_refused():
    with pytest.raises(ValueError, match=r"new params depends on the gradient of par"):
        contract.one_step(
            Custom(lambda g: g), lambda w, x: jnp.mean(w * x), np.float32(1), BATCH
        )


def test_results_that_are_not_averaged_are_refused():
    class Local(jaxdp.Design):
        def exchange(self, contribution, params, opt_state, update, axis_name):
            gradients = averaged(contribution.gradients)
            return update(
                dataclasses.replace(contribution, gradients=gradients),
                params,
                opt_state,
            )

    with pytest.raises(ValueError, match=r"new metrics\['loss'\] may differ"):
        contract.one_step(Local(), local_mean, PARAMS, BATCH)


def test_an_optimizer_state_of_local_gradients_is_refused():
    """The parameters are right for one step; the momentum would spoil the next."""

    class LocalMomentum(jaxdp.Design):
        def exchange(self, contribution, params, opt_state, update, axis_name):
            mean = jaxdp.all_reduce(contribution, axis_name, mean=True)
            right = update(mean, params, opt_state)
            local = update(contribution, params, opt_state)
            return right._replace(opt_state=local.opt_state)

    message = r"new opt_state\[0\]\.trace.* depends on the gradient of params"
    momentum = optax.sgd(0.1, momentum=0.9)
    with pytest.raises(ValueError, match=message):
        contract.one_step(
            LocalMomentum(), local_mean, PARAMS, BATCH, optimizer=momentum
        )


@pytest.mark.parametrize(
    ("link", "by"),
    [
        pytest.param(
            jaxdp.synchronize_gradients("data"), r"jaxdp\.all_reduce", id="jaxdp"
        ),
        pytest.param(
            optax.stateless(lambda updates, params: lax.pmean(updates, "data")),
            r"jax\.lax\.psum",
            id="pmean",
        ),
    ],
)
@over_whole
def test_an_optimizer_that_sums_is_refused(design, link, by):
    optimizer = optax.chain(link, optax.adam(0.1))
    message = rf"summed over axis 'data' twice, .* by {by}.*drop it from the chain"
    with pytest.raises(ValueError, match=message):
        contract.one_step(design, local_mean, PARAMS, BATCH, optimizer=optimizer)


@jax.custom_vjp
def summing_backward(x):
    return x


summing_backward.defvjp(lambda x: (x, None), lambda _, g: (lax.psum(g, "data"),))


@over_kinds
def test_a_gradient_that_is_already_summed_is_refused(design):
    """As JAX itself makes one under `check_vma=True`."""

    def loss_fn(params, x):
        return local_mean(summing_backward(params), x)

    message = (
        r"gradient of params\['b'\] is already summed over axis 'data' when it leaves "
        r"loss_fn, by jax\.lax\.psum .*too large by the number of devices.*Remove"
    )
    with pytest.raises(ValueError, match=message):
        contract.one_step(design, loss_fn, PARAMS, BATCH)


def batch_norm(params, x):
    """Synchronized BatchNorm: statistics of all replicas."""
    h = x * params["w"][None] + params["b"]
    mean = lax.pmean(jnp.mean(h, axis=0), "data")
    var = lax.pmean(jnp.mean((h - mean[None]) ** 2, axis=0), "data")
    return jnp.mean(jnp.tanh((h - mean[None]) / jnp.sqrt(var + 0.1)[None]) ** 2 * x)


def contrastive(params, x):
    """Every row against the rows of all replicas."""
    h = jnp.tanh(x * params["w"][None] + params["b"])
    everyone = lax.all_gather(h, "data", tiled=True)
    own = lax.axis_index("data") * len(h) + jnp.arange(len(h))
    return -jnp.mean(jax.nn.log_softmax(h @ everyone.T)[jnp.arange(len(h)), own])


def scanned(params, x):
    """A recurrent network over the rows."""

    def cell(carry, row):
        carry = jnp.tanh(carry * params["b"] + row @ params["w"])
        return carry, carry**2

    return jnp.mean(lax.scan(cell, jnp.float32(0.1), x)[1])


def microbatches(params, x):
    """The mean over slices of the local rows."""
    losses = lax.map(lambda rows: local_mean(params, rows), x[:, None])
    return jnp.mean(losses)


def while_loop(params, x):
    """A loop whose length depends on the rows, for a factor without gradient."""
    factor = lax.while_loop(lambda v: v < 3, lambda v: v * 2, jnp.sum(x**2))
    return factor * local_mean(params, x)


def fori_loop(params, x):
    return lax.fori_loop(0, 2, lambda i, v: v * params["b"], local_mean(params, x))


def branches(params, x):
    """Another branch on every replica, and a branch that all take."""
    loss = lax.cond(x[0, 0] > 0, local_mean, lambda p, x: p["b"] ** 2, params, x)
    twice = functools.partial(local_mean, params)
    return loss + lax.switch(1, [jnp.sum, twice], x)


@jax.custom_jvp
def cubed(x):
    return x**3


cubed.defjvp(
    lambda primals, tangents: (cubed(*primals), 3 * primals[0] ** 2 * tangents[0])
)


@jax.custom_vjp
def tripled(x):
    return x


tripled.defvjp(lambda x: (x, None), lambda _, g: (3 * g,))


def halo(params, x):
    """The neighbour's rows as a second input."""
    other = lax.ppermute(x * params["b"], "data", [(0, 1), (1, 0)])
    return jnp.mean((x + other) @ params["w"])


ACCEPTED = {
    "all-gather": contrastive,
    "batch-norm": batch_norm,
    "branches": branches,
    "custom-jvp": lambda p, x: cubed(local_mean(p, x)),
    "custom-vjp": lambda p, x: local_mean(jax.tree.map(tripled, p), x),
    "fori-loop": fori_loop,
    "global-factor": lambda p, x: p["b"] * lax.pmean(jnp.mean(x), "data"),
    "global-maximum": lambda p, x: local_mean(p, x) * lax.pmax(jnp.max(x), "data"),
    "halo": halo,
    "microbatches": microbatches,
    "nested-jit": lambda p, x: jax.jit(local_mean)(p, x),
    "pmean": lambda p, x: lax.pmean(local_mean(p, x), "data"),
    "psum-scatter": lambda p, x: jnp.mean(
        lax.psum_scatter(jnp.tanh(x[:2] @ p["w"]), "data", tiled=True) ** 2
    ),
    "regularizer-only": lambda p, x: jnp.sum(p["w"] ** 2) + p["b"],
    "remat": lambda p, x: jax.checkpoint(local_mean)(p, x),
    "scan": scanned,
    "unused": lambda p, x: jnp.mean(x @ p["w"]),
    "while-loop": while_loop,
}


@pytest.mark.parametrize("loss_fn", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_losses_are_accepted_and_right(loss_fn):
    """The gradient is that of the mean of the replicas' losses."""

    @jax.jit
    @jax.value_and_grad
    def expected_of(params):
        rows = BATCH.reshape(2, 3, 3)
        losses = jax.vmap(lambda x: loss_fn(params, x), axis_name="data")(rows)
        return jnp.mean(losses)

    loss, expected = expected_of(PARAMS)
    step = functools.partial(contract.one_step, jaxdp.NativeAllReduce())
    new, metrics = step(loss_fn, jax.tree.map(jnp.asarray, PARAMS), BATCH)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    for name, value in expected.items():
        actual = PARAMS[name] - np.asarray(new[name])
        np.testing.assert_allclose(actual, value, atol=1e-6)


def test_a_collective_of_jaxdp_in_the_loss_is_accepted():
    """Its gradient is the same on all replicas, so that the guard looks closer."""

    def loss_fn(w, x):
        return w**2 * jaxdp.all_reduce(jnp.mean(x), "data", mean=True)

    new, metrics = contract.one_step(
        jaxdp.RingAllReduce(), loss_fn, np.float32(3), np.array([1.0, 3.0], "f")
    )
    assert (new, metrics["loss"]) == (3 - 12, 18)


@over_kinds
def test_frozen_parameters_are_accepted(design):
    labels = {"w": "train", "b": "freeze"}
    optimizer = optax.multi_transform(
        {"train": optax.sgd(1.0), "freeze": optax.set_to_zero()}, labels
    )
    new, _ = contract.one_step(design, local_mean, PARAMS, BATCH, optimizer=optimizer)
    assert new["b"] == PARAMS["b"]
    assert (new["w"] != PARAMS["w"]).all()


def test_join():
    varying = guard.Fact(varies=True)
    summed = guard.Fact(summed_by="psum", gradients=frozenset({("g", 1)}))
    fresh = guard.Fact(gradients=frozenset({("g", 0), ("h", 0)}))
    assert guard.join([]) == guard.Fact()
    assert guard.join([varying, summed, fresh]) == guard.Fact(
        True, "psum", frozenset({("g", 0), ("g", 1), ("h", 0)})
    )
    assert guard.join([summed, summed]) == summed


@pytest.mark.parametrize("forgotten", ["worker", "device"])
def test_every_axis_of_a_mesh_is_proven(forgotten):
    class OneAxis(jaxdp.Design):
        most_axes = 2

        def exchange(self, contribution, params, opt_state, update, axis_name):
            (summed,) = set(axis_name) - {forgotten}
            mean = jaxdp.all_reduce(contribution, summed, mean=True)
            return update(mean, params, opt_state)

    mesh = jax.make_mesh((2, 3), ("worker", "device"))
    train = jaxdp.data_parallel(local_mean, optax.sgd(1.0), mesh, OneAxis())
    message = rf"one replica only.*sum over axis '{forgotten}'"
    with pytest.raises(ValueError, match=message):
        train.step(train.init(PARAMS), BATCH)


def test_an_aggregate_of_all_gradients_counts_as_their_sum(monkeypatch):
    """Without the mark the guard would see gradients that nobody sums."""
    design = jaxdp.ParameterServer(aggregate=jaxdp.aggregation.median)
    new, _ = contract.one_step(design, local_mean, PARAMS, BATCH)
    assert not np.array_equal(new["w"], PARAMS["w"])
    monkeypatch.setattr(marks, "aggregated", lambda tree, axis_name: tree)
    with pytest.raises(ValueError, match=r"of one replica only.*never sums"):
        contract.one_step(design, local_mean, PARAMS, BATCH)
