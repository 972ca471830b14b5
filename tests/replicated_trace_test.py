"""A trace tells what moved, byte by byte, and when; and nothing else moves."""

import sys
import threading
import time
import weakref
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from matplotlib.colors import to_hex

import jaxdp
from jaxdp.draw.gantt import draw_gantt
from jaxdp.replicated import observe
from jaxdp.replicated.views import trace as trace_module
from tests.contract import waves

# Bytes: of the parameters and buffers, and of a row of inputs, outputs and targets.
PARAMS = {"w": waves(3, 2), "b": waves(2, start=0.3)}
PHI, BUFFERS = 4 * (6 + 2), 4 * 3
ROW_IN, ROW_OUT = 4 * 3, 4 * 2
LAYOUTS = {
    "in-order": ([0, 1, 2, 3], None),
    "shuffled": ([3, 1, 0, 2], None),
    "other-output": ([3, 1, 0, 2], 2),
    "outside-output": ([2, 1, 0, 3], 6),
    "one": ([4], None),
}
SIZES = {10: [3, 3, 3, 1], 3: [1, 1, 1], 66: [17, 17, 17, 15]}
over_layouts = pytest.mark.parametrize(
    ("ids", "output_device"), LAYOUTS.values(), ids=LAYOUTS.keys()
)
over_places = pytest.mark.parametrize(
    "place", [None, 0, 7], ids=["host", "dev0", "dev7"]
)


def linear(params, x):
    return x @ params["w"] + params["b"][None]


def with_buffers(params, x, model_state):
    return linear(params, x), {"mean": model_state["mean"] + jnp.mean(x, axis=0)}


def squares(output, targets):
    return jnp.mean((output - targets) ** 2)


def batch(rows, place=None):
    x, y = waves(rows, 3), waves(rows, 2, start=0.5)
    return (x if place is None else jax.device_put(x, jax.devices()[place])), y


def name(place):
    return "host" if place is None else f"cpu:{place}"


def moved(trace):
    """All transfers between devices; sorted, since their order is free."""
    return sorted(
        (r.stage, r.what, r.source, r.target, r.nbytes)
        for r in trace.records
        if r.is_transfer and r.source != r.target
    )


def expected_moves(ids, output_device, sizes, *, place=None, buffers=0, step=True):
    """What must move, by the arithmetic of the eight stages."""
    root, used = ids[0], ids[: len(sizes)]
    out = root if output_device is None else output_device
    moves = [("1 place", "targets", None, out, sum(sizes) * ROW_OUT)] if step else []
    for device, rows in zip(used, sizes, strict=True):
        moves += [
            ("2 replicate", "parameters", root, device, PHI),
            ("2 replicate", "buffers", root, device, buffers),
            ("3 scatter", "batch", place, device, rows * ROW_IN),
            ("5 gather", "received outputs", device, out, rows * ROW_OUT),
            ("7 scatter back", "output gradients", out, device, rows * ROW_OUT),
            ("8 reduce", "received gradients", device, root, PHI),
        ]
    return sorted(
        (stage, what, name(source), name(target), nbytes)
        for stage, what, source, target, nbytes in moves
        if source != target and nbytes
    )


def traced_step(model, *given, loss_fn=squares):
    step = model.train_step(loss_fn, optax.adam(0.1))
    state, _ = step(step.init(), *given)
    with model.trace() as trace:
        step(state, *given)
    return trace


@over_layouts
@over_places
def test_a_step_moves_this_and_nothing_else(ids, output_device, place):
    model = jaxdp.DataParallel(
        linear, PARAMS, device_ids=ids, output_device=output_device
    )
    trace = traced_step(model, *batch(10, place))
    sizes = SIZES[10] if len(ids) == 4 else [10]
    assert moved(trace) == expected_moves(ids, output_device, sizes, place=place)
    others = len(sizes) - 1
    assert trace.moved("2 replicate") == trace.moved("8 reduce") == others * PHI
    if place not in ids:
        assert trace.moved(what="batch") == 10 * ROW_IN
    assert trace.moved() == sum(nbytes for *_, nbytes in moved(trace))


