"""What travels as one message; and large schedules stay quick to handle."""

import time

import numpy as np
import pytest

from jaxdp import algorithms
from jaxdp.schedule import bundles, holdings, simulate, verify
from tests.schedule_test import EVERY, move, three


def test_transfers_along_the_same_pairs_are_one_message():
    """N = 4: two contributions, a sum of two, a complete chunk, two of them."""
    found = bundles(algorithms.halving_doubling(4))
    shapes = [[(m.op, m.kind, len(m.transfers)) for m in round_] for round_ in found]
    assert shapes == [
        [("add", "own", 2)],
        [("add", "partial", 1)],
        [("replace", "complete", 1)],
        [("replace", "complete", 2)],
    ]
    assert found[0][0].pairs == ((0, 1), (1, 0), (2, 3), (3, 2))


def test_other_pairs_ops_and_kinds_travel_alone():
    """Three chunks: 2 sums up two contributions, 3 is complete from the start."""
    starts = ((0, 1, 2),) * 3 + ((0,),)
    first = (move((1, 0), chunks=(2,)),)
    second = (
        move((0, 1), chunks=(0,)),
        move((0, 1), chunks=(1,)),
        move((0, 1), chunks=(2,), op="replace"),
        move((0, 1), chunks=(3,), op="replace"),
        move((0, 2), chunks=(0,)),
        move((0, 1), chunks=(1,), op="replace"),
    )
    schedule = three(first, second, chunks=4, starts=starts, ends=((),) * 4)
    list(holdings(schedule))
    assert [(m.transfers, m.kind) for m in bundles(schedule)[1]] == [
        (second[:2], "own"),
        (second[2:3], "partial"),
        (second[3:4], "complete"),
        (second[4:5], "own"),
        (second[5:6], "own"),
    ]


@pytest.mark.parametrize("algorithm", EVERY)
def test_kinds_are_those_of_holdings(algorithm):
    for devices in (2, 3, 6, 8):
        schedule = EVERY[algorithm](devices)
        for messages, held in zip(bundles(schedule), holdings(schedule), strict=False):
            for message in messages:
                sizes = {len(held[s][c]) for t in message.transfers for s, _, c in t}
                kind = "complete" if sizes == {devices} else "own"
                if kind == "own" and sizes != {1}:
                    kind = "partial"
                assert message.kind == kind


@pytest.mark.parametrize("algorithm", EVERY)
def test_64_devices_are_verified_and_simulated_within_a_second(algorithm):
    schedule = EVERY[algorithm](64)
    start_s = time.process_time()
    verify.__wrapped__(schedule)
    for _ in simulate(schedule, np.ones((64, schedule.chunks, 4))):
        pass
    assert time.process_time() - start_s < 1.0


def test_256_devices_are_quick_to_build_verify_and_hash():
    start_s = time.process_time()
    ring = verify(algorithms.ring(256))
    assert len({ring, algorithms.ring(256), algorithms.ring(255)}) == 2
    assert time.process_time() - start_s < 5.0
