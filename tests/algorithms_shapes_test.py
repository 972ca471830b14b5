"""Who sends to whom: trees, halves and hosts have the shapes that their pages draw."""

import collections
import re

import numpy as np
import pytest

from jaxdp import algorithms
from jaxdp.algorithms import double_trees, doubling, trees
from jaxdp.schedule import bundles, simulate, verify


def edges(schedule, chunk=0):
    """Who sends a chunk to whom, and in which round."""
    return {
        (source, target): index
        for index, round_ in enumerate(schedule.rounds)
        for transfer in round_.transfers
        for source, target, moved in transfer
        if moved == chunk
    }


def digits(text):
    return [int(digit) for digit in re.findall(r"\d", text)]


def test_a_tree_is_the_one_on_its_page():
    """N = 7, root 3: levels from the left to the right."""
    levels = [digits(row) for row in re.findall(r"level \d( .*)", trees.__doc__ or "")]
    assert levels == [[3], [1, 5], [0, 2, 4, 6]]
    drawn = {
        (levels[depth][i // 2], child): depth
        for depth, below in enumerate(levels[1:])
        for i, child in enumerate(below)
    }
    assert edges(algorithms.tree_broadcast(7, root=3)) == drawn
    up = {(child, parent): 1 - depth for (parent, child), depth in drawn.items()}
    assert edges(algorithms.tree_reduce(7, root=3)) == up


def test_subtrees_are_neighbours():
    """Of 8 devices in each of 8 hosts, seven edges and one more leave their host."""
    pairs = edges(algorithms.tree_broadcast(64, root=0))
    assert sum(a // 8 != b // 8 for a, b in pairs) <= 2 * 7


def test_pipelined_chunks_follow_each_other_up_and_down():
    """N = 7, d = 2: chunk c rises in rounds c and c + 1, and comes down in the next."""
    schedule = algorithms.pipelined_tree(7, root=3, chunks=4)
    plain = edges(algorithms.tree(7, root=3))
    for chunk in range(4):
        moved = {pair: index - chunk for pair, index in edges(schedule, chunk).items()}
        assert moved == plain


def test_a_pipelined_star_sends_a_chunk_while_it_receives_the_next():
    schedule = algorithms.pipelined_star(3, root=0, chunks=2)
    moved = [
        [(t.op, *move) for t in round_.transfers for move in t]
        for round_ in schedule.rounds
    ]
    assert moved == [
        [("add", 1, 0, 0), ("add", 2, 0, 0)],
        [
            ("add", 1, 0, 1),
            ("add", 2, 0, 1),
            ("replace", 0, 1, 0),
            ("replace", 0, 2, 0),
        ],
        [("replace", 0, 1, 1), ("replace", 0, 2, 1)],
    ]


def parents(devices, chunk):
    """Of each device but the root, in the tree of a chunk."""
    schedule = algorithms.double_binary_tree(devices, chunks=2)
    rounds = schedule.rounds[len(schedule.rounds) // 2 :]
    return {
        target: source
        for round_ in rounds
        for transfer in round_.transfers
        for source, target, moved in transfer
        if moved == chunk
    }


def test_double_trees_are_those_on_their_page():
    """N = 6: tree 0 on the left of each row, tree 1 on the right."""
    rows = re.findall(r"^ {4}(\d.*)$", double_trees.__doc__ or "", re.MULTILINE)
    assert [digits(row) for row in rows] == [[0, 5], [4, 1], [2, 5, 3, 0], [1, 3, 4, 2]]
    assert parents(6, 0) == {4: 0, 2: 4, 5: 4, 1: 2, 3: 2}
    assert parents(6, 1) == {1: 5, 3: 1, 0: 1, 4: 3, 2: 3}


@pytest.mark.parametrize("devices", range(2, 65))
def test_inner_devices_of_one_tree_are_leaves_of_the_other(devices):
    inner = [collections.Counter(parents(devices, chunk).values()) for chunk in (0, 1)]
    both = set(inner[0]) & set(inner[1])
    assert both <= ({0} if devices % 2 else set())
    together = inner[0] + inner[1]
    assert max(together.values()) <= 2


def test_halving_sends_the_blocks_on_its_page():
    """N = 8: what ranks 0 to 3 send in each round of the first half, and own."""
    page = doubling.__doc__ or ""
    assert "4 to 7        0 to 3    4 to 7    0 to 3" in page
    assert "2 and 3       6 and 7   0 and 1   4 and 5" in page
    expected = [
        [[4, 5, 6, 7], [0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]],
        [[2, 3], [6, 7], [0, 1], [4, 5]],
        [[1], [5], [3], [7]],
    ]
    schedule = algorithms.halving_doubling(8)
    for index, (blocks, bit) in enumerate(zip(expected, (1, 2, 4), strict=True)):
        (message,) = bundles(schedule)[index]
        assert message.op == "add"
        assert message.pairs == tuple((rank, rank ^ bit) for rank in range(8))
        sent = [[t.chunks[rank] for t in message.transfers] for rank in range(4)]
        assert sent == blocks
    (last,) = bundles(schedule)[3]
    assert [t.chunks[:4] for t in last.transfers] == [(0, 4, 2, 6)]


def test_halving_doubling_folds_neighbours():
    """N = 6, p = 4: 1 and 3 give all they have to 0 and 2, and get all back."""
    first, *inside, last = bundles(algorithms.halving_doubling(6))
    assert [message.pairs for message in first] == [((1, 0), (3, 2))]
    assert [message.pairs for message in last] == [((0, 1), (2, 3))]
    took_part = {
        rank for (message,) in inside for pair in message.pairs for rank in pair
    }
    assert took_part == {0, 2, 4, 5}


def test_additions_of_a_direct_exchange_go_down_the_ranks():
    """Rank r adds x[r - 1], x[r - 2] and x[r - 3] to its own, in this order."""
    x = np.array([3, 1e8, 1, -1e8], np.float32)
    buffers = np.tile(x[:, None], (1, 4))
    *_, ends = simulate(algorithms.direct_reduce_scatter(4), buffers)
    sums = [((x[r] + x[r - 1]) + x[r - 2]) + x[r - 3] for r in range(4)]
    assert np.diag(ends).tolist() == sums
    assert len(set(sums)) > 1  # another order gives other bits


@pytest.mark.parametrize(("devices", "hosts"), [(8, 3), (8, 16), (6, 0), (6, -2)])
def test_hosts_that_do_not_divide_the_devices_are_refused(devices, hosts):
    message = rf"got hosts={hosts} for {devices} devices.*divide {devices}.*one of 1, 2"
    with pytest.raises(ValueError, match=message):
        algorithms.hierarchical(devices, hosts)


def test_the_remainder_is_in_the_message():
    with pytest.raises(ValueError, match=r"hosts=3 for 8 devices.*leaves 2"):
        algorithms.hierarchical(8, 3)
    with pytest.raises(ValueError, match=r"hosts=4 for 6 devices.*1, 2, 3, 6"):
        algorithms.hierarchical(8, 4).resized(6)


def test_hierarchical_by_name_takes_two_axes():
    build = algorithms.build
    schedule = build("all_reduce", "hierarchical", 6, sizes=(3, 2))
    assert verify(schedule) == algorithms.hierarchical(6, 3)
    ring = build("all_reduce", "ring", 6, sizes=(3, 2))
    assert ring == algorithms.ring(6)
    for sizes, axes in ((None, "one axis"), ((6,), r"\(6,\)"), ((1, 3, 2), r"\(1, 3")):
        message = rf"hierarchical' on .*{axes}.* 6 devices.*two.*hierarchical\(6, hosts"
        with pytest.raises(ValueError, match=message):
            build("all_reduce", "hierarchical", 6, sizes=sizes)
    with pytest.raises(ValueError, match=r"sizes=\(4, 2\) for 6 devices.* 8 devices"):
        build("all_reduce", "hierarchical", 6, sizes=(4, 2))
    with pytest.raises(ValueError, match=r"reduce got algorithm='hierarchical'. It mu"):
        build("reduce", "hierarchical", 6, sizes=(3, 2))


PIPELINED = [
    algorithms.pipelined_star,
    algorithms.pipelined_tree,
    algorithms.pipelined_tree_reduce,
    algorithms.pipelined_tree_broadcast,
    algorithms.double_binary_tree,
]


@pytest.mark.parametrize("build", PIPELINED, ids=lambda build: build.__name__)
@pytest.mark.parametrize("chunks", [0, -3])
def test_pipelines_of_no_chunks_are_refused(build, chunks):
    message = rf"{build.__name__}\(4.*got chunks={chunks}.*at least 1"
    with pytest.raises(ValueError, match=message):
        build(4, chunks=chunks)


def test_no_devices_are_refused_without_a_collective_too():
    with pytest.raises(ValueError, match=r"halving_doubling got 0 devices.*least 1"):
        algorithms.halving_doubling(0)


@pytest.mark.parametrize(
    "build",
    [
        *(algorithms.star, algorithms.star_gather, algorithms.pipelined_star),
        *(algorithms.tree, algorithms.pipelined_tree_reduce),
    ],
    ids=lambda build: build.__name__,
)
def test_roots_out_of_range_are_refused_without_a_collective_too(build):
    message = rf"{build.__name__} got root=4 on 4 devices\..* from 0 to 3: choose"
    with pytest.raises(ValueError, match=message):
        build(4, 4)
    with pytest.raises(ValueError, match="got root=3 on 2 devices"):
        build(4, root=3).resized(2)
