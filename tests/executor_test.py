"""The executor is the simulator, bit for bit, in the rounds and bytes it promises."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import jaxdp
from jaxdp import algorithms, executor, plan
from jaxdp.schedule import (
    Round,
    Schedule,
    Transfer,
    holdings,
    simulate,
    verify,
)
from tests import helpers

ALL = [
    (collective, name)
    for collective, named in algorithms.SCHEDULES.items()
    for name in named
]
over_unroll = pytest.mark.parametrize(
    "unroll", [True, False], ids=["unrolled", "rolled"]
)
over_all = pytest.mark.parametrize(("kind", "algorithm"), ALL, ids=map("-".join, ALL))


def local(schedule: Schedule, placement, buffers: np.ndarray) -> np.ndarray:
    """Of `[devices, chunks, ...]`, the rows that the executor takes or returns."""
    if any(len(holders) != 1 for holders in placement):
        return buffers
    own = [
        buffers[device, [chunk for chunk, (d,) in enumerate(placement) if d == device]]
        for device in range(schedule.devices)
    ]
    rows = max(map(len, own))
    return np.stack([np.pad(o, ((0, rows - len(o)), (0, 0))) for o in own])


def assert_executes_as_simulated(
    schedule: Schedule, mode: str, unroll: bool | None = None, seed: int = 0
) -> None:
    """Every element distinct; what a device does not start with is NaN, never read."""
    rng = np.random.default_rng(seed)
    shape = (schedule.devices, schedule.chunks, 3)
    buffers = (rng.standard_normal(shape) * 2.0 ** rng.integers(-9, 9, shape)).astype(
        np.float32
    )
    started = np.zeros(shape[:2], bool)
    for chunk, starts in enumerate(schedule.starts):
        started[list(starts), chunk] = True
    *_, final = simulate(schedule, np.where(started[..., None], buffers, 0))
    for chunk, ends in enumerate(schedule.ends):
        others = sorted({*range(schedule.devices)} - {*ends})
        final[list(ends), chunk] += 1
        final[others, chunk] = 0

    def fn(chunks):
        # Adding 1 shows a `finish` that is missing or applied twice.
        return executor.execute(
            schedule, chunks, "data", lambda complete: complete + 1, unroll
        )

    run = helpers.per_device(fn, jaxdp.data_mesh(schedule.devices), mode)
    unread = np.where(started[..., None], buffers, np.float32(np.nan))
    result = run(local(schedule, schedule.starts, unread))
    helpers.assert_bit_equal(result, local(schedule, schedule.ends, final))


@over_all
@over_unroll
def test_every_schedule_executes_as_simulated(mesh, kind, algorithm, unroll):
    schedule = algorithms.build(kind, algorithm, mesh.size, mesh.size // 2)
    loops = plan.planned(schedule, False, not unroll).loops
    if (unroll and loops) or any(loop.trips > 1 for loop in loops):
        assert_executes_as_simulated(verify(schedule), "unchecked", unroll)


@pytest.mark.parametrize("dedicated", [False, True], ids=["working", "dedicated"])
@pytest.mark.parametrize("mode", ["checked", "unchecked"])
@pytest.mark.parametrize(("devices", "servers"), [(2, 1), (5, 1), (5, 3), (8, 4)])
def test_servers_execute_as_simulated(devices, servers, dedicated, mode):
    given = (devices, servers, dedicated)
    for schedule in (
        algorithms.sharded_servers_push(*given),
        algorithms.sharded_servers_pull(devices, servers),
        algorithms.sharded_servers_collect(*given),
        algorithms.sharded_servers(*given),
    ):
        assert_executes_as_simulated(verify(schedule), mode)


@st.composite
def schedules(draw) -> Schedule:
    """Random rounds that the verifier accepts, ending wherever a chunk is complete."""
    devices, chunks = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    ranks = st.integers(0, devices - 1)
    starts = draw(
        st.lists(
            st.sets(ranks, min_size=1).map(lambda s: tuple(sorted(s))),
            min_size=chunks,
            max_size=chunks,
        )
    )
    schedule = Schedule("random", devices, chunks, tuple(starts), (), ())
    for _ in range(draw(st.integers(2, 10))):
        transfers = []
        for _ in range(draw(st.integers(1, 3))):
            order = draw(st.permutations(range(devices)))
            shift = draw(st.integers(1, devices - 1))
            count = draw(st.integers(1, devices))
            pairs = tuple((r, (r + shift) % devices) for r in order[:count])
            moved = draw(
                st.tuples(*[st.integers(0, chunks - 1)] * count),
            )
            op = draw(st.sampled_from(["add", "replace"]))
            transfers.append(Transfer(pairs, moved, op))
            try:
                longer = Schedule(
                    *("random", devices, chunks, tuple(starts), ()),
                    (*schedule.rounds, Round(tuple(transfers))),
                )
                list(holdings(longer))
            except ValueError:
                transfers.pop()
        if transfers:
            rounds = (*schedule.rounds, Round(tuple(transfers)))
            schedule = Schedule("random", devices, chunks, tuple(starts), (), rounds)
    *_, held = holdings(schedule)
    ends = tuple(
        tuple(d for d in range(devices) if held[d][c] == set(starts[c]))
        for c in range(chunks)
    )
    hypothesis.assume(schedule.rounds and any(ends))
    return Schedule("random", devices, chunks, tuple(starts), ends, schedule.rounds)


@hypothesis.settings(max_examples=30)
@hypothesis.given(
    schedule=schedules(), mode=st.sampled_from(helpers.MODES), unroll=st.booleans()
)
def test_any_schedule_executes_as_simulated(schedule, mode, unroll):
    assert_executes_as_simulated(verify(schedule), mode, unroll)


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (jnp.float32, jnp.float32),
        (jnp.bfloat16, jnp.float32),
        (jnp.float16, jnp.float32),
        (jnp.float8_e4m3fn, jnp.float32),
        (jnp.complex64, jnp.complex64),
        (np.float64, np.float64),
    ],
)
def test_sums_are_made_in_float32_or_wider(dtype, wide):
    with jax.enable_x64(True):
        assert executor.accumulation_dtype(jnp.dtype(dtype)) == wide


def program(kind: str, algorithm: str, devices: int, *leaves) -> list[helpers.Permute]:
    """The permutes of a compiled collective over leaves of these shapes and dtypes."""
    mesh = jaxdp.data_mesh(devices)
    run = helpers.per_device(helpers.collective(kind, algorithm), mesh)
    tree = [jax.ShapeDtypeStruct((devices, *shape), dtype) for shape, dtype in leaves]
    return helpers.permutes(helpers.compiled_text(run, tree))


FLOATS = [((5, 7), jnp.float32), ((), jnp.float32), ((8,), jnp.float32)]


@pytest.mark.parametrize("devices", [2, 3, 8])
def test_a_ring_is_its_rounds_and_nothing_else(devices):
    """2 (N - 1) permutes for a tree of several leaves, K / N bytes (padded) each."""
    ring = "{" + "},{".join(f"{r},{(r + 1) % devices}" for r in range(devices)) + "}"
    chunk = -(-44 // devices)
    found = program("all_reduce", "ring", devices, *FLOATS)
    assert found == [helpers.Permute("f32", chunk, ring)] * (2 * (devices - 1))
    found = program("reduce_scatter", "ring", devices, ((44,), jnp.float32))
    assert found == [helpers.Permute("f32", chunk, ring)] * (devices - 1)
    found = program("all_gather", "ring", devices, *FLOATS)
    assert found == [helpers.Permute("f32", 44, ring)] * (devices - 1)


@pytest.mark.parametrize("devices", [2, 3, 8])
def test_a_star_is_one_permute_per_other_device_and_way(devices):
    to_root = {f"{{{r},0}}" for r in range(1, devices)}
    from_root = {f"{{0,{r}}}" for r in range(1, devices)}
    found = program("all_reduce", "star", devices, *FLOATS)
    assert len(found) == 2 * (devices - 1)
    assert {p.pairs for p in found} == to_root | from_root
    assert {(p.dtype, p.elements) for p in found} == {("f32", 44)}
    for kind, pairs, elements in [
        ("reduce", to_root, 44),
        ("broadcast", from_root, 44),
        ("gather", to_root, 44),
    ]:
        found = program(kind, "star", devices, *FLOATS)
        assert len(found) == devices - 1
        assert {p.pairs for p in found} == pairs
        assert {(p.dtype, p.elements) for p in found} == {("f32", elements)}
    found = program("scatter", "star", devices, ((devices, 5), jnp.float32))
    assert {p.pairs for p in found} == from_root
    assert [p.elements for p in found] == [5] * (devices - 1)


@over_all
def test_one_device_sends_nothing(kind, algorithm):
    assert program(kind, algorithm, 1, ((1, 5), jnp.float32)) == []


@pytest.mark.parametrize("kind", helpers.SUMS)
def test_sums_of_integers_send_nothing(kind):
    """CO-2, CO-3: int-only trees and leaves without elements."""
    algorithm = "star" if kind == "reduce" else "ring"
    leaves = [((4,), jnp.int32), ((2,), jnp.bool), ((0, 3), jnp.float32)]
    assert program(kind, algorithm, 4, *leaves) == []


@pytest.mark.parametrize(
    ("dtype", "own", "sums"),
    [
        (jnp.float32, "f32", "f32"),
        (jnp.bfloat16, "u16", "f32"),
        (jnp.float16, "f16", "f32"),
        (jnp.float8_e5m2, "u8", "f32"),
        (jnp.complex64, "c64", "c64"),
    ],
    ids=["float32", "bfloat16", "float16", "float8", "complex64"],
)
def test_what_travels_in_which_dtype(dtype, own, sums):
    """Contributions and complete chunks as they are, partial sums wide; N = 4."""
    found = [p.dtype for p in program("all_reduce", "ring", 4, ((8,), dtype))]
    assert found == [own, sums, sums, own, own, own]
    assert {p.dtype for p in program("all_gather", "ring", 4, ((8,), dtype))} == {own}
    assert {p.dtype for p in program("broadcast", "star", 4, ((8,), dtype))} == {own}
    # Contributions go to the root as they are: a star has no partial sums on the wire.
    assert {p.dtype for p in program("reduce", "star", 4, ((8,), dtype))} == {own}


def test_bytes_of_a_ring():
    """2 (N - 1) K / N per device, padded to a multiple of N elements: AN-7."""
    sent = functools.partial(sum, start=0)
    for shape, expected in [((16,), 112), ((3,), 56), ((2**10,), 7168)]:
        found = program("all_reduce", "ring", 8, (shape, jnp.float32))
        assert sent(p.nbytes for p in found) == expected


def test_a_received_chunk_is_sent_on_without_being_stored():
    """The all-gather half permutes the result of a permute."""
    mesh = jaxdp.data_mesh(4)
    run = helpers.per_device(helpers.collective("all_gather", "ring"), mesh)
    text = helpers.compiled_text(run, np.zeros((4, 1000), np.float32))
    operands = [
        line.split("collective-permute(")[1].split(")")[0]
        for line in text.splitlines()
        if "collective-permute(" in line
    ]
    assert len(operands) == 3
    assert sum("permute" in operand for operand in operands) == 2


def test_fewer_owners_than_devices():
    """Chunks 0 and 1 end on their owners; device 2 owns none and gets zeros."""
    gather = Round(
        tuple(
            Transfer(((source, owner),), (owner,), "add")
            for owner in range(2)
            for source in range(3)
            if source != owner
        )
    )
    schedule = Schedule("owners", 3, 2, ((0, 1, 2),) * 2, ((0,), (1,)), (gather,))
    assert_executes_as_simulated(verify(schedule), "unchecked")


def test_a_contribution_that_came_with_sums_goes_on_as_it_was():
    """Chunk 1 goes from 2 to 0 beside a sum, in float32, and then in its own dtype."""
    rounds = (
        Round((Transfer(((0, 1),), (0,), "add"),)),
        Round((Transfer(((1, 2), (2, 0)), (0, 1), "replace"),)),
        Round((Transfer(((0, 1),), (1,), "add"), Transfer(((2, 3),), (0,), "add"))),
    )
    schedule = Schedule("beside", 4, 2, ((0, 1, 3), (1, 2)), ((3,), (1,)), rounds)
    assert_executes_as_simulated(verify(schedule), "checked")
    run = helpers.per_device(
        lambda x: executor.execute(schedule, x, "data"), jaxdp.data_mesh(4)
    )
    given = jax.ShapeDtypeStruct((4, 2, 5), jnp.bfloat16)
    found = helpers.permutes(helpers.compiled_text(run, given))
    assert sorted(p.dtype for p in found) == ["f32", "f32", "u16", "u16"]


@pytest.mark.parametrize(("devices", "rounds"), [(4, 4), (6, 6), (8, 6)])
def test_what_goes_the_same_way_in_a_round_goes_together(devices, rounds):
    """Halving-doubling: one permute per round, of half of what is left."""
    found = program("all_reduce", "halving_doubling", devices, ((48,), jnp.float32))
    assert len(found) == rounds
    half = {4: [24, 12, 12, 24], 8: [24, 12, 6, 6, 12, 24]}
    # Of six, two give all they have to a neighbour before, and get the sum after.
    sent = [48, *half[4], 48] if devices == 6 else half[devices]
    assert [p.elements for p in found] == sent
