"""The server, pushed and pulled by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.asynchronous import (
    Backup,
    Bounded,
    Eventual,
    Sequential,
    Server,
    Snapshot,
    verify,
)
from jaxdp.asynchronous.errors import deadlock
from tests.helpers import assert_bit_equal
from tests.replicated_helpers import compilations

F32 = np.float32


def serve(policy, workers, params: Any = 0.0, optimizer=None, **options):
    params = jax.tree.map(F32, params)
    server = Server(
        optimizer or optax.sgd(0.1), policy=policy, workers=workers, **options
    )
    server.init(params)
    return server


def kinds(server):
    return [(event.kind, event.worker) for event in server.events]


@pytest.mark.parametrize(("rate", "expected"), [(0.5, -1.0), (0.125, 0.5)])
def test_workers_on_one_version_act_like_one_with_their_summed_rate(rate, expected):
    # PS-1: f(x) = x^2 / 2 from 1, so that every gradient is 1.
    server = serve(Eventual(), 4, 1.0, optax.sgd(rate))
    snapshots = [server.pull(worker) for worker in range(4)]
    for worker, snapshot in enumerate(snapshots):
        assert server.push(worker, snapshot.params, snapshot) == "applied"
    assert server.params == expected
    assert [e.staleness for e in server.events if e.kind == "apply"] == [0, 1, 2, 3]


def test_a_fixed_delay_of_one():
    # x[t + 1] = x[t] - 0.9 x[t - 1], by hand; two workers in turn are that delay.
    server = serve(Eventual(), 2, 1.0, optax.sgd(0.9))
    held = [server.pull(0), server.pull(1)]
    seen = []
    for t in range(5):
        worker = t % 2
        server.push(worker, held[worker].params, held[worker])
        held[worker] = server.pull(worker)
        seen.append(float(server.params))
    assert seen == pytest.approx([0.1, -0.8, -0.89, -0.17, 0.631], rel=1e-5)


@pytest.mark.parametrize(
    ("policy", "x", "trace", "version"),
    [(Sequential(), -0.2, 2.0, 1), (Eventual(), -0.49, 3.9, 2)],
    ids=["averaged", "one-by-one"],
)
def test_momentum_of_an_average_and_of_one_by_one(policy, x, trace, version):
    # PS-5: gradients 1 and 3.
    server = serve(policy, 2, optimizer=optax.sgd(0.1, momentum=0.9))
    snapshots = [server.pull(worker) for worker in range(2)]
    for worker, gradient in enumerate([F32(1), F32(3)]):
        server.push(worker, gradient, snapshots[worker])
    assert float(server.params) == pytest.approx(x)
    assert float(server.opt_state[0].trace) == pytest.approx(trace)
    assert server.version == version


def test_backup_averages_the_first_and_counts_the_dropped():
    # PS-2: 3 workers, the first 2 count: (8 + 1) / 2, then (2 + 4) / 2.
    server = serve(Backup(1), 3)
    snapshots = [server.pull(worker) for worker in range(3)]
    fates = [server.push(w, F32(g), snapshots[w]) for w, g in [(2, 8), (0, 1), (1, 2)]]
    assert fates == ["collected", "applied", "dropped"]
    assert float(server.params) == pytest.approx(-0.45)
    snapshots = [server.pull(worker) for worker in range(3)]
    assert [s.version for s in snapshots] == [1, 1, 1]
    fates = [server.push(w, F32(g), snapshots[w]) for w, g in [(1, 2), (0, 4), (2, 8)]]
    assert fates == ["collected", "applied", "dropped"]
    assert float(server.params) == pytest.approx(-0.75)
    assert (server.applied, server.dropped) == ([2, 1, 1], [0, 1, 1])
    assert server.pushed == [2, 2, 2]


def test_a_late_worker_goes_on_with_the_open_round():
    server = serve(Backup(1), 3)
    late = server.pull(2)
    for round_index in range(3):
        for worker in (0, 1):
            snapshot = server.pull(worker)
            assert snapshot.iteration == round_index
            server.push(worker, F32(1), snapshot)
    assert server.push(2, F32(9), late) == "dropped"
    assert server.pull(2)[::2] == (3, 3)  # version and iteration


def test_pulls_before_any_push_hand_out_the_initial_parameters():
    # PS-3.
    params = {"w": np.arange(6, dtype="f").reshape(2, 3), "b": np.array([7, 8], "f")}
    server = serve(Eventual(), 1, params)
    first, second = server.pull(), server.pull()
    assert (first.version, second.version) == (0, 0)
    for snapshot in (first, second):
        assert_bit_equal(snapshot.params, params)


def test_the_initial_parameters_stay_the_callers():
    params = jnp.array([1.0, 2.0])
    server = Server(optax.sgd(0.1), device=next(iter(params.devices())))
    server.init(params)
    params.delete()
    assert_bit_equal(server.pull().params, np.array([1.0, 2.0], "f"))


@pytest.mark.parametrize(
    ("gradients", "message"),
    [
        pytest.param({"w": np.ones(3, "f")}, "structure", id="a-leaf-less"),
        pytest.param([np.ones(3, "f"), F32(1)], "structure", id="a-list"),
        pytest.param(
            {"w": np.ones((3, 1), "f"), "b": F32(1)},
            r"\['w'\] is float32\[3,1\] instead of float32\[3\]",
            id="shape",
        ),
        pytest.param(
            {"w": np.ones(3, "f"), "b": jnp.bfloat16(1)},
            r"\['b'\] is bfloat16\[\] instead of float32\[\]",
            id="dtype",
        ),
    ],
)
def test_gradients_unlike_the_parameters_are_refused(gradients, message):
    server = serve(Eventual(), 2, {"w": np.ones(3, "f"), "b": 1.0})
    with pytest.raises(ValueError, match=f"push by worker 1 got gradients.*{message}"):
        server.push(1, gradients, server.pull(1))
    assert (server.version, server.pushed, server.clocks) == (0, [0, 0], [0, 0])


def test_calls_that_are_refused():
    server = Server(optax.sgd(0.1), workers=2)
    with pytest.raises(RuntimeError, match=r"pull by worker 0 .*Call server\.init"):
        server.pull()
    with pytest.raises(
        RuntimeError, match=r"push by worker 1 came before Server\.init"
    ):
        server.push(1, F32(1), Snapshot(0, F32(1), 0))
    server.init(F32(1))
    with pytest.raises(RuntimeError, match="init was called on a server that has"):
        server.init(F32(1))
    with pytest.raises(ValueError, match=r"worker=2.*2 workers, 0 to 1"):
        server.pull(2)
    with pytest.raises(ValueError, match=r"worker=-1.*2 workers, 0 to 1"):
        server.push(-1, F32(1), server.pull())
    with pytest.raises(TypeError, match="no gradient"):
        Server(optax.sgd(0.1)).init(np.arange(3))
    with pytest.raises(ValueError, match="extra=2 for 2 workers"):
        Server(optax.sgd(0.1), policy=Backup(2), workers=2)


def test_a_gradient_is_pushed_once():
    server = serve(Eventual(), 2)
    snapshot = server.pull(0)
    server.push(0, F32(1), snapshot)
    with pytest.raises(
        ValueError, match=r"iteration 0\. The worker's clock is 1.*once"
    ):
        server.push(0, F32(1), snapshot)
    with pytest.raises(ValueError, match=r"version 5.*versions 0 to 1"):
        server.push(1, F32(1), snapshot._replace(version=5))
    assert (server.version, server.pushed) == (1, [1, 0])


def test_a_pull_beyond_the_bound_is_refused():
    server = serve(Bounded(1), 2)
    for _ in range(2):
        server.push(0, F32(1), server.pull(0))
    assert server.waits_for(0) == [1]
    with pytest.raises(RuntimeError, match=r"iteration 2 .* worker 1 \(clock 0\)"):
        server.pull(0)
    server.push(1, F32(1), server.pull(1))
    assert server.pull(0).version == 3


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["leaf", "loss", "weight"])
def test_a_push_that_is_not_finite_changes_nothing(bad, where):
    server = serve(Eventual(), 3, {"a": [1.0, 2.0], "b": 3.0}, optax.adam(0.1))
    before = (server.params, server.opt_state)
    gradients = {"a": [F32(5), F32(bad if where == "leaf" else 6)], "b": F32(7)}
    loss = jaxdp.Mean(
        F32(bad if where == "loss" else 1), F32(bad if where == "weight" else 2)
    )
    assert server.push(1, gradients, server.pull(1), loss) == "refused"
    assert_bit_equal((server.params, server.opt_state), before)
    assert (server.refused, server.pushed) == ([0, 1, 0], [0, 1, 0])
    assert (server.version, server.clocks) == (0, [0, 1, 0])
    assert kinds(server)[-1] == ("refuse", 1)
    assert server.pull(1).iteration == 1


def test_a_push_of_no_rows_is_refused():
    server = serve(Eventual(), 1)
    assert server.push(0, F32(0), server.pull(), jaxdp.Mean(F32(0), F32(0))) == (
        "refused"
    )
    assert server.params == 0


def test_a_round_with_a_refused_push_averages_the_others():
    server = serve(Sequential(), 3)
    snapshots = [server.pull(worker) for worker in range(3)]
    fates = [
        server.push(worker, F32(gradient), snapshots[worker])
        for worker, gradient in [(0, 2), (2, np.nan), (1, 4)]
    ]
    assert fates == ["collected", "refused", "applied"]
    assert float(server.params) == pytest.approx(-0.3)  # (2 + 4) / 2
    assert (server.version, server.rounds) == (1, 1)
    assert (server.applied, server.refused) == ([1, 1, 0], [0, 0, 1])


def test_a_refused_push_has_no_weight():
    server = serve(Sequential(), 2)
    snapshots = [server.pull(0), server.pull(1)]
    server.push(0, F32(np.inf), snapshots[0], jaxdp.Mean(F32(1), F32(5)))
    server.push(1, F32(6), snapshots[1], jaxdp.Mean(F32(1), F32(2)))
    assert float(server.params) == pytest.approx(-0.3)  # 6 / 2


def test_a_gradient_alone_is_divided_by_its_weight():
    server = serve(Eventual(), 1)
    server.push(0, F32(6), server.pull(), jaxdp.Mean(F32(1), F32(4)))
    assert float(server.params) == pytest.approx(-0.15)


def test_closing_drops_what_was_not_refused():
    server = serve(Sequential(), 3)
    for worker, gradient in [(0, 1), (1, np.nan)]:
        server.push(worker, F32(gradient), server.pull(worker))
    server.close()
    server.close()
    assert (server.dropped, server.refused) == ([1, 0, 0], [0, 1, 0])
    assert server.pushed == [1, 1, 0]


def test_a_round_of_refused_pushes_ends_without_an_update():
    server = serve(Sequential(), 2)
    for worker, snapshot in enumerate([server.pull(0), server.pull(1)]):
        server.push(worker, F32(np.nan), snapshot)
    assert (server.version, server.rounds, server.params) == (0, 1, 0)
    assert server.pull(0).iteration == 1


def test_a_late_push_that_is_refused_is_no_part_of_the_open_round():
    server = serve(Backup(1), 2)
    late = server.pull(1)
    server.push(0, F32(1), server.pull(0))
    assert server.push(1, F32(np.nan), late) == "refused"
    assert (server.rounds, server.refused, server.dropped) == (1, [0, 1], [0, 0])


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)], ids=str)
def test_an_average_is_weighted_and_does_not_depend_on_arrival(order):
    # In float32 (1 + 1) + 2^24 is 2^24 + 2, and (2^24 + 1) + 1 is 2^24.
    gradients = [F32(1), F32(1), F32(2**24)]
    weights = [F32(0.5), F32(2.0), F32(5.0)]
    server = serve(Sequential(), 3, optimizer=optax.sgd(1.0))
    snapshots = [server.pull(worker) for worker in range(3)]
    for w in order:
        loss = jaxdp.Mean(F32(10 * w), weights[w])
        server.push(w, gradients[w], snapshots[w], loss)
    assert server.params == -F32(2**24 + 2) / F32(7.5)
    assert [loss for _, _, loss in server.losses] == [
        [0.0, 5.0, 4.0][worker] for worker in order
    ]


def test_sums_of_short_floats_are_wide():
    # 256 + 1 is 256 in bfloat16; the mean of 256, 1, 1 and 2 is 65.
    params = jnp.zeros((), jnp.bfloat16)
    server = Server(optax.sgd(1.0), policy=Sequential(), workers=4)
    server.init(params)
    snapshots = [server.pull(worker) for worker in range(4)]
    for worker, gradient in enumerate([256, 1, 1, 2]):
        server.push(worker, jnp.bfloat16(gradient), snapshots[worker])
    assert server.params.dtype == jnp.bfloat16
    assert server.params == -65


def test_every_snapshot_is_of_one_version_and_stays_what_it_was():
    # PS-6: a and b start equal and get equal gradients.
    server = serve(Eventual(), 5, {"a": [0.0], "b": 0.0}, optax.sgd(0.25, momentum=0.5))
    random = np.random.default_rng(0)
    held, seen, updates = {}, {}, 0
    for _ in range(200):
        worker = int(random.integers(5))
        if worker in held:
            gradient = F32(random.normal())
            server.push(worker, {"a": [gradient], "b": gradient}, held.pop(worker))
            updates += 1
        else:
            held[worker] = snapshot = server.pull(worker)
            assert snapshot.version == updates
            assert snapshot.params["a"][0] == snapshot.params["b"]
            value = float(snapshot.params["b"])
            assert seen.setdefault(snapshot.version, (value, snapshot))[0] == value
    assert len(seen) > 50
    for value, snapshot in seen.values():
        assert float(snapshot.params["a"][0]) == float(snapshot.params["b"]) == value


def recording():
    """An optimizer that keeps what it was passed."""

    def update(updates, state, params=None, **extra):
        del state, params
        staleness, stale_params = extra["staleness"], extra["stale_params"]
        assert staleness.dtype == jnp.int32 and staleness.shape == ()
        return updates, (staleness, stale_params)

    def init(params):
        return jnp.int32(-1), params

    return optax.GradientTransformationExtraArgs(init, update)


@pytest.mark.parametrize("policy", [Eventual(), Sequential()], ids=str)
def test_the_optimizer_knows_how_old_a_gradient_is(policy):
    server = serve(policy, 2, optimizer=recording())
    first = [server.pull(0), server.pull(1)]
    server.push(0, F32(1), first[0])
    assert server.opt_state == ((0, 0) if policy == Eventual() else (-1, 0))
    server.push(1, F32(2), first[1])
    assert server.opt_state == ((1, 0) if policy == Eventual() else (0, 0))
    second = [server.pull(0), server.pull(1)]
    pulled = second[0].params
    server.push(1, F32(3), second[1])
    server.push(0, F32(4), second[0])
    assert server.opt_state == ((1, pulled) if policy == Eventual() else (0, pulled))


def test_a_run_compiles_its_update_once():
    traces = []

    def update(updates, state, params=None):
        traces.append(params)
        # A type that becomes weak, and a constant: each would compile the next anew.
        return updates, {"weak": 1.0, "count": state["count"] + 1}

    def init(params):
        del params
        return {"weak": jnp.zeros(()), "count": 0}

    server = serve(
        Eventual(), 2, [1.0, 2.0], optax.GradientTransformation(init, update)
    )
    with compilations() as compiled:
        for gradient in ([1.0, 2.0], [jnp.asarray(1.0)] * 2, [F32(1), jnp.float32(2)]):
            server.push(0, gradient, server.pull(0), 1.0)
    assert len(traces) == 1
    assert compiled.count("update") == 1
    assert server.opt_state["count"] == 3


def test_an_optimizer_may_have_no_state():
    def init(params) -> Any:
        del params

    def update(updates, state, params=None):
        del params
        return updates, state

    optimizer = optax.GradientTransformation(init, update)
    server = serve(Eventual(), 1, 1.0, optimizer)
    server.push(0, F32(2), server.pull())
    assert server.params == 3 and server.opt_state is None


def test_gradients_come_from_any_device_and_live_on_the_servers():
    device, other = jax.devices()[3], jax.devices()[5]
    server = serve(Eventual(), 1, optimizer=optax.adam(0.1), device=device)
    gradient = jax.device_put(F32(2), other)
    server.push(0, gradient, server.pull(), jax.device_put(F32(1), other))
    for leaf in jax.tree.leaves((server.params, server.opt_state)):
        assert leaf.devices() == {device}


def test_a_mesh_in_use_does_not_matter():
    with jax.set_mesh(jax.make_mesh((8,), ("data",))):
        server = serve(Eventual(), 1)
        server.push(0, F32(2), server.pull(), F32(1))
    assert float(server.params) == pytest.approx(-0.2)


def test_the_log_is_in_order_and_closed():
    ticks = iter(range(100))
    server = serve(Sequential(), 2, now=lambda: float(next(ticks)))
    for worker, snapshot in enumerate([server.pull(0), server.pull(1)]):
        server.push(worker, F32(1), snapshot)
    server.push(1, F32(1), server.pull(1))
    server.close()
    assert kinds(server) == [
        *[("read", 0), ("read", 1), ("apply", 0), ("apply", 1)],
        *[("read", 1), ("drop", 1)],
    ]
    assert [e.version for e in server.events] == [0, 0, 1, 1, 1, 1]
    assert server.pushed == [1, 2] and server.dropped == [0, 1]
    times = [e.time_s for e in server.events]
    assert times == sorted(times) and times[2] == times[3]


def test_deadlock_says_who_waits_for_whom():
    server = serve(Bounded(0), 3)
    for worker in (0, 2):
        server.push(worker, F32(1), server.pull(worker))
    error = deadlock(server, "train", ["waits", "has stopped", "waits"])
    assert "Bounded(max_staleness=0)" in str(error)
    assert "worker 0 (clock 1) waits for worker 1 (clock 0)" in str(error)
    assert "worker 1 (clock 0) has stopped;" in str(error)
    with pytest.raises(ValueError, match="No span is its push"):
        verify([], server.events, server.policy, 3)
