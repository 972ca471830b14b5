"""Threads that really race: bounds are provoked, and every log is proven.

Workers are held before a push by an event. That others have stopped is read, under the
lock, from what they wait for: they cannot go on before the held one pushes.
"""

import contextlib
import itertools
import math
import signal
import threading
import time
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.asynchronous import threads
from jaxdp.asynchronous.policies import Backup, Bounded, Eventual, Policy, Sequential
from jaxdp.asynchronous.server import Server
from jaxdp.asynchronous.threads import train
from jaxdp.asynchronous.worker import loss_and_gradients
from jaxdp.staleness import compensate_delay, scale_by_staleness
from tests.helpers import assert_bit_equal

PATIENCE_S = 60.0
RNG = np.random.default_rng(11)
PARAMS = {
    "w": RNG.normal(size=(3, 2)).astype(np.float32),
    "b": RNG.normal(size=2).astype(np.float32),
}
ROWS = RNG.normal(size=(4, 6, 5, 5)).astype(np.float32)  # worker, iteration, row, x, y


def batches(worker, iteration):
    return ROWS[worker, iteration]


def loss_fn(params, rows):
    output = rows[:, :3] @ params["w"] + params["b"][None]
    return jnp.mean((output - rows[:, 3:]) ** 2)


def linear(x, slope):
    """A loss whose gradient is what the batch says."""
    return jnp.sum(x * slope)


class Background:
    """A call of `train` in a thread of its own, and a view into its crew."""

    def __init__(self, monkeypatch, *arguments, **keywords):
        crew_class = threads.Crew

        def capture(*args):
            self.crew = crew_class(*args)
            return self.crew

        monkeypatch.setattr(threads, "Crew", capture)
        self.crew: Any = None
        self.error: BaseException | None = None
        self.run: Any = None
        self.thread = threading.Thread(
            target=self.work, args=(arguments, keywords), daemon=True
        )
        self.thread.start()

    def work(self, arguments, keywords):
        try:
            self.run = train(*arguments, **keywords)
        except BaseException as error:
            self.error = error

    def until(self, predicate):
        """Polls, under the lock, until the crew is as wanted."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if self.crew is not None:
                with self.crew.turn:
                    if predicate(self.crew):
                        return
            time.sleep(0.002)
        state = self.crew and (self.crew.states, self.crew.server.clocks)
        pytest.fail(f"Not reached within {PATIENCE_S} s: {state}")

    def result(self) -> Any:
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive(), f"train hangs: {self.crew.states}"
        if self.error is not None:
            raise self.error
        self.run.verify()
        return self.run


def stopped(crew, worker):
    """Whether it waits and has nothing to wake up for."""
    return crew.states[worker] == "waits" and not crew.may_go_on(worker)


class Hold:
    """A `before_push` that holds one worker in one iteration until it is released."""

    def __init__(self, worker, iteration):
        self.where = worker, iteration
        self.reached, self.release = threading.Event(), threading.Event()

    def __call__(self, worker, iteration):
        if (worker, iteration) == self.where:
            self.reached.set()
            assert self.release.wait(PATIENCE_S)


@pytest.fixture
def hold():
    """Makes holds, and lets nobody wait when the test has ended."""
    holds = []

    def make(worker, iteration):
        holds.append(Hold(worker, iteration))
        return holds[-1]

    yield make
    for each in holds:
        each.release.set()


def trained(*arguments, **keywords) -> Any:
    """A run that proved its log and left no thread behind."""
    before = set(threading.enumerate())
    run = train(*arguments, **keywords)
    assert set(threading.enumerate()) == before
    run.verify()
    return run


def averaged(optimizer, params, workers, iterations):
    """Synchronous training, written out: the mean of the workers' gradients."""
    gradient = jax.jit(jax.value_and_grad(loss_fn))

    @jax.jit
    def update(params, state, gradients):
        mean = gradients[0]  # the bits of a single worker are kept
        if workers > 1:
            mean = jax.tree.map(lambda *leaves: sum(leaves) / workers, *gradients)
        updates, state = optimizer.update(mean, state, params)
        return optax.apply_updates(params, updates), state

    params, losses = jax.tree.map(jnp.asarray, params), []
    state = jax.jit(optimizer.init)(params)
    for t in range(iterations):
        pairs = [gradient(params, batches(worker, t)) for worker in range(workers)]
        params, state = update(params, state, [gradients for _, gradients in pairs])
        losses += [float(loss) for loss, _ in pairs]
    return params, state, losses


