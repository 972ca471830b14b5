"""A memory watch takes the same steps with less memory, and loses none."""

import gc
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.replicated import microbatches, watch
from jaxdp.replicated.devices import resolve
from jaxdp.replicated.microbatches import Setting
from jaxdp.replicated.views import trace
from jaxdp.replicated.watch import MemoryWatch
from tests.contract import waves
from tests.helpers import assert_bit_equal

PARAMS = {"in": waves(3, 5), "out": waves(5, 2, start=0.5)}
FALLBACKS = ("smaller batch", "one device")
over_fallbacks = pytest.mark.parametrize("fallback", FALLBACKS)
FULL = "RESOURCE_EXHAUSTED: Out of memory allocating 7 B."
STEPS = 5


def apply_fn(params, x):
    return jnp.tanh(x @ params["in"]) @ params["out"]


def squares(output, targets):
    return jnp.mean((output - targets) ** 2)


def with_metric(output, targets):
    return squares(output, targets), jaxdp.Aux(metrics={"first": output[:, 0].mean()})


def weighted(output, targets):
    """Weights differ from row to row, so that micro-batches do too."""
    weights = targets[:, :1] ** 2
    losses = weights * (output - targets) ** 2
    metrics = {"first": jaxdp.Mean(output[:, 0].sum(), len(output))}
    mean = jaxdp.Mean(losses.sum(), weights.sum())
    return mean, jaxdp.Aux(metrics=metrics)


def batch(rows, start=0.0):
    return waves(rows, 3, start=start), waves(rows, 2, start=start + 0.3)


def make_step(loss_fn=squares, device_ids=(3, 1, 0, 2), output_device=3):
    model = jaxdp.DataParallel(
        apply_fn, PARAMS, device_ids=device_ids, output_device=output_device
    )
    return model.train_step(loss_fn, optax.adam(0.1))


@pytest.fixture(scope="module")
def step():
    return make_step()


def actions(watched):
    return [event.action for event in watched.events]


@over_fallbacks
@pytest.mark.parametrize(
    ("loss_fn", "rows", "output_device"),
    [
        (with_metric, 12, 3),
        (with_metric, 10, 5),
        (weighted, 10, 3),
        (weighted, 2, 5),
    ],
    ids=["scalar", "scalar-uneven-elsewhere", "mean-uneven", "mean-few-elsewhere"],
)
def test_less_memory_makes_the_same_updates(loss_fn, rows, output_device, fallback):
    step = make_step(loss_fn, device_ids=[3, 1, 0], output_device=output_device)
    watched = MemoryWatch(step, limit_bytes=1, fallback=fallback)
    plain, lowered = step.init(), step.init()
    for i in range(STEPS):
        plain, expected = step(plain, *batch(rows, start=i))
        lowered, metrics = watched(lowered, *batch(rows, start=i))
        assert metrics.keys() == expected.keys()
        # Sums over rows are taken in another order: some last bits differ.
        for name, value in expected.items():
            np.testing.assert_allclose(metrics[name], value, rtol=2e-6, atol=1e-7)
    for each, reference in zip(
        jax.tree.leaves(lowered.params), jax.tree.leaves(plain.params), strict=True
    ):
        np.testing.assert_allclose(each, reference, rtol=2e-5, atol=2e-6)
        assert each.devices() == set(resolve([3], "test"))
    assert "1 row" in actions(watched)[-1] or fallback == "one device"
    assert "on cpu:3 alone" in actions(watched)[-1]


def test_a_batch_is_lowered_step_by_step(step):
    seen = []
    watched = MemoryWatch(step, limit_bytes=1, on_event=seen.append)
    state = step.init()
    for i in range(6):
        state, _ = watched(state, *batch(10, start=i))
    assert actions(watched) == [
        "from the next step on 2 micro-batches of at most 5 rows on 4 devices",
        "from the next step on 4 micro-batches of at most 3 rows on 4 devices",
        "from the next step on 10 micro-batches of at most 1 row on cpu:3 alone",
        "nothing lower is left, it stays at 10 micro-batches of at most 1 row "
        "on cpu:3 alone",
    ]
    assert [event.step for event in watched.events] == [1, 2, 3, 4]
    assert {event.rows for event in watched.events} == {10}
    assert {event.limit_bytes for event in watched.events} == {1}
    assert seen == watched.events