@pytest.mark.parametrize("output_device", [None, 0, 1, 6])
def test_a_device_without_rows_gets_nothing(output_device):
    ids = [3, 1, 0, 2]
    model = jaxdp.DataParallel(
        linear, PARAMS, device_ids=ids, output_device=output_device
    )
    trace = traced_step(model, *batch(3, 1))
    assert moved(trace) == expected_moves(ids, output_device, SIZES[3], place=1)
    assert "cpu:2" not in {record.target for record in trace.records}


@over_layouts
def test_buffers_move_out_beside_parameters_and_not_back(ids, output_device):
    model = jaxdp.DataParallel(
        with_buffers,
        PARAMS,
        model_state={"mean": waves(3)},
        device_ids=ids,
        output_device=output_device,
    )
    trace = traced_step(model, *batch(66))
    sizes = SIZES[66] if len(ids) == 4 else [66]
    assert moved(trace) == expected_moves(ids, output_device, sizes, buffers=BUFFERS)
    assert trace.moved(what="buffers") == (len(ids) - 1) * BUFFERS


def test_weight_of_the_loss_goes_to_the_root():
    def loss_fn(output, targets):
        return jaxdp.Mean(jnp.sum((output - targets) ** 2), 20)

    ids, out = [3, 1, 0, 2], 6
    model = jaxdp.DataParallel(linear, PARAMS, device_ids=ids, output_device=out)
    trace = traced_step(model, *batch(10), loss_fn=loss_fn)
    weight = ("8 reduce", "weight of the loss", "cpu:6", "cpu:3", 4)
    expected = [*expected_moves(ids, out, SIZES[10]), weight]
    assert moved(trace) == sorted(expected)


@over_layouts
@over_places
def test_grad_through_the_model_moves_the_same(ids, output_device, place):
    model = jaxdp.DataParallel(
        linear, PARAMS, device_ids=ids, output_device=output_device
    )
    x, _ = batch(10, place)
    with model.trace() as trace:
        jax.grad(lambda params: jnp.sum(model.apply(params, x)))(model.params)
    sizes = SIZES[10] if len(ids) == 4 else [10]
    expected = expected_moves(ids, output_device, sizes, place=place, step=False)
    assert moved(trace) == expected


def test_gradient_of_the_batch_goes_back_where_it_came_from():
    model = jaxdp.DataParallel(linear, PARAMS, device_ids=[1, 0, 2, 3])
    x, _ = batch(10, 2)
    with model.trace() as trace:
        gradient = jax.grad(lambda x: jnp.sum(model(x)))(x)
    assert gradient.devices() == {jax.devices()[2]}
    about = "7 backward", "gradients of the batch"
    assert [move for move in moved(trace) if move[1] == about[1]] == [
        (*about, "cpu:0", "cpu:2", 3 * ROW_IN),
        (*about, "cpu:1", "cpu:2", 3 * ROW_IN),
        (*about, "cpu:3", "cpu:2", 1 * ROW_IN),
    ]
    assert trace.moved("8 reduce") == 0


@over_layouts
def test_a_call_moves_parameters_rows_and_outputs(ids, output_device):
    model = jaxdp.DataParallel(
        linear, PARAMS, device_ids=ids, output_device=output_device
    )
    with model.trace() as trace:
        model(batch(10)[0])
    sizes = SIZES[10] if len(ids) == 4 else [10]
    whole = expected_moves(ids, output_device, sizes, step=False)
    assert moved(trace) == [move for move in whole if move[0] < "6"]


def test_programs_run_once_per_device_and_stage():
    ids = [3, 1, 0, 2]
    model = jaxdp.DataParallel(linear, PARAMS, device_ids=ids, output_device=6)
    trace = traced_step(model, *batch(10))
    programs = [r for r in trace.records if not r.is_transfer]
    assert [(r.stage, r.replica, r.source, r.target, r.nbytes) for r in programs] == [
        *[("4 forward", i, name(d), name(d), 0) for i, d in enumerate(ids)],
        ("6 loss", None, "cpu:6", "cpu:6", 0),
        *[("7 backward", i, name(d), name(d), 0) for i, d in enumerate(ids)],
        ("8 optimizer", None, "cpu:3", "cpu:3", 0),
    ]
    forward = programs[0]
    assert (forward.what, forward.shape, forward.arrays) == (
        *("outputs", "float32[3,2]", 1),
    )
    replicate = [r for r in trace.records if r.stage == "2 replicate"]
    assert [(r.replica, r.shape, r.arrays) for r in replicate] == [
        (i, "float32[3,2]", 2) for i in range(4)
    ]


