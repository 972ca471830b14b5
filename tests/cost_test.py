"""What schedules cost, against numbers counted by hand."""

import dataclasses

import pytest

from jaxdp import algorithms, cost
from jaxdp.schedule import Round, Schedule, Transfer
from jaxdp.targets import Hardware, Link, hardware

ALPHA_S = 1e-6
LINK = Link(name="wire", bytes_per_s=1e9, alpha_s=ALPHA_S)
NETWORK = Link(name="ethernet", bytes_per_s=1e8, alpha_s=10e-6)
ONE_HOST = Hardware(
    name="test",
    flops_per_s=(("f32", 1.0),),
    memory_bytes_per_s=1.0,
    memory_bytes=1,
    link=LINK,
    network=NETWORK,
    devices_per_host=64,
)
TWO_PER_HOST = dataclasses.replace(ONE_HOST, devices_per_host=2)
SHARED = dataclasses.replace(
    TWO_PER_HOST, network=dataclasses.replace(NETWORK, shared=True)
)


def links(*pairs, size):
    return dict.fromkeys(pairs, size)


def every_pair(devices):
    return [(a, b) for a in range(devices) for b in range(devices) if a != b]


TREE_OF_4 = [(2, 3), (3, 0), (1, 0), (3, 2), (0, 3), (0, 1)]