@pytest.mark.parametrize(
    ("setting", "rows", "devices", "fallback", "lower"),
    [
        (Setting(), 8, 4, "smaller batch", Setting(2)),
        (Setting(), 5, 4, "smaller batch", Setting(2)),
        (Setting(), 4, 4, "smaller batch", Setting(1, True)),
        (Setting(2), 8, 4, "smaller batch", Setting(2, True)),
        (Setting(2), 10, 4, "smaller batch", Setting(4)),
        (Setting(2, True), 8, 4, "smaller batch", None),
        (Setting(), 8, 4, "one device", Setting(1, True)),
        (Setting(1, True), 8, 4, "one device", None),
        (Setting(), 1, 4, "smaller batch", None),
        (Setting(), 1, 4, "one device", None),
        (Setting(), 8, 1, "one device", None),
        (Setting(), 8, 1, "smaller batch", Setting(2)),
        (Setting(8), 8, 1, "smaller batch", None),
    ],
)
def test_the_next_lower_setting(setting, rows, devices, fallback, lower):
    assert setting.lower(rows, devices, fallback) == lower


@pytest.mark.parametrize("rows", [1, 2, 5, 9, 10, 33, 66])
@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
def test_every_setting_has_all_rows_and_smaller_slices(rows, devices):
    setting, slices = Setting(), []
    while setting is not None and not setting.alone:
        sizes = setting.sizes(rows, devices)
        assert sum(sizes) == rows
        slices.append(-(-max(sizes) // devices))
        setting = setting.lower(rows, devices, "smaller batch")
    assert slices == sorted(set(slices), reverse=True)
    assert slices[-1] == 1
    if setting is not None:
        assert setting.sizes(rows, devices) == [1] * rows


def dot(w, x):
    return x @ w


def dot_step(*shape):
    model = jaxdp.DataParallel(dot, waves(*shape), device_ids=[6, 7])
    return model.train_step(lambda x, y: jnp.mean(x * y), optax.sgd(0.01))


def held_on(device_id):
    """Bytes that other tests have left on a device."""
    gc.collect()
    return sum(
        array.nbytes
        for array in jax.live_arrays()
        if device_id in {device.id for device in array.devices()}
    )


# When gradients have arrived, the root of 2 devices holds, of 16 rows of 64 floats:
# the model's own parameters and the state's, its slice, targets and outputs, the
# gradient of its own outputs, the loss; its gradients and those of the other.
WHOLE = 2 * 256 + 8 * 256 + 16 * 4 + 16 * 4 + 8 * 4 + 4 + 2 * 256
# The second of two parts: half of all rows; loss and weight of both; the sum beside.
PARTS = 2 * 256 + 4 * 256 + 8 * 4 + 8 * 4 + 4 * 4 + 2 * 8 + 3 * 256
# The second of two slices, alone: as many rows as before, and no gradients of others.
ALONE = 2 * 256 + 8 * 256 + 8 * 4 + 8 * 4 + 8 * 4 + 2 * 8 + 2 * 256


@pytest.mark.parametrize(
    ("limit", "fallback", "measured"),
    [
        (WHOLE, "smaller batch", []),
        (WHOLE - 1, "smaller batch", [WHOLE]),
        (PARTS, "smaller batch", [WHOLE]),
        (PARTS - 1, "smaller batch", [WHOLE, PARTS]),
        (ALONE, "one device", [WHOLE]),
        (ALONE - 1, "one device", [WHOLE, ALONE]),
    ],
)
def test_measured_bytes_are_those_counted_by_hand(limit, fallback, measured):
    left = held_on(6)
    step = dot_step(64)
    watched = MemoryWatch(step, limit_bytes=limit + left, fallback=fallback)
    state, x, y = step.init(), waves(16, 64), waves(16)
    for _ in range(3):
        state = watched(state, x, y)[0]
        if len(watched.events) == len(measured):
            break
    state = watched(state, x, y)[0]
    found = [(event.measured_bytes or 0) - left for event in watched.events]
    assert found == measured
    assert all(event.limit_bytes == limit + left for event in watched.events)


@pytest.mark.parametrize(
    ("fallback", "rows", "measured"),
    [
        # Parameters twice, a slice of one row, targets, outputs, their gradient, loss
        # and weight twice; the sum so far, and what each replica adds.
        ("smaller batch", 4, 2 * 1024 + 256 + 2 * 16 + 2 * 16 + 16 + 16 + 3 * 1024),
        ("one device", 2, 2 * 1024 + 256 + 16 + 16 + 16 + 16 + 2 * 1024),
    ],
)
def test_gradients_are_summed_in_one_set_of_buffers(fallback, rows, measured):
    left = held_on(6)
    step = dot_step(64, 4)
    watched = MemoryWatch(step, limit_bytes=1, fallback=fallback)
    state, x, y = step.init(), waves(rows, 64), waves(rows, 4)
    for _ in range(2):
        state = watched(state, x, y)[0]
    assert (watched.events[1].measured_bytes or 0) - left == measured


@over_fallbacks
def test_the_root_really_holds_less_afterwards(fallback):
    params = {"w": waves(64, 3), "v": waves(3, 64)}

    def wide(params, x):
        return x @ params["w"] @ params["v"]

    model = jaxdp.DataParallel(wide, params, device_ids=[6, 4, 5, 7])
    step = model.train_step(squares, optax.sgd(0.01))
    watched = MemoryWatch(step, limit_bytes=1, fallback=fallback)
    state, x = step.init(), waves(16, 64)
    for _ in range(4):
        state, _ = watched(state, x, x)
    with model.memory() as before:
        state, _ = step(state, x, x)
    with model.memory() as after:
        state, _ = watched(state, x, x)
    peaks = [memory.peak("cpu:6").nbytes for memory in (before, after)]
    assert peaks[1] < 0.8 * peaks[0]


@over_fallbacks
def test_a_step_that_cannot_be_allocated_is_taken_in_rounds(monkeypatch, fallback):
    step, tried = make_step(), []
    whole = type(step).run

    def full(self, state, inputs, targets, keywords, rows=None):
        tried.append(rows)
        if rows is None:
            raise jax.errors.JaxRuntimeError(FULL)
        return whole(self, state, inputs, targets, keywords, rows)

    plain = step.init()
    for i in range(2):
        plain, expected = step(plain, *batch(8, start=i))
    monkeypatch.setattr(type(step), "run", full)
    watched = MemoryWatch(step, limit_bytes=10**9, fallback=fallback)
    state = step.init()
    for i in range(2):
        state, metrics = watched(state, *batch(8, start=i))
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=2e-6)
    for each, reference in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(plain.params), strict=True
    ):
        np.testing.assert_allclose(each, reference, rtol=2e-5, atol=2e-6)
    each = {"smaller batch": [4, 4], "one device": [2, 2, 2, 2]}[fallback]
    assert tried == [None, *each, *each]
    (event,) = watched.events
    assert event[:4] == (1, 8, None, 10**9)
    assert event.action.startswith("an allocation failed, again with ")