# What is trained


@pytest.mark.parametrize(
    "policy", [Sequential(), Eventual(), Bounded(0), Backup(0)], ids=str
)
def test_one_worker_is_plain_optax_bit_for_bit(policy):
    optimizer = optax.adam(0.05)
    run = trained(
        loss_fn, optimizer, PARAMS, batches, workers=1, policy=policy, iterations=5
    )
    params, state, losses = averaged(optimizer, PARAMS, workers=1, iterations=5)
    assert_bit_equal(run.params, params)
    assert_bit_equal(run.opt_state, state)
    assert [loss for *_, loss in run.losses] == losses
    assert run.staleness == {0: 5}


def test_sequential_is_synchronous_training_however_threads_arrive():
    """The second run has another straggler."""
    optimizer = optax.sgd(0.1, momentum=0.9)

    def run(slow):
        return trained(
            *(loss_fn, optimizer, PARAMS, batches),
            workers=4,
            policy=Sequential(),
            iterations=6,
            devices=jax.devices()[:2],
            before_push=lambda worker, _: time.sleep(0.004 * (worker == slow)),
        )

    first, second = run(slow=0), run(slow=3)
    expected, *_ = averaged(optimizer, PARAMS, workers=4, iterations=6)
    chex.assert_trees_all_close(first.params, expected, rtol=2e-5, atol=2e-6)
    assert_bit_equal(first.params, second.params)
    assert (first.updates, first.staleness) == (6, {0: 24})


def test_uneven_batches_are_weighted_by_their_rows():
    def total(params, rows):
        output = rows[:, :3] @ params["w"] + params["b"][None]
        return jaxdp.Mean(jnp.sum((output - rows[:, 3:]) ** 2), 2 * len(rows))

    def uneven(worker, iteration):
        return batches(worker, iteration)[: 2 + worker]

    params, gradient = jax.tree.map(jnp.asarray, PARAMS), jax.jit(jax.grad(loss_fn))
    for t in range(3):
        rows = np.concatenate([uneven(worker, t) for worker in range(3)])
        gradients = gradient(params, rows)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
    sgd = optax.sgd(0.1)
    shared: Any = {"workers": 3, "policy": Sequential(), "iterations": 3}
    run = trained(total, sgd, PARAMS, uneven, **shared)
    chex.assert_trees_all_close(run.params, params, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("link", "late_step"),
    [(scale_by_staleness(), 8 / 4), (compensate_delay(0.01), 8 - 0.01 * 8 * 8 * 4)],
    ids=["scale", "compensate"],
)
def test_the_optimizer_learns_how_late_a_gradient_is(
    monkeypatch, hold, link, late_step
):
    """Worker 1 makes 4 steps of 1 while worker 0 holds a gradient of 8."""
    held = hold(0, 0)
    background = Background(
        *(monkeypatch, linear, optax.chain(link, optax.sgd(1.0)), jnp.float32(20.0)),
        batches=lambda worker, iteration: np.float32(1.0 if worker else 8.0),
        workers=2,
        policy=Eventual(),
        iterations=4,
        before_push=held,
    )
    background.until(lambda crew: crew.states == ["works", "has finished"])
    with background.crew.turn:
        assert background.crew.server.params == 16.0
    held.release.set()
    run = background.result()
    assert [e.staleness for e in run.events if e.worker == 0 and e.kind == "apply"] == [
        *(4, 0, 0, 0)
    ]
    np.testing.assert_allclose(run.params, 16 - late_step - 3 * 8, rtol=1e-6)


# The bound


