"""Bounded delay in a compiled step: which gradient is applied when, and what travels.

The reference is a loop over plain optax that keeps gradients in a list.
"""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.program import dependence
from tests import contract
from tests.contract import BATCHES, PARAMS
from tests.helpers import assert_bit_equal, assert_replicas_bit_equal

BOUND = 2e-6  # as in tests/designs_test.py
Server = jaxdp.ParameterServer
OPTIMIZER = optax.adam(0.01)


@jax.jit
def apply(params, opt_state, gradient):
    updates, opt_state = OPTIMIZER.update(gradient, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


class Reference:
    """Plain optax whose gradients wait in a list."""

    gradient = staticmethod(jax.jit(jax.grad(contract.loss_fn)))

    def __init__(self, bound, policy):
        self.bound, self.policy = bound, policy
        self.params = jax.tree.map(jnp.asarray, PARAMS)
        self.opt_state = OPTIMIZER.init(self.params)
        self.waiting = []

    def step(self, batch):
        self.waiting.append(self.gradient(self.params, batch))
        if len(self.waiting) > self.bound:
            self.apply(1 if self.policy == "sliding" else len(self.waiting))

    def apply(self, count):
        for _ in range(count):
            given = self.params, self.opt_state, self.waiting.pop(0)
            self.params, self.opt_state = apply(*given)

    def flush(self):
        self.apply(len(self.waiting))


VARIANTS = {
    "one": (dict(), 3),
    "servers": (dict(servers=2), 3),
    "dedicated": (dict(servers=2, dedicated=True), 5),
    "worker": (dict(servers=2, update_on="worker"), 3),
    "aggregate": (
        dict(servers=2, aggregate=lambda t: jax.tree.map(lambda x: x.mean(0), t)),
        3,
    ),
    "grid": (dict(), (2, 2)),
}
RUNS = [
    *[
        (policy, bound, "one")
        for policy in ("sliding", "window")
        for bound in (1, 2, 3)
    ],
    *[("sliding", 1, name) for name in VARIANTS if name != "one"],
    *[("window", 2, name) for name in VARIANTS if name != "one"],
]


@pytest.mark.parametrize(("policy", "bound", "variant"), RUNS)
def test_applies_each_gradient_when_the_policy_says(policy, bound, variant):
    """Five steps, a flush, two steps, a flush: every gradient once, in order."""
    options, devices = VARIANTS[variant]
    mesh = (
        jaxdp.data_mesh(devices)
        if isinstance(devices, int)
        else jax.make_mesh(devices, ("worker", "device"))
    )
    design = Server(max_staleness=bound, policy=policy, **options)
    train = jaxdp.data_parallel(contract.loss_fn, OPTIMIZER, mesh, design)
    state, reference = train.init(PARAMS), Reference(bound, policy)
    for i, batch in enumerate(BATCHES[:7]):
        loss = contract.loss_fn(reference.params, batch)
        state, metrics = train.step(state, batch)
        reference.step(batch)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=0, atol=BOUND)
        if i in (4, 6):
            state = train.flush(state)
            reference.flush()
        chex.assert_trees_all_close(state.params, reference.params, rtol=0, atol=BOUND)
        assert_replicas_bit_equal((state.params, metrics))
    assert int(state.step) == 7


@pytest.mark.parametrize("policy", ["sliding", "window"])
def test_a_second_flush_changes_nothing(policy):
    design = Server(max_staleness=2, policy=policy)
    mesh = jaxdp.data_mesh(2)
    train = jaxdp.data_parallel(contract.loss_fn, OPTIMIZER, mesh, design)
    state, _ = train.step(train.init(PARAMS), BATCHES[0])
    assert_bit_equal(train.params(state), PARAMS)  # nothing applied so far
    state = train.flush(state)
    once = jax.tree.map(np.asarray, (state.params, state.opt_state.opt_state))
    assert not np.array_equal(once[0]["scale"], PARAMS["scale"])
    state = train.flush(state)
    assert_bit_equal((state.params, state.opt_state.opt_state), once)


def test_designs_without_delay_have_nothing_to_flush():
    for design in (jaxdp.RingAllReduce(), Server()):
        mesh = jaxdp.data_mesh(2)
        train = jaxdp.data_parallel(contract.loss_fn, OPTIMIZER, mesh, design)
        state = train.init(PARAMS)
        assert train.flush(state) is state


@pytest.mark.parametrize(
    ("policy", "ages"),
    [("sliding", [0, 1, 2, 2, 2, 2, 2]), ("window", [0, 1, 2, 0, 1, 2, 0])],
)
@pytest.mark.parametrize("update_on", ["server", "worker"])
def test_tells_the_optimizer_how_stale_a_gradient_is(policy, ages, update_on):
    """Each update adds the age, in a digit of its own to the base 8."""

    def update(updates, state: Any, params=None, **extra):
        del updates, params
        return state * extra["staleness"], state * 8

    def init(params: Any):
        return jnp.ones_like(params)

    write = optax.GradientTransformationExtraArgs(init, update)
    design = Server(max_staleness=2, policy=policy, update_on=update_on)
    mesh = jaxdp.data_mesh(2)
    train = jaxdp.data_parallel(lambda w, x: jnp.mean(w * x), write, mesh, design)
    state = train.init(np.float32(0))
    for _ in range(7):
        state, _ = train.step(state, np.ones(2, "f"))
    state = train.flush(state)
    expected = sum(age * 8**i for i, age in enumerate(ages))
    assert float(state.params) == expected


