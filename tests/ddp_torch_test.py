"""What users of DistributedDataParallel rely on, step by step against PyTorch.

Buckets, accumulation, weighted rows, ranks that run out of rows, BatchNorm's buffers,
communication hooks, local SGD and loss scales: same initial parameters, same batches,
12 steps; every loss, parameter, buffer and scale. Torch runs as real processes over
gloo.
"""

import dataclasses

import numpy as np
import pytest

from tests.torch_reference import ddp_jobs, ddp_reference
from tests.torch_reference import ddp_problem as problem
from tests.torch_reference import problem as parity_problem
from tests.torch_reference.installed import require_torch

pytestmark = pytest.mark.torch

# Largest difference of any parameter, buffer or loss after any step, relative to
# numbers above 1.
#
# float64: measured 1.4e-15, and 1.4e-14 with Adam, BatchNorm and micro-batches of two
# rows.
#
# float32: numbers lie below 4, where one rounding costs at most 2**-23, so that writing
# parameters in 12 steps of two libraries costs at most 24 * 2**-23 = 2.9e-6. Measured:
# 1.2e-7 for parameters, and 6e-7 for losses under Adam, whose bias correction optax
# rounds to float32 and torch does not.
#
# fp16: forward and backward pass round to 2**-11 in an order of their own. Measured:
# 1e-4. A step moves parameters by 0.02 and more.
BOUND = {"float64": 1e-10, "float32": 2.9e-6, "fp16": 5e-4}
# Another option changes some parameter by more than this.
VISIBLE = 1e-4

JOBS = ddp_jobs.all_jobs()
JAX_JOBS = [job for job in JOBS if job.library == "jax"]
# `bf16_compress_hook` rounds every partial sum, and torch's BatchNorm counts steps that
# are skipped; see the tests of these.
SAME = [
    (job, other)
    for job in JAX_JOBS
    for other in ddp_jobs.torch_jobs_for(job)
    if not (job.compression == "bf16" and other.design == "ddp")
    and not (job.buffers and job.compute)
]
# What need not be alike, or is there in torch only.
ONE_SIDED = {"bucket_bytes", *(f"gradients/{name}" for name in problem.SHAPES["mlp"])}
# By hand: an overflow divides the scale by 4, and every third good step doubles it.
SCALES = [1024, 256, 256, 256, 512, 128, 32, 32, 32, 8, 8, 8]
GOOD_STEPS = [0, 1, 2, 0, 0, 0, 1, 2, 0, 1, 2, 0]


def jobs_that(condition) -> pytest.MarkDecorator:
    """Parametrize over the jobs, of either library, for which this holds."""
    chosen = [job for job in JOBS if condition(job)]
    assert chosen
    return pytest.mark.parametrize("job", chosen, ids=str)


@pytest.fixture(scope="module", autouse=True)
def _torch_is_installed():
    require_torch()


def made_by(job: problem.Job, **changes) -> problem.Arrays:
    """Return what a job produced, or one that differs from it in these fields."""
    return ddp_reference.run_reference(dataclasses.replace(job, **changes))


def bound_of(job: problem.Job) -> float:
    return BOUND["fp16" if job.compute == "fp16" else job.dtype]


def without_stale(job: problem.Job, made: problem.Arrays) -> problem.Arrays:
    """Give every rank rank 0's buffers, if the next forward pass will.

    jaxdp broadcasts them after the step, torch before the next one.
    """
    if job.buffers != "broadcast":
        return made
    return made | {
        name: np.broadcast_to(array[:1], array.shape)
        for name, array in made.items()
        if name.startswith("buffers/")
    }


def assert_same(left: problem.Arrays, right: problem.Arrays, bound: float) -> None:
    """Compare all that both libraries produced; integers and flags exactly."""
    names = left.keys() - ONE_SIDED
    assert names == right.keys() - ONE_SIDED
    for name in names:
        array, other = left[name], right[name]
        assert array.shape == other.shape and array.dtype.kind == other.dtype.kind
        tolerance = bound if array.dtype.kind == "f" else 0
        np.testing.assert_allclose(
            array, other, tolerance, tolerance, equal_nan=False, err_msg=name
        )


def params_of(made: problem.Arrays) -> np.ndarray:
    """Return all parameters after every step, `[NUM_STEPS, all of them]`."""
    names = sorted(name for name in made if name.startswith("params/"))
    return np.concatenate(
        [made[name].reshape(problem.NUM_STEPS, -1) for name in names], axis=1
    )


def distances(left: problem.Arrays, right: problem.Arrays) -> np.ndarray:
    """Return the largest difference of any parameter after every step."""
    return np.abs(params_of(left) - params_of(right)).max(axis=1)


@pytest.mark.parametrize(("job", "other"), SAME, ids=str)
def test_jaxdp_equals_torch(job, other):
    theirs = without_stale(job, made_by(other))
    assert_same(made_by(job), theirs, bound_of(job))


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_all_replicas_end_bit_equal(job):
    made = made_by(job)
    for name in problem.SHAPES[job.model]:
        copies = made[f"final/{name}"]
        assert len(copies) == job.world_size
        assert len({copy.tobytes() for copy in copies}) == 1


