"""`jaxdp.ParameterServer` equals parameter servers in PyTorch over gloo, step by step.

Synchronous or with delayed gradients: same initial parameters, same batches, 30 steps;
every loss, the parameters after every step and after `flush`.
"""

import dataclasses
import functools

import numpy as np
import pytest

from tests.torch_reference import problem as parity_problem
from tests.torch_reference import server_numpy, server_reference
from tests.torch_reference import server_problem as problem
from tests.torch_reference.installed import require_torch

pytestmark = pytest.mark.torch

# Largest absolute difference of any loss, or of any parameter after any step.
#
# float64: measured 1e-15 for parameters and 6e-15 for losses.
#
# float32: parameters and losses lie below 4, where one rounding costs at most 2**-23.
# Writing the parameters rounds once per step, so 30 steps of two libraries cost up to
# 60 * 2**-23 = 7.2e-6, if every rounding goes the wrong way. Measured: 1.2e-7 for
# parameters and 2.4e-7 for losses. Not with Adam, whose bias correction 1 - 0.999**t
# optax rounds to float32 and torch does not.
BOUND = {"float64": 1e-10, "float32": 7.2e-6}
# Another delay changes every leaf at some step, and every flush, by more than this.
VISIBLE = 1e-4

JOBS = problem.all_jobs()
JAX_JOBS = [job for job in JOBS if job.library == "jax"]
TORCH_JOBS = [job for job in JOBS if job.library == "torch"]
over_jax_jobs = pytest.mark.parametrize("job", JAX_JOBS, ids=str)
over_torch_jobs = pytest.mark.parametrize("job", TORCH_JOBS, ids=str)


@pytest.fixture(scope="module", autouse=True)
def _torch_is_installed():
    require_torch()


def made_by(job: problem.Job, **changes) -> problem.Arrays:
    """Return what a job produced, or one that differs from it in these fields."""
    return server_reference.run_reference(dataclasses.replace(job, **changes))


@functools.cache
def made_by_numpy(
    optimizer: str, max_staleness: int, policy: str, dtype: str
) -> problem.Arrays:
    """Return what one machine makes of the same batches."""
    data = problem.make_data(dtype)
    return server_numpy.train(optimizer, max_staleness, policy, data)


def first_worker(made: problem.Arrays) -> problem.Arrays:
    """Keep one copy of what all workers hold after the flush."""
    return {
        name: array[0] if name.startswith("flushed/") else array
        for name, array in made.items()
    }


def assert_same(left: problem.Arrays, right: problem.Arrays, bound: float) -> None:
    """Compare all that two jobs produced, of one worker each."""
    assert left.keys() == right.keys()
    for name, array in left.items():
        assert array.shape == right[name].shape
        difference = np.abs(array.astype(np.float64) - right[name]).max()
        assert difference <= bound, f"{name} differs"  # written so that NaN fails


@over_jax_jobs
def test_jaxdp_equals_torch(job):
    ours = first_worker(made_by(job))
    for design in problem.torch_designs(job):
        theirs = first_worker(made_by(job, library="torch", design=design))
        for made in (ours, theirs):
            assert {str(array.dtype) for array in made.values()} == {job.dtype}
        assert_same(ours, theirs, BOUND[job.dtype])


@over_torch_jobs
def test_torch_equals_numpy_on_one_machine(job):
    """The references follow the index laws of the delays, wherever servers are."""
    options = job.optimizer, job.max_staleness, job.policy, job.dtype
    assert_same(first_worker(made_by(job)), made_by_numpy(*options), BOUND[job.dtype])


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_all_workers_end_bit_equal(job):
    workers = job.workers if job.library == "torch" else range(job.world_size)
    made = made_by(job)
    for name in parity_problem.SHAPES[problem.MODEL]:
        copies = made[f"flushed/{name}"]
        assert len(copies) == len(workers)
        assert len({copy.tobytes() for copy in copies}) == 1


@over_jax_jobs
def test_flush_changes_what_is_in_flight_only(job):
    made = made_by(job)
    in_flight = job.max_staleness
    if job.policy == "window":
        in_flight = problem.NUM_STEPS % (job.max_staleness + 1)
    moved = max(
        np.abs(made[f"flushed/{name}"][0] - made[f"params/{name}"][-1]).max()
        for name in parity_problem.SHAPES[problem.MODEL]
    )
    assert moved == 0 if in_flight == 0 else moved > VISIBLE


@pytest.mark.parametrize("optimizer", problem.HYPER_PARAMETERS)
@pytest.mark.parametrize("policy", problem.POLICIES)
@pytest.mark.parametrize("max_staleness", problem.STALENESS)
def test_another_delay_is_another_trajectory(optimizer, max_staleness, policy):
    """So delays matter here, and the comparison can fail."""
    other_policy = {"sliding": "window", "window": "sliding"}[policy]
    made = made_by_numpy(optimizer, max_staleness, policy, "float64")
    for other in (
        made_by_numpy(optimizer, max_staleness - 1, policy, "float64"),
        made_by_numpy(optimizer, max_staleness + 1, policy, "float64"),
        made_by_numpy(optimizer, max_staleness, other_policy, "float64"),
    ):
        for name in made:
            assert np.abs(made[name] - other[name]).max() > VISIBLE, name


@over_torch_jobs
def test_comparison_notices_one_changed_number(job):
    made = first_worker(made_by(job))
    for name, array in made.items():
        changed = array.copy()
        changed.flat[-1] += 2 * BOUND[job.dtype]
        with pytest.raises(AssertionError, match=f"{name} differs"):
            assert_same(made | {name: changed}, made, BOUND[job.dtype])


def test_last_window_is_incomplete():
    """And parts of two servers are unequal without padding."""
    assert [problem.NUM_STEPS % (stale + 1) for stale in problem.STALENESS] == [0, 0, 2]
    shapes = parity_problem.SHAPES[problem.MODEL].values()
    assert sum(int(np.prod(shape)) for shape in shapes) % 2 == 1
