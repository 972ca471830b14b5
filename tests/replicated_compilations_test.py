"""What a step compiles, waits for, donates and refuses."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from tests.contract import waves
from tests.replicated_helpers import compilations

DEVICES = [2, 0, 3, 1]


@pytest.fixture
def compiled():
    """The names of the functions compiled so far, one for each program."""
    with compilations() as names:
        yield names


def squares(output, targets):
    return jnp.mean((output - targets) ** 2)


def make_step(
    apply_fn=None, optimizer=None, loss_fn=squares, device_ids=DEVICES, **options
):
    apply_fn = apply_fn or (lambda w, x: x @ w)
    model = jaxdp.DataParallel(apply_fn, waves(3, 2), device_ids=device_ids, **options)
    return model.train_step(loss_fn, optimizer or optax.adam(0.1))


def batch(rows):
    return waves(rows, 3), waves(rows, 2, start=0.5)


@pytest.mark.parametrize(
    ("tail", "sizes", "forwards", "updates"),
    [
        pytest.param(4, [2, 1], 4, 1, id="1,1,1,1"),
        pytest.param(3, [2, 1], 3, 2, id="1,1,1"),  # sums 3 gradients instead of 4
        pytest.param(6, [2], 0, 2, id="2,2,2"),  # the slices of 8 rows
        pytest.param(7, [2, 1], 1, 1, id="2,2,2,1"),
    ],
)
def test_nothing_is_compiled_twice_over_epochs_with_a_tail(
    compiled, tail, sizes, forwards, updates
):
    traced = {"apply": [], "loss": [], "update": 0}

    def apply_fn(w, x):
        traced["apply"].append(len(x))
        return x @ w

    def loss_fn(output, targets):
        traced["loss"].append(len(output))
        return jaxdp.Mean(jnp.sum((output - targets) ** 2), output.size)

    adam = optax.adam(0.1)

    def update(updates, state, params=None):
        traced["update"] += 1
        return adam.update(updates, state, params)

    optimizer = optax.GradientTransformation(adam.init, update)
    step = make_step(apply_fn, optimizer, loss_fn)
    state = step.init()
    state, _ = step(state, *batch(8))
    full = len(compiled)
    assert compiled.count("forward") == compiled.count("backward") == 4
    state, _ = step(state, *batch(tail))
    both = len(compiled)
    for i in range(98):
        state, _ = step(state, *batch(tail if i % 25 == 24 else 8))
    assert len(compiled) == both
    again = compiled[full:]
    assert again.count("forward") == again.count("backward") == forwards
    assert traced == {"apply": sizes, "loss": [8, tail], "update": updates}


def test_other_models_and_steps_do_not_drive_programs_out(compiled):
    first = make_step()
    other = make_step(lambda w, x: jnp.tanh(x @ w), optax.sgd(0.1), device_ids=[1, 2])
    x, y = batch(7)

    def rounds(states, times):
        for _ in range(times):
            for i, step in enumerate((first, other)):
                states[i], _ = step(states[i], x, y)
                step.model(x)
                jax.grad(lambda w, m=step.model: jnp.sum(m.apply(w, x)))(
                    step.model.params
                )

    states = [first.init(), other.init()]
    rounds(states, 2)
    known = len(compiled)
    rounds(states, 10)
    assert len(compiled) == known


def test_a_new_static_value_compiles_and_an_old_one_does_not(compiled):
    step = make_step(lambda w, x, power: (x @ w) ** power)
    state = step.init()
    counts = []
    for power in (2, 3, 2, 3, 2.0):
        before = len(compiled)
        state, _ = step(state, *batch(4), power=power)
        counts.append(len(compiled) - before > 0)
    assert counts == [True, True, False, False, True]


@jax.jit
def late(x, rounds):
    """`x`, after some work."""

    def body(_, a):
        return jnp.sin(a @ a)

    start = jnp.full((48, 48), 0.01)
    return x + 0 * jax.lax.fori_loop(0, rounds, body, start)[0, 0]


@pytest.mark.parametrize("call", ["step", "model"])
def test_all_stages_start_before_the_batch_is_there(call):
    step = make_step(output_device=5)
    x, y = batch(10)
    x = jax.device_put(x, jax.devices()[6])
    y = jax.device_put(y, jax.devices()[5])

    def run(x):
        if call == "model":
            return step.model(x)
        return step(step.init(), x, y)

    expected = run(late(x, 3))
    # On a busy machine the work may be done before the host is; a host that waits
    # for it never is.
    for rounds in (1_000, 10_000, 100_000):
        given = late(x, rounds)
        result = run(given)
        waited = given.is_ready()
        jax.tree.map(np.testing.assert_array_equal, result, expected)
        if not waited:
            break
    assert not waited


def test_state_is_donated_and_serves_one_step():
    step = make_step()
    state = step.init()
    kept = jax.tree.map(jnp.copy, state)
    new, _ = step(state, *batch(8))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    with pytest.raises(RuntimeError) as error:
        step(state, *batch(8))
    message = str(error.value)
    assert message.startswith("A train step got a state whose arrays have been deleted")
    assert "A step donates the state" in message
    assert "jax.tree.map(jnp.copy, state)" in message
    again, _ = step(kept, *batch(8))
    jax.tree.map(np.testing.assert_array_equal, again, new)


def test_a_donated_state_is_refused_before_anything_runs():
    step = make_step()
    state = step.init()
    step(state, *batch(8))
    with step.model.trace() as trace, pytest.raises(RuntimeError, match="deleted"):
        step(state, *batch(8))
    assert trace.records == []


def test_gradients_are_wanted_of_all_params():
    model = jaxdp.DataParallel(
        lambda p, x: x * p["w"], {"w": jnp.float32(1.0), "n": jnp.int32(3)}
    )
    step = model.train_step(squares, optax.sgd(0.1))
    message = r"no gradient: params\['n'\] \(int32\)\. .*Keep counters"
    with pytest.raises(TypeError, match=message):
        step.init()
    started = step.init({"w": jnp.float32(2.0)})
    assert float(started.params["w"]) == 2


@pytest.mark.parametrize(
    ("loss_fn", "error", "message"),
    [
        pytest.param(
            lambda output, y: (jnp.mean(output), jaxdp.Aux(model_state={"n": 1})),
            ValueError,
            r"returned a model_state\. .*apply_fn.*Return Aux\(metrics=\.\.\.\) alone",
            id="model-state",
        ),
        pytest.param(
            lambda output, y: (
                jnp.mean(output),
                jaxdp.Aux(metrics={"loss": jnp.max(output)}),
            ),
            ValueError,
            r"a metric named 'loss'\. That name holds the loss.*Rename it",
            id="loss-twice",
        ),
        pytest.param(
            lambda output, y: output - y,
            ValueError,
            r"a loss of shape \(8, 2\).*scalar",
            id="no-scalar",
        ),
        pytest.param(
            lambda output, y: jnp.argmax(output),
            TypeError,
            r"a loss of dtype int32",
            id="integer",
        ),
    ],
)
def test_refuses_losses_that_are_none(loss_fn, error, message):
    step = make_step(loss_fn=loss_fn)
    state = step.init()
    with pytest.raises(error, match=message):
        step(state, *batch(8))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        pytest.param([1.0, 2.0], r"a train step got lists of numbers", id="list"),
        pytest.param(
            {"y": np.array(["a"])},
            r"targets\['y'\] is an array of dtype <U1",
            id="text",
        ),
    ],
)
def test_refuses_targets_that_no_device_takes(targets, message):
    step = make_step()
    with pytest.raises(TypeError, match=message):
        step(step.init(), batch(8)[0], targets)


def raises_for_one_row(w, x):
    if len(x) == 1:
        raise KeyError("a slice of one row")
    return x @ w


def raises_for_negative(w, x):
    def look(x):
        if (x < 0).any():
            raise ValueError("a negative input")
        return x

    return jax.pure_callback(look, jax.typeof(x), x) @ w


@pytest.mark.parametrize(
    ("apply_fn", "spoil", "error", "message"),
    [
        pytest.param(
            raises_for_one_row,
            lambda x: x,
            RuntimeError,
            r"Replica 3 on cpu:1, row 9 raised KeyError: 'a slice of one row'",
            id="while-traced",
        ),
        pytest.param(
            raises_for_negative,
            lambda x: np.where(np.arange(10)[:, None] == 7, -x, x),
            RuntimeError,
            r"(?s)Replica 2 on cpu:3, rows 6 to 8 raised .*a negative input",
            id="while-running",
        ),
    ],
)
def test_a_failing_step_leaves_the_state_usable(apply_fn, spoil, error, message):
    step = make_step(apply_fn)
    state = step.init()
    before = jax.tree.map(np.asarray, state)
    x, y = np.abs(waves(10, 3)) + 0.1, waves(10, 2)
    with pytest.raises(error, match=message):
        step(state, spoil(x), y)
    jax.tree.map(np.testing.assert_array_equal, state, before)
    state, metrics = step(state, x[:8], y[:8])
    expected = np.mean((x[:8] @ waves(3, 2) - y[:8]) ** 2)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-6)


def test_a_failing_step_waits_for_replicas_that_run():
    step = make_step(raises_for_one_row)
    x = jax.device_put(waves(10, 3), jax.devices()[6])
    state, y = step.init(), waves(10, 2)
    for rounds in (1, 20_000):  # compiles first, then has work to wait for
        given = late(x, rounds)
        with pytest.raises(RuntimeError, match="Replica 3"):
            step(state, given, y)
        assert given.is_ready()


@pytest.mark.parametrize("calls_back", [False, True], ids=["plain", "calls-back"])
def test_only_programs_that_call_the_host_are_waited_for(monkeypatch, calls_back):
    def apply_fn(w, x):
        if calls_back:
            jax.debug.callback(lambda: None)
        return x @ w

    step = make_step(apply_fn)
    state = step.init()
    waits, wait = [], jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda x: (waits.append(x), wait(x)))
    step(state, *batch(8))
    step.model(batch(8)[0])
    assert len(waits) == (4 + 4 if calls_back else 0)


def test_steps_run_on_other_threads():
    step = make_step()
    results = {}

    def work(name, rows):
        state = step.init()
        for _ in range(3):
            state, metrics = step(state, *batch(rows))
        results[name] = float(metrics["loss"])

    threads = [threading.Thread(target=work, args=(n, 8 + n % 2)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    work("alone, 8", 8)
    work("alone, 9", 9)
    assert results[0] == results[2] == results["alone, 8"]
    assert results[1] == results[3] == results["alone, 9"]