@pytest.mark.parametrize(
    ("policy", "held", "stops_at"),
    [
        (Bounded(0), 0, 1),
        (Bounded(0), 2, 3),
        (Bounded(1), 0, 2),
        (Bounded(1), 2, 4),
        (Bounded(3), 0, 4),
        (Sequential(), 0, 1),
        (Sequential(), 2, 3),
        (Backup(0), 1, 2),
    ],
    ids=str,
)
def test_others_stop_at_the_bound_of_a_held_worker(
    monkeypatch, hold, policy, held, stops_at
):
    holding, fetched = hold(0, held), []

    def recorded(worker, iteration):
        fetched.append((worker, iteration))
        return batches(worker, iteration)

    background = Background(
        *(monkeypatch, loss_fn, optax.sgd(0.1), PARAMS, recorded),
        workers=4,
        policy=policy,
        iterations=6,
        devices=jax.devices()[:2],
        before_push=holding,
    )
    assert holding.reached.wait(PATIENCE_S)
    background.until(lambda crew: all(stopped(crew, worker) for worker in (1, 2, 3)))
    crew = background.crew
    with crew.turn:
        assert crew.server.clocks == [held, stops_at, stops_at, stops_at]
        assert [crew.server.waits_for(worker) for worker in (1, 2, 3)] == [[0]] * 3
        assert max(iteration for worker, iteration in fetched if worker) == stops_at - 1
        stopped_s = crew.now()
    holding.release.set()
    run = background.result()
    assert run.pushed == run.applied == (6, 6, 6, 6)
    first_s = min(
        span.start_s
        for span in run.spans
        if span.kind == "compute" and span.worker and span.iteration == stops_at
    )
    waits = [
        span.worker
        for span in run.spans
        if span.kind == "wait" and span.start_s < stopped_s < span.end_s
    ]
    assert first_s > stopped_s
    assert sorted(waits) == [1, 2, 3]


def test_eventual_waits_for_nobody(monkeypatch, hold):
    held = hold(0, 0)
    background = Background(
        *(monkeypatch, loss_fn, optax.sgd(0.1), PARAMS, batches),
        workers=3,
        policy=Eventual(),
        iterations=6,
        before_push=held,
    )
    background.until(lambda crew: crew.states == ["works", *["has finished"] * 2])
    assert background.crew.server.clocks == [0, 6, 6]
    held.release.set()
    run = background.result()
    late = [e for e in run.events if (e.worker, e.kind, e.iteration) == (0, "apply", 0)]
    assert [event.staleness for event in late] == [12]
    assert run.updates == 18
    assert "wait" not in {span.kind for span in run.spans}


def test_backup_workers_are_not_waited_for_and_their_pushes_counted(monkeypatch, hold):
    held = hold(0, 0)
    background = Background(
        *(monkeypatch, linear, optax.sgd(1.0), jnp.float32(0.0)),
        batches=lambda worker, iteration: np.float32([100.0, 1.0, 3.0][worker]),
        workers=3,
        policy=Backup(1),
        iterations=6,
        before_push=held,
    )
    background.until(lambda crew: crew.states == ["works", *["has finished"] * 2])
    held.release.set()
    run = background.result()
    assert run.updates == 6
    assert run.pushed == (1, 6, 6)
    assert run.applied == (0, 6, 6)
    assert run.dropped == (1, 0, 0)
    assert run.params == -6 * (1 + 3) / 2


@pytest.mark.parametrize("policy", [Sequential(), Bounded(0)], ids=str)
def test_refused_pushes_are_counted_and_hold_up_nobody(policy):
    def poisoned(worker, iteration):
        return batches(worker, iteration) * np.float32(
            np.nan if (worker, iteration) in {(1, 1), (2, 3)} else 1
        )

    run = trained(
        *(loss_fn, optax.sgd(0.1), PARAMS, poisoned),
        workers=3,
        policy=policy,
        iterations=5,
    )
    assert run.refused == (0, 1, 1)
    assert run.applied == (5, 4, 4)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(run.params))


# Many at once


