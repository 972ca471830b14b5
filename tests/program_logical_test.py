"""The traced program: bytes as written, next to bytes as compiled."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.lax import parallel
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P

from jaxdp.program import analyze, logical
from tests.programs import DATA, RING, ROWS, data_mesh


def report_of(body, x: Any = ROWS, mesh=None, spec=DATA):
    # The outputs of bodies here are not checked for replication: only bytes matter.
    mapped = jax.jit(
        jax.shard_map(
            body,
            mesh=mesh or data_mesh(),
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
    )
    traced = mapped.trace(x)
    return analyze(traced.lower().compile(), traced)


def psum(x):
    return lax.psum(x, "data")


def psum_scatter(x):
    return lax.psum_scatter(x, "data", scatter_dimension=1, tiled=True)


def all_gather(x):
    return lax.all_gather(x, "data", tiled=True)


def all_to_all(x):
    return lax.all_to_all(x, "data", 1, 0, tiled=True)


def shift(x):
    return lax.ppermute(x, "data", RING)


@pytest.mark.parametrize(
    ("body", "as_float32"),
    [
        (psum, 112),
        (partial(lax.pmax, axis_name="data"), 112),
        (psum_scatter, 56),
        (all_gather, 448),
        (all_to_all, 56),
        (shift, 64),
    ],
    ids=["psum", "pmax", "psum_scatter", "all_gather", "all_to_all", "ppermute"],
)
def test_written_bytes_follow_the_written_type(body, as_float32):
    report = report_of(body)
    assert report.logical_sent_bytes == report.sent_bytes == (as_float32,) * 8
    half = report_of(body, ROWS.astype(np.float16))
    assert half.logical_sent_bytes == (as_float32 // 2,) * 8


@pytest.mark.parametrize(
    "body",
    [psum, psum_scatter, all_gather, shift],
    ids=["psum", "psum_scatter", "all_gather", "ppermute"],
)
def test_bfloat16_is_written_and_float32_is_sent_on_cpu(body):
    report = report_of(body, ROWS.astype(jnp.bfloat16))
    assert report.logical_collectives is not None
    assert report.logical_collectives[0].dtypes == ("bf16",)
    assert report.collectives[0].dtypes == ("f32",)
    assert report.logical_sent_bytes is not None
    assert report.sent_bytes == tuple(2 * sent for sent in report.logical_sent_bytes)
    assert f"written   {report.logical_sent_bytes[0]} B by every device" in str(report)


@pytest.mark.parametrize(
    ("dtype", "sent"), [("float16", "f16"), ("complex64", "c64"), ("int32", "s32")]
)
def test_other_types_are_sent_as_written(dtype, sent):
    report = report_of(psum, ROWS.astype(dtype))
    assert report.logical_collectives is not None
    assert report.logical_collectives[0].dtypes == (sent,)
    assert report.collectives[0].dtypes == (sent,)


@pytest.mark.parametrize(
    ("dtype", "name", "size"),
    [
        (jnp.bfloat16, "bf16", 2),
        (jnp.float8_e4m3fn, "f8e4m3fn", 1),
        (jnp.uint8, "u8", 1),
        (jnp.bool_, "pred", 1),
    ],
)
def test_names_of_element_types(dtype, name, size):
    report = report_of(shift, jnp.ones((8, 3), dtype))
    assert report.logical_collectives is not None
    (array,) = report.logical_collectives[0].arrays
    assert (str(array), array.bytes) == (f"{name}[1,3]", 3 * size)


def test_collectives_that_xla_merges_are_written_apart():
    report = report_of(lambda x: psum(x[:, :8]) + psum(x[:, 8:] * 2))
    assert report.logical_collectives is not None
    assert [op.bytes for op in report.logical_collectives] == [32, 32]
    assert report.static_count("all-reduce") == 1
    assert report.logical_sent_bytes == report.sent_bytes == (112,) * 8


@pytest.mark.parametrize(
    ("axis", "groups"),
    [
        ("host", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("data", ((0, 1, 2, 3), (4, 5, 6, 7))),
        (("host", "data"), ((0, 1, 2, 3, 4, 5, 6, 7),)),
    ],
    ids=["host", "data", "both"],
)
def test_groups_and_pairs_agree_with_the_compiled_program(axis, groups):
    mesh, spec = data_mesh((2, 4), ("host", "data")), P(("host", "data"))
    gather = partial(lax.all_gather, axis_name=axis, tiled=True)
    report = report_of(gather, mesh=mesh, spec=spec)
    assert report.logical_collectives is not None
    assert report.logical_collectives[0].groups == groups
    assert report.collectives[0].groups == groups
    move = partial(lax.ppermute, axis_name=axis, perm=[(0, 1)])
    report = report_of(move, mesh=mesh, spec=spec)
    assert report.logical_collectives is not None
    assert report.logical_collectives[0].pairs == tuple(g[:2] for g in groups)
    assert report.collectives[0].pairs == tuple(g[:2] for g in groups)
    assert report.logical_sent_bytes == report.sent_bytes


def test_a_group_follows_the_order_of_the_axes():
    mesh, spec = data_mesh((2, 4), ("host", "data")), P(("host", "data"))
    gather = partial(lax.all_gather, axis_name=("data", "host"), tiled=True)
    report = report_of(gather, mesh=mesh, spec=spec)
    assert report.logical_collectives is not None
    assert report.logical_collectives[0].groups == ((0, 4, 1, 5, 2, 6, 3, 7),)
    assert report.collectives[0].groups == ((0, 4, 1, 5, 2, 6, 3, 7),)


def test_groups_of_indices_along_an_axis():
    indices = [[0, 3], [1, 2], [4, 7], [5, 6]]
    report = report_of(lambda x: lax.psum(x, "data", axis_index_groups=indices))
    assert report.logical_collectives is not None
    assert report.logical_collectives[0].groups == tuple(map(tuple, indices))
    assert report.logical_sent_bytes == report.sent_bytes == (64,) * 8


def test_loops_branches_and_nested_functions():
    @jax.custom_vjp
    def twice(x):
        return shift(shift(x))

    twice.defvjp(lambda x: (twice(x), None), lambda _, g: (g,))

    def body(x):
        def layer(x, _):
            x = jax.jit(twice)(x)
            return jax.checkpoint(lambda x: shift(jnp.sin(x)))(x), None

        x, _ = lax.scan(layer, x, None, length=5)
        x = lax.fori_loop(0, 7, lambda _, x: shift(x), x)
        small = lambda x: x.at[:, :8].set(shift(x[:, :8]))  # noqa: E731
        return lax.cond(x[0, 0] > 0, small, lambda x: shift(shift(x)), x)

    report = report_of(body)
    assert report.logical_collectives is not None
    counts = [op.count for op in report.logical_collectives]
    assert counts == [5, 5, 5, 7, 1, 1, 1]
    assert [op.conditional for op in report.logical_collectives] == [False] * 4 + [
        True
    ] * 3
    # 15 in the scan, 7 in the loop, and the larger branch has two of a whole row.
    assert report.logical_sent_bytes == (24 * 64,) * 8
    assert report.sent_bytes == report.logical_sent_bytes


def test_pmap():
    mapped = jax.pmap(psum, axis_name="data")
    program = mapped.lower(ROWS[:4]).compile()
    report = analyze(program, jax.make_jaxpr(mapped)(ROWS[:4]))
    assert report.logical_sent_bytes == report.sent_bytes == (96,) * 4


def test_without_the_traced_program_there_are_no_written_bytes():
    report = analyze(jax.jit(jnp.sin).lower(1.0).compile())
    assert report.logical_sent_bytes is None and report.logical_collectives is None


def test_what_the_partitioner_adds_is_not_written():
    traced = jax.jit(jnp.sin).trace(1.0)
    report = analyze(traced.lower().compile(), traced)
    assert report.logical_sent_bytes == (0,)


def test_a_broadcast_starts_at_its_source():
    def body(x):
        # A tuple, because jax 0.10 and 0.12 take a bare name apart into letters.
        return lax.pbroadcast(x, ("data",), 3)

    mapped = jax.shard_map(body, mesh=data_mesh(), in_specs=DATA, out_specs=DATA)
    (op,) = logical.collectives(jax.make_jaxpr(mapped)(ROWS), 8)
    assert op.groups == ((3, 0, 1, 2, 4, 5, 6, 7),)


def test_a_loop_of_unknown_length_is_refused():
    def body(x):
        return lax.while_loop(lambda x: x.sum() < 3, shift, x)

    mapped = jax.shard_map(body, mesh=data_mesh(), in_specs=DATA, out_specs=DATA)
    with pytest.raises(ValueError, match=r"while_loop .* contains 'ppermute'"):
        logical.collectives(jax.make_jaxpr(mapped)(ROWS), 8)


def test_a_collective_whose_bytes_are_not_static_is_refused():
    def body(x, sizes):
        one = sizes[0]
        return lax.ragged_all_to_all(x, x, one, one, one, one, axis_name="data")

    mapped = jax.shard_map(body, mesh=data_mesh(), in_specs=DATA, out_specs=DATA)
    sizes = np.ones((8, 8), np.int32)
    jaxpr = jax.make_jaxpr(mapped)(ROWS.reshape(-1), sizes)
    with pytest.raises(ValueError, match="primitive 'ragged_all_to_all'"):
        logical.collectives(jaxpr, 8)


def test_a_trace_of_another_mesh_is_refused():
    def traced(devices):
        mesh = data_mesh((devices,))
        mapped = jax.shard_map(all_gather, mesh=mesh, in_specs=DATA, out_specs=DATA)
        return jax.jit(mapped).trace(ROWS)

    with pytest.raises(ValueError, match=r"mesh of 4 devices, .*compiled one for 8"):
        analyze(traced(8).lower().compile(), traced(4))


def test_a_body_without_its_mesh_is_refused():
    inner = jax.make_jaxpr(psum, axis_env=[("data", 8)])(ROWS[0])
    with pytest.raises(ValueError, match=r"over \['data'\], which no mesh around it"):
        logical.collectives(inner, 8)


def test_what_is_not_traced_is_refused():
    program = jax.jit(jnp.sin).lower(1.0).compile()
    with pytest.raises(TypeError, match=r"traced=Compiled.*jax\.stages.Traced"):
        analyze(program, program)


# They carry an axis name and move nothing, or end what a start began.
SILENT = {"axis_index", "preduced", "vary_unreduced_cast", "vary_unreduced_cast_p"}


def test_every_collective_primitive_of_this_jax_is_known():
    # Reads a private module: jax lists its collectives nowhere else, and an unknown
    # one would be missing from the report without a word.
    primitives = [p for p in vars(parallel).values() if isinstance(p, Primitive)]
    names = {p.name.removesuffix("_start") for p in primitives}
    names = {name for name in names if not name.endswith("_done")}
    assert names <= SILENT | set(logical.KIND_OF) | set(logical.REFUSED)
    assert len(names) > 10
