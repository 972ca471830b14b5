"""The cases AN-1 to AN-7: what readers of compiled programs have got wrong elsewhere.

Each has the input and the numbers of its report. Where CPUs differ from other
backends, real modules of those stand beside (`tests/modules.py`).
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdp
from jaxdp.program import analyze, traffic
from jaxdp.program.collective import CollectiveOp
from jaxdp.program.hlo.groups import parse_groups
from jaxdp.program.hlo.shapes import Array
from tests.modules import module_text
from tests.programs import DATA, RING, ROWS, data_mesh


def report_of(body, x, mesh=None, out_specs=DATA, **options):
    mapped = jax.shard_map(
        body,
        mesh=mesh or data_mesh(),
        in_specs=DATA,
        out_specs=out_specs,
        check_vma=False,
    )
    lowered = jax.jit(mapped).lower(x)
    return analyze(lowered.compile(compiler_options=options or None))


def gradient(w, x):
    return jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", 4),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", 2),
        ("[1,8]<=[8]", 8),
        ("{{0}}", 1),
    ],
)
def test_an_1_group_sizes_in_every_syntax(text, size):
    assert {len(group) for group in parse_groups(text)} == {size}


def test_an_1_groups_of_real_programs():
    partitioned = analyze(module_text("cpu-partitioned"))  # written as mesh axes
    assert "mesh['axis_0'=" in module_text("cpu-partitioned")
    assert {len(g) for g in partitioned.collectives[0].groups} == {4}
    (alone,) = report_of(
        partial(lax.psum, axis_name="data"), ROWS[:1], data_mesh((1,)), P()
    ).collectives
    assert alone.groups == ((0,),) and alone.rounds == 0
    single = report_of(
        partial(lax.psum, axis_name="data"), ROWS[:1], data_mesh((1,)), P()
    )
    assert single.sent_bytes == (0,) and single.link_bytes == {}
    with pytest.raises(ValueError, match=r"cannot read replica_groups='\{0,1\}'"):
        parse_groups("{0,1}")


@pytest.mark.parametrize(
    ("body", "factor"),
    [
        (lambda x: lax.psum(x, "data"), 14),
        (lambda x: lax.psum_scatter(x[0], "data", tiled=True), 7),
        (lambda x: lax.all_gather(x, "data", tiled=True), 7 * 8),
        (lambda x: lax.ppermute(x, "data", RING), 8),
    ],
    ids=["all_reduce", "reduce_scatter", "all_gather", "permute"],
)
@pytest.mark.parametrize(
    ("dtype", "wire", "itemsize"), [("bfloat16", "f32", 4), ("float16", "f16", 2)]
)
def test_an_2_the_type_on_the_wire(body, factor, dtype, wire, itemsize):
    x = jnp.ones((8, 16), dtype)
    mapped = jax.jit(
        jax.shard_map(
            body, mesh=data_mesh(), in_specs=DATA, out_specs=DATA, check_vma=False
        )
    )
    report = analyze(mapped.lower(x).compile(), mapped.trace(x))
    assert report.collectives[0].dtypes == (wire,)  # bfloat16 is widened on CPUs
    assert report.sent_bytes == (factor * 2 * itemsize,) * 8  # chunks of 2
    assert report.logical_sent_bytes == (factor * 2 * 2,) * 8


def test_an_2_our_ring_keeps_two_bytes_on_cpus_and_gpus():
    for name in ("cpu-bf16", "h100-bf16", "tpu-v6e-bf16"):
        ops = analyze(module_text(name)).collectives
        assert {"u16"} < {dtype for op in ops for dtype in op.dtypes} == {"u16", "f32"}


def two_sums(x, barrier=False):
    first = lax.psum(x[:, :8], "data")
    if barrier:
        first, x = lax.optimization_barrier((first, x))
    return first, lax.psum(x[:, 8:] * 2, "data")


@pytest.mark.parametrize("barrier", [False, True])
def test_an_3_combined_buckets_count_as_their_sum(barrier):
    body = partial(two_sums, barrier=barrier)
    merged = report_of(body, ROWS, out_specs=P())
    found = [str(array) for op in merged.collectives for array in op.arrays]
    assert found == ["f32[1,8]", "f32[1,8]"]
    # jax 0.10 merges them in spite of a barrier, 0.12 does not.
    assert len(merged.collectives) == 1 or barrier
    apart = report_of(
        body, ROWS, out_specs=P(), xla_disable_hlo_passes="cpu-all-reduce-combiner"
    )
    assert len(apart.collectives) == 2
    assert merged.sent_bytes == apart.sent_bytes == (2 * 14 * 4,) * 8


def test_an_3_the_partitioner_sums_three_gradients_at_once():
    mesh = data_mesh()

    def loss(params, x):
        hidden = jnp.tanh(x @ params["w"] + params["b"][None])
        return jnp.mean((hidden @ params["v"]) ** 2)

    params = {"w": np.ones((16, 8)), "b": np.ones(8), "v": np.ones((8, 1))}
    params = {key: value.astype(np.float32) for key, value in params.items()}
    place = partial(NamedSharding, mesh)
    step = jax.jit(
        jax.grad(loss),
        in_shardings=(place(P()), place(DATA)),
        out_shardings=place(P()),
    )
    report = analyze(step.lower(params, ROWS).compile())
    (op,) = report.collectives
    assert sorted(array.elements for array in op.arrays) == [8, 8, 128]
    assert report.sent_bytes == (14 * 4 * (1 + 1 + 16),) * 8


def test_an_4_seven_permutes_in_a_loop():
    for name in ("cpu-loop", "h100-loop", "tpu-v5e-loop"):
        assert analyze(module_text(name)).sent_bytes == (7 * 4096,) * 8
    report = report_of(
        lambda x: lax.fori_loop(0, 7, lambda _, b: lax.ppermute(b, "data", RING), x),
        ROWS,
    )
    assert report.sent_bytes == (7 * 64,) * 8 == (448,) * 8
    assert (len(report.collectives), report.permutes, report.rounds) == (1, 7, 7)


def test_an_4_gathers_of_layers_count_forward_and_backward():
    for name in ("cpu-layers", "h100-layers", "h100-layers-jax0.12", "tpu-v5e-layers"):
        assert analyze(module_text(name)).count("all-gather") == 5 + 5


@pytest.mark.parametrize(("inside", "count"), [(True, 4), (False, 1)])
def test_an_4_sums_of_four_microbatches(inside, count):
    def body(x):
        def microbatch(total, row):
            return total + (lax.psum(row, "data") if inside else row), None

        total = lax.scan(microbatch, x[0, :4] * 0, x.reshape(4, 4))[0]
        return total if inside else lax.psum(total, "data")

    report = report_of(body, ROWS, out_specs=P())
    assert report.count("all-reduce") == count
    assert report.sent_bytes == (count * 14 * 4,) * 8


def test_an_4_accumulation_sums_once():
    train = jaxdp.data_parallel(
        lambda params, batch: jnp.mean((batch @ params) ** 2),
        optax.sgd(0.1),
        jaxdp.data_mesh(8),
        jaxdp.NativeAllReduce(),
        accumulate=4,
    )
    state = train.init(np.ones((16, 1), np.float32))
    batch = np.ones((32, 16), np.float32)
    assert analyze(train.lower(state, batch).compile()).count("all-reduce") == 1


def test_an_5_a_shard_of_a_gradient_is_an_all_reduce_unless_it_is_asked_for():
    mesh = data_mesh()
    place = partial(NamedSharding, mesh)
    step = jax.jit(
        gradient,
        in_shardings=(place(P()), place(DATA)),
        out_shardings=place(DATA),
    )
    partitioned = analyze(step.lower(np.ones((16, 4), np.float32), ROWS).compile())
    assert [op.kind for op in partitioned.collectives] == ["all-reduce"]
    assert str(partitioned.collectives[0].arrays[0]) == "f32[4,16]"
    assert partitioned.sent_bytes == (14 * 8 * 4,) * 8

    def own_part(x):
        rank = lax.axis_index("data")
        return lax.dynamic_slice_in_dim(lax.psum(x, "data"), 2 * rank, 2, 1)

    sliced = report_of(own_part, ROWS)
    scattered = report_of(
        lambda x: lax.psum_scatter(x[0], "data", tiled=True)[None], ROWS
    )
    assert [op.kind for op in sliced.collectives] == ["all-reduce"]
    assert [op.kind for op in scattered.collectives] == ["reduce-scatter"]
    assert sliced.sent_bytes == (112,) * 8 and scattered.sent_bytes == (56,) * 8


def test_an_5_gpus_scatter_what_tpus_reduce_and_slice():
    gpu, tpu = (analyze(module_text(f"{t}-kinds")) for t in ("h100", "tpu-v5e"))
    assert (gpu.count("reduce-scatter"), gpu.count("all-reduce")) == (1, 1)
    assert (tpu.count("reduce-scatter"), tpu.count("all-reduce")) == (0, 2)


def test_an_6_donated_arguments_count_once():
    step = jax.jit(lambda w, x: (w - x.sum() * 2, x.sum()), donate_argnums=0)
    program = step.lower(np.ones(50, np.float32), np.ones(8, np.float32)).compile()
    memory = analyze(program).memory
    assert memory is not None
    assert (memory.argument_bytes, memory.aliased_bytes) == (200 + 32, 200)
    others = memory.output_bytes + memory.temporary_bytes
    assert memory.peak_bytes == 232 + others - 200
    assert jax.devices()[0].memory_stats() is None  # and is not asked


def test_an_6_text_has_no_memory():
    assert analyze(module_text("h100-loop")).memory is None


@pytest.mark.parametrize(
    ("kind", "shape", "sent", "factor"),
    [
        ("all-reduce", (16,), 112, 2 * 7 / 8),  # 64 bytes
        ("reduce-scatter", (16,), 56, 7 / 8),
        ("all-gather", (2,), 56, 7 / 8),  # of 16
        ("all-to-all", (16,), 56, 7 / 8),
        ("all-reduce", (3,), 56, 2 * 7 / 8),  # padded to 8 chunks, and not 21
    ],
)
def test_an_7_bytes_and_bandwidth_factors(kind, shape, sent, factor):
    op = CollectiveOp(kind, (Array("f32", shape, 32),), groups=(tuple(range(8)),))
    assert traffic.sent(op) == traffic.received(op) == dict.fromkeys(range(8), sent)
    assert op.bus_factor == factor
    assert op.rounds == (14 if kind == "all-reduce" else 7)
    alone = CollectiveOp(kind, op.arrays, groups=((0,),))
    assert traffic.sent(alone) == {0: 0} and alone.bus_factor == alone.rounds == 0
