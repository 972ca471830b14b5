"""The verifier accepts what is right, and refuses everything else by number."""

import dataclasses
import re
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxdp import algorithms
from jaxdp.schedule import (
    Placement,
    Round,
    Schedule,
    Transfer,
    holdings,
    local_row,
    local_rows,
    simulate,
    verify,
)

EVERYWHERE = ((0, 1, 2),)


def three(
    *rounds: tuple[Transfer, ...],
    chunks: int = 1,
    starts: Placement = EVERYWHERE,
    ends: Placement = EVERYWHERE,
) -> Schedule:
    """A schedule for three devices, an all-reduce of one chunk unless changed."""
    return Schedule("mine", 3, chunks, starts, ends, tuple(map(Round, rounds)))


def move(*pairs: tuple[int, int], op: Any = "add", chunks=None) -> Transfer:
    return Transfer(pairs, chunks or (0,) * len(pairs), op)


def counts(schedule: Schedule) -> np.ndarray:
    """How often each contribution is in each chunk at the end, by simulation.

    `[devices, chunks, devices]`, independent of the verifier's sets.
    """
    ones = np.zeros((schedule.devices, schedule.chunks, schedule.devices), int)
    for chunk, starts in enumerate(schedule.starts):
        for device in starts:
            ones[device, chunk, device] = 1
    *_, final = simulate(schedule, ones)
    return final


def is_right(schedule: Schedule) -> bool:
    """Whether every chunk ends as the sum of its contributions, each exactly once."""
    final = counts(schedule)
    return all(
        final[device, chunk].tolist()
        == [int(d in schedule.starts[chunk]) for d in range(schedule.devices)]
        for chunk, ends in enumerate(schedule.ends)
        for device in ends
    )


WRONG = {
    "lacks_a_contribution": (
        three((move((1, 0)),), (move((0, 1), op="replace"),), ends=((0, 1),)),
        r"mine: after the last round \(2 in all\) device 0 lacks the contributions of "
        r"devices \[2\] to chunk 0; it must hold those of \[0, 1, 2\]",
    ),
    "no_rounds": (three(), r"\(0 in all\) device 0 lacks .* devices \[1, 2\]"),
    "counts_twice": (
        three((move((1, 0)),), (move((1, 0)),)),
        r"mine, round 1: device 0 would count the contributions of devices \[1\] to "
        r"chunk 0 twice: it holds those of \[0, 1\] and receives those of \[1\]",
    ),
    "counts_twice_in_a_round": (
        three((move((1, 0)), move((1, 0)))),
        r"round 0: device 0 would count the contributions of devices \[1\]",
    ),
    "sends_what_it_lacks": (
        three((move((2, 1), op="replace"),), starts=((0,),)),
        r"round 0: device 2 sends chunk 0, which it does not hold",
    ),
    "sends_what_arrives_in_the_same_round": (
        three((move((0, 1), op="replace"), move((1, 2), op="replace")), starts=((0,),)),
        r"round 0: device 1 sends chunk 0, which it does not hold",
    ),
    "overwrites": (
        three((move((0, 1), op="replace"),), ends=((1,),)),
        r"device 1 lacks the contributions of devices \[1, 2\] to chunk 0",
    ),
    "duplicate_source": (
        three((move((0, 1), (0, 2)),)),
        r"round 0: a transfer has pairs \(\(0, 1\), \(0, 2\)\); one transfer uses each "
        r"source and each target once",
    ),
    "duplicate_target": (
        three((move((0, 1), (2, 1)),)),
        r"pairs \(\(0, 1\), \(2, 1\)\); one transfer uses each source and each target",
    ),
    "target_out_of_range": (
        three((move((0, 3)),)),
        r"pairs \(\(0, 3\),\); devices run from 0 to 2",
    ),
    "source_out_of_range": (
        three((move((-1, 0)),)),
        r"pairs \(\(-1, 0\),\); devices run from 0 to 2",
    ),
    "chunk_out_of_range": (
        three((move((0, 1), chunks=(1,)),)),
        r"chunks \(1,\); they run from 0 to 0",
    ),
    "sends_to_itself": (
        three((move((1, 1)),)),
        r"pairs \(\(1, 1\),\); a device need not send to itself",
    ),
    "mixes_complete_and_partial": (
        three(
            (move((0, 1), op="replace"),),
            (move((0, 2), (1, 0), op="replace", chunks=(0, 1)),),
            chunks=2,
            starts=((0,), (0, 1)),
            ends=((1,), (0,)),
        ),
        r"round 1: the transfer \(\(0, 2\), \(1, 0\)\) mixes complete chunks with part",
    ),
    "adds_to_nothing": (
        three((move((0, 1)),), starts=((0,),)),
        r"round 0: device 1 adds to chunk 0, of which it holds nothing.*op='replace'",
    ),
    "unknown_op": (
        three((move((0, 1), op="max"),)),
        r"op 'max'; it must be 'add' or 'replace'",
    ),
    "no_pairs": (three((move(),)), r"0 pairs and 0 chunks"),
    "pairs_without_chunks": (
        three((Transfer(((0, 1), (1, 2)), (0,), "add"),)),
        r"2 pairs and 1 chunks; it needs one chunk per pair",
    ),
    "starts_of_other_length": (
        three(starts=EVERYWHERE * 2),
        r"mine has 1 chunks but places 2 in `starts`",
    ),
    "ends_of_other_length": (
        three(ends=()),
        r"mine has 1 chunks but places 0 in `ends`",
    ),
    "starts_out_of_range": (
        three(starts=((0, 7),)),
        r"places chunks on devices \[7\] in `starts`; devices run from 0 to 2",
    ),
    "ends_out_of_range": (
        three(ends=((-1, 3),)),
        r"places chunks on devices \[-1, 3\] in `ends`; devices run from 0 to 2",
    ),
}