def test_a_round_that_cannot_be_allocated_counts_once(monkeypatch, step):
    """The second part fails: the sum of the first must not stay."""
    whole, failed = type(step).run, []

    def full(self, state, inputs, targets, keywords, rows=None):
        if rows is None or (rows == 4 and len(failed) < 3):
            failed.append(rows)
            if len(failed) != 2:
                raise jax.errors.JaxRuntimeError(FULL)
        return whole(self, state, inputs, targets, keywords, rows)

    plain, _ = step(step.init(), *batch(8))
    monkeypatch.setattr(type(step), "run", full)
    watched = MemoryWatch(step, limit_bytes=10**9)
    state, _ = watched(step.init(), *batch(8))
    assert failed == [None, 4, 4]
    assert [event.step for event in watched.events] == [1, 1]
    assert actions(watched)[-1].endswith(
        "8 micro-batches of at most 1 row on cpu:3 alone"
    )
    for each, reference in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(plain.params), strict=True
    ):
        np.testing.assert_allclose(each, reference, rtol=2e-5, atol=2e-6)


def test_what_a_failed_round_held_is_gone_before_the_next(monkeypatch, step):
    whole, held, alive = type(step).run, [], []

    def full(self, state, inputs, targets, keywords, rows=None):
        if rows is None:
            activations = jnp.arange(7.0)
            held.append(weakref.ref(activations))
            raise jax.errors.JaxRuntimeError(FULL)
        alive.append(held[0]())
        return whole(self, state, inputs, targets, keywords, rows)

    monkeypatch.setattr(type(step), "run", full)
    MemoryWatch(step, limit_bytes=10**9)(step.init(), *batch(8))
    assert alive == [None, None]


