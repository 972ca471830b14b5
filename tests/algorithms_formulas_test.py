"""Rounds and bytes are those that docstrings promise, for every number of devices."""

import math

import numpy as np
import pytest

from jaxdp import algorithms, cost
from jaxdp.schedule import bundles

SIZES = range(1, 65)


def log2(devices):
    """Of the largest power of two that is not above."""
    return int(math.log2(devices))


def bytes_of(schedule):
    """Sent and received by each device, in chunks: K is `schedule.chunks`."""
    counted = cost.cost(schedule, schedule.chunks, 1)
    assert counted.rounds == len(schedule.rounds)
    return counted.sent_bytes, counted.received_bytes


# Builder -> rounds, chunks that each device sends, and receives, in each direction.
RINGS = {
    algorithms.ring: lambda n: (2 * (n - 1), 2 * (n - 1)),
    algorithms.ring_reduce_scatter: lambda n: (n - 1, n - 1),
    algorithms.ring_all_gather: lambda n: (n - 1, n - 1),
    algorithms.bidirectional_ring: lambda n: (2 * (n // 2), 2 * (n - 1)),
    algorithms.bidirectional_ring_reduce_scatter: lambda n: (n // 2, n - 1),
    algorithms.bidirectional_ring_all_gather: lambda n: (n // 2, n - 1),
    algorithms.direct: lambda n: (2 * (n > 1), 2 * (n - 1)),
    algorithms.direct_reduce_scatter: lambda n: (int(n > 1), n - 1),
    algorithms.direct_all_gather: lambda n: (int(n > 1), n - 1),
}


@pytest.mark.parametrize(
    ("build", "law"), RINGS.items(), ids=[build.__name__ for build in RINGS]
)
def test_all_devices_of_a_ring_do_the_same(build, law):
    for devices in SIZES:
        schedule = build(devices)
        rounds, moved = law(devices)
        assert (schedule.chunks, len(schedule.rounds)) == (devices, rounds)
        assert bytes_of(schedule) == ((moved,) * devices,) * 2


def test_a_bidirectional_ring_uses_both_links_of_a_device():
    for devices in range(3, 65):
        for half in (
            algorithms.bidirectional_ring_reduce_scatter,
            algorithms.bidirectional_ring_all_gather,
        ):
            links = cost.cost(half(devices), devices, 1).link_bytes
            right = {(r, (r + 1) % devices): devices // 2 for r in range(devices)}
            left = {(r, (r - 1) % devices): (devices - 1) // 2 for r in range(devices)}
            assert links == right | left


@pytest.mark.parametrize("chunks", [1, 4, 7])
def test_pipelined_stars(chunks):
    for devices in SIZES:
        root = devices // 3
        schedule = algorithms.pipelined_star(devices, root, chunks)
        assert len(schedule.rounds) == (chunks + 1 if devices > 1 else 0)
        load = [chunks * (devices - 1 if r == root else 1) for r in range(devices)]
        load = tuple(load) if devices > 1 else (0,)
        assert bytes_of(schedule) == (load, load)


def children_of(devices, root):
    """By rank, counted in the broadcast."""
    found = np.zeros(devices, int)
    for round_ in algorithms.tree_broadcast(devices, root).rounds:
        for transfer in round_.transfers:
            for parent, _, _ in transfer:
                found[parent] += 1
    return found


@pytest.mark.parametrize("place", [0.0, 0.4, 0.99])
def test_trees(place):
    for devices in SIZES:
        root = int(place * devices)
        depth = log2(devices)
        down, up, both = (
            build(devices, root)
            for build in (
                algorithms.tree_broadcast,
                algorithms.tree_reduce,
                algorithms.tree,
            )
        )
        rounds = [len(schedule.rounds) for schedule in (down, up, both)]
        assert rounds == [depth, depth, 2 * depth]
        children, parents = children_of(devices, root), np.ones(devices, int)
        parents[root] = 0
        assert max(children) <= 2 and sum(children) == devices - 1
        for schedule, sent, received in (
            (down, children, parents),
            (up, parents, children),
            (both, children + parents, children + parents),
        ):
            assert bytes_of(schedule) == (tuple(sent), tuple(received))
        for round_ in both.rounds:
            assert 1 <= len(round_.transfers) <= 2


@pytest.mark.parametrize("chunks", [1, 2, 5, 8])
def test_pipelined_trees_take_one_more_round_for_one_more_chunk(chunks):
    for devices in range(2, 65):
        root, depth = devices // 2, log2(devices)
        for pipelined, plain, rounds in (
            (
                algorithms.pipelined_tree_broadcast,
                algorithms.tree_broadcast,
                chunks + depth - 1,
            ),
            (
                algorithms.pipelined_tree_reduce,
                algorithms.tree_reduce,
                chunks + depth - 1,
            ),
            (algorithms.pipelined_tree, algorithms.tree, chunks + 2 * depth - 1),
        ):
            schedule = pipelined(devices, root, chunks)
            assert len(schedule.rounds) == rounds
            once, times = bytes_of(plain(devices, root)), bytes_of(schedule)
            assert np.array_equal(chunks * np.array(once), times)
            for round_ in schedule.rounds:
                assert 1 <= len(round_.transfers) <= 4


@pytest.mark.parametrize("chunks", [1, 2, 5, 8, 32])
def test_double_binary_trees(chunks):
    for devices in SIZES:
        schedule = algorithms.double_binary_tree(devices, chunks)
        assert len(schedule.rounds) <= 2 * (chunks + 2 * math.log2(devices))
        sent, received = map(np.array, bytes_of(schedule))
        assert sum(sent) == sum(received) == 2 * (devices - 1) * chunks
        if chunks % 2 == 0:  # both trees carry half
            assert max(sent) <= 2 * chunks and max(received) <= 2 * chunks
        # A device sends one chunk and receives one: never two, one after the other.
        assert all(len(round_.transfers) == 1 for round_ in schedule.rounds)


def test_recursive_doubling_moves_whole_buffers():
    for devices in SIZES:
        schedule = algorithms.recursive_doubling(devices)
        bits = log2(devices)
        beyond = devices - 2**bits
        assert len(schedule.rounds) == bits + 2 * (beyond > 0)
        sent = [bits + (r < beyond) for r in range(2**bits)] + [1] * beyond
        assert bytes_of(schedule) == (tuple(sent), tuple(sent))


def test_halving_doubling_is_the_rings_bytes_in_log_n_messages():
    for devices in SIZES:
        schedule = algorithms.halving_doubling(devices)
        bits = log2(devices)
        power = 2**bits
        beyond = devices - power
        assert schedule.chunks == power
        assert len(schedule.rounds) == 2 * bits + 2 * (beyond > 0)
        inside = 2 * (power - 1)
        pairs = [inside + power, power] * beyond
        sent = tuple(pairs + [inside] * (devices - 2 * beyond))
        assert bytes_of(schedule) == (sent, sent)
        assert all(len(messages) == 1 for messages in bundles(schedule))


@pytest.mark.parametrize("hosts", [1, 2, 3, 4, 8])
def test_hierarchies(hosts):
    for inside in range(1, 64 // hosts + 1):
        devices = hosts * inside
        schedule = algorithms.hierarchical(devices, hosts)
        assert len(schedule.rounds) == 2 * (inside - 1) + 2 * (hosts - 1)
        assert bytes_of(schedule) == ((2 * (devices - 1),) * devices,) * 2
        assert all(len(messages) == 1 for messages in bundles(schedule))
        away = np.zeros(devices, int)
        links = cost.cost(schedule, devices, 1).link_bytes
        for (source, target), size in links.items():
            if source // inside != target // inside:
                away[source] += size
                assert source % inside == target % inside
        assert away.tolist() == [2 * (hosts - 1)] * devices


def test_one_host_and_one_device_per_host_are_rings():
    for devices in (1, 2, 6, 7):
        ring = algorithms.ring(devices).rounds
        for hosts in (1, devices):
            assert algorithms.hierarchical(devices, hosts).rounds == ring