@pytest.mark.parametrize(("schedule", "message"), WRONG.values(), ids=WRONG)
def test_wrong_schedules_are_refused(schedule, message):
    with pytest.raises(ValueError, match=message):
        verify(schedule)


def test_verify_returns_the_schedule():
    schedule = algorithms.ring(4)
    assert verify(schedule) == schedule


def test_schedules_are_values():
    assert algorithms.ring(5) == algorithms.ring(5)
    assert hash(algorithms.ring(5)) == hash(algorithms.ring(5))
    assert algorithms.ring(5) != algorithms.ring(6)
    assert repr(algorithms.ring(4)) == "Schedule(name='ring(4)', devices=4, chunks=4)"


def test_then_joins_rounds_and_keeps_the_ends():
    scattered, gathered = (
        algorithms.ring_reduce_scatter(4),
        algorithms.ring_all_gather(4),
    )
    joined = scattered.then(gathered, "both")
    assert joined.rounds == scattered.rounds + gathered.rounds
    assert (joined.name, joined.starts, joined.ends) == (
        "both",
        scattered.starts,
        gathered.ends,
    )


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            algorithms.ring_reduce_scatter(4),
            algorithms.ring_all_gather(3),
            r"ring_reduce_scatter\(4\)\.then got ring_all_gather\(3\), which starts on "
            r"\(\(0,\), \(1,\), \(2,\)\) of 3 devices.* of 4 devices",
        ),
        (
            algorithms.star_reduce(3, root=1),
            algorithms.star_broadcast(3, root=2),
            r"starts on \(\(2,\),\) of 3 devices.*ends: \(\(1,\),\) of 3 devices",
        ),
    ],
    ids=["other_devices", "other_root"],
)
def test_then_refuses_what_does_not_follow(first, second, message):
    with pytest.raises(ValueError, match=message):
        first.then(second, "both")


@pytest.mark.parametrize(
    ("placement", "rows"),
    [
        (((0,), (1,), (2,)), [0, 0, 0]),
        (((0,),), [0]),
        (((0,), (0,)), [0, 1]),
        (((0, 1),) * 3, [0, 1, 2]),
        (((1,), (0,), (1,), (1,)), [0, 0, 1, 2]),
        (((1,), (0,), (1, 2), (1,)), [0, 1, 2, 3]),
    ],
)
def test_local_rows(placement, rows):
    assert local_rows(placement) == max(rows) + 1
    assert [local_row(placement, chunk) for chunk in range(len(placement))] == rows


def test_a_transfer_iterates_over_source_target_chunk():
    transfer = Transfer(((0, 1), (1, 2)), (5, 7), "add")
    assert list(transfer) == [(0, 1, 5), (1, 2, 7)]


def test_holdings_of_a_ring_follow_the_index_law():
    """After round s, device r holds s + 2 contributions to chunk r - 2 - s."""
    n = 5
    before, *after = holdings(algorithms.ring_reduce_scatter(n))
    assert all(before[d][c] == {d} for d in range(n) for c in range(n))
    for s, held in enumerate(after):
        for r in range(n):
            chunk = (r - 2 - s) % n
            assert held[r][chunk] == {(chunk + 1 + i) % n for i in range(s + 2)}