def test_scaling_by_staleness_in_a_compiled_step():
    """Gradients 1: applied whole at staleness 0 and 1, halved at 2."""
    optimizer = optax.chain(jaxdp.scale_by_staleness(), optax.sgd(1.0))
    design, mesh = Server(max_staleness=2), jaxdp.data_mesh(2)
    train = jaxdp.data_parallel(lambda w, x: jnp.mean(w * x), optimizer, mesh, design)
    state, history = train.init(np.float32(0)), []
    for _ in range(6):
        state, _ = train.step(state, np.ones(2, "f"))
        history.append(float(state.params))
    assert history == [0, 0, -1, -2, -2.5, -3]


# What travels.

WEIGHTS = np.linspace(-1, 1, 840, dtype="f").reshape(20, 42)
PHI = WEIGHTS.nbytes


def lowered(devices, inner=1, **options):
    def loss_fn(w, x):
        return jnp.mean((x @ w) ** 2)

    mesh = jaxdp.data_mesh(devices)
    if inner > 1:
        mesh = jax.make_mesh((devices, inner), ("worker", "device"))
    design = Server(**options)
    train = jaxdp.data_parallel(loss_fn, optax.sgd(0.1), mesh, design)
    rows = (devices - design.serving_ranks) * inner
    state = train.init(WEIGHTS)
    return train.lower(state, np.ones((rows, 20), "f"))


@functools.cache
def report(devices, inner=1, **options):
    return jaxdp.analyze(lowered(devices, inner, **options).compile())


def riding(workers):
    """Bytes beside gradients, per message, in a push as in a pull.

    Loss and its weight, and a flag per worker.
    """
    return 8 + 4 * workers


@pytest.mark.parametrize("devices", [2, 3, 5, 8])
def test_one_server_carries_n_minus_1_gradients(devices):
    counted = report(devices)
    more = riding(devices)
    others = devices - 1
    assert counted.received_bytes[0] == others * (PHI + more)
    assert counted.sent_bytes[0] == others * (PHI + more)
    assert set(counted.sent_bytes[1:]) == {PHI + more}
    assert set(counted.received_bytes[1:]) == {PHI + more}
    assert counted.permutes == 2 * others


@pytest.mark.parametrize("dedicated", [False, True], ids=["working", "dedicated"])
@pytest.mark.parametrize("servers", [1, 2, 4])
def test_each_of_s_servers_carries_1_of_s(servers, dedicated):
    """CB6: per link, what a server serves is the same 1 / S of one server's."""
    counted = report(8, servers=servers, dedicated=dedicated)
    workers = 8 - servers if dedicated else 8
    more = riding(workers)
    part = PHI // servers + more
    for server in range(servers):
        for other in range(8):
            links = (other, server), (server, other)
            found = [counted.link_bytes.get(link, 0) for link in links]
            works = other >= servers or not dedicated
            expected = [part * works, part]
            if other < servers:  # they serve each other as well, if they work
                expected = [part + part * works] * 2
            assert found == ([0, 0] if other == server else expected)
    if dedicated:
        assert counted.received_bytes[0] == counted.sent_bytes[0] == 7 * part


def test_bounded_delay_moves_the_same_gradients():
    """Sliding pushes and pulls as often; loss and flags travel in a round of their own.

    A window pushes once more where it closes: twice in its last step.
    """
    alone, slid = report(4), report(4, max_staleness=2)
    more = riding(4)
    assert slid.received_bytes[0] == slid.sent_bytes[0] == 3 * (PHI + more)
    assert slid.permutes == 2 * alone.permutes
    window = report(4, max_staleness=2, policy="window")
    assert window.received_bytes[0] == 3 * (2 * PHI + more)


def test_workers_of_several_devices_push_once():
    """Each of two devices pushes its half, so a worker's links carry one gradient."""
    counted = report(3, 2)
    across = {
        link: n
        for link, n in counted.link_bytes.items()
        if link[0] // 2 != link[1] // 2
    }
    assert set(across.values()) == {PHI // 2 + riding(3)}
    to_server = {(b, a) for a in (0, 1) for b in (2 + a, 4 + a)}
    assert set(across) == to_server | {(a, b) for b, a in to_server}


# What waits for what.


def waiting(inner=1, **options):
    """Transfers of gradients or parameters; how many wait for a product; and back."""
    compiled = lowered(3, inner, **options).compile()
    found = dependence(compiled)
    large = {n for n, op in found.collectives.items() if op.bytes >= PHI // 8}
    waits = large & found.collectives_after_matmuls().keys()
    for products in found.matmuls_after_collectives().values():
        assert not products & large
    return len(large), len(waits)


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(servers=2),
        dict(update_on="worker"),
        dict(servers=2, dedicated=True),
        dict(aggregate=lambda tree: tree.max(0)),
        dict(inner=2),
    ],
    ids=["one", "servers", "worker", "dedicated", "aggregate", "grid"],
)
def test_delayed_transfers_and_the_step_do_not_wait_for_each_other(options):
    """Without delay all gradients wait for the backward pass: the test can fail."""
    alone, delayed = waiting(**options), waiting(max_staleness=1, **options)
    assert alone[0] == alone[1] > 3
    assert delayed == (alone[0], 0)
    assert waiting(max_staleness=2, **options) == delayed


def test_a_window_pushes_beside_the_step_and_once_more_where_it_closes():
    """Two pushes and a pull; the push beside the step waits for nothing of it."""
    found, waits = waiting(max_staleness=2, policy="window")
    assert (found, waits) == (2 + 2 + 2, 2 + 2)