def test_no_torn_reads_and_one_version_for_all(monkeypatch):
    """PS-6 and PS-7: equal leaves stay equal, and versions are counted once."""
    pulled, pull = [], Server.pull

    def recorded(server, worker):
        snapshot = pull(server, worker)
        pulled.append(snapshot)
        return snapshot

    monkeypatch.setattr(Server, "pull", recorded)
    start = np.linspace(-1, 1, 4096, dtype=np.float32)
    run = trained(
        lambda p, x: jnp.sum((p["a"] - x) ** 2) + jnp.sum((p["b"] - x) ** 2),
        optax.adam(0.01),
        {"a": start, "b": start.copy()},
        lambda worker, iteration: np.float32(worker + iteration / 100),
        workers=8,
        policy=Eventual(),
        iterations=25,
    )
    by_version = {}
    for snapshot in pulled:
        assert_bit_equal(snapshot.params["a"], snapshot.params["b"])
        known = by_version.setdefault(snapshot.version, snapshot.params)
        assert_bit_equal(snapshot.params, known)
    different = {np.asarray(params["a"]).tobytes() for params in by_version.values()}
    assert len(different) == len(by_version) > 20
    made = [event.version for event in run.events if event.kind == "apply"]
    assert made == list(range(1, 201))
    assert run.pushed == run.applied == (25,) * 8
    assert run.updates == 200


def test_two_workers_push_a_hundred_times_each():
    run = trained(
        *(linear, optax.sgd(1.0), jnp.float32(0.0)),
        batches=lambda worker, iteration: np.float32([1.0, 1024.0][worker]),
        workers=2,
        policy=Bounded(2),
        iterations=100,
    )
    assert run.params == -(100 + 102_400)
    assert run.updates == 200
    assert max(run.staleness) <= 2 * 2 + 1


# Where and how


def test_workers_compute_on_their_devices_and_the_server_on_its_own(monkeypatch):
    devices = jax.devices()
    seen, threads_of, pushed, push = [], {}, [], Server.push

    def recording(loss_fn):
        program = loss_and_gradients(loss_fn)

        def recorded(params, batch):
            loss, gradients = program(params, batch)
            arrays = jax.tree.leaves((params, batch, loss, gradients))
            used = set().union(*(array.devices() for array in arrays))
            seen.append((threading.get_ident(), used))
            return loss, gradients

        return recorded

    def arriving(server, worker, gradients, snapshot, loss):
        pushed.append({leaf.device for leaf in jax.tree.leaves((gradients, loss))})
        return push(server, worker, gradients, snapshot, loss)

    monkeypatch.setattr(threads, "loss_and_gradients", recording)
    monkeypatch.setattr(Server, "push", arriving)
    run = trained(
        *(loss_fn, optax.adam(0.1), PARAMS),
        batches=lambda w, t: jax.device_put(batches(w, t), devices[6]),
        workers=4,
        policy=Bounded(1),
        iterations=3,
        devices=devices[1:4],
        server_device=devices[7],
        before_push=lambda worker, _: threads_of.update(
            {worker: threading.get_ident()}
        ),
    )
    assert len(set(threads_of.values())) == 4
    for worker, thread in threads_of.items():
        used = [devices for ident, devices in seen if ident == thread]
        assert used == [{devices[1 + worker % 3]}] * 3
    assert pushed == [{devices[7]}] * 12  # nobody holds the lock while they travel
    for leaf in jax.tree.leaves((run.params, run.opt_state)):
        assert leaf.devices() == {devices[7]}


def test_the_server_is_on_the_first_device_by_default():
    run = trained(
        *(loss_fn, optax.sgd(0.1), PARAMS, batches),
        workers=2,
        policy=Sequential(),
        iterations=1,
    )
    assert run.params["w"].devices() == {jax.devices()[0]}


def test_each_batch_is_fetched_once_and_the_loss_traced_once():
    fetched, traces = [], []

    def recorded(worker, iteration):
        fetched.append((worker, iteration))
        return batches(worker, iteration)

    def traced(params, rows):
        traces.append(threading.current_thread())
        return loss_fn(params, rows)

    trained(
        *(traced, optax.sgd(0.1), PARAMS, recorded),
        workers=4,
        policy=Bounded(1),
        iterations=6,
    )
    assert sorted(fetched) == list(itertools.product(range(4), range(6)))
    assert traces == [threading.main_thread()]


