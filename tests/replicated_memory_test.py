"""What every device holds at every stage, computed by hand."""

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.program.memory import Memory as Needs
from jaxdp.replicated.observe import Event
from jaxdp.replicated.views import memory as memory_module
from jaxdp.replicated.views.memory import OTHER, TEMPORARY
from tests.contract import waves

# 8 parameters of 4 bytes; 5 rows on 3 devices are 2, 2, 1.
PARAMS = {"w": waves(3, 2), "b": waves(2, start=0.3)}
PHI, ROW_IN, ROW_OUT = 32, 12, 8
IDS, SIZES = [5, 4, 7], [2, 2, 1]
X, Y = waves(5, 3), waves(5, 2, start=0.5)

# 50 parameters of 4 bytes; 8 rows on 4 devices, 32 bytes of inputs on each.
MLP = {
    "hidden": {"w": waves(4, 5), "b": waves(5, start=0.2)},
    "out": {"w": waves(5, 4, start=0.4), "b": waves(4, start=0.6)},
    "scale": np.float32(1.1),
}


def linear(params, x):
    return x @ params["w"] + params["b"][None]


def mlp(params, x):
    hidden = jnp.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"][None])
    return params["scale"] * hidden @ params["out"]["w"] + params["out"]["b"][None]


def squares(output, targets):
    return jnp.mean((output - targets) ** 2)


def watched_step(apply_fn, params, x, y, optimizer, **options):
    model = jaxdp.DataParallel(apply_fn, params, **options)
    step = model.train_step(squares, optimizer)
    state, _ = step(step.init(), x, y)
    with model.memory() as memory:
        step(state, x, y)
    return memory


def at_the_end(memory, stage, own=True):
    """The kinds that each device holds after a stage; empty devices left out."""
    last = {}
    for snapshot in memory.snapshots:
        if snapshot.stage == stage:
            last.setdefault(snapshot.what, {})[snapshot.device] = snapshot.kinds
    final = list(last.values())[-1] if last else {}
    ours = {
        device: {k: n for k, n in kinds.items() if k not in (OTHER, TEMPORARY)}
        for device, kinds in final.items()
    }
    return {device: kinds for device, kinds in ours.items() if kinds} if own else final


def test_the_stages_of_a_step_hold_this():
    memory = watched_step(
        linear, PARAMS, X, Y, optax.sgd(0.1, momentum=0.9), device_ids=IDS
    )
    state = {"parameters": PHI, "optimizer state": PHI}
    root = state | {"targets": 5 * ROW_OUT}
    assert at_the_end(memory, "1 place") == {"cpu:5": root}
    batch = [{"batch": rows * ROW_IN} for rows in SIZES]
    assert at_the_end(memory, "3 scatter") == {
        "cpu:5": root | batch[0],
        "cpu:4": batch[1],
        "cpu:7": batch[2],
    }
    copies = {"parameters": PHI}
    assert at_the_end(memory, "2 replicate") == {
        "cpu:5": root | batch[0],
        "cpu:4": copies | batch[1],
        "cpu:7": copies | batch[2],
    }
    outputs = [{"outputs": rows * ROW_OUT} for rows in SIZES]
    others = {
        "cpu:4": copies | batch[1] | outputs[1],
        "cpu:7": copies | batch[2] | outputs[2],
    }
    # A linear layer needs its inputs and weights again, and nothing else.
    forward = {"cpu:5": root | batch[0] | outputs[0]} | others
    assert at_the_end(memory, "4 forward") == forward
    root = root | batch[0] | {"received outputs": 5 * ROW_OUT}
    assert at_the_end(memory, "5 gather") == {"cpu:5": root} | others
    root = root | {"loss": 4, "output gradients": 5 * ROW_OUT}
    assert at_the_end(memory, "6 loss") == {"cpu:5": root} | others
    for device, rows in (("cpu:4", 2), ("cpu:7", 1)):
        others[device] = others[device] | {"output gradients": rows * ROW_OUT}
    assert at_the_end(memory, "7 scatter back") == {"cpu:5": root} | others
    reduced = at_the_end(memory, "8 reduce")
    mine = {"gradients": PHI, "received gradients": 2 * PHI}
    assert {k: reduced["cpu:5"].get(k) for k in mine} == mine
    for device in ("cpu:4", "cpu:7"):  # the copies of the parameters are gone
        assert reduced[device]["gradients"] == PHI
        assert "parameters" not in reduced[device]
    updated = at_the_end(memory, "8 optimizer")
    assert updated["cpu:5"] == state | mine | {"loss": 4}  # donated, not twice
    assert set(updated) == {"cpu:5"}


