"""torch DDP and jaxdp, step by step, in the same processes.

Other parity tests compare with jaxdp on the devices of one process; here both libraries
cross the same process boundaries, 12 steps in float64.
"""

import itertools

import numpy as np
import pytest

from tests import processes_helpers
from tests.processes_torch_jobs import DESIGNS, HYPER_PARAMETERS, STEPS, first_params
from tests.torch_reference import reference
from tests.torch_reference.installed import require_torch

pytestmark = pytest.mark.torch

# Largest difference of any parameter after any step, and of any loss; numbers lie below
# 2. Measured: 4e-16. A gradient N times too large moves Adam's parameters by 1e-7.
BOUND = 1e-10
PROCESSES = (2, 4)
over_processes = pytest.mark.parametrize("processes", PROCESSES, ids="p{}".format)
over_optimizers = pytest.mark.parametrize("optimizer", HYPER_PARAMETERS)
over_designs = pytest.mark.parametrize("design", DESIGNS)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What every process saw, by the number of processes."""
    require_torch()
    folder = tmp_path_factory.mktemp("processes")
    command = ["tests.processes_torch_jobs", str(folder), *map(str, PROCESSES)]
    (variables,) = processes_helpers.environments(1, 1)
    reference.run(command, variables, folder)
    return {
        count: processes_helpers.read(folder / str(count), count) for count in PROCESSES
    }


def params_of(steps):
    """All parameters after every step, `[STEPS, all of them]`."""
    names = sorted(first_params())
    assert all(sorted(step["params"]) == names for step in steps)
    return np.stack(
        [
            np.concatenate([step["params"][name].ravel() for name in names])
            for step in steps
        ]
    )


def losses_of(steps):
    return np.array([step["loss"] for step in steps])


@over_processes
@over_optimizers
@over_designs
def test_every_step_is_that_of_torch(found, processes, optimizer, design):
    """Losses, parameters, and what each step changed: its gradient's effect."""
    assert len(found[processes]) == processes
    for rank in found[processes]:
        theirs, ours = (rank[optimizer][name] for name in ("torch", design))
        left, right = params_of(theirs), params_of(ours)
        assert left.dtype == right.dtype == np.float64
        assert len(left) == len(right) == STEPS
        assert np.abs(left).max() < 2
        np.testing.assert_allclose(right, left, rtol=0, atol=BOUND)
        moves = np.diff(left, axis=0)
        np.testing.assert_allclose(np.diff(right, axis=0), moves, rtol=0, atol=BOUND)
        assert np.abs(moves).max(axis=1).min() > 1e5 * BOUND
        np.testing.assert_allclose(
            losses_of(ours), losses_of(theirs), rtol=0, atol=BOUND
        )


@over_processes
@over_optimizers
def test_all_processes_end_bit_equal(found, processes, optimizer):
    for name in ("torch", *DESIGNS):
        copies = {
            params_of(rank[optimizer][name]).tobytes() for rank in found[processes]
        }
        assert len(copies) == 1


@over_optimizers
def test_both_sent_several_buckets(found, optimizer):
    for rank in itertools.chain(*found.values()):
        theirs, ours = rank[optimizer]["buckets"]
        assert theirs >= 3 and ours >= 3


@over_optimizers
def test_two_and_four_processes_take_the_same_steps(found, optimizer):
    """The mean is over all rows, whoever has them."""
    two, four = (params_of(found[n][0][optimizer]["ring"]) for n in PROCESSES)
    np.testing.assert_allclose(two, four, rtol=0, atol=BOUND)
    other = params_of(found[2][0]["sgd" if optimizer == "adam" else "adam"]["ring"])
    assert np.abs(two - other).max() > 1e-3