def test_simulate_against_hand_computed_buffers():
    """Ring reduce-scatter, N = 4: device r starts with 10**r * (1, 2, 3, 4)."""
    start = 10 ** np.arange(4)[:, None] * np.arange(1, 5)
    first, *_, last = simulate(algorithms.ring_reduce_scatter(4), start)
    np.testing.assert_array_equal(first, start)
    second = list(simulate(algorithms.ring_reduce_scatter(4), start))[1]
    np.testing.assert_array_equal(
        second,
        [
            [1, 2, 3003, 4],  # device 0 got chunk 2 from device 3
            [10, 20, 30, 44],  # device 1 got chunk 3 from device 0
            [110, 200, 300, 400],  # device 2 got chunk 0 from device 1
            [1000, 2200, 3000, 4000],  # device 3 got chunk 1 from device 2
        ],
    )
    np.testing.assert_array_equal(np.diag(last), [1111, 2222, 3333, 4444])


def test_simulate_leaves_its_input_and_what_it_yielded_alone():
    start = np.arange(9.0).reshape(3, 3)
    kept = start.copy()
    states = list(simulate(algorithms.ring(3), start))
    np.testing.assert_array_equal(start, kept)
    np.testing.assert_array_equal(states[0], kept)
    assert len(states) == 1 + 4
    assert not np.array_equal(states[-1], states[-2])


def test_replaces_in_one_round_apply_in_order():
    last = three((move((0, 2), op="replace"), move((1, 2), op="replace")))
    *_, final = simulate(last, np.array([[1], [2], [3]]))
    assert final.ravel().tolist() == [1, 2, 2]
    *_, held = holdings(last)
    assert held[2][0] == {1}


def transfers_of(schedule: Schedule) -> list[tuple[int, int]]:
    return [
        (i, j) for i, r in enumerate(schedule.rounds) for j, _ in enumerate(r.transfers)
    ]


def with_transfer(schedule: Schedule, at, transfer: Transfer | None) -> Schedule:
    """The schedule with one transfer exchanged or dropped."""
    i, j = at
    transfers = list(schedule.rounds[i].transfers)
    transfers[j : j + 1] = [] if transfer is None else [transfer]
    rounds = list(schedule.rounds)
    rounds[i] = Round(tuple(transfers))
    return dataclasses.replace(schedule, rounds=tuple(rounds))


def drop_pair(draw, t: Transfer, schedule):
    i = draw(st.integers(0, len(t.pairs) - 1))
    return Transfer(
        t.pairs[:i] + t.pairs[i + 1 :], t.chunks[:i] + t.chunks[i + 1 :], t.op
    )


def change_chunk(draw, t: Transfer, schedule):
    i = draw(st.integers(0, len(t.chunks) - 1))
    other = (t.chunks[i] + draw(st.integers(1, schedule.chunks - 1))) % schedule.chunks
    chunks = (*t.chunks[:i], other, *t.chunks[i + 1 :])
    return dataclasses.replace(t, chunks=chunks)


def swap_targets(draw, t: Transfer, schedule):
    i, j = draw(st.permutations(range(len(t.pairs))))[:2]
    pairs = list(t.pairs)
    pairs[i], pairs[j] = (pairs[i][0], pairs[j][1]), (pairs[j][0], pairs[i][1])
    return dataclasses.replace(t, pairs=tuple(pairs))


def flip_op(draw, t: Transfer, schedule):
    return dataclasses.replace(t, op="add" if t.op == "replace" else "replace")


MUTATIONS = [lambda *_: None, drop_pair, change_chunk, swap_targets, flip_op]
MUTATION_IDS = ["drop_transfer", "drop_pair", "change_chunk", "swap_targets", "flip_op"]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=MUTATION_IDS)
@hypothesis.settings(max_examples=40)
@hypothesis.given(data=st.data(), devices=st.integers(2, 9))
def test_a_ring_with_one_change_is_refused(mutate, data, devices):
    ring = algorithms.ring(devices)
    at = data.draw(st.sampled_from(transfers_of(ring)))
    old = ring.rounds[at[0]].transfers[at[1]]
    mutant = with_transfer(ring, at, mutate(data.draw, old, ring))
    assert mutant != ring
    if mutate is swap_targets and is_right(mutant):
        assert verify(mutant) == mutant
        return
    with pytest.raises(ValueError, match=r"round \d+: |\(\d+ in all\)"):
        verify(mutant)