@jobs_that(lambda job: job.library == "torch" and ddp_jobs.in_one_process(job))
def test_torch_equals_one_process(job):
    """The references compute the gradient of the mean over all rows."""
    together, alone = made_by(job), made_by(ddp_jobs.one_process_job(job))
    of_all = [name for name in alone if name.startswith(("buffers/", "final/"))]
    together |= {name: together[name][:1] for name in of_all}
    assert_same(together, alone, bound_of(job))


@jobs_that(lambda job: job.model == "mlp")
def test_there_are_several_buckets(job):
    sizes = made_by(job)["bucket_bytes"]
    itemsize = np.dtype(job.dtype).itemsize
    params = sum(np.prod(shape) for shape in problem.SHAPES[job.model].values())
    assert len(sizes) >= 3
    assert 0 <= sizes.sum() - params * itemsize <= 2 * itemsize  # loss and weight


@pytest.mark.parametrize("library", ["jax", "torch"])
def test_ranks_without_rows_are_left_out_and_torch_by_default_counts_them(library):
    """Torch's default divides by all ranks, so gradients shrink as ranks run out.

    `divide_by_initial_world_size=False` makes it the mean over the rows there are, and
    that is what a masked mean is in jaxdp.
    """
    job = next(job for job in JAX_JOBS if job.rows == "join_slots")
    if library == "torch":
        (job,) = ddp_jobs.torch_jobs_for(job)
    slots, rows, even = (
        made_by(job, rows=rows) for rows in ("join_slots", "join", "even")
    )
    first = min(problem.ENDS[job.world_size])
    for moved in (distances(slots, rows), distances(rows, even)):
        assert moved[:first].max() <= BOUND["float64"]
        assert moved[first:].max() > VISIBLE
    left = slots["losses"][first] / rows["losses"][first]  # of the same parameters
    assert left == pytest.approx(3 / 4, abs=BOUND["float64"])


def with_one_option_less() -> list[tuple[problem.Job, problem.Job]]:
    """Return pairs of jobs that differ in one option only."""
    changes = [
        {"rows": "even"},
        {"error_feedback": False},
        {"compression": "", "power_rank": 0, "error_feedback": False},
        {"buffers": "per_replica"},
    ]
    pairs = [
        (job, dataclasses.replace(job, **change)) for job in JOBS for change in changes
    ]
    return [(job, other) for job, other in pairs if other != job and other in JOBS]


@pytest.mark.parametrize(("job", "other"), with_one_option_less(), ids=str)
def test_another_option_is_another_trajectory(job, other):
    """So options matter here, and the comparison can fail."""
    made, less = made_by(job), made_by(other)
    if job.buffers == "broadcast":  # parameters do not depend on running statistics
        name = "buffers/norm.running_mean"
        assert np.abs(made[name] - less[name])[1:].max() > VISIBLE
    else:
        assert distances(made, less).max() > VISIBLE


@jobs_that(lambda job: job.buffers == "per_replica")
def test_every_replica_keeps_its_own_buffers(job):
    made = made_by(job)
    for name in ("buffers/norm.running_mean", "buffers/norm.running_var"):
        last = made[name][:, -1]
        assert len({copy.tobytes() for copy in last}) == job.world_size


@jobs_that(lambda job: job.model == "norm_net" and not job.compute)
def test_batches_are_counted_in_integers(job):
    counts = made_by(job)["buffers/norm.num_batches_tracked"]
    assert counts.dtype == np.int64
    per_step = np.arange(1, problem.NUM_STEPS + 1) * job.accumulate
    np.testing.assert_array_equal(counts[0], per_step)


@jobs_that(lambda job: job.compression == "powersgd")
def test_power_sgd_starts_at_its_step(job):
    exact = made_by(job, compression="", power_rank=0, error_feedback=False)
    moved = distances(made_by(job), exact)
    assert moved[: problem.START_STEP].max() <= BOUND["float64"]
    assert moved[problem.START_STEP] > VISIBLE


@jobs_that(lambda job: job.sync_every)
def test_replicas_are_alike_when_averaged_and_only_then(job):
    """Each keeps its parameters, and its optimizer state, between two averages."""
    made = made_by(job)
    steps = np.arange(problem.NUM_STEPS)
    averaged = (steps < problem.START_STEP) | ((steps + 1) % job.sync_every == 0)
    for name in problem.SHAPES[job.model]:
        copies = made[f"replicas/{name}"].reshape(job.world_size, problem.NUM_STEPS, -1)
        spread = np.ptp(copies, axis=0).max(axis=1)
        assert (spread[averaged] == 0).all() and (spread[~averaged] > VISIBLE).all()


