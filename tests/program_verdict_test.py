"""Did the compiler keep the design? Programs where it did, and where it did not."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdp
from jaxdp import targets
from jaxdp.compression import Bf16
from jaxdp.program.collective import CollectiveOp
from jaxdp.program.hlo import parse
from jaxdp.program.hlo.shapes import Array
from jaxdp.program.verdict import compare
from jaxdp.program.verdict.changes import find
from jaxdp.program.verdict.distance import distances
from tests.compilers import needs_compiler
from tests.contract import waves
from tests.modules import module_text
from tests.programs import DATA, data_mesh

DEVICES, WIDTH = 4, 16
LAYER = WIDTH * WIDTH * 4 / 2**20  # MiB: one bucket per layer
PARAMS = {name: waves(WIDTH, WIDTH, start=ord(name)) for name in "abcdef"}
ROWS = waves(4 * DEVICES, WIDTH, start=0.4)
BUCKETS = 1 + len(PARAMS)  # the loss, and a layer each
RING = functools.partial(jaxdp.RingAllReduce, LAYER, first_bucket_mb=None)
NATIVE = functools.partial(jaxdp.NativeAllReduce, LAYER, first_bucket_mb=None)


def loss_fn(params, x):
    for w in params.values():
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def training(design, devices=DEVICES, loss_fn=loss_fn):
    mesh = jaxdp.data_mesh(devices)
    return jaxdp.data_parallel(loss_fn, optax.adam(0.1), mesh, design)


def compiled(train, rows=ROWS, **options):
    lowered = train.lower(train.init(PARAMS), rows)
    return lowered.compile(compiler_options=options)


@functools.cache
def step_of(design, devices=DEVICES):
    """A training, and the report of its step."""
    train = training(design, devices)
    return train, jaxdp.analyze(compiled(train))


def verdict_of(design):
    train, report = step_of(design)
    return report.verify(train)


def kinds(verdict):
    return [finding.kind for finding in verdict.findings]


@pytest.mark.parametrize(
    ("design", "buckets"),
    [
        pytest.param(RING(), BUCKETS, id="ring"),
        pytest.param(jaxdp.RingAllReduce(), 1, id="ring-one-bucket"),
        pytest.param(RING(compression=Bf16()), BUCKETS, id="bf16"),
        pytest.param(jaxdp.AllReduce("recursive_doubling"), 1, id="doubling"),
        pytest.param(NATIVE(), BUCKETS, id="native"),
        pytest.param(jaxdp.GatherToRoot(), 0, id="root"),
        pytest.param(jaxdp.ParameterServer(2), 0, id="server"),
        # The loss; gradients before the fourth step; parameters after it.
        pytest.param(
            jaxdp.LocalSGD(2, start_step=4, bucket_cap_mb=LAYER), 1 + 6 + 6, id="local"
        ),
    ],
)
def test_every_design_is_kept(design, buckets):
    verdict = verdict_of(design)
    assert verdict.kept
    assert verdict.findings == ()
    assert verdict.buckets_found == verdict.buckets_asked == buckets
    assert verdict.written == len(verdict.distances) > 0


def test_buckets_are_those_of_the_training():
    train, report = step_of(RING())
    verdict = report.verify(train)
    assert tuple(b.contents for b in verdict.buckets) == train.buckets(PARAMS, ROWS)
    assert [b.name for b in verdict.buckets] == [f"bucket_{i}" for i in range(1, 8)]
    assert {b.collectives for b in verdict.buckets} == {2 * (DEVICES - 1)}
    text = str(verdict).splitlines()
    assert text[0] == "kept: 7 of 7 buckets travel as they were written"
    assert text[2] == "found   bucket_2, 6 collectives, 1024 B float32: params['f']"
    assert text[-1].startswith("collective-permute: 42 of 42 block; at most 0 kernels")


def test_native_without_a_cap_is_merged_as_it_allows():
    verdict = verdict_of(jaxdp.NativeAllReduce())
    (merged,) = verdict.findings
    assert (merged.kind, merged.broken) == ("merged", False)
    assert len(merged.written) == BUCKETS
    assert [len(op.arrays) for op in merged.found] == [BUCKETS]
    assert verdict.kept
    assert (verdict.buckets_asked, verdict.buckets_found) == (BUCKETS, 0)
    assert "the design leaves the others to XLA" in str(verdict)


def test_native_with_a_cap_and_the_combiner_left_on_is_not_kept():
    train = training(NATIVE())
    report = jaxdp.analyze(compiled(train, xla_disable_hlo_passes=""))
    verdict = report.verify(train)
    (merged,) = verdict.findings
    assert (merged.kind, merged.broken) == ("merged", True)
    assert not verdict.kept
    assert (verdict.buckets_asked, verdict.buckets_found) == (BUCKETS, 0)
    assert "not kept: 0 of 7 buckets" in str(verdict)
    # 6 layers of 1024 bytes and a loss of 4, before and after.
    assert "6148 bytes, travel as 1 all-reduce, 6148 bytes" in merged.text


@pytest.mark.parametrize("abstract", [False, True], ids=["arrays", "shapes"])
def test_the_step_as_it_is_traced(abstract):
    train, report = step_of(NATIVE())
    rows = jax.ShapeDtypeStruct(ROWS.shape, ROWS.dtype) if abstract else ROWS
    traced = train.trace(train.init(PARAMS), rows)
    text = traced.lower().compile().as_text()
    assert text is not None
    both = jaxdp.analyze(text, traced)
    assert both.logical_collectives is not None
    names = [op.op_name for op in both.logical_collectives]
    assert names == [f"exchange/bucket_{i}" for i in range(1, 8)]
    assert both.sent_bytes == both.logical_sent_bytes == report.sent_bytes
    assert compare(both).kept


def test_another_number_of_devices_than_the_training_has():
    _, report = step_of(RING())
    verdict = report.verify(training(RING(), devices=1))
    assert verdict.kept
    assert verdict.written == BUCKETS * 2 * (DEVICES - 1)
    assert verdict.buckets[1].contents is not None


def test_text_with_shapes():
    train = training(NATIVE(), devices=2)
    program = compiled(train)
    shapes = jax.ShapeDtypeStruct(ROWS.shape, ROWS.dtype)
    verdict = jaxdp.analyze(program.as_text()).verify(train, PARAMS, shapes)
    assert verdict == jaxdp.analyze(program).verify(train)
    assert verdict.written == BUCKETS


def test_one_device_sends_nothing():
    train = training(RING(), devices=1)
    verdict = jaxdp.analyze(compiled(train)).verify(train)
    assert verdict.kept and verdict.buckets == () == verdict.findings
    assert str(verdict) == "kept: nothing was written to be sent, and nothing is"


def test_collectives_of_the_loss_are_no_part_of_the_design():
    """XLA may merge them; they are told of."""

    def loss(params, x):
        first = lax.psum(jnp.sum(x), "data")
        second = lax.psum(jnp.max(x), "data")
        return jnp.mean((x @ params["a"]) ** 2) + lax.stop_gradient(first * second)

    train = training(RING(), loss_fn=loss)
    verdict = jaxdp.analyze(compiled(train)).verify(train)
    assert kinds(verdict) == ["merged"]
    assert verdict.kept


def report_of(body, *args, **options):
    """A function on eight devices: what was written, and what was compiled."""
    mapped = jax.shard_map(
        body, mesh=data_mesh(), in_specs=DATA, out_specs=DATA, check_vma=False
    )
    traced = jax.jit(mapped).trace(*args)
    return jaxdp.analyze(traced.lower().compile(compiler_options=options), traced)


WIDE = np.arange(8 * 16, dtype=np.float32).reshape(8, 16)


@pytest.mark.parametrize("barrier", [False, True], ids=["plain", "barrier"])
def test_two_sums_travel_as_one(barrier):
    """AN-3."""

    def body(x, y):
        total = lax.psum(x, "data")
        if barrier:
            total, y = lax.optimization_barrier((total, y))
        return total, lax.psum(y, "data")

    report = report_of(body, WIDE[:, :8], WIDE[:, 8:])
    verdict = compare(report)
    if barrier and report.count("all-reduce") == 2:  # as on jax 0.12
        assert verdict.kept and not verdict.findings
        return
    assert not verdict.kept
    (merged,) = verdict.findings
    assert (merged.kind, len(merged.written), len(merged.found)) == ("merged", 2, 1)
    assert sum(a.bytes for op in merged.found for a in op.arrays) == 2 * 8 * 4


def test_the_sum_of_a_tree_is_cut_into_its_leaves():
    report = report_of(
        lambda x, y: lax.psum((x, y), "data"),
        *(WIDE[:, :8], WIDE[:, 8:]),
        xla_disable_hlo_passes="cpu-all-reduce-combiner",
    )
    written = [CollectiveOp("all-reduce", _arrays(8, 8), groups=EVERYBODY)]
    (split,) = compare(report, written).findings
    assert (split.kind, len(split.found)) == ("split", 2)


def test_a_sum_of_which_each_takes_its_part_is_no_reduce_scatter():
    """AN-5: against a reduce-scatter that was meant, bytes double."""

    def body(x):
        total = lax.psum(x[0], "data")
        return lax.dynamic_slice_in_dim(total, 2 * lax.axis_index("data"), 2)

    report = report_of(body, WIDE)
    meant = report_of(lambda x: lax.psum_scatter(x[0], "data", tiled=True), WIDE)
    assert compare(meant).kept and not compare(meant).findings
    verdict = compare(report, meant.logical_collectives)
    (replaced,) = verdict.findings
    assert not verdict.kept
    assert (replaced.kind, replaced.found[0].kind) == ("replaced", "all-reduce")
    assert report.sent_bytes == tuple(2 * sent for sent in meant.sent_bytes)
    assert "1 reduce-scatter, 64 bytes, became 1 all-reduce, 64 bytes" in str(verdict)


def test_what_the_partitioner_adds_was_written_by_nobody():
    """AN-5: a gradient with a sharded result is all-reduced whole."""
    mesh = data_mesh()
    rows, part = NamedSharding(mesh, P("data")), NamedSharding(mesh, P(None, "data"))

    def gradient(w, x):
        return jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    step = jax.jit(
        gradient, in_shardings=(NamedSharding(mesh, P()), rows), out_shardings=part
    )
    traced = step.trace(np.ones((4, 16), np.float32), np.ones((8, 4), np.float32))
    report = jaxdp.analyze(traced.lower().compile(), traced)
    verdict = compare(report)
    assert kinds(verdict) == ["added"]
    assert verdict.findings[0].found[0].kind == "all-reduce"
    meant = [CollectiveOp("reduce-scatter", _arrays(64), groups=EVERYBODY)]
    assert kinds(compare(report, meant)) == ["replaced"]


def test_bf16_travels_as_float32_on_cpu():
    """AN-2."""
    verdict = compare(report_of(lambda x: lax.psum(x, "data"), jnp.bfloat16(WIDE)))
    (retyped,) = verdict.findings
    assert (retyped.kind, verdict.kept) == ("retyped", False)
    assert retyped.text.endswith("written as bf16 travel as f32: 64 bytes for 32")


def test_bits_of_the_same_width_are_no_change():
    report = report_of(
        lambda x: lax.ppermute(
            lax.bitcast_convert_type(x, jnp.uint16), "data", [(0, 1)]
        ),
        jnp.bfloat16(WIDE),
    )
    meant = [CollectiveOp("collective-permute", _arrays(16, dtype="bf16", bits=16),
                          pairs=((0, 1),))]  # fmt: skip
    assert compare(report, meant).findings == ()


def test_a_result_that_nobody_reads_is_missing():
    def body(x):
        return x + 0 * lax.psum(x, "data").astype(jnp.int32).astype(x.dtype)

    def unread(x):
        lax.psum(x, "data")
        return x

    report = report_of(unread, WIDE)
    written = report.logical_collectives
    assert written is not None and len(written) == 1
    assert kinds(compare(report)) == ["missing"]
    assert kinds(compare(report_of(body, WIDE))) == []


def test_a_loop_is_the_same_as_its_rounds():
    ring = [(i, (i + 1) % 8) for i in range(8)]

    def rolled(x):
        return lax.fori_loop(0, 7, lambda _, x: lax.ppermute(x, "data", ring) + 1, x)

    def unrolled(x):
        for _ in range(7):
            x = lax.ppermute(x, "data", ring) + 1
        return x

    loop, rounds = report_of(rolled, WIDE), report_of(unrolled, WIDE)
    assert compare(loop).findings == compare(rounds).findings == ()
    assert compare(loop, rounds.logical_collectives).findings == ()
    written = rounds.logical_collectives
    assert written is not None
    assert kinds(compare(loop, written[:6])) == ["added"]


EVERYBODY = (tuple(range(8)),)
RING_PAIRS = tuple((i, (i + 1) % 8) for i in range(8))


def _arrays(*sizes, dtype="f32", bits=32):
    return tuple(Array(dtype, (size,), bits) for size in sizes)


def op(kind, *sizes, groups=EVERYBODY, pairs=(), **fields):
    groups = () if pairs else groups
    return CollectiveOp(kind, _arrays(*sizes), groups, pairs, **fields)


def bucket(number, *sizes, **fields):
    name = f"jit(_step)/shard_map/exchange/bucket_{number}/psum"
    return op("all-reduce", *sizes, op_name=name, **fields)


@pytest.mark.parametrize(
    ("written", "found", "expected"),
    [
        pytest.param(
            [op("all-reduce", 16)],
            [op("reduce-scatter", 16), op("all-gather", 2)],
            ["replaced"],
            id="sum-as-scatter-and-gather",
        ),
        pytest.param(
            [op("all-reduce", 13)],  # padded to 16
            [op("reduce-scatter", 16), op("all-gather", 2)],
            ["replaced"],
            id="padded",
        ),
        pytest.param(
            [op("all-gather", 2)], [op("all-reduce", 16)], ["replaced"], id="gather"
        ),
        pytest.param(
            [op("all-to-all", 16)], [op("all-gather", 16)], ["replaced"], id="exchange"
        ),
        pytest.param(
            [op("collective-broadcast", 5)],
            [op("all-reduce", 5)],
            ["replaced"],
            id="broadcast",
        ),
        pytest.param(
            [op("all-to-all", 16)], [op("all-to-all", *[2] * 8)], [], id="in-parts"
        ),
        pytest.param(
            [op("collective-permute", 4, pairs=RING_PAIRS)],
            [
                op("collective-permute", 4, pairs=RING_PAIRS[:7]),
                op("collective-permute", 4, pairs=RING_PAIRS[7:]),
            ],
            ["split"],
            id="ring-cut-open",
        ),
        pytest.param(
            [op("collective-permute", 4, pairs=((0, 1),))],
            [op("collective-permute", 4, pairs=((1, 0),))],
            ["missing", "added"],
            id="turned-round",
        ),
        pytest.param(
            [bucket(1, 3), bucket(2, 5)], [bucket(1, 8)], ["merged"], id="end-to-end"
        ),
        pytest.param(
            [bucket(i, size) for i, size in enumerate([3, 5, 7, 9, 11], start=1)],
            [bucket(1, 14), bucket(2, 21)],  # 3 + 11, and 5 + 7 + 9
            ["merged", "merged"],
            id="end-to-end-out-of-order",
        ),
        pytest.param(
            [bucket(i, size) for i, size in enumerate([3, 5, 5, 9], start=1)],
            [bucket(1, 17)],
            ["merged"],
            id="equal-sums-once",
        ),
        pytest.param(
            [bucket(1, 3), bucket(2, 5)],
            [bucket(1, 11)],
            ["missing", "missing", "added"],
            id="more-than-was-written",
        ),
        pytest.param(
            [bucket(1, 3), bucket(2, 5)],
            [bucket(2, 5), bucket(1, 3)],
            [],
            id="in-another-order",
        ),
        pytest.param(
            [bucket(1, 3), bucket(1, 5)],
            [bucket(1, 3, 5)],
            ["merged"],
            id="in-one-bucket",
        ),
        pytest.param(
            [op("all-reduce", 4, groups=((0, 1), (2, 3)))],
            [op("all-reduce", 4, groups=((0, 1, 2, 3),))],
            ["missing", "added"],
            id="other-groups",
        ),
        pytest.param(
            [op("all-reduce", 4, groups=((0,), (1,)))], [], [], id="one-device-alone"
        ),
        pytest.param(
            [op("all-reduce", 4, branch=(("0", 1),))],
            [op("all-reduce", 4)],
            ["unconditional"],
            id="branch-always-runs",
        ),
    ],
)
def test_changes(written, found, expected):
    assert [finding.kind for finding in find(written, found)] == expected


def test_merging_inside_a_bucket_breaks_nothing():
    merged = [bucket(1, 3, 5)]
    assert not find([bucket(1, 3), bucket(1, 5)], merged)[0].broken
    assert find([bucket(1, 3), bucket(2, 5)], merged)[0].broken
    assert not find([bucket(1, 3), bucket(2, 5)], merged, {"merged"})[0].broken


def test_of_equals_the_scope_tells_which_is_missing():
    (missing,) = find([bucket(1, 4), bucket(2, 4)], [bucket(2, 4)])
    assert missing.text.startswith("1 all-reduce of bucket_1, 16 bytes, ")


@pytest.mark.parametrize(("scope", "broken"), [("loss", False), ("exchange", True)])
def test_what_the_loss_sends_is_its_own_business(scope, broken):
    name = f"jit(_step)/shard_map/{scope}/psum"
    wide = op("all-reduce", 4, op_name=name)
    narrow = dataclasses.replace(wide, arrays=_arrays(4, dtype="bf16", bits=16))
    (retyped,) = find([narrow], [wide])
    assert (retyped.kind, retyped.broken) == ("retyped", broken)


def test_distances_of_a_real_schedule():
    """The h100 module: every start has its done, with kernels between."""
    module = parse(module_text("h100-kinds"))
    found = {distance.kind: distance for distance in distances(module)}
    assert {"all-reduce", "reduce-scatter", "all-gather"} <= found.keys()


SCHEDULE = """HloModule step, is_scheduled=true, num_partitions=2