@pytest.mark.parametrize(
    ("fallback", "remedy"),
    [("smaller batch", "Use fewer"), ("one device", "Use fallback='smaller batch', ")],
)
def test_when_nothing_fits_the_state_survives(monkeypatch, step, fallback, remedy):
    def fail(*_):
        raise jax.errors.JaxRuntimeError(FULL)

    watched = MemoryWatch(step, limit_bytes=10**9, fallback=fallback)
    state = step.init()
    with monkeypatch.context() as patch:
        patch.setattr(type(step), "run", fail)
        with pytest.raises(RuntimeError) as caught:
            watched(state, *batch(8))
    message = str(caught.value)
    assert "RESOURCE_EXHAUSTED: Out of memory allocating 7 B in step 1, with" in message
    assert "at most" in message and "row" in message and "on cpu:3 alone" in message
    assert f"Nothing lower is left of fallback={fallback!r} for 8 rows." in message
    assert remedy in message
    watched(state, *batch(8))


def test_other_errors_are_not_retried(monkeypatch, step):
    watched = MemoryWatch(step, limit_bytes=10**9)
    error = ValueError("no memory of that")

    def fail(*_):
        raise error

    monkeypatch.setattr(type(step), "run", fail)
    with pytest.raises(ValueError, match="no memory of that"):
        watched(step.init(), *batch(8))
    assert watched.events == []


def statistics(params, x, model_state):
    """Buffers that tell which rows were seen, in which order, with which key."""
    key, noise = jax.random.split(model_state["key"])
    noisy = x * params + jax.random.uniform(noise, x.shape)
    last = {"last": x[-1, 0], "decayed": 0.5 * model_state["decayed"] + x.sum()}
    return noisy, {"key": key, **last}


def stateful_step():
    start = {"key": jax.random.key(3), "last": -1.0, "decayed": 8.0}
    start = {"key": start.pop("key"), **jax.tree.map(jnp.float32, start)}
    model = jaxdp.DataParallel(
        statistics, jnp.float32(2.0), model_state=start, device_ids=[3, 1, 0]
    )
    return model.train_step(squares, optax.sgd(0.01))


def powers(rows):
    """A sum of them tells which."""
    return 2.0 ** np.arange(rows, dtype="f")[:, None]


def test_one_device_leaves_the_buffers_and_draws_of_the_whole_step():
    step = stateful_step()
    watched = MemoryWatch(step, limit_bytes=1, fallback="one device")
    plain, lowered = step.init(), step.init()
    for _ in range(2):
        plain, expected = step(plain, powers(8), powers(8))
        lowered, metrics = watched(lowered, powers(8), powers(8))
        np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=2e-6)
    assert "3 micro-batches of at most 3 rows on cpu:3 alone" in actions(watched)[-1]
    jax.tree.map(
        assert_bit_equal,
        _data(lowered.model_state),
        _data(plain.model_state),
    )


@pytest.mark.parametrize("steps", [2, 3], ids=["parts", "parts-alone"])
def test_smaller_batches_update_buffers_part_after_part(steps):
    step = stateful_step()
    watched = MemoryWatch(step, limit_bytes=1)
    state = step.init()
    for _ in range(steps - 1):
        state, _ = watched(state, powers(6), powers(6))
        state = state._replace(model_state=step.init().model_state)
    state, _ = watched(state, powers(6), powers(6))
    # Two parts of three rows, of which the root has one each: rows 0 and 3.
    key = jax.random.split(jax.random.split(jax.random.key(3))[0])[0]
    expected = {"key": key, "last": 8.0, "decayed": 0.5 * (0.5 * 8 + 1) + 8}
    jax.tree.map(
        np.testing.assert_array_equal, _data(state.model_state), _data(expected)
    )


