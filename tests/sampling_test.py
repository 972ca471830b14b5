"""Which rows a sampler chooses, for whom, and where it goes on."""

import itertools
import json
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from jaxdp.sampling import Sampler

UNKNOWN: Any = "wrap"  # typed so that the checker lets it pass as a mistake


def listed(batches):
    """Index lists and mask lists of batches."""
    return [(rows.indices.tolist(), rows.mask.tolist()) for rows in batches]


def real(batches):
    """The rows that are used, in order."""
    return [int(i) for rows in batches for i in rows.indices[rows.mask]]


def test_orders_never_change():
    """Written down: a checkpoint must find the order that it was saved in."""
    orders = {
        (0, 0): [4, 6, 2, 7, 3, 5, 9, 0, 8, 1],
        (0, 1): [9, 1, 3, 8, 7, 6, 0, 4, 2, 5],
        (1, 0): [8, 4, 7, 0, 1, 2, 5, 9, 6, 3],
        (7, 3): [3, 5, 4, 7, 8, 0, 9, 2, 1, 6],
    }
    for (seed, epoch), order in orders.items():
        sampler = Sampler(10, 10, seed=seed)
        (rows,) = sampler.epoch(epoch)
        assert rows.indices.tolist() == order
        assert rows.indices.dtype == np.int64 and rows.mask.dtype == bool


def test_every_epoch_has_an_order_of_its_own_and_every_row_once():
    sampler = Sampler(97, 16, seed=5)
    orders = [real(sampler.epoch(epoch)) for epoch in range(4)]
    assert all(sorted(order) == list(range(97)) for order in orders)
    others = [real(Sampler(97, 16, seed=seed).epoch(0)) for seed in (6, 8)]
    different = {tuple(order) for order in [*orders, *others]}
    assert len(different) == 6


def test_without_shuffling_rows_come_as_they_are():
    sampler = Sampler(7, 4, shuffle=False)
    expected = [([0, 1, 2, 3], [True] * 4), ([4, 5, 6, 4], [True, True, True, False])]
    assert listed(sampler.epoch(0)) == listed(sampler.epoch(3)) == expected


@pytest.mark.parametrize(
    ("remainder", "sizes", "used"),
    [("pad", [4, 4, 4], 10), ("drop", [4, 4], 8), ("keep", [4, 4, 2], 10)],
)
def test_remainders(remainder, sizes, used):
    sampler = Sampler(10, 4, seed=2, remainder=remainder)
    batches = list(sampler.epoch(0))
    assert len(sampler) == len(batches)
    assert [len(rows.indices) for rows in batches] == sizes
    assert [len(rows.mask) for rows in batches] == sizes
    assert len(set(real(batches))) == len(real(batches)) == used


def test_padding_repeats_real_rows_of_the_batch():
    *_, last = Sampler(10, 8, seed=4).epoch(0)
    assert last.mask.tolist() == [True] * 2 + [False] * 6
    assert last.indices.tolist() == last.indices[:2].tolist() * 4


@pytest.mark.parametrize("length", [1, 3])
def test_fewer_rows_than_a_batch(length):
    (rows,) = Sampler(length, 8).epoch(0)
    assert sorted(rows.indices[rows.mask].tolist()) == list(range(length))
    assert rows.indices.shape == rows.mask.shape == (8,)


@given(
    length=st.integers(1, 60),
    share=st.integers(1, 7),
    processes=st.integers(1, 4),
    remainder=st.sampled_from(["pad", "drop"]),
    epoch=st.integers(0, 3),
)
def test_shares_of_processes_make_the_batches_of_one(
    length, share, processes, remainder, epoch
):
    """DA-4: equally many batches of one shape on all processes."""
    size = share * processes
    options = {"seed": 3, "remainder": "pad" if length < size else remainder}
    whole = list(Sampler(length, size, **options).epoch(epoch))
    shares = [
        list(
            Sampler(
                length, size, process_index=i, process_count=processes, **options
            ).epoch(epoch)
        )
        for i in range(processes)
    ]
    assert {len(batches) for batches in shares} == {len(whole)}
    assert all(rows.mask.shape == (share,) for batches in shares for rows in batches)
    for rows, *parts in zip(whole, *shares, strict=True):
        for field in ("indices", "mask"):
            together = np.concatenate([getattr(part, field) for part in parts])
            np.testing.assert_array_equal(together, getattr(rows, field))


def test_a_process_without_rows_gets_as_many_batches():
    """DA-4: 7 rows in batches of 2 are 4 batches, and the second process has 3 rows."""
    one, two = (
        list(Sampler(7, 2, process_index=i, process_count=2).epoch(0)) for i in (0, 1)
    )
    assert [rows.mask.tolist() for rows in one] == [[True]] * 4
    assert [rows.mask.tolist() for rows in two] == [[True]] * 3 + [[False]]


def test_a_loop_ends_with_the_epoch_and_the_next_goes_on():
    sampler = Sampler(10, 4, seed=1)
    for epoch in range(3):
        assert sampler.state()["epoch"] == epoch
        assert listed(sampler) == listed(sampler.epoch(epoch))


def test_a_loop_that_was_left_goes_on_with_the_next_batch():
    sampler = Sampler(10, 4, seed=1)
    first = list(itertools.islice(sampler, 2))
    assert sampler.state()["batch"] == 2
    assert listed([*first, *sampler]) == listed(sampler.epoch(0))
    assert (sampler.state()["epoch"], sampler.state()["batch"]) == (1, 0)


def test_looking_at_an_epoch_moves_nothing():
    sampler = Sampler(10, 4)
    list(itertools.islice(sampler, 1))
    before = sampler.state()
    list(sampler.epoch(5))
    assert sampler.state() == before


