"""Ring and star do what they promise, in the rounds and bytes that they promise."""

import collections
import re

import numpy as np
import pytest

from jaxdp import algorithms
from jaxdp.algorithms import rings
from jaxdp.schedule import Schedule, simulate, verify

ALL = [
    (collective, name)
    for collective, named in algorithms.SCHEDULES.items()
    for name in named
]
ROOTED = ("reduce", "broadcast", "gather", "scatter")
over_all = pytest.mark.parametrize(("collective", "algorithm"), ALL)
over_sizes = pytest.mark.parametrize("devices", [*range(1, 17), 64])


def sent_and_received(schedule: Schedule) -> tuple[list[int], list[int]]:
    """Chunks that each device sends and receives."""
    sent, received = collections.Counter(), collections.Counter()
    for round_ in schedule.rounds:
        for transfer in round_.transfers:
            for source, target, _ in transfer:
                sent[source] += 1
                received[target] += 1
    ranks = range(schedule.devices)
    return [sent[r] for r in ranks], [received[r] for r in ranks]


def built(collective, algorithm):
    """The schedules of an algorithm for 1 to 64 devices, with up to three roots."""
    for devices in range(1, 65):
        roots = {0, devices // 2, devices - 1} if collective in ROOTED else {0}
        for root in sorted(roots):
            yield algorithms.build(collective, algorithm, devices, root)


@over_all
def test_every_schedule_is_proven(collective, algorithm):
    for schedule in built(collective, algorithm):
        assert verify(schedule) == schedule
        assert bool(schedule.rounds) == (schedule.devices > 1)


@over_all
def test_every_schedule_sums_exactly(collective, algorithm):
    """By simulation, with distinct integers: independent of the verifier."""
    rng = np.random.default_rng(0)
    for schedule in built(collective, algorithm):
        x = rng.integers(0, 2**50, (schedule.devices, schedule.chunks))
        *_, final = simulate(schedule, x)
        places = zip(schedule.starts, schedule.ends, strict=True)
        for chunk, (starts, ends) in enumerate(places):
            total = sum(x[device, chunk] for device in starts)
            assert all(final[device, chunk] == total for device in ends)


@over_sizes
@over_all
def test_every_schedule_starts_and_ends_where_its_collective_does(
    collective, algorithm, devices
):
    root = devices // 2
    schedule = algorithms.build(collective, algorithm, devices, root)
    everywhere, own = {tuple(range(devices))}, [(r,) for r in range(devices)]
    starts, ends = list(schedule.starts), list(schedule.ends)
    if collective in ("all_reduce", "reduce", "reduce_scatter"):
        assert set(starts) == everywhere
    if collective in ("all_reduce", "broadcast", "all_gather"):
        assert set(ends) == everywhere
    if collective in ("all_gather", "gather"):
        assert starts == own
    if collective in ("reduce_scatter", "scatter"):
        assert ends == own
    if collective in ("broadcast", "scatter"):
        assert set(starts) == {(root,)}
    if collective in ("reduce", "gather"):
        assert set(ends) == {(root,)}


@over_sizes
def test_a_ring_costs_what_it_says(devices):
    """2 (N - 1) rounds; 2 (N - 1) chunks of K / N sent and received per device."""
    ring = algorithms.ring(devices)
    assert ring.chunks == devices
    assert len(ring.rounds) == 2 * (devices - 1)
    assert sent_and_received(ring) == ([2 * (devices - 1)] * devices,) * 2
    for half in (algorithms.ring_reduce_scatter, algorithms.ring_all_gather):
        schedule = half(devices)
        assert len(schedule.rounds) == devices - 1
        assert sent_and_received(schedule) == ([devices - 1] * devices,) * 2


@over_sizes
def test_a_ring_sends_to_the_right_hand_neighbour_only(devices):
    for round_ in algorithms.ring(devices).rounds:
        (transfer,) = round_.transfers
        assert transfer.pairs == tuple((r, (r + 1) % devices) for r in range(devices))


def test_the_ring_sends_the_chunks_of_the_table():
    """The worked table in the module docstring, N = 4."""
    assert rings.__doc__
    rows = re.findall(r"^ +(\d|owns)((?: +\d){4})", rings.__doc__, re.MULTILINE)
    *sent, (last, owned) = [(name, tuple(map(int, row.split()))) for name, row in rows]
    assert sent == [
        ("0", (3, 0, 1, 2)),
        ("1", (2, 3, 0, 1)),
        ("2", (1, 2, 3, 0)),
    ]
    schedule = algorithms.ring_reduce_scatter(4)
    assert [r.transfers[0].chunks for r in schedule.rounds] == [row for _, row in sent]
    assert (last, owned) == ("owns", (0, 1, 2, 3))
    assert schedule.ends == tuple((r,) for r in owned)


def test_ring_all_gather_sends_the_chunk_that_it_just_received():
    chunks = [r.transfers[0].chunks for r in algorithms.ring_all_gather(4).rounds]
    assert chunks == [(0, 1, 2, 3), (3, 0, 1, 2), (2, 3, 0, 1)]
    ops = {t.op for r in algorithms.ring_all_gather(4).rounds for t in r.transfers}
    assert ops == {"replace"}


@pytest.mark.parametrize("root", [0, 2, 4])
def test_a_star_loads_the_link_of_its_root(root):
    n = 5
    star = algorithms.star(n, root)
    assert (star.chunks, len(star.rounds)) == (1, 2)
    load = [n - 1 if r == root else 1 for r in range(n)]
    assert sent_and_received(star) == (load, load)
    for build in (algorithms.star_gather, algorithms.star_reduce):
        sent, received = sent_and_received(build(n, root))
        assert sent == [int(r != root) for r in range(n)]
        assert received == [(n - 1) * (r == root) for r in range(n)]
    for build in (algorithms.star_scatter, algorithms.star_broadcast):
        sent, received = sent_and_received(build(n, root))
        assert sent == [(n - 1) * (r == root) for r in range(n)]
        assert received == [int(r != root) for r in range(n)]


def test_a_star_adds_in_rank_order():
    """In float32 ((1e8 + 1) + 1) - 1e8 is 0; 1e8 - 1e8 first would give 2."""
    x = np.array([1e8, 1, 1, -1e8], np.float32).reshape(4, 1)
    *_, ends = simulate(algorithms.star(4), x)
    assert ends.ravel().tolist() == [0, 0, 0, 0]


def test_a_ring_adds_from_the_next_rank_round_to_the_owner():
    """Chunk 1 is ((x2 + x3) + x0) + x1, chunk 2 is ((x3 + x0) + x1) + x2."""
    x = np.tile(np.array([1e8, 1, 1, -1e8], np.float32)[:, None], (1, 4))
    *_, ends = simulate(algorithms.ring(4), x)
    assert ends.tolist() == [[0, 1, 2, 0]] * 4


@pytest.mark.parametrize(
    ("devices", "rounds"), [(1, 0), (2, 1), (3, 3), (4, 2), (6, 4), (8, 3), (64, 6)]
)
def test_recursive_doubling_takes_log_n_rounds(devices, rounds):
    """Whole buffers; ranks beyond a power of two send before and receive after."""
    schedule = algorithms.recursive_doubling(devices)
    assert (schedule.chunks, len(schedule.rounds)) == (1, rounds)
    power = 2 ** int(np.log2(devices))
    sent, received = sent_and_received(schedule)
    inside = [int(np.log2(devices)) + (r < devices - power) for r in range(power)]
    assert sent == received == inside + [1] * (devices - power)


def test_recursive_doubling_adds_by_pairs():
    """(x0 + x1) + (x2 + x3) on every rank; in rank order the sum would be 0."""
    x = np.array([1e8, 1, 1, -1e8], np.float32).reshape(4, 1)
    *_, ends = simulate(algorithms.recursive_doubling(4), x)
    pairs = (x[0] + x[1]) + (x[2] + x[3])
    assert ends.ravel().tolist() == [pairs.item()] * 4
    x = np.array([1, 2, 4, 8, 16], np.float32).reshape(5, 1)
    *_, ends = simulate(algorithms.recursive_doubling(5), x)
    assert ends.ravel().tolist() == [31] * 5


@pytest.mark.parametrize("collective", algorithms.SCHEDULES)
def test_unknown_algorithms_are_refused(collective):
    others = ["auto", "native", "hierarchical"] if collective == "all_reduce" else []
    known = re.escape(str(sorted([*algorithms.SCHEDULES[collective], *others])))
    message = (
        rf"{collective} got algorithm='trees'. It must be one of {known}, or a .*Sch"
    )
    with pytest.raises(ValueError, match=message):
        algorithms.build(collective, "trees", 4)


@over_all
@pytest.mark.parametrize("root", [-1, 4, 9])
def test_roots_out_of_range_are_refused(collective, algorithm, root):
    message = rf"{collective} got root={root} on 4 devices.*from 0 to 3"
    with pytest.raises(ValueError, match=message):
        algorithms.build(collective, algorithm, 4, root)


@over_all
@pytest.mark.parametrize("devices", [0, -2])
def test_no_devices_are_refused(collective, algorithm, devices):
    with pytest.raises(
        ValueError, match=rf"{collective} got {devices} devices.*least 1"
    ):
        algorithms.build(collective, algorithm, devices)


def test_a_schedule_is_built_once_for_each_number_of_devices():
    ring = algorithms.ring(5).resized(9)
    assert ring is algorithms.ring(9)
    first, *others = (round_.transfers[0].pairs for round_ in ring.rounds)
    assert all(pairs is first for pairs in others)


def test_resizing_keeps_the_options():
    resized = algorithms.pipelined_tree(4, 1, chunks=3).resized(6)
    assert resized is algorithms.pipelined_tree(6, 1, chunks=3)
    assert resized.resized(4).name == "pipelined_tree(4, root=1, chunks=3)"