def _data(buffers):
    return buffers | {"key": jax.random.key_data(buffers["key"])}


def test_every_part_is_cut_from_all_arrays_and_has_its_own_key():
    host = np.arange(10.0).reshape(2, 5)
    on_device = jnp.arange(20, 30).reshape(2, 5)
    inputs = (host, {"x": on_device, "key": jax.random.key(1)}, "mode")
    keywords = {"keys": jax.random.split(jax.random.key(2), (2, 5)), "train": True}
    targets = [host + 50, np.float32(7), 3, None]
    whole = microbatches.batch_of(inputs, targets, keywords, 1, "test")
    assert whole.rows == 5
    parts = list(whole.split(2, 1))
    assert [part.rows for part in parts] == [3, 2]
    drawn = set()
    for part, cut in zip(parts, [slice(0, 3), slice(3, 5)], strict=True):
        first, tree, mode = part.inputs
        np.testing.assert_array_equal(first, host[:, cut])
        np.testing.assert_array_equal(tree["x"], on_device[:, cut])
        assert (mode, part.keywords["train"]) == ("mode", True)
        cut_keys = jax.random.key_data(part.keywords["keys"])
        np.testing.assert_array_equal(
            cut_keys, jax.random.key_data(keywords["keys"])[:, cut]
        )
        np.testing.assert_array_equal(part.targets[0], host[:, cut] + 50)
        assert part.targets[1:] == [7, 3, None]
        drawn.add(float(jax.random.uniform(tree["key"])))
    assert len(drawn) == 2
    assert [part.rows for part in whole.split(4, 1)] == [2, 2, 1]
    assert next(whole.split(1, 1)) is whole


@over_fallbacks
def test_rows_may_lie_along_another_dimension(fallback):
    def across(w, x):
        return w[:, None] * x

    w, x = waves(3), waves(3, 4)
    model = jaxdp.DataParallel(across, w, device_ids=[1, 0], dim=-1)
    step = model.train_step(squares, optax.sgd(0.1))
    watched = MemoryWatch(step, limit_bytes=1, fallback=fallback)
    plain, lowered = step.init(), step.init()
    for _ in range(3):
        plain, _ = step(plain, x, 2 * x)
        lowered, _ = watched(lowered, x, 2 * x)
    np.testing.assert_allclose(lowered.params, plain.params, rtol=1e-6)
    assert actions(watched)


@pytest.mark.parametrize(
    ("targets", "named"),
    [
        (waves(7, 2), r"targets of shape \(7, 2\)"),
        ({"y": waves(8, 2), "z": waves(2, 8)}, r"targets\['z'\] of shape \(2, 8\)"),
        ([waves(9), waves(1)], r"targets\[0\].*\(9,\), targets\[1\].*\(1,\)"),
    ],
)
def test_targets_need_the_rows_of_the_inputs(step, targets, named):
    watched, state = MemoryWatch(step, limit_bytes=10**9), step.init()
    message = f"MemoryWatch got {named}.*along dim=0.*need the 8 rows.*Give every"
    with pytest.raises(ValueError, match=message):
        watched(state, batch(8)[0], targets)
    watched(state, *batch(8))


def test_targets_need_the_dimension():
    across = jaxdp.DataParallel(lambda w, x: w * x, jnp.float32(1), dim=1)
    watched = MemoryWatch(across.train_step(squares, optax.sgd(1.0)), limit_bytes=1)
    with pytest.raises(ValueError, match=r"targets of shape \(4,\).*along dim=1"):
        watched(watched.step.init(), waves(3, 4), waves(4))