def test_stages_come_in_the_order_of_their_dependencies():
    model = jaxdp.DataParallel(linear, PARAMS, device_ids=[1, 0, 2])
    trace = traced_step(model, *batch(6))
    stages = list(dict.fromkeys(record.stage for record in trace.records))
    after = {
        "4 forward": {"2 replicate", "3 scatter"},
        "5 gather": {"4 forward"},
        "6 loss": {"1 place", "5 gather"},
        "7 scatter back": {"6 loss"},
        "7 backward": {"7 scatter back"},
        "8 reduce": {"7 backward"},
        "8 optimizer": {"8 reduce"},
    }
    for stage, before in after.items():
        assert all(stages.index(each) < stages.index(stage) for each in before)
    assert all(r.start_ms >= 0 and r.duration_ms >= 0 for r in trace.records)
    assert trace.records[0].start_ms == 0
    assert all(r.end_ms == r.start_ms + r.duration_ms for r in trace.records)


class Scripted:
    """A pool whose results were there when the script says."""

    def __init__(self, *ends):
        self.ends = list(ends)

    def submit(self, *_):
        done = Future()
        done.set_result(self.ends.pop(0))
        return done


def event(what, target, began, given=(), program=True, source=None):
    made = {what: [jnp.zeros(2)]}
    lower: Any = (lambda: None) if program else None
    device = jax.devices()[target]
    source = device if source is None else jax.devices()[source]
    about = ("4 forward", what, 0, source, device)
    return observe.Event(*about, list(given), made, lower, began)


def test_a_record_starts_when_it_could():
    pool: Any = Scripted(10.5, 11.0, 12.0, 12.5, 15.0, 12.25)
    trace = trace_module.Trace(pool)
    copy = event("copy", 1, 10.0, program=False, source=0)
    arrived = copy.made["copy"]
    for each in [
        copy,
        event("first", 1, 10.125, arrived),  # waits for the copy
        event("second", 1, 10.25),  # for the device, until 11
        event("elsewhere", 2, 10.25),  # for nothing
        event("late", 2, 14.0),  # not dispatched before
        event("sent", 1, 10.5, arrived, program=False, source=2),  # no program
    ]:
        trace.see(each)
    assert [(r.what, r.start_ms, r.duration_ms) for r in trace.records] == [
        ("copy", 0.0, 500.0),
        ("first", 500.0, 500.0),
        ("second", 1000.0, 1000.0),
        ("elsewhere", 250.0, 2250.0),
        ("late", 4000.0, 1000.0),
        ("sent", 500.0, 1750.0),
    ]


def heavy(w, x, rounds):
    """Some work that a compiler cannot leave out."""

    def body(_, a):
        return jnp.sin(a @ a)

    start = jnp.full((48, 48), 0.01) * x[0]
    return w * x + 0 * jax.lax.fori_loop(0, rounds, body, start)[0, 0]


def test_forwards_overlap():
    model = jaxdp.DataParallel(heavy, jnp.float32(2), device_ids=range(4))
    # On a busy machine a forward may end before the next is dispatched; it always
    # does if the host waits for it.
    for rounds in (1_000, 10_000, 100_000):
        x = np.arange(4, dtype="f")
        model(x, rounds)
        with model.trace() as trace:
            model(x, rounds)
        forwards = [r for r in trace.records if r.stage == "4 forward"]
        last_start = max(r.start_ms for r in forwards)
        first_end = min(r.end_ms for r in forwards)
        if last_start < first_end:
            break
    assert len(forwards) == 4
    assert last_start < first_end


def small_trace():
    model = jaxdp.DataParallel(linear, PARAMS, device_ids=[1, 0], output_device=2)
    with model.trace() as trace:
        model(batch(5)[0])
    return trace