COUNTED = [
    # 10 elements in 4 chunks: 3 each, 12 bytes; 3 + 3 rounds of one chunk.
    (
        algorithms.ring(4),
        10,
        4,
        (6, (72,) * 4, (72,) * 4, links((0, 1), (1, 2), (2, 3), (3, 0), size=72)),
    ),
    (
        algorithms.ring_reduce_scatter(3),
        9,
        2,
        (2, (12,) * 3, (12,) * 3, links((0, 1), (1, 2), (2, 0), size=12)),
    ),
    (
        algorithms.ring_all_gather(2),
        1,
        8,
        (1, (8, 8), (8, 8), links((0, 1), (1, 0), size=8)),
    ),
    (algorithms.ring(1), 100, 4, (0, (0,), (0,), {})),
    # Whole buffers of 20 bytes through rank 1.
    (
        algorithms.star(4, root=1),
        5,
        4,
        (
            2,
            (20, 60, 20, 20),
            (20, 60, 20, 20),
            links((0, 1), (2, 1), (3, 1), (1, 0), (1, 2), (1, 3), size=20),
        ),
    ),
    (
        algorithms.star_reduce(3),
        7,
        1,
        (1, (0, 7, 7), (14, 0, 0), links((1, 0), (2, 0), size=7)),
    ),
    (
        algorithms.star_broadcast(3, root=2),
        7,
        2,
        (1, (0, 0, 28), (14, 14, 0), links((2, 0), (2, 1), size=14)),
    ),
    # 9 elements in 3 chunks of 6 bytes.
    (
        algorithms.star_gather(3),
        9,
        2,
        (1, (0, 6, 6), (12, 0, 0), links((1, 0), (2, 0), size=6)),
    ),
    (
        algorithms.star_scatter(3),
        9,
        2,
        (1, (12, 0, 0), (0, 6, 6), links((0, 1), (0, 2), size=6)),
    ),
    # Rounds: 2 -> 0; 0 <-> 1; 0 -> 2. Whole buffers of 8 bytes.
    (
        algorithms.recursive_doubling(3),
        2,
        4,
        (3, (16, 8, 8), (16, 8, 8), links((0, 1), (0, 2), (1, 0), (2, 0), size=8)),
    ),
    (
        algorithms.recursive_doubling(4),
        2,
        4,
        (
            2,
            (16,) * 4,
            (16,) * 4,
            links(
                *((0, 1), (1, 0), (2, 3), (3, 2)),
                *((0, 2), (1, 3), (2, 0), (3, 1)),
                size=8,
            ),
        ),
    ),
    # 4 chunks of 12 bytes: 2 rounds of each half go right, the first goes left too.
    (
        algorithms.bidirectional_ring(4),
        10,
        4,
        (
            4,
            (72,) * 4,
            (72,) * 4,
            links((0, 1), (1, 2), (2, 3), (3, 0), size=48)
            | links((1, 0), (2, 1), (3, 2), (0, 3), size=24),
        ),
    ),
    (
        algorithms.bidirectional_ring_reduce_scatter(3),
        9,
        2,
        (1, (12,) * 3, (12,) * 3, links(*every_pair(3), size=6)),
    ),
    (
        algorithms.bidirectional_ring_all_gather(5),
        5,
        1,
        (
            2,
            (4,) * 5,
            (4,) * 5,
            links(*[(r, (r + way) % 5) for r in range(5) for way in (1, 4)], size=2),
        ),
    ),
    (
        algorithms.direct(3),
        9,
        2,
        (2, (24,) * 3, (24,) * 3, links(*every_pair(3), size=12)),
    ),
    (
        algorithms.direct_reduce_scatter(4),
        4,
        1,
        (1, (3,) * 4, (3,) * 4, links(*every_pair(4), size=1)),
    ),
    (
        algorithms.direct_all_gather(2),
        1,
        8,
        (1, (8, 8), (8, 8), links((0, 1), (1, 0), size=8)),
    ),
    # 3 -> 0 -> 1 <- 2.
    (
        algorithms.tree_reduce(4, root=1),
        7,
        1,
        (2, (7, 0, 7, 7), (7, 14, 0, 0), links((3, 0), (0, 1), (2, 1), size=7)),
    ),
    (
        algorithms.tree_broadcast(3, root=2),
        7,
        2,
        (1, (0, 0, 28), (14, 14, 0), links((2, 0), (2, 1), size=14)),
    ),
    # 2 <- 3 <- 0 -> 1, and back before.
    (
        algorithms.tree(4),
        5,
        4,
        (4, (40, 20, 20, 40), (40, 20, 20, 40), links(*TREE_OF_4, size=20)),
    ),
    # Two chunks of 12 bytes: up in rounds 0 to 2, down in rounds 2 to 4.
    (
        algorithms.pipelined_tree(4, chunks=2),
        5,
        4,
        (5, (48, 24, 24, 48), (48, 24, 24, 48), links(*TREE_OF_4, size=24)),
    ),
    (
        algorithms.pipelined_tree_reduce(4, root=1, chunks=3),
        7,
        1,
        (4, (9, 0, 9, 9), (9, 18, 0, 0), links((3, 0), (0, 1), (2, 1), size=9)),
    ),
    (
        algorithms.pipelined_tree_broadcast(3, root=2, chunks=2),
        7,
        2,
        (2, (0, 0, 32), (16, 16, 0), links((2, 0), (2, 1), size=16)),
    ),
    (
        algorithms.pipelined_star(3, root=1, chunks=2),
        5,
        4,
        (
            3,
            (24, 48, 24),
            (24, 48, 24),
            links((0, 1), (2, 1), (1, 0), (1, 2), size=24),
        ),
    ),
    # One chunk of 12 bytes through 1 <- 2 <- 0 and 2 -> 3, one through 2 <- 1 <- 3 and
    # 1 -> 0, each up and down.
    (
        algorithms.double_binary_tree(4, chunks=2),
        5,
        4,
        (
            8,
            (24, 48, 48, 24),
            (24, 48, 48, 24),
            links(*[(0, 2), (2, 3), (3, 1), (1, 0)], size=12)
            | links(*[(2, 0), (3, 2), (1, 3), (0, 1)], size=12)
            | links((1, 2), (2, 1), size=24),
        ),
    ),
    # Two chunks of 12 bytes to the next rank, one to the next but one, and back.
    (
        algorithms.halving_doubling(4),
        10,
        4,
        (
            4,
            (72,) * 4,
            (72,) * 4,
            links((0, 1), (1, 0), (2, 3), (3, 2), size=48)
            | links((0, 2), (2, 0), (1, 3), (3, 1), size=24),
        ),
    ),
    # 1 gives all 8 bytes to 0, which halves them with 2.
    (
        algorithms.halving_doubling(3),
        2,
        4,
        (4, (16, 8, 8), (16, 8, 8), links((1, 0), (0, 1), (0, 2), (2, 0), size=8)),
    ),
    # Blocks of 24 bytes inside, there and back; chunks of 12 across, twice.
    (
        algorithms.hierarchical(4, 2),
        10,
        4,
        (
            4,
            (72,) * 4,
            (72,) * 4,
            links((0, 1), (1, 0), (2, 3), (3, 2), size=48)
            | links((0, 2), (2, 0), (1, 3), (3, 1), size=24),
        ),
    ),
    # Servers 0 and 1, chunks of 5 elements: each server hears of the two others
    # and tells the two others; rank 2 pushes to both.
    (
        algorithms.sharded_servers(3, 2),
        10,
        4,
        (
            2,
            (60, 60, 40),
            (60, 60, 40),
            {
                (0, 1): 40,
                (1, 0): 40,
                (0, 2): 20,
                (1, 2): 20,
                (2, 0): 20,
                (2, 1): 20,
            },
        ),
    ),
    (
        algorithms.sharded_servers(3, 1, dedicated=True),
        10,
        4,
        (
            2,
            (80, 40, 40),
            (80, 40, 40),
            links((0, 1), (0, 2), (1, 0), (2, 0), size=40),
        ),
    ),
    (
        algorithms.sharded_servers_push(4, 1),
        6,
        2,
        (1, (0, 12, 12, 12), (36, 0, 0, 0), links((1, 0), (2, 0), (3, 0), size=12)),
    ),
    (
        algorithms.sharded_servers_pull(3, 3),
        6,
        2,
        (
            1,
            (8, 8, 8),
            (8, 8, 8),
            links((0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1), size=4),
        ),
    ),
    # 2 servers keep the chunks of 3 workers apart: 6 chunks of 2 elements.
    (
        algorithms.sharded_servers_collect(3, 2),
        12,
        1,
        (
            1,
            (2, 2, 4),
            (4, 4, 0),
            links((0, 1), (1, 0), (2, 0), (2, 1), size=2),
        ),
    ),
]