def test_threads_see_the_settings_of_the_caller():
    """JAX keeps what context managers set per thread."""
    seen = []
    wide = jax.tree.map(np.float64, PARAMS)
    with jax.enable_x64(True), jax.default_matmul_precision("float32"):
        run = trained(
            *(loss_fn, optax.sgd(0.1), wide),
            batches=lambda w, t: batches(w, t).astype(np.float64),
            workers=2,
            policy=Sequential(),
            iterations=4,
            before_push=lambda *_: seen.append(jax.default_matmul_precision.value),
        )
        expected, *_ = averaged(optax.sgd(0.1), wide, workers=2, iterations=4)
        chex.assert_trees_all_equal_dtypes(run.params, wide)
        chex.assert_trees_all_close(run.params, expected, rtol=1e-12)
    assert seen == ["float32"] * 8


def test_params_and_snapshots_are_not_donated():
    params = jax.tree.map(jnp.asarray, PARAMS)
    trained(
        *(loss_fn, optax.sgd(0.1), params, batches),
        workers=2,
        policy=Eventual(),
        iterations=3,
    )
    assert_bit_equal(params, jax.tree.map(jnp.asarray, PARAMS))


# Failures


@contextlib.contextmanager
def raising_in(expected, worker, iteration):
    """An error that names its worker, and leaves no thread behind."""
    before = set(threading.enumerate())
    with pytest.raises(expected) as info:
        yield
    note = info.value.__notes__[-1]
    assert f"worker {worker} of jaxdp.asynchronous.train" in note
    assert f"iteration {iteration}." in note
    assert set(threading.enumerate()) == before


class Broken(Exception):
    pass


@pytest.mark.parametrize("policy", [Bounded(0), Eventual()], ids=str)
@pytest.mark.parametrize(
    ("where", "iteration"), [("batches", 0), ("batches", 2), ("before_push", 2)]
)
def test_what_a_worker_raises_stops_all_and_names_it(policy, where, iteration):
    def fail(caller, *about):
        if caller == where and about == (2, iteration):
            raise Broken(caller)

    def failing_batches(*about):
        fail("batches", *about)
        return batches(about[0], about[1] % 6)

    with raising_in(Broken, 2, iteration):
        train(
            *(loss_fn, optax.sgd(0.1), PARAMS, failing_batches),
            workers=4,
            policy=policy,
            iterations=10_000,
            devices=jax.devices()[:2],
            before_push=lambda *about: fail("before_push", *about),
        )


def test_the_first_failure_counts(monkeypatch, hold):
    held = hold(1, 0)

    def fail(worker, iteration):
        held(worker, iteration)
        raise Broken(worker)

    background = Background(
        *(monkeypatch, loss_fn, optax.sgd(0.1), PARAMS, batches),
        workers=2,
        policy=Eventual(),
        iterations=1,
        before_push=fail,
    )
    background.until(lambda crew: crew.failure is not None)
    held.release.set()
    with pytest.raises(Broken, match=r"^0\n"):
        background.result()


def test_a_loss_that_fails_names_the_worker():
    with raising_in(TypeError, 0, 0):
        train(
            *(lambda params, rows: "nine", optax.sgd(0.1), PARAMS, batches),
            workers=2,
            policy=Eventual(),
            iterations=1,
        )


def test_an_optimizer_that_fails_names_the_worker_that_pushed():
    def update(updates, state, params=None):
        raise Broken("update")

    broken = optax.GradientTransformation(optax.init_empty_state, update)
    with raising_in(Broken, 0, 0):
        train(
            *(loss_fn, broken, PARAMS, batches),
            workers=1,
            policy=Eventual(),
            iterations=2,
        )