%fused (p: f32[4,4]) -> f32[4,4] {
  %p = f32[4,4] parameter(0)
  ROOT %d = f32[4,4] dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%wrapped (q: f32[4,4]) -> f32[2,4] {
  %q = f32[4,4] parameter(0)
  ROOT %rs = f32[2,4] reduce-scatter(%q), replica_groups={{0,1}}, dimensions={0}
}

ENTRY %main (x: f32[4,4]) -> f32[4,4] {
  %x = f32[4,4] parameter(0)
  %apart = f32[4,4] all-reduce-start(%x), replica_groups={{0,1}}
  %one = f32[4,4] fusion(%x), kind=kLoop, calls=%fused
  %same = f32[4,4] bitcast(%one)
  %two = f32[4,4] dot(%same, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %three = f32[4,4] add(%one, %two)
  %done = f32[4,4] all-reduce-done(%apart)
  %next = f32[4,4] all-reduce-start(%done), replica_groups={{0,1}}
  %sum = f32[4,4] all-reduce-done(%next)
  %now = f32[4,4] all-reduce(%sum), replica_groups={{0,1}}
  %async = ((f32[4,4]), f32[2,4]) async-start(%now), calls=%wrapped
  %four = f32[4,4] negate(%x)
  %async-done = f32[2,4] async-done(%async)
  %sync = f32[4,4] all-reduce-start(%x), replica_groups={{0,1}}, SYNC
  %five = f32[4,4] negate(%x)
  %sync-done = f32[4,4] all-reduce-done(%sync)
  ROOT %end = f32[4,4] add(%four, %four)
}
""".replace("SYNC", 'backend_config={"collective_backend_config":{"is_sync":true}}')


@pytest.mark.parametrize("mark", ['"is_sync":true', r"\"is_sync\": true"])
def test_distances_counted_by_hand(mark):
    text = SCHEDULE.replace('"is_sync":true', mark)
    found = {d.name: (d.kernels, d.matmuls, d.blocking) for d in compare_text(text)}
    assert found == {
        "apart": (3, 2, False),
        "next": (0, 0, True),
        "now": (0, 0, True),
        "async": (1, 0, False),
        "sync": (1, 0, True),
    }


def compare_text(text=SCHEDULE):
    return distances(parse(text))


def test_a_start_without_an_end_is_refused():
    text = SCHEDULE.replace("all-reduce-done(%apart)", "negate(%x)")
    with pytest.raises(ValueError, match=r"no end of '%apart = .*'-done'"):
        compare_text(text)


@needs_compiler("h100")
class TestH100:
    """Compiled for GPUs that are not here."""

    def verdict(self, design, **options):
        train = training(design)
        trainer = train.step.__self__
        lowered = trainer.on(targets.mesh("h100", DEVICES)).lower_abstract(PARAMS, ROWS)
        report = jaxdp.analyze(lowered.compile(compiler_options=options))
        return report, report.verify(train)

    def test_a_ring_is_kept(self):
        report, verdict = self.verdict(RING())
        assert verdict.kept and verdict.buckets_found == BUCKETS
        assert report.permutes == BUCKETS * 2 * (DEVICES - 1) == 42
        assert any(distance.matmuls for distance in verdict.distances)

    def test_permutes_of_different_buckets_combined(self):
        threshold = {"xla_gpu_collective_permute_combine_threshold_bytes": 2**25}
        design = dataclasses.replace(RING(), in_flight=None)
        report, verdict = self.verdict(design, **threshold)
        assert not verdict.kept and set(kinds(verdict)) == {"merged"}
        assert report.permutes == 36 < 42
        carried = sum(len(finding.written) for finding in verdict.findings)
        combined = sum(len(finding.found) for finding in verdict.findings)
        assert carried - combined == 42 - 36

    def test_without_a_cap_leaves_are_laid_end_to_end(self):
        _, verdict = self.verdict(jaxdp.NativeAllReduce())
        assert verdict.kept and kinds(verdict) == ["merged"]
        (merged,) = verdict.findings[0].found
        assert [array.elements for array in merged.arrays] == [6 * 256 + 1]


class TestRefused:
    """What cannot be judged."""

    def test_no_training(self):
        report = report_of(lambda x: x, WIDE)
        with pytest.raises(TypeError, match=r"verify got train=function"):
            report.verify(loss_fn)

    def test_the_program_of_another_design(self):
        _, report = step_of(RING())
        with pytest.raises(ValueError, match=r"RingAllReduce.*GatherToRoot\(root=0\)"):
            report.verify(training(jaxdp.GatherToRoot()))

    def test_no_step(self):
        report = report_of(lambda x: x, WIDE)
        with pytest.raises(ValueError, match="state is of no training"):
            report.verify(training(RING()))

    def test_text_without_shapes(self):
        report = dataclasses.replace(step_of(RING())[1], arguments=None)
        with pytest.raises(ValueError, match=r"got 0 arguments after train.*needs 2"):
            report.verify(training(RING()))

    def test_text_for_another_number_of_devices(self):
        report = dataclasses.replace(step_of(RING())[1], arguments=None)
        with pytest.raises(ValueError, match=r"for 4 devices, and a training on 2"):
            report.verify(training(RING(), devices=2), PARAMS, ROWS)

    def test_another_number_of_devices_on_two_axes(self):
        mesh = data_mesh((2, 2), ("worker", "device"))
        design = jaxdp.ParameterServer(2)
        train = jaxdp.data_parallel(loss_fn, optax.adam(0.1), mesh, design)
        report = dataclasses.replace(step_of(design)[1], devices=2)
        message = r"for 2 devices.*'worker': 2, 'device': 2}, which is 4"
        with pytest.raises(ValueError, match=message):
            report.verify(train)

    def test_a_report_without_what_was_written(self):
        traced = jax.jit(lambda x: x).trace(1.0)
        report = jaxdp.analyze(traced.lower().compile())
        with pytest.raises(ValueError, match="without logical collectives"):
            compare(report)