@pytest.mark.parametrize(
    ("schedule", "elements", "itemsize", "expected"),
    COUNTED,
    ids=lambda value: value.name if isinstance(value, Schedule) else "",
)
def test_rounds_and_bytes(schedule, elements, itemsize, expected):
    counted = cost.cost(schedule, elements, itemsize)
    assert counted == expected
    assert sum(counted.link_bytes.values()) == sum(counted.sent_bytes)


def test_every_algorithm_is_counted_by_hand_above():
    functions = {f for of in algorithms.SCHEDULES.values() for f in of.values()}
    names = {f.__name__ for f in functions}
    assert names <= {schedule.name.partition("(")[0] for schedule, *_ in COUNTED}
    assert len(names) == 24


@pytest.mark.parametrize(
    ("schedule", "sent"),
    [
        # Chunks of 3 elements. Round 0 moves contributions, rounds 1 and 2 sums of two
        # and of three, rounds 3 to 5 complete sums: 6 + 12 + 12 + 6 + 6 + 6 bytes.
        (algorithms.ring(4), (48,) * 4),
        (algorithms.ring(2), (24, 24)),  # chunks of 6: a sum of two is complete
        (algorithms.star(3), (48, 24, 24)),  # nothing but contributions and the sum
        (algorithms.recursive_doubling(4), (24 + 48,) * 4),
        # 2 -> 0; then 0 sends a sum of two and 1 a contribution in one transfer, which
        # has one type; 0 -> 2 is complete.
        (algorithms.recursive_doubling(3), (48 + 24, 48, 24)),
        (algorithms.sharded_servers(3, 2), (36, 36, 24)),
        (algorithms.ring_all_gather(4), (18,) * 4),
        # Chunks of 3: two contributions, one sum of two, one and two complete ones.
        (algorithms.halving_doubling(4), (12 + 12 + 6 + 12,) * 4),
        # Blocks of two contributions; a sum of two; complete chunks: one, then two.
        (algorithms.hierarchical(4, 2), (12 + 12 + 6 + 12,) * 4),
    ],
    ids=lambda value: value.name if isinstance(value, Schedule) else "",
)
def test_partial_sums_may_be_wider(schedule, sent):
    assert cost.cost(schedule, 12, 2, partial_itemsize=4).sent_bytes == sent


def test_wider_partial_sums_take_longer():
    # 4 chunks of 500 elements: 1000 bytes in four rounds, 2000 bytes in two.
    seconds = cost.time_s(algorithms.ring(4), 2000, 2, ONE_HOST, partial_itemsize=4)
    assert seconds == pytest.approx(4 * 2e-6 + 2 * 3e-6)


def test_an_empty_buffer_has_no_bytes():
    assert cost.cost(algorithms.ring(3), 0, 4).sent_bytes == (0, 0, 0)


