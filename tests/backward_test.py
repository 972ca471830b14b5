"""When gradients are ready, which are zero by construction, and which are not read."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp import backward

PARAMS = {
    "a": np.ones((3, 3), "f"),
    "b": np.ones((3, 3), "f"),
    "c": np.ones((3, 3), "f"),
    "scalar": np.float32(2),
    "stopped": np.ones(4, "f"),
    "unused": np.float32(3),
}


def layer(w, x):
    return jnp.tanh(x @ w)


def traced(loss_fn, params=PARAMS):
    return jax.make_jaxpr(jax.grad(loss_fn))(params, jnp.ones((2, 3)))


def loss_with(wrap):
    def loss_fn(p, x):
        for name in "cab":  # not the order of the tree
            x = wrap(layer)(p[name], x)
        return jnp.sum(x * p["scalar"]) + jnp.sum(jax.lax.stop_gradient(p["stopped"]))

    return loss_fn


@pytest.mark.parametrize(
    "wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "checkpoint"]
)
def test_gradients_are_ready_in_reversed_order_of_use(wrap):
    a, b, c, scalar, *_ = backward.readiness(traced(loss_with(wrap)))
    assert scalar < b < a < c


def test_order_is_seen_through_a_call_around_everything():
    a, b, c, scalar, *_ = backward.readiness(traced(jax.jit(loss_with(jax.jit))))
    assert scalar < b < a < c


def test_casts_of_all_gradients_at_the_end_change_no_times():
    loss_fn = loss_with(lambda f: f)

    def cast(params, x):
        gradients = jax.grad(loss_fn)(params, x)
        return jax.tree.map(lambda g: g.T.astype(jnp.bfloat16), gradients)

    times = backward.readiness(jax.make_jaxpr(cast)(PARAMS, jnp.ones((2, 3))))
    a, b, c, scalar, *_ = times
    assert scalar < b < a < c
    assert times[:4] == backward.readiness(traced(loss_fn))[:4]


def test_a_parameter_used_twice_is_ready_with_its_first_use():
    def loss_fn(p, x):
        return jnp.sum(layer(p["a"], layer(p["b"], layer(p["a"], x))))

    a, b, *_ = backward.readiness(traced(loss_fn))
    assert b < a


def test_all_results_of_a_loop_are_ready_at_once():
    def loss_fn(p, x):
        x, _ = jax.lax.scan(lambda x, w: (layer(w, x), None), x, p["stack"])
        return jnp.sum(layer(p["first"], x))

    params = {"first": np.ones((3, 3), "f"), "stack": np.ones((4, 3, 3), "f")}
    first, stack = backward.readiness(traced(loss_fn, params))
    assert first < stack


def test_zeros_are_known_without_a_batch():
    assert backward.zeros(traced(loss_with(jax.jit))) == [False] * 4 + [True] * 2
    assert (
        backward.zeros(traced(jax.jit(loss_with(jax.jit)))) == [False] * 4 + [True] * 2
    )


def test_a_gradient_that_only_happens_to_be_zero_is_not_known_to_be():
    def loss_fn(p, x):
        return jax.lax.cond(x[0, 0] > 0, lambda: jnp.sum(p["a"]), lambda: 0.0)

    assert backward.zeros(traced(loss_fn))[0] is False


MASK = {name: name in "ab" for name in PARAMS}
FROZEN = {name: not trains for name, trains in MASK.items()}
LABELS = {name: "train" if trains else "freeze" for name, trains in MASK.items()}
BOTH: dict[Any, Any] = {"train": optax.adamw(0.1), "freeze": optax.set_to_zero()}
ONLY_AB = [True, True, False, False, False, False]


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        pytest.param(optax.adamw(0.1), [True] * 6, id="all"),
        pytest.param(optax.set_to_zero(), [False] * 6, id="none"),
        pytest.param(optax.partition(BOTH, LABELS), ONLY_AB, id="partition"),
        pytest.param(
            optax.chain(
                optax.masked(optax.adam(0.1), MASK),
                optax.masked(optax.set_to_zero(), FROZEN),
            ),
            ONLY_AB,
            id="masked-to-zero",
        ),
        # ER-4: it passes on what it masks out.
        pytest.param(
            optax.masked(optax.adam(0.1), MASK), [True] * 6, id="masked-alone"
        ),
        pytest.param(
            optax.chain(optax.clip_by_global_norm(1.0), optax.partition(BOTH, LABELS)),
            [True] * 6,
            id="norm-of-all-first",
        ),
        pytest.param(
            optax.chain(optax.partition(BOTH, LABELS), optax.clip_by_global_norm(1.0)),
            ONLY_AB,
            id="norm-of-all-last",
        ),
    ],
)
def test_read_gradients(optimizer, expected):
    assert backward.read_gradients(optimizer, PARAMS) == expected