@pytest.fixture
def interruptible():
    """A job in the background is started with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_all_workers():
    """One that comes in JAX's hook of the garbage collector is lost: ask again."""
    before, caller = set(threading.enumerate()), threading.get_ident()
    asked = [-math.inf]

    def interrupt(worker, iteration):
        if worker == 1 and iteration >= 2 and time.monotonic() > asked[-1] + 2:
            asked.append(time.monotonic())
            signal.pthread_kill(caller, signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(
            *(loss_fn, optax.sgd(0.1), PARAMS, lambda w, t: batches(w, t % 6)),
            workers=3,
            policy=Bounded(1),
            iterations=10_000,  # more than it takes, and it ends all the same
            devices=jax.devices()[:2],
            before_push=interrupt,
        )
    assert set(threading.enumerate()) == before


class StuckAt(Policy):
    """Starts no iteration from a number on."""

    def __init__(self, limit):
        self.limit = limit

    def __str__(self):
        return f"StuckAt({self.limit})"

    def waits_for(self, iteration, clocks, rounds):
        return [0] if iteration >= self.limit else []


@pytest.mark.parametrize("limit", [0, 3])
@pytest.mark.parametrize("workers", [1, 3])
def test_when_all_wait_it_is_reported_with_every_clock(monkeypatch, workers, limit):
    background = Background(
        *(monkeypatch, loss_fn, optax.sgd(0.1), PARAMS, batches),
        workers=workers,
        policy=StuckAt(limit),
        iterations=6,
    )
    with pytest.raises(RuntimeError) as info:
        background.result()
    message = str(info.value)
    assert message.startswith("train came to a halt at")
    for worker in range(workers):
        assert f"worker {worker} (clock {limit}) waits for worker 0" in message
    assert not hasattr(info.value, "__notes__")
    assert not [t for t in threading.enumerate() if t.name.startswith("jaxdp")]


class TooLate(Policy):
    """Iteration 1 must start before anybody has finished it."""

    def waits_for(self, iteration, clocks, rounds):
        return [0] if iteration == 1 and max(clocks) >= 2 else []


def test_when_the_last_that_works_finishes_it_is_reported(monkeypatch, hold):
    """Worker 1 waits while worker 0 does its last iteration."""
    holds = [hold(0, 2), hold(1, 0)]
    background = Background(
        *(monkeypatch, loss_fn, optax.sgd(0.1), PARAMS, batches),
        workers=2,
        policy=TooLate(),
        iterations=3,
        before_push=lambda *about: [each(*about) for each in holds],
    )
    assert holds[0].reached.wait(PATIENCE_S)
    holds[1].release.set()
    background.until(lambda crew: stopped(crew, 1))
    holds[0].release.set()
    with pytest.raises(RuntimeError) as info:
        background.result()
    message = str(info.value)
    assert "worker 0 (clock 3) has finished" in message
    assert "worker 1 (clock 1) waits for worker 0 (clock 3)" in message


class OneAtATime(Policy):
    """Iteration 2 may not be started by both of two workers at once."""

    def waits_for(self, iteration, clocks, rounds):
        if iteration != 2:
            return []
        return [1] if clocks[1] < 1 else [0] * (list(clocks) == [2, 2])


def test_one_that_waited_and_works_again_can_still_wake_others(monkeypatch, hold):
    first, second, last = hold(1, 0), hold(1, 1), hold(0, 2)
    background = Background(
        *(monkeypatch, loss_fn, optax.sgd(0.1), PARAMS, batches),
        workers=2,
        policy=OneAtATime(),
        iterations=3,
        before_push=lambda *about: [each(*about) for each in (first, second, last)],
    )
    background.until(lambda crew: stopped(crew, 0))
    first.release.set()
    assert last.reached.wait(PATIENCE_S)
    second.release.set()
    background.until(lambda crew: stopped(crew, 1) or crew.failure)
    last.release.set()
    assert background.result().pushed == (3, 3)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"iterations": 0}, ValueError, r"train got iterations=0\."),
        ({"iterations": 2.5}, TypeError, r"train got iterations=2\.5\."),
        ({"workers": 0}, ValueError, r"workers=0\."),
        ({"policy": Backup(2)}, ValueError, r"Backup got extra=2 for 2 workers"),
        ({"devices": []}, ValueError, r"no devices for 2 workers\..*at least 1"),
        ({"params": {"w": np.arange(3)}}, TypeError, r"\['w'\] \(int"),
    ],
    ids=["iterations", "fraction", "workers", "backup", "devices", "params"],
)
def test_bad_arguments_are_refused(changes, error, message):
    good: Any = {"params": PARAMS, "workers": 2, "policy": Eventual(), "iterations": 1}
    with pytest.raises(error, match=message):
        train(loss_fn, optax.sgd(0.1), batches=batches, **(good | changes))