def test_a_swap_that_changes_only_the_order_of_additions_is_accepted():
    """Device 0's share of chunk 3 goes straight to its owner, 2's share of 1 too."""
    ring = algorithms.ring(4)
    old = ring.rounds[0].transfers[0]
    swapped = dataclasses.replace(old, pairs=((0, 3), (1, 2), (2, 1), (3, 0)))
    mutant = verify(with_transfer(ring, (0, 0), swapped))
    assert is_right(mutant)


EVERY = {
    **algorithms.SCHEDULES["all_reduce"],
    "hierarchical": lambda devices: algorithms.hierarchical(devices, 2 - devices % 2),
}


@pytest.mark.parametrize("algorithm", EVERY)
@hypothesis.settings(max_examples=25)
@hypothesis.given(data=st.data(), devices=st.integers(2, 9))
def test_of_every_algorithm_what_the_verifier_accepts_is_right(
    algorithm, data, devices
):
    """One pair dropped or one op turned round: refused, or proven by counting."""
    schedule = EVERY[algorithm](devices)
    at = data.draw(st.sampled_from(transfers_of(schedule)))
    old = schedule.rounds[at[0]].transfers[at[1]]
    mutate = data.draw(st.sampled_from([drop_pair, flip_op]))
    mutant = with_transfer(schedule, at, mutate(data.draw, old, schedule))
    try:
        verify(mutant)
    except ValueError as error:
        assert re.search(rf"round {at[0]}: |round \d+: |last round", str(error))
    else:
        assert is_right(mutant), old


TREE = algorithms.tree(4)  # 2 -> 3 -> 0 <- 1, and back


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            with_transfer(TREE, (0, 0), None),
            r"tree\(4, root=0\): after the last round \(4 in all\) device 0 lacks the "
            r"contributions of devices \[2\] to chunk 0; it must hold .*\[0, 1, 2, 3\]",
        ),
        (
            with_transfer(TREE, (3, 0), None),
            r"device 2 lacks the contributions of devices \[0, 1, 3\] to chunk 0",
        ),
        (
            with_transfer(TREE, (1, 1), move((1, 0), op="replace")),
            r"device 0 lacks the contributions of devices \[0, 2, 3\] to chunk 0",
        ),
        (
            with_transfer(TREE, (1, 1), move((3, 1))),
            r"device 0 lacks the contributions of devices \[1\] to chunk 0",
        ),
        (
            with_transfer(TREE, (2, 1), move((0, 1))),
            r"round 2: device 1 would count the contributions of devices \[1\] to "
            r"chunk 0 twice: it holds those of \[1\] and receives those of \[0, 1",
        ),
    ],
    ids=["no_leaf", "no_way_back", "overwritten", "elsewhere", "added_twice"],
)
def test_what_is_wrong_with_a_tree_is_named(schedule, message):
    with pytest.raises(ValueError, match=message):
        verify(schedule)


@hypothesis.settings(max_examples=60)
@hypothesis.given(data=st.data(), devices=st.integers(2, 5))
def test_what_the_verifier_accepts_is_right(data, devices):
    """One change in a star: refused, or proven equivalent by counting."""
    build = data.draw(
        st.sampled_from(
            [algorithms.star, algorithms.star_gather, algorithms.star_scatter]
        )
    )
    star = build(devices, data.draw(st.integers(0, devices - 1)))
    at = data.draw(st.sampled_from(transfers_of(star)))
    old = star.rounds[at[0]].transfers[at[1]]
    pair = data.draw(st.permutations(range(devices)))[:2]
    chunk = data.draw(st.integers(0, star.chunks - 1))
    op = data.draw(st.sampled_from(["add", "replace"]))
    mutant = with_transfer(star, at, Transfer((tuple(pair),), (chunk,), op))
    try:
        verify(mutant)
    except ValueError as error:
        assert re.search(r"round \d|last round", str(error))
    else:
        assert is_right(mutant), old


@hypothesis.given(data=st.data(), devices=st.integers(2, 8))
def test_the_order_of_pairs_is_immaterial(data, devices):
    """The equivalent change: the same pairs with the same chunks in another order."""
    ring = algorithms.ring(devices)
    at = data.draw(st.sampled_from(transfers_of(ring)))
    old = ring.rounds[at[0]].transfers[at[1]]
    order = data.draw(st.permutations(range(devices)))
    shuffled = Transfer(
        tuple(old.pairs[i] for i in order), tuple(old.chunks[i] for i in order), old.op
    )
    mutant = verify(with_transfer(ring, at, shuffled))
    np.testing.assert_array_equal(counts(mutant), counts(ring))