def test_outputs_and_loss_lie_on_the_output_device():
    memory = watched_step(
        linear, PARAMS, X, Y, optax.sgd(0.1), device_ids=IDS, output_device=6
    )
    assert at_the_end(memory, "6 loss")["cpu:6"] == {
        "targets": 5 * ROW_OUT,
        "received outputs": 5 * ROW_OUT,
        "output gradients": 5 * ROW_OUT,
        "loss": 4,
    }
    root = at_the_end(memory, "8 reduce")["cpu:5"]
    assert root["parameters"] == root["gradients"] == PHI
    assert root["received gradients"] == 2 * PHI
    assert not {"targets", "received outputs", "loss"} & set(root)


def test_the_root_holds_more_by_what_it_serves():
    assert jax.devices()[0].memory_stats() is None  # nothing here may need it
    rows = 32
    memory = watched_step(
        mlp,
        MLP,
        waves(8, 4),
        waves(8, 4, start=0.5),
        optax.adam(0.1),
        device_ids=range(4),
    )
    phi, adam = 200, 2 * 200 + 4

    def more(stage):
        held = at_the_end(memory, stage)
        root, *others = (held[f"cpu:{i}"] for i in range(4))
        assert others[0] == others[1] == others[2]
        kinds = {**root, **others[0]}
        by_kind = {k: root.get(k, 0) - others[0].get(k, 0) for k in kinds}
        return {kind: nbytes for kind, nbytes in by_kind.items() if nbytes}

    assert more("2 replicate") == {"optimizer state": adam, "targets": 4 * rows}
    gathered = {"received outputs": 4 * rows, "outputs": -rows}  # its own included
    served = {"optimizer state": adam, "targets": 4 * rows} | gathered
    assert more("5 gather") == served
    served |= {"loss": 4, "output gradients": 3 * rows}
    assert more("7 scatter back") == served
    after = more_at_the_reduction(memory)
    assert after["received gradients"] == 3 * phi
    assert after["optimizer state"] == adam
    assert after["parameters"] == phi


def more_at_the_reduction(memory):
    held = at_the_end(memory, "8 reduce")
    root, other = held["cpu:0"], held["cpu:1"]
    assert root["gradients"] == other["gradients"] == 200
    return {kind: n - other.get(kind, 0) for kind, n in root.items()}


def test_inference_holds_no_activations():
    model = jaxdp.DataParallel(mlp, MLP, device_ids=range(4))
    x = waves(8, 4)

    def kinds(run):
        with model.memory() as memory:
            run()
        return {kind for snapshot in memory.snapshots for kind in snapshot.kinds}

    inference = kinds(lambda: model(x))
    assert {"parameters", "batch", "outputs", "gathered outputs"} <= inference
    assert not {"activations", "gradients", "output gradients"} & inference
    training = kinds(
        lambda: jax.grad(lambda p: jnp.sum(model.apply(p, x)))(model.params)
    )
    assert {"activations", "gradients", "received gradients"} <= training


def others_of(memory, device):
    """What is not the step's own, at the first moment."""
    first = memory.snapshots[0]
    found = [
        each.kinds
        for each in memory.snapshots
        if (each.stage, each.what) == (first.stage, first.what)
        and each.device == device
    ]
    return found[0].get(OTHER, 0) if found else 0


