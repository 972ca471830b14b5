"""Rounds in loops: the same bits as written out, in a program that does not grow."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdp
from jaxdp import algorithms, executor, plan, sites, targets
from jaxdp.cost import cost
from jaxdp.schedule import Round, Schedule, Transfer, holdings, local_rows, verify
from jaxdp.targets.quiet import quietly
from tests import executor_test, helpers
from tests.compilers import needs_compiler

everywhere = executor_test.assert_executes_as_simulated
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.complex64)
KINDS = [kind for kind in helpers.KINDS if kind not in ("gather", "scatter")]
LOOPING = ("ring", "pipelined_tree")  # rounds that repeat


@st.composite
def repeating(draw) -> Schedule:
    """Bodies of a few rounds, run several times with other chunks."""
    devices, chunks = draw(st.integers(2, 4)), draw(st.integers(2, 6))
    starts = (tuple(range(devices)),) * chunks
    if draw(st.booleans()):
        starts = tuple((draw(st.integers(0, devices - 1)),) for _ in range(chunks))
    body = []
    for _ in range(draw(st.integers(1, 3))):
        moves = []
        for _ in range(draw(st.integers(1, 2))):
            shift = draw(st.integers(1, devices - 1))
            count = draw(st.integers(1, devices))
            pairs = tuple((r, (r + shift) % devices) for r in range(count))
            op = draw(st.sampled_from(["add", "replace"]))
            moves += [(pairs, op)] * draw(st.sampled_from([1, 1, 2]))
        body.append(moves)
    schedule = Schedule("random", devices, chunks, starts, (), ())
    for _ in range(draw(st.integers(2, 6))):
        for moves in body:
            transfers, moved = [], ()
            for place, (pairs, op) in enumerate(moves):
                if place and moves[place - 1] == (pairs, op):  # two travel together
                    moved = tuple((chunk + 1) % chunks for chunk in moved)
                else:
                    moved = tuple(draw(st.integers(0, chunks - 1)) for _ in pairs)
                transfers.append(Transfer(pairs, moved, op))
                rounds = (*schedule.rounds, Round(tuple(transfers)))
                longer = Schedule("random", devices, chunks, starts, (), rounds)
                try:
                    list(holdings(longer))
                except ValueError:
                    transfers.pop()
            if transfers:
                rounds = (*schedule.rounds, Round(tuple(transfers)))
                schedule = Schedule("random", devices, chunks, starts, (), rounds)
    *_, held = holdings(schedule)
    ends = tuple(
        tuple(d for d in range(devices) if held[d][c] == set(starts[c]))
        for c in range(chunks)
    )
    hypothesis.assume(any(ends))
    made = Schedule("random", devices, chunks, starts, ends, schedule.rounds)
    hypothesis.assume(any(p.trips > 1 for p in plan.planned(made, False, True).loops))
    return made


@hypothesis.settings(max_examples=40)
@hypothesis.given(schedule=repeating(), mode=st.sampled_from(helpers.MODES))
def test_any_repeating_schedule_executes_as_simulated(schedule, mode):
    everywhere(verify(schedule), mode, unroll=False)


def test_what_a_trip_reads_is_found():
    """Of value 5, two trips of one row: of this trip at first, then of the last one."""

    def read(*rows):
        row = np.array(rows).reshape(-1, 1, 1)
        return plan.Read(np.full(row.shape, 5), row)

    kind = plan.Kind(((0, 1),), "replace", "own", 1)
    loop = plan.Loop(3, ((plan.Move(kind, 5, read(0, 0, 0), None),),))
    mixed = sites.found_in(loop, read(0, 0, 1), 7)
    assert mixed.keys == ((sites.NOW, 5, 0), (sites.BEFORE, 5, 0))
    assert mixed.read.value.ravel().tolist() == [0, 1, 1]
    value = np.array([4, 5, 5]).reshape(-1, 1, 1)
    handed = sites.found_in(loop, plan.Read(value, read(9, 0, 1).row), 7)
    assert handed.keys == ((sites.HANDED, 5, 7),)
    assert handed.start is not None
    assert (handed.start.value, handed.start.row) == (4, 9)
    further = sites.found_in(loop, plan.Read(value, read(9, 0, 0).row), 7)
    assert further.keys == ((sites.OUTSIDE, 4, 0), (sites.EARLIER, 5, 0))


@pytest.mark.parametrize("late", [1, 2, 3])
def test_chunks_are_sent_on_some_trips_later(late):
    """Two chunks a round from 0 to 1, which sends them to 2 so many rounds later.

    Before them device 1 sends what it starts with.
    """
    rounds, first = 6, 2 * late  # chunks of device 0 begin with that one
    starts = ((1,),) * first + ((0,),) * (2 * rounds)

    def transfers(pair, chunk):
        return [Transfer((pair,), (chunk + i,), "replace") for i in range(2)]

    schedule = Schedule(
        "late",
        *(3, first + 2 * rounds, starts),
        ends=((1, 2),) * (2 * rounds) + ((0, 1),) * first,
        rounds=tuple(
            Round((*transfers((0, 1), first + 2 * i), *transfers((1, 2), 2 * i)))
            for i in range(rounds)
        ),
    )
    (loop,) = plan.planned(schedule, False, True).loops
    assert (loop.trips, len(loop.moves)) == (rounds, 2)
    everywhere(verify(schedule), "checked", unroll=False)


@pytest.mark.parametrize("devices", [5, 6, 7])
@pytest.mark.parametrize(
    "algorithm", ["ring", "bidirectional_ring", "pipelined_star", "double_binary_tree"]
)
def test_other_numbers_of_devices_execute_as_simulated(algorithm, devices):
    schedule = algorithms.build("all_reduce", algorithm, devices)
    assert any(p.trips > 1 for p in plan.planned(schedule, False, True).loops)
    everywhere(verify(schedule), "unchecked", unroll=False)


def both(kind: str, devices: int, unroll: bool | None, mean: bool = False):
    """Algorithms of a collective that loop, in one function of a tree."""
    options = {"mean": mean} if kind in helpers.SUMS else {}
    named = [*algorithms.SCHEDULES[kind]]

    def run(tree):
        return {
            name: helpers.collective(kind, name, devices - 1, unroll=unroll, **options)(
                tree
            )
            for name in named
            if name in LOOPING
        }

    return run


@pytest.mark.parametrize("mode", ["checked", "pmap"])  # types that vary, and none
@pytest.mark.parametrize("kind", KINDS)
def test_all_dtypes_have_the_same_bits(kind, mode):
    """Contributions, sums and results of other dtypes, and what moves as bits."""
    devices = 4
    rng = np.random.default_rng(3)
    shape = (devices, 7)
    wide = rng.standard_normal(shape) * 2.0 ** rng.integers(-3, 3, shape)
    tree = [jnp.asarray(wide).astype(dtype) for dtype in DTYPES]
    tree.append(jnp.asarray(rng.integers(0, 100, shape), jnp.int8))
    mesh = jaxdp.data_mesh(devices)
    results = [
        helpers.per_device(both(kind, devices, unroll, mean=True), mesh, mode)(tree)
        for unroll in (True, False)
    ]
    helpers.assert_bit_equal(*results)


@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
def test_gradients_are_the_same(check_vma):
    """Through every kind of collective; exact, in integers."""
    devices = 4
    x = jnp.arange(16.0 * devices).reshape(devices, 4, 4)

    def gradient(unroll):
        def local(x):
            total = jnp.zeros(())
            for kind in KINDS:
                for moved in jax.tree.leaves(both(kind, devices, unroll)(x[0])):
                    weights = jnp.arange(1.0, moved.size + 1).reshape(moved.shape)
                    own = 1 + jax.lax.axis_index("data")
                    total += own * jnp.sum(weights * moved**2)
            return total[None]

        run = jax.shard_map(
            local,
            mesh=jaxdp.data_mesh(devices),
            in_specs=P("data"),
            out_specs=P("data"),
            check_vma=check_vma,
        )
        return jax.jit(jax.grad(lambda x: jnp.sum(run(x))))(x)

    found = gradient(False)
    assert len(np.unique(found)) == x.size
    helpers.assert_bit_equal(gradient(True), found)


def lowered(devices: int, unroll: bool | None, dtype=jnp.float32) -> str:
    """The program of a ring on devices that need not exist."""
    mesh = AbstractMesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    run = jax.shard_map(
        lambda x: jaxdp.all_reduce(x, "data", unroll=unroll),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P(),
    )
    size = (3 * devices * devices,)
    x = jax.ShapeDtypeStruct(size, dtype, sharding=NamedSharding(mesh, P("data")))
    return jax.jit(run).trace(x).lower(lowering_platforms=("cpu",)).as_text()


def operations(text: str) -> tuple[int, int]:
    """Permutes, and operations in all."""
    return text.count("stablehlo.collective_permute"), text.count(" = ")


@pytest.mark.parametrize(("dtype", "loops"), [(jnp.float32, 2), (jnp.bfloat16, 3)])
def test_a_rolled_ring_is_as_long_for_any_number_of_devices(dtype, loops):
    """One permute per half; of bfloat16 the first round sends bits, and is alone."""
    short, long = (operations(lowered(n, False, dtype)) for n in (4, 256))
    assert short == long
    assert long[0] == loops


def test_a_ring_written_out_grows_by_as_much_for_each_device():
    counts = [operations(lowered(n, True)) for n in (16, 32, 64)]
    assert [permutes for permutes, _ in counts] == [30, 62, 126]
    (_, at_16), (_, at_32), (_, at_64) = counts
    # A number more that is not 1, so that a product more: hence not equal.
    assert at_64 - at_32 <= 2.02 * (at_32 - at_16)
    assert at_32 < 1000


def test_long_schedules_are_rolled_unless_one_asks():
    rounds = executor.MOST_ROUNDS
    devices = rounds // 2 + 1  # 2 (N - 1) rounds
    assert operations(lowered(devices, None))[0] == rounds
    assert operations(lowered(devices + 1, None))[0] == 2
    assert operations(lowered(devices + 1, True))[0] == rounds + 2


def counted(devices: int, dtype) -> list[tuple[Schedule, int, jax.ShapeDtypeStruct]]:
    """Every schedule, the elements it moves, and what devices put in."""
    found = []
    for kind, named in algorithms.SCHEDULES.items():
        for name in named:
            schedule = algorithms.build(kind, name, devices)
            shape = (devices, local_rows(schedule.starts), 11)
            elements = schedule.chunks * 11
            found.append((schedule, elements, jax.ShapeDtypeStruct(shape, dtype)))
    return found


def in_loops(cases):
    """Runs them all, on what devices put in."""
    return lambda given: [
        executor.execute(schedule, x, "data", lambda y, x=x: y.astype(x.dtype), False)
        for (schedule, _, _), x in zip(cases, given, strict=True)
    ]


def assert_sends(report, cases, itemsize: int, partial: int) -> None:
    """Bytes by device, of all schedules together."""
    expected = [cost(s, elements, itemsize, partial) for s, elements, _ in cases]
    sent = np.sum([each.sent_bytes for each in expected], axis=0)
    assert report.sent_bytes == tuple(sent.tolist())
    received = np.sum([each.received_bytes for each in expected], axis=0)
    assert report.received_bytes == tuple(received.tolist())


@pytest.mark.parametrize(
    ("dtype", "widths"), [(jnp.float32, (4, 4)), (jnp.bfloat16, (2, 4))]
)
def test_analyze_counts_the_trips(dtype, widths):
    cases = counted(4, dtype)
    run = helpers.per_device(in_loops(cases), jaxdp.data_mesh(4))
    compiled = run.lower([x for _, _, x in cases]).compile()
    text = compiled.as_text()
    assert text is not None and text.count(" while(") > 5
    assert_sends(jaxdp.analyze(compiled), cases, *widths)


@needs_compiler("h100")
def test_analyze_counts_the_trips_on_gpus():
    cases = counted(4, jnp.bfloat16)
    mesh = targets.mesh("h100", 4)
    run = helpers.per_device(in_loops(cases), mesh)
    with quietly():
        compiled = targets.compile_for(
            run, [x for _, _, x in cases], target="h100", devices=4
        )
    assert_sends(jaxdp.analyze(compiled), cases, 2, 4)


@pytest.mark.parametrize("unroll", [True, False, None])
def test_designs_pass_it_on(unroll):
    """What a bucket of 4 devices is: 6 permutes, or 2 in loops."""
    import optax

    def loss_fn(params, batch):
        return jnp.mean((batch["x"] @ params - batch["y"]) ** 2)

    batch = {"x": jnp.ones((8, 3)), "y": jnp.ones(8)}
    for design in (
        jaxdp.RingAllReduce(None, None, unroll=unroll),
        jaxdp.AllReduce("ring", None, None, unroll=unroll),
    ):
        train = jaxdp.data_parallel(loss_fn, optax.sgd(0.1), jaxdp.data_mesh(4), design)
        text = train.lower(train.init(jnp.ones(3)), batch).as_text()
        permutes = text.count("stablehlo.collective_permute")
        assert permutes == (2 if unroll is False else 6)