def test_batches_of_another_kind_are_measured_for_themselves():
    compiled = []

    def flagged(params, x, train):
        compiled.append(train)
        return apply_fn(params, x)

    model = jaxdp.DataParallel(flagged, PARAMS, device_ids=[3, 1])
    step = model.train_step(squares, optax.sgd(0.1))
    watched = MemoryWatch(step, limit_bytes=1)
    state = step.init()
    for rows, train in [(4, True), (2, True), (4, False), (4, True), (2, True)]:
        state, _ = watched(state, *batch(rows), train=train)
    found = [(event.step, event.rows, event.action) for event in watched.events]
    of = "from the next step on {} micro-batches of at most {} on {}".format
    assert found == [
        (1, 4, of(2, "2 rows", "2 devices")),
        (2, 2, of(2, "1 row", "cpu:3 alone")),
        (3, 4, of(2, "2 rows", "2 devices")),
        (4, 4, of(4, "1 row", "cpu:3 alone")),
        (
            5,
            2,
            f"nothing lower is left, it stays at{of(2, '1 row', 'cpu:3 alone')[21:]}",
        ),
    ]
    state, _ = watched(state, *batch(4), train=True)
    seen = len(compiled)
    for _ in range(3):
        state, _ = watched(state, *batch(4), train=True)
        state, _ = watched(state, *batch(2), train=True)
    assert len(compiled) == seen


def test_only_first_steps_are_observed(monkeypatch, step):
    observed = []
    memory = type(step.model).memory
    monkeypatch.setattr(
        type(step.model), "memory", lambda self: observed.append(1) or memory(self)
    )
    watched, state = MemoryWatch(step, limit_bytes=10**9), step.init()
    plain = step.init()
    for i in range(4):
        state, metrics = watched(state, *batch(8, start=i))
        plain, expected = step(plain, *batch(8, start=i))
        assert_bit_equal(metrics["loss"], expected["loss"])
    jax.tree.map(assert_bit_equal, state, plain)
    assert len(observed) == 1
    watched(state, *batch(9))
    assert len(observed) == 2


class Backend:
    """Statistics of a device: peaks to come, one for each time it is asked."""

    def __init__(self, monkeypatch, *peaks, limit=1000):
        self.peaks, self.limit, self.last = list(peaks), limit, 0
        monkeypatch.setattr(watch, "_stats", self)

    def __call__(self, device):
        assert device.id == 3
        self.last = self.peaks.pop(0) if self.peaks else self.last
        return {"bytes_limit": self.limit, "peak_bytes_in_use": self.last}


def refuse(*_):
    raise AssertionError("observed")


def test_a_backend_with_statistics_is_not_observed(monkeypatch, step):
    # Asked when the watch is made, then before and after each step.
    Backend(monkeypatch, 0, 100, 200, 200, 900, 900, 900, 900, 901)
    monkeypatch.setattr(type(step.model), "memory", refuse)
    watched, state = MemoryWatch(step), step.init()
    assert watched.limit_bytes == 900
    for i in range(4):
        assert watched.events == []
        state, _ = watched(state, *batch(8, start=i))
    (event,) = watched.events
    assert event[:4] == (4, 8, 901, 900)
    assert event.action == (
        "from the next step on 2 micro-batches of at most 4 rows on 4 devices"
    )


def test_a_peak_of_the_past_is_no_reason_to_lower(monkeypatch, step):
    """It never falls: from then on, the watch looks for itself."""
    Backend(monkeypatch, 0, 100, 60_000, limit=100_000)
    watched, state = MemoryWatch(step, limit=0.5), step.init()
    for i in range(4):
        state, _ = watched(state, *batch(8, start=i))
    state, _ = watched(state, *batch(9))
    assert [event[:4] for event in watched.events] == [(1, 8, 60_000, 50_000)]


def test_past_the_limit_the_watch_looks_for_itself(monkeypatch, step):
    Backend(monkeypatch, 100)
    watched, state = MemoryWatch(step, limit_bytes=1), step.init()
    for i in range(2):
        state, _ = watched(state, *batch(5, start=i))
    assert [event.step for event in watched.events] == [1, 2]
    # Five rows, and parameters of 100 bytes that the model and the state hold.
    assert all((event.measured_bytes or 0) > 200 for event in watched.events)


