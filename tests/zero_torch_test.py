"""`jaxdp.Zero` equals ZeRO in PyTorch over gloo, step by step, at every stage.

Beside it are `ZeroRedundancyOptimizer` around DDP and `fully_shard`, that frees
parameters after the forward pass or keeps them: same initial parameters, same batches,
20 steps of Adam on gradients clipped by their global norm, in float64; every loss and
the parameters after every step.
"""

import dataclasses

import numpy as np
import pytest

from tests.torch_reference import zero_problem as problem
from tests.torch_reference import zero_reference
from tests.torch_reference.installed import require_torch

pytestmark = pytest.mark.torch

# Largest absolute difference of any parameter after any step, and of any loss, where
# both sides clip by torch's formula. Measured: 3.3e-16 and 8.9e-16.
BOUND = 1e-10
# Where ours clips as optax does. Torch adds epsilon = 1e-6 to the norm it divides by,
# so that a clipped gradient is smaller by epsilon / norm <= epsilon / MAX_NORM of it.
# Adam divides a mean of gradients by the root of a mean of their squares: a step, about
# as long as the learning rate, changes by at most twice that share of itself. In 20
# steps that adds up to 20 * 2 * 1e-6 / 1.5 * 0.01 = 2.7e-7. Measured: 1.3e-8 for
# parameters and 6.6e-8 for losses.
CLIP_BOUND = 2.7e-7
VISIBLE = 1e-3  # some step moves every leaf by more than this

JOBS = problem.all_jobs()
JAX_JOBS = [job for job in JOBS if job.library == "jax"]
TORCH_JOBS = [job for job in JOBS if job.library == "torch"]
over_torch_jobs = pytest.mark.parametrize("job", TORCH_JOBS, ids=str)


@pytest.fixture(scope="module", autouse=True)
def _torch_is_installed():
    require_torch()


made_by = zero_reference.run_reference


def theirs(job: problem.Job, stage: int | None = None) -> problem.Arrays:
    """Return what torch makes of a JAX job, at its stage or at another one."""
    return made_by(problem.torch_job(job, stage or job.stage))


def compared(made: problem.Arrays) -> problem.Arrays:
    """Return what both libraries produce alike."""
    return {name: made[name] for name in made if name not in ("held", "norms")}


def assert_same(left: problem.Arrays, right: problem.Arrays, bound: float) -> None:
    """Compare losses and parameters after every step."""
    left, right = compared(left), compared(right)
    assert left.keys() == right.keys()
    for name, array in left.items():
        assert array.shape == right[name].shape
        assert array.dtype == right[name].dtype == np.float64
        difference = np.abs(array - right[name]).max()
        assert difference <= bound, f"{name} differs"  # written so that NaN fails


@pytest.mark.parametrize("stage", problem.STAGES)
@pytest.mark.parametrize("job", [j for j in JAX_JOBS if j.clip == "torch"], ids=str)
def test_every_stage_equals_every_way_of_torch(job, stage):
    assert_same(made_by(job), theirs(job, stage), BOUND)


@pytest.mark.parametrize("job", [j for j in JAX_JOBS if j.clip == "optax"], ids=str)
def test_clip_of_optax_differs_by_the_epsilon_of_torch(job):
    ours, other = compared(made_by(job)), compared(theirs(job))
    assert_same(ours, other, CLIP_BOUND)
    assert max(np.abs(ours[name] - other[name]).max() for name in ours) > BOUND


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_all_ranks_gather_the_same_bits(job):
    made = made_by(job)
    for name, shape in job.shapes.items():
        copies = made[f"final/{name}"]
        assert copies.shape == (job.world_size, *shape)
        assert len({copy.tobytes() for copy in copies}) == 1
        np.testing.assert_array_equal(copies[0], made[f"params/{name}"][-1])


@pytest.mark.parametrize("job", JAX_JOBS, ids=str)
def test_a_device_holds_its_part_of_every_moment(job):
    """Rounded up to whole elements: all devices the same."""
    parts = [-(-int(np.prod(s)) // job.world_size) for s in job.shapes.values()]
    expected = [2 * sum(parts)] * job.world_size
    np.testing.assert_array_equal(made_by(job)["held"], expected)


@over_torch_jobs
def test_torch_shards_its_moments(job):
    """So that it is ZeRO with which ours is compared."""
    held, elements = made_by(job)["held"], sum(map(np.prod, job.shapes.values()))
    assert held.sum() == 2 * elements and held.max() < 2 * elements


@over_torch_jobs
def test_some_steps_clip_and_others_do_not(job):
    clips = made_by(job)["norms"] > problem.MAX_NORM[job.model]
    assert 5 <= clips.sum() <= len(clips) - 5


@over_torch_jobs
def test_parameters_move_more_than_bounds(job):
    made = made_by(job)
    for name in job.shapes:
        moved = np.abs(np.diff(made[f"params/{name}"], axis=0)).max()
        assert moved > VISIBLE > 1e3 * CLIP_BOUND


@over_torch_jobs
def test_comparison_notices_one_changed_number(job):
    made = compared(made_by(job))
    for name, array in made.items():
        changed = array.copy()
        changed.flat[-1] += 2 * BOUND
        with pytest.raises(AssertionError, match=f"{name} differs"):
            assert_same(made | {name: changed}, made, BOUND)


def test_leaves_are_smaller_than_devices_or_not_divisible():
    jobs = [job for job in JAX_JOBS if job.world_size == 4 and job.model == "mlp"]
    sizes = {int(np.prod(shape)) for shape in jobs[0].shapes.values()}
    assert sizes == {1, 13, 26}
    assert dataclasses.replace(jobs[0], stage=3) in JAX_JOBS