def test_rows_say_what_records_say():
    trace = small_trace()
    rows = trace.rows()
    assert [list(row.values())[:6] for row in rows] == [
        ["3 scatter", "batch", "host", "cpu:1", "float32[3,3]", 1],
        ["3 scatter", "batch", "host", "cpu:0", "float32[2,3]", 1],
        ["2 replicate", "parameters", "cpu:1", "cpu:1", "float32[3,2]", 2],
        ["2 replicate", "parameters", "cpu:1", "cpu:0", "float32[3,2]", 2],
        ["4 forward", "outputs", "cpu:1", "", "float32[3,2]", 1],
        ["4 forward", "outputs", "cpu:0", "", "float32[2,2]", 1],
        ["5 gather", "received outputs", "cpu:1", "cpu:2", "float32[3,2]", 1],
        ["5 gather", "received outputs", "cpu:0", "cpu:2", "float32[2,2]", 1],
        ["5 gather", "join", "cpu:2", "", "float32[5,2]", 1],
    ]
    assert [row["moved_bytes"] for row in rows] == [36, 24, 0, 32, 0, 0, 24, 16, 0]
    assert [(row["start_ms"], row["duration_ms"]) for row in rows] == [
        (record.start_ms, record.duration_ms) for record in trace.records
    ]


def test_table_holds_every_row_and_the_sum():
    trace = small_trace()
    table = trace.table()
    assert table.row_count == 9
    assert [column.header for column in table.columns] == list(trace.rows()[0])
    assert table.caption == "132 bytes moved"
    lines = str(trace).splitlines()
    assert lines[0].strip() == "Stages by device"
    assert lines[-1].strip() == "132 bytes moved"
    copies = [line.split() for line in lines if "parameters" in line]
    assert [words[:8] for words in copies] == [
        ["2", "replicate", "parameters", "cpu:1", "cpu:1", "float32[3,2]", "2", "0"],
        ["2", "replicate", "parameters", "cpu:1", "cpu:0", "float32[3,2]", "2", "32"],
    ]


def test_gantt_draws_a_lane_per_device_and_a_bar_per_record(tmp_path):
    trace = small_trace()
    figure = trace.gantt(title="Two replicas", note="a call")
    axes: Any = figure.axes[0]
    lanes = [label.get_text() for label in axes.get_yticklabels()]
    assert lanes == ["cpu:0", "cpu:1", "cpu:2"]
    bars = axes.patches
    assert len(bars) == len(trace.records)
    colours = {}
    for bar, record in zip(bars, trace.records, strict=True):
        assert bar.get_gid() == f"{record.stage}, {record.target}"
        assert bar.get_x() == record.start_ms
        assert bar.get_width() == pytest.approx(record.duration_ms)
        middle = bar.get_y() + bar.get_height() / 2
        lane = lanes.index(record.target)
        assert abs(middle - lane) < 0.5
        assert (middle < lane) == record.is_transfer
        colours.setdefault(record.stage, set()).add(to_hex(bar.get_facecolor()))
    assert all(len(found) == 1 for found in colours.values())
    assert len(set.union(*colours.values())) == len(colours) == 4
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["2 replicate", "3 scatter", "4 forward", "5 gather"]
    assert axes.get_title(loc="left") == "Two replicas"
    assert "a call" in {text.get_text() for text in axes.texts}
    path = tmp_path / "gantt.svg"
    draw_gantt(trace.records, path)
    assert path.read_bytes().startswith(b"<?xml")


def test_nothing_recorded_is_shown_as_nothing():
    model = jaxdp.DataParallel(linear, PARAMS)
    with model.trace() as trace:
        pass
    assert trace.records == trace.rows() == []
    assert trace.moved() == 0
    assert trace.table().row_count == 0
    assert str(trace).strip() == ""
    figure = trace.gantt()
    figure.canvas.draw()
    assert len(figure.axes[0].patches) == 0


def test_missing_matplotlib_names_the_extra(monkeypatch):
    trace = small_trace()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError) as error:
        trace.gantt()
    assert str(error.value).startswith("draw_gantt found no matplotlib")
    assert "pip install 'jax-data-parallel[experiments]'" in str(error.value)
    assert len(trace.rows()) == 9


def test_only_the_block_is_recorded_and_traces_nest():
    model = jaxdp.DataParallel(linear, PARAMS, device_ids=[0, 1])
    other = jaxdp.DataParallel(linear, PARAMS, device_ids=[2])
    x, _ = batch(4)
    model(x)
    with model.trace() as outer:
        model(x)
        with model.trace() as inner:
            other(x)
        model(x)
    model(x)
    alone, both = len(inner.records), len(outer.records)
    assert {record.target for record in inner.records} == {"cpu:2"}
    assert both == 2 * 9 + alone
    assert outer.records[9].what == inner.records[0].what
    assert inner.records[0].start_ms == 0 < outer.records[9].start_ms