def test_a_given_limit_goes_before_the_device_s(monkeypatch, step):
    Backend(monkeypatch, 100, 701)
    watched = MemoryWatch(step, limit_bytes=700)
    watched(step.init(), *batch(8))
    assert [event[:4] for event in watched.events] == [(1, 8, 701, 700)]


@pytest.mark.parametrize(
    ("fallback", "limit", "sums"),
    [("smaller batch", 1, 4), ("one device", 1, 2), ("smaller batch", 10**9, 0)],
    ids=["parts-alone", "slices-alone", "whole"],
)
def test_nothing_is_donated_that_is_waited_for(monkeypatch, fallback, limit, sums):
    """Watchers that come late still find the arrays of a traced step."""
    end = trace._end

    def late(made):
        time.sleep(0.3)  # longer than it takes to start a step
        return end(made)

    step = make_step(device_ids=[3, 1])
    watched = MemoryWatch(step, limit_bytes=limit, fallback=fallback)
    state, _ = watched(step.init(), *batch(4))
    state, _ = watched(state, *batch(4))
    monkeypatch.setattr(trace, "_end", late)
    with step.model.trace() as traced:
        state, _ = watched(state, *batch(4))
    found = [r for r in traced.records if r.what == "sum of micro-batches"]
    assert len(found) == sums
    assert all(r.target == "cpu:3" and not r.is_transfer for r in found)


def test_a_round_starts_when_the_one_before_has_ended(monkeypatch):
    step, log = make_step(device_ids=[3, 1]), []
    watched = MemoryWatch(step, limit_bytes=1, fallback="one device")
    state, run, wait = step.init(), type(step).run, jax.block_until_ready
    for _ in range(2):
        state, _ = watched(state, *batch(4))
    monkeypatch.setattr(
        type(step), "run", lambda *args: log.append("run") or run(*args)
    )
    monkeypatch.setattr(
        jax, "block_until_ready", lambda tree: log.append("wait") or wait(tree)
    )
    watched(state, *batch(4))
    assert log == ["run", "wait", "run", "wait"]


def test_a_used_state_is_refused(step):
    state = step.init()
    step(state, *batch(8))
    with pytest.raises(RuntimeError, match="deleted"):
        MemoryWatch(step, limit_bytes=1)(state, *batch(8))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"limit": 0}, ValueError, "limit=0. It must be more than 0, at most 1"),
        (
            {"limit": -0.5},
            ValueError,
            r"limit=-0\.5. It must be more than 0, at most 1",
        ),
        ({"limit": 1.1}, ValueError, r"limit=1\.1. It must be more than 0, at most 1"),
        ({"limit": float("nan")}, ValueError, "limit=nan. It must be more than 0"),
        ({"limit": "90 %"}, TypeError, "limit='90 %'. It must be a number, a share"),
        ({"limit": True}, TypeError, "limit=True. It must be a number, a share"),
        (
            {"limit_bytes": 0},
            ValueError,
            "limit_bytes=0. It must be more than 0, bytes",
        ),
        ({"limit_bytes": -3}, ValueError, "limit_bytes=-3. It must be more than 0"),
        ({"limit_bytes": float("inf")}, ValueError, "limit_bytes=inf. It must be"),
        ({"limit_bytes": "1 GB"}, TypeError, "limit_bytes='1 GB'. It must be a number"),
        ({"fallback": "smaller"}, ValueError, "fallback='smaller'.* 'one device'"),
        ({"on_event": 3}, TypeError, "on_event of type int.*a function.*Pass print"),
        (
            {"limit_bytes": None},
            ValueError,
            r"limit=0\.9 and no limit_bytes, for the root cpu:3.*memory_stats\(\) has "
            "no 'bytes_limit'.*Pass limit_bytes=",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_limits_and_names_are_checked(step, options, kind, message):
    with pytest.raises(kind, match=message):
        MemoryWatch(step, **({"limit_bytes": 9} | options))


def test_a_step_is_needed():
    with pytest.raises(TypeError, match=r"step of type function.*train_step"):
        MemoryWatch(apply_fn, limit_bytes=1)  # pyright: ignore[reportArgumentType]
