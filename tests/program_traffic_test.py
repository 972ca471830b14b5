"""Bytes of really compiled programs, against numbers computed by hand.

Eight forced CPU devices. Cases are those of the collectives (sizes, groups, loops,
merged buckets) and of what XLA changes on the way (types, reduce-scatter).
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdp.program import analyze, traffic
from jaxdp.program.collective import CollectiveOp
from jaxdp.program.hlo.shapes import Array
from jaxdp.program.report import ProgramReport
from tests.programs import DATA, RING, ROWS, data_mesh


def compiled(body, *args, mesh=None, in_specs=DATA, out_specs=DATA):
    mesh = mesh or data_mesh()
    mapped = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    return jax.jit(mapped).lower(*args).compile()


def shift(x, pairs=None):
    return lax.ppermute(x, "data", pairs or RING)


def test_there_are_eight_devices():
    assert jax.device_count() == 8


@pytest.mark.parametrize(
    ("body", "x", "out_specs", "kind", "size", "sent"),
    [
        (lambda x: lax.psum(x, "data"), ROWS, P(), "all-reduce", 64, 112),
        (
            lambda x: lax.psum_scatter(x[0], "data", tiled=True),
            ROWS,
            P("data"),
            "reduce-scatter",
            64,
            56,
        ),
        (
            lambda x: lax.all_gather(x, "data", tiled=True),
            ROWS[0],
            P("data"),
            "all-gather",
            64,
            56,
        ),
        (
            lambda x: lax.all_to_all(x, "data", 1, 0, tiled=True),
            ROWS,
            P("data"),
            "all-to-all",
            64,
            56,
        ),
        (shift, ROWS, P("data"), "collective-permute", 64, 64),
        (lambda x: lax.psum(x[0, :3], "data"), ROWS, P(), "all-reduce", 12, 56),
        (lambda x: lax.psum(x[0, 0], "data"), ROWS, P(), "all-reduce", 4, 56),
    ],
    ids=[
        "all_reduce",
        "reduce_scatter",
        "all_gather",
        "all_to_all",
        "permute",
        "three_elements_padded_to_eight",
        "scalar_padded_to_eight",
    ],
)
def test_bytes_of_each_kind_on_eight_devices(body, x, out_specs, kind, size, sent):
    report = analyze(compiled(body, x, out_specs=out_specs))
    (op,) = report.collectives
    assert (op.kind, op.bytes, op.dtypes, op.count) == (kind, size, ("f32",), 1)
    assert report.devices == 8
    assert report.sent_bytes == report.received_bytes == (sent,) * 8


def test_one_device_keeps_its_all_reduce_and_sends_nothing():
    body = partial(lax.psum, axis_name="data")
    report = analyze(compiled(body, ROWS, mesh=data_mesh((1,)), out_specs=P()))
    assert report.count("all-reduce") == 1
    assert report.collectives[0].groups == ((0,),)
    assert report.sent_bytes == report.received_bytes == (0,)


def test_a_program_without_collectives():
    report = analyze(jax.jit(lambda x: x @ x.T).lower(ROWS).compile())
    assert (report.collectives, report.devices, report.sent_bytes) == ((), 1, (0,))
    assert report.link_bytes == {} and report.permutes == 0


@pytest.mark.parametrize(
    ("axis", "groups", "sent"),
    [
        ("host", ((0, 4), (1, 5), (2, 6), (3, 7)), 64),
        ("data", ((0, 1, 2, 3), (4, 5, 6, 7)), 96),
        (("host", "data"), (tuple(range(8)),), 112),
    ],
    ids=["host", "data", "both"],
)
def test_groups_of_a_two_axis_mesh(axis, groups, sent):
    mesh = data_mesh((2, 4), ("host", "data"))
    body = partial(lax.psum, axis_name=axis)
    spec = P(("host", "data"))
    rest = tuple(name for name in ("host", "data") if name not in axis)
    program = compiled(body, ROWS, mesh=mesh, in_specs=spec, out_specs=P(rest or None))
    report = analyze(program)
    assert report.collectives[0].groups == groups
    assert report.sent_bytes == (sent,) * 8


def test_groups_of_the_partitioner_on_a_two_axis_mesh():
    mesh = data_mesh((2, 4), ("host", "data"))

    def loss(w, x):
        return jnp.sum((x @ w) ** 2)

    step = jax.jit(
        jax.grad(loss),
        in_shardings=(NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))),
        out_shardings=NamedSharding(mesh, P()),
    )
    report = analyze(step.lower(np.ones((16, 4), np.float32), ROWS).compile())
    (op,) = report.collectives
    assert op.groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    # 4 x 16 float32 in groups of 4: 2 * 3 / 4 * 256 bytes.
    assert (op.bytes, report.sent_bytes) == (256, (384,) * 8)


def test_devices_are_numbered_by_mesh_position():
    auto = (jax.sharding.AxisType.Auto,)
    backwards = jax.sharding.Mesh(jax.devices()[::-1], ("data",), axis_types=auto)
    body = partial(shift, pairs=[(0, 1)])
    x = jax.device_put(ROWS, NamedSharding(backwards, P("data")))
    report = analyze(compiled(body, x, mesh=backwards))
    assert report.link_bytes == {(0, 1): 64}


def test_a_permute_is_counted_pair_by_pair():
    def body(x):
        x = shift(x, [(0, 0), (1, 2), (3, 4)])
        return shift(x[:, :4], [(1, 2), (2, 0)])

    report = analyze(compiled(body, ROWS))
    assert report.link_bytes == {(1, 2): 80, (3, 4): 64, (2, 0): 16}
    assert report.sent_bytes == (0, 80, 16, 64, 0, 0, 0, 0)
    assert report.received_bytes == (16, 0, 80, 0, 64, 0, 0, 0)
    assert report.collectives[0].pairs == ((0, 0), (1, 2), (3, 4))


def test_who_sends_to_whom_in_kinds_without_pairs_is_a_model():
    def links(kind, *groups):
        return traffic.links(CollectiveOp(kind, (Array("f32", (6,), 32),), groups))

    ring = {(0, 2): 32, (2, 1): 32, (1, 0): 32}  # 4 chunks of 2 elements, in its order
    assert links("all-reduce", (0, 2, 1)) == ring
    assert links("reduce-scatter", (0, 1), (3, 2)) == dict.fromkeys(
        [(0, 1), (1, 0), (3, 2), (2, 3)], 12
    )
    assert links("all-gather", (5, 4)) == {(5, 4): 24, (4, 5): 24}
    everybody = [(a, b) for a in range(3) for b in range(3) if a != b]
    assert links("all-to-all", (0, 1, 2)) == dict.fromkeys(everybody, 8)
    assert links("collective-broadcast", (1, 0, 2)) == {(1, 0): 24, (0, 2): 24}
    assert links("all-reduce", (7,)) == {}


def test_a_loop_of_seven_permutes_sends_448_bytes():
    def body(x):
        return lax.fori_loop(0, 7, lambda _, block: shift(block), x)

    report = analyze(compiled(body, ROWS))
    assert report.static_count("collective-permute") == 1
    assert report.collectives[0].count == report.permutes == 7
    assert report.sent_bytes == report.received_bytes == (448,) * 8
    assert report.link_bytes == dict.fromkeys(RING, 448)


def test_gathers_in_a_scan_over_layers_count_forward_and_backward():
    def loss(layers, x):
        @jax.checkpoint
        def layer(x, w):
            return jnp.tanh(x @ lax.all_gather(w, "data", tiled=True)), None

        return lax.psum(lax.scan(layer, x, layers)[0].sum(), "data")

    mapped = jax.shard_map(
        loss,
        mesh=data_mesh(),
        in_specs=(P(None, "data"), P("data")),
        out_specs=P(),
    )
    layers = np.ones((5, 16, 16), np.float32)
    report = analyze(jax.jit(jax.grad(mapped)).lower(layers, ROWS).compile())
    assert report.static_count("all-gather") == 2
    assert report.count("all-gather") == 10
    assert report.count("reduce-scatter") == 5
    # Each is 7 / 8 of a 16 x 16 float32 matrix.
    assert report.sent_bytes == (15 * 896,) * 8


def sum_in_the_loop(x):
    def microbatch(total, row):
        return total + lax.psum(row, "data"), None

    return lax.scan(microbatch, jnp.zeros(4), x.reshape(4, 4))[0]


def sum_after_the_loop(x):
    def microbatch(total, row):
        return total + row, None

    return lax.psum(lax.scan(microbatch, x[0, :4] * 0, x.reshape(4, 4))[0], "data")


@pytest.mark.parametrize(
    ("body", "count", "sent"),
    [(sum_in_the_loop, 4, 4 * 56), (sum_after_the_loop, 1, 56)],
    ids=["in_the_loop", "after_the_loop"],
)
def test_all_reduces_of_four_microbatches(body, count, sent):
    report = analyze(compiled(body, ROWS, out_specs=P()))
    assert report.count("all-reduce") == count
    assert report.sent_bytes == (sent,) * 8  # 4 float32, padded to 8


def test_merged_buckets_count_as_their_sum():
    def body(x):
        first = lax.psum(x[:, :8], "data")
        second = lax.psum(x[:, 8:] * 2, "data")
        return first, second

    report = analyze(compiled(body, ROWS, out_specs=P()))
    (op,) = report.collectives
    assert [str(array) for array in op.arrays] == ["f32[1,8]", "f32[1,8]"]
    assert (op.bytes, report.sent_bytes) == (64, (112,) * 8)
    assert "2x f32[1,8]" in str(report)


def test_the_larger_branch_counts():
    def body(x):
        def half(x):
            return shift(x[:, :8]).repeat(2, axis=1)

        return lax.cond(x[0, 0] > 3, shift, half, x)

    report = analyze(compiled(body, ROWS))
    assert [op.conditional for op in report.collectives] == [True, True]
    assert report.permutes == 1
    assert report.sent_bytes == report.received_bytes == (64,) * 8


def test_a_loop_of_unknown_length_is_refused():
    def body(x):
        return lax.while_loop(lambda x: x.sum() < 3, shift, x)

    with pytest.raises(ValueError, match=r"how often the loop '[^']+' runs.*while\("):
        analyze(compiled(body, ROWS))


def test_pmap():
    program = jax.pmap(partial(lax.psum, axis_name="data"), axis_name="data")
    report = analyze(program.lower(ROWS[:4]).compile())
    assert (report.devices, report.sent_bytes) == (4, (96,) * 4)


def test_the_partitioner_on_cpu_keeps_an_all_reduce_where_a_shard_is_asked_for():
    mesh = data_mesh()

    def loss(w, x):
        return jnp.sum((x @ w) ** 2)

    step = jax.jit(
        jax.grad(loss),
        in_shardings=(NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))),
        out_shardings=NamedSharding(mesh, P("data")),
    )
    report = analyze(step.lower(np.ones((16, 4), np.float32), ROWS).compile())
    assert report.count("all-reduce") == 1 and report.count("reduce-scatter") == 0
    assert report.sent_bytes == (448,) * 8


def test_memory_counts_donated_arguments_once():
    step = jax.jit(lambda w, x: (w - x.sum() * 2, x.sum()), donate_argnums=0)
    program = step.lower(np.ones(50, np.float32), np.ones(8, np.float32)).compile()
    memory = analyze(program).memory
    assert memory is not None
    assert (memory.argument_bytes, memory.aliased_bytes) == (232, 200)
    outputs, temporaries = memory.output_bytes, memory.temporary_bytes
    assert memory.peak_bytes == 232 + outputs + temporaries - 200


def test_text_says_the_same_as_the_program_but_nothing_of_memory():
    program = compiled(shift, ROWS)
    from_text = analyze(program.as_text())
    assert from_text.collectives == analyze(program).collectives
    assert from_text.memory is None


def test_a_backend_without_memory_figures(monkeypatch):
    program = compiled(shift, ROWS)
    monkeypatch.setattr(jax.stages.Compiled, "memory_analysis", lambda self: None)
    assert analyze(program).memory is None


def test_operations_say_where_they_come_from():
    (op,) = analyze(compiled(shift, ROWS)).collectives
    assert op.op_name.endswith("/ppermute")
    file, _, line = op.source.rpartition(":")
    assert file.endswith("program_traffic_test.py") and line.isdigit()


def test_the_summary_is_a_table():
    report = analyze(compiled(partial(shift, pairs=[(0, 1), (1, 2)]), ROWS))
    lines = str(report).splitlines()
    assert lines[0] == "1 collective on 8 devices"
    assert lines[1].split() == [
        *("kind", "dtype", "arrays", "bytes", "count", "between", "from")
    ]
    assert lines[2].split()[:7] == [
        "collective-permute",
        "f32",
        "f32[1,16]",
        "64",
        "1",
        "2",
        "pairs",
    ]
    assert lines[3] == "sent      0 to 64 B, the most by device 0"
    assert isinstance(report, ProgramReport) and "written" not in str(report)