def test_other_threads_are_recorded():
    model = jaxdp.DataParallel(linear, PARAMS, device_ids=[0, 1])
    with model.trace() as trace:
        thread = threading.Thread(target=model, args=batch(4)[:1])
        thread.start()
        thread.join()
    assert len(trace.records) == 9


def test_an_error_in_the_block_leaves_what_was_seen():
    model = jaxdp.DataParallel(linear, PARAMS, device_ids=[0, 1])
    with pytest.raises(KeyError, match="mine"), model.trace() as trace:
        model(batch(4)[0])
        raise KeyError("mine")
    assert len(trace.records) == 9
    model(batch(4)[0])
    assert len(trace.records) == 9


def test_an_error_of_a_replica_leaves_what_ran_before():
    def apply_fn(params, x):
        if len(x) == 1:
            raise ValueError("one row")
        return linear(params, x)

    model = jaxdp.DataParallel(apply_fn, PARAMS, device_ids=[0, 1])
    with pytest.raises(ValueError, match="Replica 1"), model.trace() as trace:
        model(batch(3)[0])
    assert [r.replica for r in trace.records if r.stage == "4 forward"] == [0]
    model(batch(4)[0])


def test_results_that_cannot_be_waited_for_end_the_trace_only(monkeypatch):
    def broken(made):
        raise RuntimeError("the device is gone")

    model = jaxdp.DataParallel(linear, PARAMS, device_ids=[0, 1])
    monkeypatch.setattr(trace_module, "_end", broken)
    with pytest.raises(RuntimeError, match="the device is gone"), model.trace():
        model(batch(4)[0])
    assert model(batch(4)[0]).shape == (4, 2)


def test_a_late_watcher_meets_no_donated_array(monkeypatch):
    on_time = trace_module._end

    def late(made):
        time.sleep(0.1)
        return on_time(made)

    model = jaxdp.DataParallel(linear, PARAMS, device_ids=[0, 1])
    step = model.train_step(squares, optax.adam(0.1))
    state = step.init()
    monkeypatch.setattr(trace_module, "_end", late)
    with model.trace() as trace:
        for _ in range(2):
            state, _ = step(state, *batch(4))
    assert sum(r.stage == "8 optimizer" for r in trace.records) == 2


def test_a_trace_keeps_no_arrays():
    model = jaxdp.DataParallel(linear, PARAMS, device_ids=[0, 1])
    with model.trace() as trace:
        output = model(batch(4)[0])
    gone = weakref.ref(output)
    del output
    assert gone() is None
    assert len(trace.records) == 9


def test_without_a_trace_nobody_is_told(monkeypatch):
    def told(*_):
        raise AssertionError

    monkeypatch.setattr(observe, "Event", told)
    model = jaxdp.DataParallel(linear, PARAMS, device_ids=[0, 1])
    assert model(batch(4)[0]).shape == (4, 2)
    assert observe.now() == 0


@pytest.mark.parametrize(
    ("place", "source"),
    [
        pytest.param(np.asarray, "host", id="host"),
        pytest.param(
            lambda x: jax.device_put(x, jax.devices()[3]), "cpu:3", id="another device"
        ),
    ],
)
def test_parameters_from_elsewhere_go_to_the_root_first(place, source):
    params = {"a": np.arange(3, dtype=np.float32), "b": np.ones(2, np.float32)}
    model = jaxdp.DataParallel(
        lambda p, x: p["a"].sum() * x + p["b"].sum(), params, device_ids=[1, 0]
    )
    with model.trace() as trace:
        output = model.apply(jax.tree.map(place, params), np.ones(4, np.float32))
    copies = [
        (record.source, record.target, record.nbytes)
        for record in trace.records
        if record.stage == "2 replicate"
    ]
    assert copies == [
        (source, "cpu:1", 20),
        ("cpu:1", "cpu:1", 0),
        ("cpu:1", "cpu:0", 20),
    ]
    np.testing.assert_array_equal(output, [5, 5, 5, 5])
