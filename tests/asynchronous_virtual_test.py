"""Simulated runs against plain optax loops and timetables worked out by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.asynchronous import (
    Backup,
    Bounded,
    Constant,
    Eventual,
    Link,
    LogNormal,
    Sequential,
    Span,
    Stops,
    simulate,
)
from tests.helpers import assert_bit_equal
from tests.replicated_helpers import compilations

F32 = np.float32
STRAGGLER = [Constant(1.0)] * 3 + [Constant(4.5)]
UNEVEN = LogNormal(1.0, 0.6)


def linear(x, gradient):
    """A loss whose gradient is the batch."""
    return x * gradient


def by_worker(*gradients):
    return lambda worker, iteration: F32(gradients[worker])


def run_linear(policy, gradients=(1, 2, 3, 4), **options):
    """A run of sgd(0.1) from 0, proven from its log."""
    options = {"optimizer": optax.sgd(0.1), "workers": len(gradients)} | options
    options = {"params": F32(0), "batches": by_worker(*gradients)} | options
    run = simulate(linear, policy=policy, **options)
    run.verify()
    return run


def mlp_loss(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)


def mlp():
    w = np.sin(np.arange(12, dtype="f")).reshape(3, 4)
    return {"w": w, "v": np.cos(np.arange(8, dtype="f")).reshape(4, 2)}


def mlp_batch(worker, iteration, rows=5):
    random = np.random.default_rng([worker, iteration])
    return random.normal(size=(rows, 3)).astype("f"), np.ones((rows, 2), "f")


def plain(loss_fn, optimizer, params, batches):
    """One update per batch, without this library."""
    gradient = jax.jit(jax.value_and_grad(loss_fn))

    @jax.jit
    def update(gradients, state, params):
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(optimizer.init)(params)
    for batch in batches:
        params, state = update(gradient(params, batch)[1], state, params)
    return params, state


@pytest.mark.parametrize(
    "policy", [Sequential(), Bounded(0), Eventual(), Backup(0)], ids=str
)
def test_one_worker_is_plain_optax(policy):
    # PS-4, bit for bit.
    optimizer = optax.adam(0.05)
    run = simulate(
        mlp_loss, optimizer, mlp(), mlp_batch, workers=1, policy=policy, iterations=5
    )
    expected = plain(mlp_loss, optimizer, mlp(), [mlp_batch(0, i) for i in range(5)])
    assert_bit_equal((run.params, run.opt_state), expected)
    assert run.staleness == {0: 5}


@pytest.mark.parametrize("weighted", [False, True], ids=["means", "weighted"])
def test_sequential_is_synchronous_data_parallelism(weighted):
    workers, rounds, optimizer = 3, 4, optax.adam(0.05)
    rows = [2, 5, 9] if weighted else [5, 5, 5]

    def loss_fn(params, batch):
        mean = mlp_loss(params, batch)
        return jaxdp.Mean(mean * len(batch[0]), len(batch[0])) if weighted else mean

    def batches(worker, iteration):
        return mlp_batch(worker, iteration, rows[worker])

    run = simulate(
        loss_fn,
        optimizer,
        mlp(),
        batches,
        workers=workers,
        policy=Sequential(),
        iterations=rounds,
        compute=UNEVEN,
    )
    run.verify()

    def joined(iteration):
        parts = [batches(worker, iteration) for worker in range(workers)]
        return tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))

    expected, _ = plain(mlp_loss, optimizer, mlp(), map(joined, range(rounds)))
    for actual, wanted in zip(
        *map(jax.tree.leaves, (run.params, expected)), strict=True
    ):
        np.testing.assert_allclose(actual, wanted, rtol=2e-5, atol=1e-6)
    assert (run.updates, run.applied) == (rounds, (rounds,) * workers)
    # The worker's own losses: the mean over its own rows.
    first = [loss for version, _, loss in run.losses if version == 0]
    own = [float(mlp_loss(mlp(), batches(w, 0))) for w in range(workers)]
    assert sorted(first) == pytest.approx(sorted(own), rel=1e-5)


@pytest.mark.parametrize(
    ("policy", "x", "trace"),
    [(Sequential(), -0.2, 2.0), (Eventual(), -0.49, 3.9), (Bounded(0), -0.49, 3.9)],
    ids=str,
)
def test_momentum_of_an_average_and_of_one_by_one(policy, x, trace):
    # PS-5.
    optimizer = optax.sgd(0.1, momentum=0.9)
    run = run_linear(policy, (1, 3), optimizer=optimizer, iterations=1)
    assert float(run.params) == pytest.approx(x)
    assert float(run.opt_state[0].trace) == pytest.approx(trace)


def test_backup_workers_by_hand():
    # PS-2. Rounds end at 1.5, 3 and 4.5 s with the pushes of workers 0 and 1. Worker 2
    # pushes round 0 at 3.9 s, then round 2, which is open then, at 7.8 s.
    times = [Constant(1.0), Constant(1.5), Constant(3.9)]
    run = run_linear(Backup(1), (1, 2, 8), iterations=3, compute=times)
    assert float(run.params) == pytest.approx(-0.1 * 3 * (1 + 2) / 2)
    assert (run.pushed, run.applied, run.dropped) == ((3, 3, 2), (3, 3, 0), (0, 0, 2))
    drops = [(e.time_s, e.iteration) for e in run.events if e.kind == "drop"]
    assert drops == [(3.9, 0), (pytest.approx(7.8), 2)]
    waits = [(s.start_s, s.end_s) for s in run.spans if s.kind == "wait"]
    assert waits == [(1.0, 1.5), (2.5, 3.0)]
    assert run.duration_s == pytest.approx(7.8)


def test_backup_takes_whoever_is_first():
    # Worker 0 stops from 1.5 to 3.2 s: rounds are made of 0 and 1, then of 1 and 2.
    times = [Stops(Constant(1.0), 1.5, 3.2), Constant(1.1), Constant(1.3)]
    run = run_linear(Backup(1), (1, 2, 8), iterations=2, compute=times)
    assert float(run.params) == pytest.approx(-0.1 * (1 + 2 + 2 + 8) / 2)
    assert (run.applied, run.dropped) == ((1, 2, 1), (1, 0, 1))


def behind(run):
    """How far each read is ahead of the slowest worker, from the events alone."""
    done = [0] * run.workers
    for event in run.events:
        if event.kind == "read":
            yield event.iteration - min(done)
        else:
            done[event.worker] += 1


@pytest.mark.parametrize("bound", [0, 1, 2])
@pytest.mark.parametrize("compute", [STRAGGLER, UNEVEN], ids=["straggler", "uneven"])
def test_the_bound_holds_and_is_reached(bound, compute):
    run = run_linear(Bounded(bound), iterations=8, compute=compute)
    assert max(behind(run)) == bound
    assert run.updates == 32
    if compute is STRAGGLER:
        assert run.wait_share[3] == 0 < min(run.wait_share[:3])


def test_without_a_bound_nobody_waits():
    run = run_linear(Eventual(), iterations=8, compute=STRAGGLER)
    assert max(behind(run)) == 6  # starts its last at 7 s; the straggler has done 1
    assert not run.wait_share.any()


def test_a_longer_bound_waits_less():
    policies = [Bounded(0), Bounded(1), Bounded(3), Eventual()]
    runs = [run_linear(p, iterations=9, compute=STRAGGLER) for p in policies]
    shares = [run.wait_share.mean() for run in runs]
    assert shares == sorted(shares, reverse=True) and len(set(shares)) == 4
    ratios = [run.compute_to_communication for run in runs]
    assert ratios == sorted(ratios) and np.isinf(ratios[-1])


@pytest.mark.parametrize("policy", [Sequential(), Bounded(1), Backup(1)], ids=str)
def test_a_run_is_the_same_from_its_seed(policy):
    def go(seed):
        run = simulate(
            lambda x, batch: jnp.sin(x * batch[0]) + batch[1],
            optax.adam(0.05),
            F32(1),
            lambda *numbers: np.random.default_rng(numbers).normal(size=2).astype("f"),
            workers=3,
            policy=policy,
            iterations=6,
            compute=UNEVEN,
            link=Link(0.01, 1e-3),
            seed=seed,
        )
        run.verify()
        return run

    first, second, other = go(0), go(0), go(1)
    assert first.spans == second.spans and first.events == second.events
    assert first.losses == second.losses
    assert_bit_equal(first.params, second.params)
    assert first.spans != other.spans


def test_workers_draw_durations_of_their_own():
    run = run_linear(Eventual(), iterations=1, compute=UNEVEN)
    assert len({s.end_s for s in run.spans if s.kind == "compute"}) == 4


def times_of(run, worker, kind):
    return [(s.start_s, s.end_s) for s in run.spans if s[:2] == (worker, kind)]


def test_messages_queue_at_the_server():
    # 12 bytes: 0.5 + 12 / 4 = 3.5 s each, one after another in each direction.
    run = simulate(
        lambda x, batch: jnp.sum(x),
        optax.sgd(0.1),
        np.zeros(3, "f"),
        lambda worker, iteration: None,
        workers=2,
        policy=Eventual(),
        iterations=2,
        compute=[Constant(5.0), Constant(2.0)],
        link=Link(0.5, 0.25),
    )
    run.verify()
    assert times_of(run, 0, "pull") == [(0, 3.5), (12, 15.5)]
    assert times_of(run, 1, "pull") == [(0, 7), (15.5, 19)]
    assert times_of(run, 0, "compute") == [(3.5, 8.5), (15.5, 20.5)]
    assert times_of(run, 1, "compute") == [(7, 9), (19, 21)]
    assert times_of(run, 0, "push") == [(8.5, 12), (20.5, 24)]
    assert times_of(run, 1, "push") == [(9, 15.5), (21, 27.5)]
    assert run.events_processed == 8
    assert run.duration_s == 27.5
    np.testing.assert_allclose(run.utilisation, [10 / 27.5, 4 / 27.5])
    # Pulls take 3.5 + 7 + 3.5 + 3.5 s, pushes 3.5 + 6.5 + 3.5 + 6.5 s.
    assert run.compute_to_communication == pytest.approx(14 / (17.5 + 20))


def test_who_asked_first_is_served_first():
    compute = [Constant(2.0), Constant(1.0), Constant(3.0)]
    options = {"iterations": 2, "link": Link(0.25)}
    run = run_linear(Sequential(), (1, 2, 3), compute=compute, **options)
    second = [times_of(run, worker, "pull")[1] for worker in (1, 0, 2)]
    assert second == [(4.0, 4.25), (4.0, 4.5), (4.0, 4.75)]


def test_servers_have_one_version():
    # PS-7: 8 bytes, half on each server, of which one is slow: 1 + 4 / 2 = 3 s.
    run = simulate(
        lambda x, gradient: (x["a"] + x["b"]) * gradient,
        optax.sgd(0.25, momentum=0.5),
        {"a": F32(0), "b": F32(0)},
        lambda worker, iteration: F32(worker - iteration / 64),
        workers=2,
        policy=Eventual(),
        iterations=100,
        compute=UNEVEN,
        servers=2,
        link=[Link(0.25), Link(1.0, 0.5)],
        evaluate=lambda x: x["a"] - x["b"],
    )
    run.verify()
    made = [e.version for e in run.events if e.kind == "apply"]
    assert made == list(range(1, 201)) and run.applied == (100, 100)
    # Each push is applied as its last part arrives, and no part is younger than others.
    arrivals = {(s.worker, s.iteration): s.end_s for s in run.spans if s.kind == "push"}
    for event in run.events:
        if event.kind == "apply":
            assert event.time_s == arrivals[event.worker, event.iteration]
    shortest = min(end - start for start, end in times_of(run, 0, "push"))
    assert shortest == pytest.approx(3.0)
    assert [value for _, _, value in run.evaluations] == [0.0] * 201


def test_a_stop_that_ends_delays_one_iteration():
    compute = [Constant(1.0), Stops(Constant(2.0), 3.0, 7.0)]
    run = run_linear(Eventual(), (1, 2), iterations=2, compute=compute)
    assert times_of(run, 1, "stopped") == [(3, 7)]
    assert times_of(run, 1, "compute") == [(0, 2), (2, 3), (7, 8)]
    assert run.utilisation[1] == 0.5


NEVER = [Constant(1.0), Constant(1.5), Stops(Constant(1.0), 1.25)]


@pytest.mark.parametrize(
    ("policy", "clocks", "end"),
    [
        (Sequential(), (2, 2), "iterations"),
        (Sequential(), (2, 2), "until_s"),
        (Bounded(0), (2, 2), "updates"),
        (Bounded(2), (4, 4), "iterations"),
        (Backup(0), (2, 2), "updates"),
    ],
    ids=str,
)
def test_waiting_for_ever_is_reported(policy, clocks, end):
    with pytest.raises(RuntimeError, match="simulate came to a halt") as error:
        run_linear(policy, (1, 2, 3), compute=NEVER, **{end: 100})
    message = str(error.value)
    for worker, clock in enumerate(clocks):
        waits = f"worker {worker} (clock {clock}) waits for worker 2 (clock 1)"
        assert waits in message
    assert "worker 2 (clock 1) stopped at 1." in message and " for ever" in message
    assert str(policy) in message and "Eventual()" in message


@pytest.mark.parametrize(
    ("policy", "end"),
    [(Eventual(), "iterations"), (Eventual(), "until_s"), (Backup(1), "updates")],
    ids=str,
)
def test_others_go_on_without_a_worker_that_stopped(policy, end):
    run = run_linear(policy, (1, 2, 3), compute=NEVER, **{end: 12})
    assert run.pushed[2] == 1
    (stopped,) = [s for s in run.spans if s.kind == "stopped"]
    assert 1.25 <= stopped.start_s <= 1.5 and stopped.end_s == run.duration_s
    if end == "iterations":
        assert run.pushed[:2] == (12, 12)
    if end == "updates":
        assert run.updates == 12


def test_updates_that_are_never_reached_are_reported():
    compute = [Stops(Constant(1.0), 2.5)] * 2
    with pytest.raises(RuntimeError, match=r"worker 1 \(clock 2\) stopped at 2\.5 s"):
        run_linear(Eventual(), (1, 2), compute=compute, updates=100)
    assert run_linear(Eventual(), (1, 2), compute=compute, until_s=9.0).updates == 4


def nan_once(worker, iteration):
    return F32(np.nan if (worker, iteration) == (1, 2) else worker + 1)


@pytest.mark.parametrize(
    ("policy", "x", "updates"),
    [
        # 4 rounds of mean 2, but the third of (1 + 3) / 2, which is 2 as well.
        pytest.param(Sequential(), -0.8, 4, id="sequential"),
        pytest.param(Eventual(), -0.1 * (4 * 6 - 2), 11, id="eventual"),
        pytest.param(Bounded(0), -0.1 * (4 * 6 - 2), 11, id="bounded"),
    ],
)
def test_a_push_that_is_not_finite_is_refused(policy, x, updates):
    run = run_linear(policy, (1, 2, 3), batches=nan_once, iterations=4)
    assert float(run.params) == pytest.approx(x)
    assert (run.refused, run.pushed, run.updates) == ((0, 1, 0), (4, 4, 4), updates)
    (event,) = [e for e in run.events if e.kind == "refuse"]
    assert (event.worker, event.iteration) == (1, 2)
    assert sum(np.isnan(loss) for _, _, loss in run.losses) == 1


@pytest.mark.parametrize("policy", [Sequential(), Eventual()], ids=str)
def test_a_run_that_has_diverged_ends(policy):
    batches = by_worker(np.nan, np.nan)
    with pytest.raises(RuntimeError, match=r"0 of 3 updates.*\[\d+, \d+\].*diverged"):
        run_linear(policy, (1, 2), batches=batches, updates=3)
    run = run_linear(policy, (1, 2), batches=batches, iterations=300)
    assert run.updates == 0 and sum(run.refused) == sum(run.pushed) >= 300


def test_a_long_run_has_not_diverged():
    run = run_linear(Sequential(), (1, 2), updates=250)
    assert float(run.params) == pytest.approx(-37.5, rel=1e-4)


def test_the_first_end_counts():
    def go(**ends):
        run = run_linear(Eventual(), compute=STRAGGLER, **ends)
        return run.updates, run.duration_s

    assert go(iterations=2) == (8, 9.0)
    assert go(iterations=2, updates=5) == (5, 2.0)
    assert go(updates=8, until_s=3.0) == (8, 3.0)
    assert go(updates=10, until_s=2.5) == (6, 2.5)
    assert go(iterations=2, until_s=20.0) == (8, 9.0)


def test_what_is_under_way_at_the_end_is_cut():
    link = Link(0.25)
    run = run_linear(
        Sequential(),
        (1, 2),
        compute=[Constant(1.0), Constant(3.0)],
        link=link,
        until_s=2.0,
    )
    assert run.spans == (
        Span(0, "pull", 0.0, 0.25, 0, 0),
        Span(1, "pull", 0.0, 0.5, 0, 0),
        Span(0, "compute", 0.25, 1.25, 0, 0),
        Span(1, "compute", 0.5, 2.0, 0, 0),
        Span(0, "push", 1.25, 1.5, 0, 0),
        Span(0, "wait", 1.5, 2.0, 1, -1),
    )
    # The push of the open round ends the run as dropped.
    assert (run.pushed, run.dropped, run.updates) == ((1, 0), (1, 0), 0)
    np.testing.assert_allclose(run.wait_share, [0.25, 0.0])
    # A push under way has not arrived.
    run = run_linear(Eventual(), (1,), link=link, until_s=1.4)
    assert [s.kind for s in run.spans] == ["pull", "compute"]


@pytest.mark.parametrize(
    ("every", "versions"), [(1, [0, 1, 2, 3, 4, 5]), (2, [0, 2, 4, 5]), (9, [0, 5])]
)
def test_evaluations(every, versions):
    run = run_linear(
        Eventual(), (1,), iterations=5, evaluate=lambda x: -10 * x, evaluate_every=every
    )
    assert [version for version, _, _ in run.evaluations] == versions
    assert [time_s for _, time_s, _ in run.evaluations] == versions
    values = [value for _, _, value in run.evaluations]
    assert values == pytest.approx(versions, rel=1e-6)


def test_losses_are_of_the_pulled_version():
    # x^2 / 2 at lr 0.5, two workers on one version: 1, 0, then both pulled after one.
    run = simulate(
        lambda x, batch: x**2 / 2,
        optax.sgd(0.5),
        F32(1),
        lambda worker, iteration: None,
        workers=2,
        policy=Bounded(0),
        iterations=2,
        compute=[Constant(1.0), Constant(2.0)],
    )
    assert run.losses == ((0, 1.0, 0.5), (0, 2.0, 0.5), (2, 3.0, 0.0), (2, 4.0, 0.0))


def test_reports():
    run = run_linear(
        Bounded(1),
        (1, 2),
        iterations=3,
        compute=[Constant(1.0), Constant(2.0)],
        link=Link(0.5),
    )
    assert run.updates_per_s == run.updates / run.duration_s
    assert sum(run.staleness.values()) == run.updates == 6
    rows = run.table()
    assert [row["worker"] for row in rows] == [0, 1]
    for worker, row in enumerate(rows):
        assert row["pushed"] == 3 == row["applied"]
        assert row["computing"] == pytest.approx(3 * (worker + 1) / run.duration_s)
        assert row["waiting"] == pytest.approx(run.wait_share[worker])
        assert row["dropped"] == row["refused"] == 0
    assert "params" not in repr(run) and "Bounded" in repr(run)


def test_waiting_counts_as_communication():
    compute = [Constant(1.0), Constant(2.0)]
    run = run_linear(Sequential(), (1, 2), iterations=2, compute=compute)
    assert run.compute_to_communication == 6.0  # worker 0 waits 1 s, once


def test_workers_compute_on_their_devices():
    seen = set()

    def batches(worker, iteration):
        return jax.device_put(F32(worker), jax.devices()[0])

    def loss_fn(x, gradient):
        jax.debug.callback(lambda: seen.add(1))
        return x * gradient

    devices = [jax.devices()[2], 5, jax.devices()[4]]
    with compilations() as compiled:
        run = simulate(
            loss_fn,
            optax.sgd(0.1),
            F32(0),
            batches,
            workers=4,
            policy=Eventual(),
            iterations=3,
            devices=devices,
        )
    jax.effects_barrier()
    assert seen == {1}
    assert compiled.count("program") == 3  # one for each device
    assert compiled.count("update") == 1
    assert run.params.devices() == {jax.devices()[2]}
    one = run_linear(Eventual(), (0, 1, 2, 3), iterations=3)
    assert_bit_equal(run.params, one.params)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ValueError, "no end.*at least 1"),
        ({"iterations": 0}, ValueError, "iterations=0.*at least 1"),
        ({"updates": 2.5}, TypeError, r"updates=2\.5.*integer"),
        ({"until_s": 0.0}, ValueError, r"until_s=0\.0.*more than 0"),
        ({"until_s": np.inf}, ValueError, "until_s=inf.*finite"),
        ({"updates": 1, "workers": 0}, ValueError, "workers=0.*at least 1"),
        ({"updates": 1, "servers": 0}, ValueError, "servers=0.*at least 1"),
        ({"updates": 1, "evaluate_every": 0}, ValueError, "evaluate_every=0"),
        ({"updates": 1, "policy": Backup(2)}, ValueError, "extra=2 for 2 workers"),
        (
            {"updates": 1, "compute": [Constant(1.0)]},
            ValueError,
            "1 entries in compute for 2 workers",
        ),
        ({"updates": 1, "compute": 1.0}, TypeError, r"got 1\.0 in compute.*Constant"),
        ({"updates": 1, "link": [Link()] * 2}, ValueError, "2 entries.*1 servers"),
        ({"updates": 1, "link": Constant(1.0)}, TypeError, r"Constant.* in link.*Link"),
        ({"updates": 1, "devices": []}, ValueError, r"devices=\[\].*at least 1"),
        ({"updates": 1, "devices": [99]}, ValueError, r"devices\[0\]=99"),
        ({"updates": 1, "params": 3}, TypeError, "no gradient"),
    ],
)
def test_what_cannot_run_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        run_linear(**{"policy": Eventual(), "gradients": (1, 2)} | options)


def test_a_loss_with_aux_is_refused():
    def loss_fn(x, batch):
        return x, jaxdp.Aux(metrics={"x": x})

    with pytest.raises(TypeError, match=r"Aux.*Return the loss alone"):
        simulate(
            loss_fn,
            optax.sgd(0.1),
            F32(0),
            by_worker(1),
            workers=1,
            policy=Eventual(),
            iterations=1,
        )


def test_counts_that_the_log_does_not_bear_out_are_found():
    run = run_linear(Eventual(), (1, 2), iterations=2)
    with pytest.raises(ValueError, match="settled no such push"):
        dataclasses.replace(run, events=run.events[:-1]).verify()
    for name in ("pushed", "applied", "dropped", "refused"):
        first, second = getattr(run, name)
        wrong = dataclasses.replace(run, **{name: (first, second + 1)})
        with pytest.raises(ValueError, match="of worker 1 counted as"):
            wrong.verify()


def test_staleness_of_equal_workers_is_the_number_of_others():
    # Each of 4 equal workers sees the 3 others push between its pull and its push.
    def ages(policy):
        return run_linear(policy, iterations=25).staleness

    assert ages(Eventual()) == {0: 1, 1: 1, 2: 1, 3: 97}
    assert ages(Bounded(0)) == {0: 25, 1: 25, 2: 25, 3: 25}


def test_a_second_run_compiles_nothing(caplog):
    """Comparing policies must not pay for a compilation per policy."""
    optimizer = optax.adam(0.1)

    def loss_fn(w, x):
        return jnp.mean((w * x) ** 2)

    def run(policy):
        caplog.clear()
        with jax.log_compiles():
            simulate(
                loss_fn,
                optimizer,
                np.float32(2),
                lambda worker, iteration: np.array([worker, iteration], "f"),
                workers=2,
                iterations=2,
                policy=policy,
            )
        return [m for m in caplog.messages if "Finished XLA compilation" in m]

    assert run(Eventual())
    assert not run(Bounded(1))


def test_what_cannot_be_hashed_is_compiled_anew():
    class Loss:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, w, x):
            return jnp.mean(w * x)

    run = simulate(
        Loss(),
        optax.sgd(1.0),
        np.float32(0),
        lambda worker, iteration: np.float32(3),
        workers=1,
        iterations=2,
        policy=Eventual(),
    )
    assert float(run.params) == -6