def bf16_jobs(world_size: int) -> dict[str, problem.Job]:
    """Return the jobs of all who round to bf16, and of torch that does not."""
    (ours,) = (
        job
        for job in JAX_JOBS
        if job.compression == "bf16" and job.world_size == world_size
    )
    jobs = {job.design: job for job in ddp_jobs.torch_jobs_for(ours)}
    exact = dataclasses.replace(jobs["ddp"], compression="")
    return {"ours": ours, "hook": jobs["ddp"], "exact": exact}


@pytest.mark.parametrize("world_size", [2, 4])
def test_bf16_gradients_differ_from_the_hook_by_its_rounding_of_sums(world_size):
    """For N replicas whose gradients have the mean magnitude A, by N * 2**-8 * A.

    Rounding to bf16 changes a number by at most 2**-8 of it. Both libraries round every
    replica's gradient alike. jaxdp rounds the mean once more, torch each of the N - 1
    partial sums, and none of these is larger than A.
    """
    jobs = bf16_jobs(world_size)
    params = problem.make_data(jobs["ours"]).params
    learning_rate = parity_problem.HYPER_PARAMETERS["sgd"]["learning_rate"]
    for name, start in params.items():
        ours, hook, exact = (
            (start - made_by(job)[f"params/{name}"][0]) / learning_rate
            for job in jobs.values()
        )
        gradients = made_by(jobs["hook"])[f"gradients/{name}"]
        np.testing.assert_allclose(gradients.mean(axis=0), exact, rtol=0, atol=1e-10)
        unit = 2**-8 * np.abs(gradients).mean(axis=0) * (1 + 2**-8)
        assert (np.abs(ours - hook) <= world_size * unit + 1e-10).all()
        assert (np.abs(ours - exact) <= 2 * unit + 1e-10).all()
        assert np.abs(ours - exact).max() > unit.max() / 16


def test_bf16_sums_in_more_bits_are_nearer_to_the_exact_run():
    jobs = bf16_jobs(4)
    ours, hook, exact = (params_of(made_by(job)) for job in jobs.values())
    assert 0 < np.abs(ours - exact).mean() < np.abs(hook - exact).mean()


@jobs_that(lambda job: job.compute)
def test_scales_are_those_written_down(job):
    made = made_by(job)
    overflows = np.isin(np.arange(problem.NUM_STEPS), problem.OVERFLOWS)
    np.testing.assert_array_equal(made["scales"], SCALES)
    np.testing.assert_array_equal(made["good_steps"], GOOD_STEPS)
    np.testing.assert_array_equal(made["skipped"], overflows)
    start = problem.make_data(job).params
    first = np.concatenate([start[name].ravel() for name in sorted(start)])
    before = np.stack([first, *params_of(made)[:-1]])
    moved = (before != params_of(made)).any(axis=1)
    np.testing.assert_array_equal(moved, ~overflows)


def test_skipped_steps_leave_buffers_alone_and_torch_counts_them():
    """Running statistics of a batch that overflowed may not be finite either."""
    (job,) = (job for job in JAX_JOBS if job.buffers and job.compute)
    (other,) = ddp_jobs.torch_jobs_for(job)
    ours, theirs = made_by(job), made_by(other)
    buffers = {name for name in ours if name.startswith("buffers/")}
    assert_same(ours, theirs | {name: ours[name] for name in buffers}, bound_of(job))
    counts = "buffers/norm.num_batches_tracked"
    np.testing.assert_array_equal(ours[counts][0], np.cumsum(~ours["skipped"]))
    np.testing.assert_array_equal(theirs[counts][0], 1 + np.arange(problem.NUM_STEPS))
    for name in buffers:
        for step in problem.OVERFLOWS[1:]:
            np.testing.assert_array_equal(ours[name][:, step], ours[name][:, step - 1])


@jobs_that(lambda job: job.library == "torch" and not job.compute)
def test_comparison_notices_one_changed_number(job):
    made = made_by(job)
    for name, array in made.items():
        if name in ONE_SIDED or array.dtype.kind != "f":
            continue
        changed = array.copy()
        changed.flat[-1] += 3 * bound_of(job) * max(1, abs(changed.flat[-1]))
        with pytest.raises(AssertionError, match=name):
            assert_same(made | {name: changed}, made, bound_of(job))


def test_rows_and_overflows_are_uneven():
    """What the jobs are made for: empty replicas and micro-batches, early overflows."""
    assert problem.ROWS % 4 == 0 and problem.RAGGED_ROWS % 4
    assert problem.ENDS[4][0] == min(problem.ENDS[4])
    tokens = next(job for job in JAX_JOBS if job.rows == "tokens")
    weights = problem.make_data(tokens).weights
    assert not weights[:, tokens.micro_batches(0)[0]].any()
    assert len(np.unique(weights.sum(axis=1))) > 2
    assert {
        step for step, scale in enumerate(SCALES[:-1]) if SCALES[step + 1] < scale
    } == set(problem.OVERFLOWS)
