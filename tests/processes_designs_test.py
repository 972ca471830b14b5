"""Designs over several processes: the same bits as on the same devices of one process.

All starts run the same module with four devices; see `processes_jobs`.
"""

import contextlib

import numpy as np
import pytest

from tests import processes_helpers
from tests.processes_jobs import CASES, EDGES, OVERFLOW, STEPS

STARTS = {"2x2": (2, 2, [*CASES]), "4x1": (4, 1, [*EDGES])}
EVERY = [(start, case) for start, (_, _, cases) in STARTS.items() for case in cases]
EXACT = [(start, case) for start, case in EVERY if CASES[case].exact]
ROUNDED = [given for given in EVERY if given not in EXACT]
# Three steps of numbers below 4, each rounded a few times to 24 bits.
BOUND = 1e-6


def each_of(given):
    ids = [f"{start}-{case}" for start, case in given]
    return pytest.mark.parametrize(("start", "case"), given, ids=ids)


@pytest.fixture(scope="module")
def found():
    """What all processes found: by start, a list by rank."""
    starts = {"1x4": (1, 4, [*CASES])} | STARTS
    with contextlib.ExitStack() as stack:
        groups = {
            name: stack.enter_context(
                processes_helpers.started("processes_jobs", processes, devices, *cases)
            )
            for name, (processes, devices, cases) in starts.items()
        }
        return {name: group.results() for name, group in groups.items()}


def bits(found):
    """Arrays and numbers as what `==` compares exactly."""
    if isinstance(found, dict):
        return {name: bits(value) for name, value in found.items()}
    if isinstance(found, list):
        return [bits(value) for value in found]
    array = np.asarray(found)
    return array.dtype.name, array.shape, array.tobytes()


@each_of(EXACT)
def test_processes_train_the_same_bits_as_one(found, start, case):
    """Every metric of every step, and every leaf of the last state, on every rank."""
    (alone,) = found["1x4"]
    assert len(alone[case]["metrics"]) == STEPS
    for rank, together in enumerate(found[start]):
        assert together[case]["processes"] == STARTS[start][0]
        for what in ("metrics", "params", "state", "model_state"):
            assert bits(together[case][what]) == bits(alone[case][what]), (rank, what)


@each_of(ROUNDED)
def test_native_sums_are_the_same_up_to_rounding(found, start, case):
    (alone,) = found["1x4"]
    for together in found[start]:
        for name, expected in alone[case]["state"].items():
            np.testing.assert_allclose(
                together[case]["state"][name], expected, rtol=0, atol=BOUND
            )
        for at, expected in zip(
            together[case]["metrics"], alone[case]["metrics"], strict=True
        ):
            np.testing.assert_allclose(at["loss"], expected["loss"], rtol=BOUND)


@each_of(EVERY)
def test_all_devices_of_all_processes_end_bit_equal(found, start, case):
    copies = [copy for rank in found[start] for copy in rank[case]["replicas"]]
    assert len(copies) == 4
    assert len(set(copies)) == 1


@each_of([("1x4", case) for case in CASES] + EVERY)
def test_a_step_is_compiled_once(found, start, case):
    """ST-3: exactly one compilation over many steps."""
    for rank in found[start]:
        assert rank[case]["compilations"][0] >= 1
        assert not any(rank[case]["compilations"][1:])
        if "rng" not in CASES[case].init:  # JAX looks a key up twice
            assert rank[case]["cached"] == 1


def test_cases_differ():
    """So that none can pass by running another one's options."""
    assert len(EXACT) + len(ROUNDED) == len(CASES) + len(EDGES)
    assert {type(case.design).__name__ for case in CASES.values()} == {
        *("AllReduce", "GatherToRoot", "LocalSGD", "NativeAllReduce"),
        *("ParameterServer", "RingAllReduce", "Zero"),
    }


@pytest.mark.parametrize("start", STARTS)
def test_an_overflow_on_one_process_is_skipped_by_all(found, start):
    for rank in found[start]:
        if "ring-loss-scale" in rank:
            skipped = [bool(m["skipped"]) for m in rank["ring-loss-scale"]["metrics"]]
            assert skipped == [step == OVERFLOW for step in range(STEPS)]