def test_arrays_of_the_caller_are_other_arrays_and_count_once():
    model = jaxdp.DataParallel(linear, PARAMS, device_ids=IDS)

    def others():
        with model.memory() as memory:
            model(X)
        return np.array([others_of(memory, f"cpu:{i}") for i in (5, 2, 3)])

    before = others()
    devices = jax.devices()
    mine = jax.device_put(np.zeros(1000, "f"), devices[5])
    alias = jax.device_put(mine, devices[5])
    mesh = jax.sharding.Mesh(np.array(devices[2:4]), "data")
    spec = jax.sharding.PartitionSpec("data")
    split = jax.device_put(
        np.zeros(60, np.int16), jax.sharding.NamedSharding(mesh, spec)
    )
    keys = jax.device_put(jax.random.split(jax.random.key(0), 7), devices[2])
    assert (others() - before).tolist() == [4000, 60 + 7 * 8, 60]
    mine.delete()
    del alias, split, keys
    assert (others() - before).tolist() == [0, 0, 0]


def test_an_address_that_was_freed_means_nothing_later(monkeypatch):
    device = jax.devices()[4]
    made, alive = iter([[1], [2], []]), iter([[1], [2], [1, 2]])
    monkeypatch.setattr(
        memory_module,
        "_buffers",
        lambda arrays: [
            (address, device, 8 * address)
            for address in next(made if arrays == ["made"] else alive)
        ],
    )
    monkeypatch.setattr(memory_module.jax, "block_until_ready", lambda arrays: None)
    memory = memory_module.Memory()
    for what in ("first", "second", "third"):
        arrays: Any = ["made"]
        about = ("4 forward", what, 0, device, device, [])
        memory.see(Event(*about, {what: arrays}, None, 0.0))
    assert [snapshot.kinds for snapshot in memory.snapshots] == [
        {"first": 8},
        {"second": 16},
        {OTHER: 8, "second": 16},
    ]


def test_temporaries_count_where_and_while_a_program_runs(monkeypatch):
    monkeypatch.setattr(
        memory_module, "memory_of", lambda compiled: Needs(1, 2, 12345, 4)
    )
    model = jaxdp.DataParallel(linear, PARAMS, device_ids=IDS)
    with model.memory() as memory:
        model(X)
    needing = [s for s in memory.snapshots if TEMPORARY in s.kinds]
    assert [(s.stage, s.what, s.device) for s in needing] == [
        ("4 forward", "outputs", "cpu:5"),
        ("4 forward", "outputs", "cpu:4"),
        ("4 forward", "outputs", "cpu:7"),
        ("5 gather", "join", "cpu:5"),
    ]
    for snapshot in needing:
        assert snapshot.kinds[TEMPORARY] == 12345
        assert snapshot.nbytes == sum(snapshot.kinds.values()) > 12345


def test_programs_whose_needs_are_unknown_are_counted_without(monkeypatch):
    monkeypatch.setattr(memory_module, "memory_of", lambda compiled: None)
    model = jaxdp.DataParallel(linear, PARAMS, device_ids=IDS)
    with model.memory() as memory:
        model(X)
    assert not any(TEMPORARY in snapshot.kinds for snapshot in memory.snapshots)
    assert at_the_end(memory, "4 forward")["cpu:7"]["outputs"] == ROW_OUT


def test_needs_are_those_of_the_program():
    def apply_fn(w, x):
        return jnp.sin(x @ w) @ w  # what lies between is nobody's result

    w, x = waves(16, 16), waves(32, 16)
    model = jaxdp.DataParallel(apply_fn, w, device_ids=[4])
    with model.memory() as memory:
        model(x)
    needs = jax.jit(apply_fn).lower(w, x).compile().memory_analysis()
    forward = [s for s in memory.snapshots if s.stage == "4 forward"]
    found = {s.device: s.kinds.get(TEMPORARY, 0) for s in forward}
    assert needs is not None
    assert found["cpu:4"] == needs.temp_size_in_bytes >= 32 * 16 * 4