@pytest.mark.parametrize("steps", [0, 3, 5, 7, 10])
@pytest.mark.parametrize(("saving", "going_on"), [(1, 1), (2, 2), (2, 4), (4, 1)])
def test_resumed_at_the_same_sample(steps, saving, going_on):
    """DA-3, also on another number of processes: 5 batches an epoch."""

    def run(processes, state, count):
        """What all processes read in `count` steps, and their states."""
        samplers = [
            Sampler(20, 4, seed=9, process_index=i, process_count=processes)
            for i in range(processes)
        ]
        for sampler in samplers:
            if state is not None:
                sampler.restore(json.loads(json.dumps(state)))
        streams = [itertools.chain(sampler, sampler, sampler) for sampler in samplers]
        read = [
            [int(i) for stream in streams for i in next(stream).indices]
            for _ in range(count)
        ]
        (state,) = {json.dumps(sampler.state()) for sampler in samplers}
        return read, json.loads(state)

    whole, end = run(1, None, 10)
    assert (
        np.sort(np.ravel(whole[:5])).tolist() == list(range(20))
        and whole[:5] != whole[5:]
    )
    before, state = run(saving, None, steps)
    after, found = run(going_on, state, 10 - steps)
    assert before + after == whole
    assert found == end and (end["epoch"], end["batch"]) == (2, 0)


def test_restoring_inside_a_loop_moves_it():
    sampler = Sampler(12, 4, shuffle=False)
    start = sampler.state()
    loop = iter(sampler)
    assert next(loop).indices[0] == 0
    assert next(loop).indices[0] == 4
    sampler.restore(start)
    assert next(loop).indices[0] == 0


def test_making_one_costs_nothing():
    sampler = Sampler(10**15, 1000)  # its order would take 8 PB
    assert len(sampler) == 10**12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"length": 0}, r"length=0\. .*least 1\. .*len\(l", id="no-rows"),
        pytest.param({"length": 2.5}, r"length=2\.5\. .*an integer", id="float"),
        pytest.param({"batch_size": 0}, r"batch_size=0\. .*at least 1", id="size-0"),
        pytest.param({"seed": -1}, r"seed=-1\. .*at least 0", id="seed"),
        pytest.param({"process_count": 0}, r"process_count=0\. .*least 1", id="none"),
        pytest.param(
            {"process_index": -1}, r"process_index=-1\. .*least 0", id="negative"
        ),
        pytest.param(
            {"process_count": 3, "process_index": 3, "batch_size": 6},
            r"process_index=3 of 3 processes.*0 to 2",
            id="index",
        ),
        pytest.param(
            {"process_count": 3},
            r"batch_size=4 for 3 processes.*4 = 3 x 1 \+ 1\. .*of 3 or 6",
            id="4-by-3",
        ),
        pytest.param(
            {"process_count": 6}, r"4 = 6 x 0 \+ 4\. Use a batch_size of 6", id="4-by-6"
        ),
        pytest.param(
            {"remainder": UNKNOWN}, r"'wrap'\. It must be 'pad', 'd", id="remainder"
        ),
        pytest.param(
            {"length": 3, "remainder": "drop"},
            r"length=3, batch_size=4 .*3 // 4 = 0 .*at most 3",
            id="all-dropped",
        ),
        pytest.param(
            {"remainder": "keep", "process_count": 2},
            r"'keep' for 2 processes.*Use remainder='pad' or 'drop'",
            id="keep",
        ),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=f"Sampler got .*{message}"):
        Sampler(**{"length": 10, "batch_size": 4} | options)


def test_numbers_of_numpy_are_accepted():
    options: Any = {"length": np.int32(10), "batch_size": 4, "seed": np.uint8(3)}
    sampler = Sampler(**options)
    assert listed(sampler.epoch(1)) == listed(Sampler(10, 4, seed=3).epoch(1))
    assert json.loads(json.dumps(sampler.state())) == sampler.state()


def test_negative_epochs_are_refused():
    with pytest.raises(ValueError, match=r"Sampler\.epoch got -1\. .*from 0"):
        Sampler(10, 4).epoch(-1)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        pytest.param(Sampler(11, 4), "length=11, and this one has length=10", id="len"),
        pytest.param(Sampler(10, 5), "batch_size=5, .* batch_size=4", id="batch"),
        pytest.param(Sampler(10, 4, seed=6), "seed=6, .* seed=0", id="seed"),
        pytest.param(
            Sampler(10, 4, shuffle=False), "shuffle=False, .*shuffle=True", id="shuffle"
        ),
        pytest.param(
            Sampler(10, 4, remainder="drop"),
            "remainder='drop', .*remainder='pad'",
            id="remainder",
        ),
        pytest.param(
            Sampler(12, 4, seed=6),
            "length=12, seed=6, and this one has length=10, seed=0",
            id="two",
        ),
    ],
)
def test_states_of_other_samplers_are_refused(other, message):
    with pytest.raises(ValueError, match=f"Sampler.restore got .*{message}"):
        Sampler(10, 4).restore(other.state())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"batch": 3}, r"epoch 0 and batch 3\..*batches 0 to 2", id="end"),
        pytest.param({"batch": -1}, r"epoch 0 and batch -1\.", id="before"),
        pytest.param({"epoch": -1}, r"epoch -1 and", id="epoch"),
    ],
)
def test_positions_that_do_not_exist_are_refused(change, message):
    sampler = Sampler(10, 4)
    with pytest.raises(ValueError, match=f"Sampler.restore got {message}"):
        sampler.restore(sampler.state() | change)


def test_what_is_no_state_is_refused():
    with pytest.raises(ValueError, match=r"without epoch, length\. It must have epoch"):
        state = Sampler(10, 4).state()
        del state["epoch"], state["length"]
        Sampler(10, 4).restore(state)