@pytest.mark.parametrize(
    ("schedule", "machine", "seconds"),
    [
        # 2000 elements of 2 bytes in 4 chunks of 1000 bytes: 6 x (1 us + 1 us).
        (algorithms.ring(4), ONE_HOST, 6 * 2e-6),
        # The root takes part in three transfers of 4000 bytes, one after the other,
        # each way.
        (algorithms.star(4), ONE_HOST, 2 * 3 * 5e-6),
        (algorithms.recursive_doubling(4), ONE_HOST, 2 * 5e-6),
        # 1 -> 2 and 3 -> 0 cross the network: 10 us + 10 us, in every round.
        (algorithms.ring(4), TWO_PER_HOST, 6 * 20e-6),
        (algorithms.ring(4), SHARED, 6 * 20e-6),
        # Round 1 inside hosts: 5 us; round 2: both of a host cross, 4000 bytes each.
        (algorithms.recursive_doubling(4), TWO_PER_HOST, 5e-6 + 50e-6),
        (algorithms.recursive_doubling(4), SHARED, 5e-6 + 90e-6),
        # Blocks go as one message: 1 us + 2 us, then 1 us + 1 us, and back.
        (algorithms.halving_doubling(4), ONE_HOST, 2 * (3e-6 + 2e-6)),
        (algorithms.hierarchical(4, 2), TWO_PER_HOST, 2 * 3e-6 + 2 * 20e-6),
        (algorithms.hierarchical(4, 2), SHARED, 2 * 3e-6 + 2 * 30e-6),
        # A device has a transfer to the right and one to the left, 1000 bytes each.
        (algorithms.bidirectional_ring(4), ONE_HOST, 2 * (4e-6 + 2e-6)),
        # Three transfers of 1000 bytes, both ways at once.
        (algorithms.direct(4), ONE_HOST, 2 * 3 * 2e-6),
        # The root takes part in two transfers of 4000 bytes, its left child in one.
        (algorithms.tree(4), ONE_HOST, 2 * (2 * 5e-6 + 5e-6)),
        # Two chunks of 2000 bytes, and one transfer in each of eight rounds.
        (algorithms.double_binary_tree(4, chunks=2), ONE_HOST, 8 * 3e-6),
        (algorithms.ring(1), ONE_HOST, 0.0),
    ],
    ids=[
        "ring",
        "star",
        "doubling",
        "ring_over_hosts",
        "ring_over_shared_adapters",
        "doubling_over_hosts",
        "doubling_over_shared_adapters",
        "halving_doubling",
        "hierarchical_over_hosts",
        "hierarchical_over_shared_adapters",
        "bidirectional_ring",
        "direct",
        "tree",
        "double_binary_tree",
        "alone",
    ],
)
def test_seconds(schedule, machine, seconds):
    assert cost.time_s(schedule, 2000, 2, machine) == pytest.approx(seconds, rel=1e-12)


def one_transfer(*pairs):
    chunks = (0,) * len(pairs)
    return Round((Transfer(pairs, chunks, "replace"),))


def by_hand(devices, *rounds):
    everywhere = (tuple(range(devices)),)
    return Schedule("by_hand", devices, 1, everywhere, everywhere, rounds)


def test_an_adapter_is_shared_by_direction_and_by_what_enters_too():
    # Hosts {0, 1}, {2, 3}, {4, 5}: two pairs enter the second, one leaves it.
    into = by_hand(6, one_transfer((0, 2), (4, 3), (2, 1)))
    assert cost.time_s(into, 1000, 1, SHARED) == pytest.approx(30e-6)
    apart = by_hand(6, one_transfer((0, 2), (2, 4), (4, 0)))
    assert cost.time_s(apart, 1000, 1, SHARED) == pytest.approx(20e-6)


def test_a_shared_link_inside_a_host_is_no_adapter():
    bus = dataclasses.replace(ONE_HOST, link=dataclasses.replace(LINK, shared=True))
    doubling = algorithms.recursive_doubling(4)
    assert cost.time_s(doubling, 2000, 2, bus) == pytest.approx(10e-6)


def test_sending_and_receiving_at_once_costs_the_longer():
    # Device 1 receives inside its host (2 us) and sends to another (20 us).
    schedule = by_hand(4, one_transfer((0, 1), (1, 2)))
    assert cost.time_s(schedule, 1000, 1, TWO_PER_HOST) == pytest.approx(20e-6)


def test_a_target_is_hardware_by_name():
    h100 = hardware("h100")
    expected = 14 * h100.link.transfer_s(500)
    assert cost.time_s(algorithms.ring(8), 1000, 4, "h100") == pytest.approx(expected)


@pytest.mark.parametrize("numbers", [(-1, 4), (10, 0)])
def test_sizes_that_are_none_are_refused(numbers):
    elements, itemsize = numbers
    message = rf"elements={elements} of itemsize={itemsize} bytes for ring\(4\)"
    with pytest.raises(ValueError, match=message):
        cost.cost(algorithms.ring(4), elements, itemsize)
    with pytest.raises(ValueError, match=message):
        cost.time_s(algorithms.ring(4), elements, itemsize, ONE_HOST)


def test_an_unknown_target_is_refused():
    with pytest.raises(ValueError, match="h1000"):
        cost.time_s(algorithms.ring(4), 10, 4, "h1000")