def test_peak_is_the_fullest_moment():
    memory = watched_step(linear, PARAMS, X, Y, optax.sgd(0.1), device_ids=IDS)
    peak = memory.peak("cpu:7")
    assert peak.device == "cpu:7"
    assert peak.nbytes == max(s.nbytes for s in memory.snapshots if s.device == "cpu:7")
    assert {"cpu:5", "cpu:4", "cpu:7"} <= set(memory.devices)
    with pytest.raises(ValueError) as error:
        memory.peak("cpu:99")
    message = str(error.value)
    assert message.startswith("Memory.peak got device='cpu:99'.")
    assert f"one of the {len(memory.devices)} devices" in message
    assert "'cpu:7'" in message
    assert "with model.memory() as memory:" in message


def test_rows_are_the_fullest_moments_in_mib():
    memory = watched_step(linear, PARAMS, X, Y, optax.sgd(0.1), device_ids=IDS)
    rows = memory.rows()
    (row,) = (r for r in rows if (r["stage"], r["device"]) == ("4 forward", "cpu:7"))
    assert row["parameters_mb"] == PHI / 2**20
    assert row["outputs_mb"] == ROW_OUT / 2**20
    assert row["received gradients_mb"] == 0
    parts = [v for k, v in row.items() if k.endswith("_mb") and k != "all_mb"]
    assert row["all_mb"] == pytest.approx(sum(parts))
    places = [(r["stage"], r["device"]) for r in rows]
    assert len(places) == len(set(places))
    for place, row in zip(places, rows, strict=True):
        fullest = max(
            s.nbytes for s in memory.snapshots if (s.stage, s.device) == place
        )
        assert row["all_mb"] == fullest / 2**20


def test_table_and_text_show_stage_device_and_sum():
    memory = watched_step(linear, PARAMS, X, Y, optax.sgd(0.1), device_ids=IDS)
    table = memory.table()
    assert [column.header for column in table.columns] == ["stage", "device", "all_mb"]
    assert table.row_count == len(memory.rows())
    text = " ".join(str(memory).split())
    assert text.startswith("Memory by stage and device, in MiB stage device all_mb")
    assert "8 optimizer" in text


def test_nothing_watched_is_nothing_held():
    model = jaxdp.DataParallel(linear, PARAMS, device_ids=IDS)
    with model.memory() as memory:
        pass
    model(X)
    assert memory.snapshots == memory.devices == memory.rows() == []
    assert memory.table().row_count == 0
    with pytest.raises(ValueError, match="one of the 0 devices"):
        memory.peak("cpu:0")


def test_memory_and_trace_watch_together():
    model = jaxdp.DataParallel(linear, PARAMS, device_ids=IDS)
    with model.trace() as trace, model.memory() as memory:
        model(X)
    seen = list(dict.fromkeys((s.stage, s.what) for s in memory.snapshots))
    assert seen == list(dict.fromkeys((r.stage, r.what) for r in trace.records))


class Cycle:
    """Frees its array only when garbage is collected."""

    def __init__(self):
        self.array = jax.device_put(waves(10**6), jax.devices()[5])
        self.own = self


def test_what_nobody_can_reach_is_freed_before_the_step():
    gc.collect()
    gc.disable()
    left = sum(
        shard.data.nbytes
        for array in jax.live_arrays()
        for shard in array.addressable_shards
        if shard.device.id == 5
    )
    try:
        Cycle()
        memory = watched_step(linear, PARAMS, X, Y, optax.sgd(0.1), device_ids=IDS)
    finally:
        gc.enable()
    assert memory.peak("cpu:5").kinds.get(OTHER, 0) < left + 10**6
