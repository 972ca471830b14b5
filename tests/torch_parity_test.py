"""jaxdp equals PyTorch, step by step, with torch as real processes over gloo.

Each design is compared with the torch program of the same name and idea: same initial
parameters, same batches, 20 steps, the parameters after every step and every loss.
"""

import dataclasses

import numpy as np
import pytest

from tests.torch_reference import problem, reference
from tests.torch_reference.installed import require_torch

pytestmark = pytest.mark.torch

PAIRS = [
    ("RingAllReduce", "ring"),
    ("RingAllReduce", "ddp"),
    ("GatherToRoot", "star"),
    ("NativeAllReduce", "ddp"),
]

# Largest absolute difference of any parameter after any step, and of any loss.
#
# float64: measured 7e-16 for parameters and 1.3e-15 for losses, a few units in the last
# place. 1e-10 leaves room for other instruction sets and is far below what a wrong sum
# costs: even a gradient N times too large, which Adam nearly cancels, moves its
# parameters by 1e-7, through epsilon. (Under Adam, float32 cannot see that one.)
#
# float32: parameters and losses lie below 4, where one rounding costs at most 2**-23 =
# 1.2e-7. Writing the parameters rounds once per step, so 20 steps of two libraries
# cost up to 40 * 2**-23 = 4.8e-6, if every rounding goes the wrong way. Gradients add
# less (they are rounded relative to their own size, and the learning rate shrinks
# them). Measured: 6e-7 for parameters, and 1.2e-6 for the loss under Adam, whose bias
# correction 1 - 0.999**t optax rounds to float32 and torch does not. So 5e-6 is four
# times what was seen and no more than the worst case of rounding alone. It holds as
# long as no ReLU switches in one library only: see `test_rounding_switches_no_relu`.
BOUND = {"float64": 1e-10, "float32": 5e-6}

over_optimizers = pytest.mark.parametrize("optimizer", problem.OPTIMIZERS)
over_dtypes = pytest.mark.parametrize("dtype", problem.WORLD_SIZES)
over_models = pytest.mark.parametrize("model", problem.MODELS)
over_workers = pytest.mark.parametrize(
    ("world_size", "dtype"),
    [
        pytest.param(world_size, dtype, id=f"n{world_size}-{dtype}")
        for dtype, world_sizes in problem.WORLD_SIZES.items()
        for world_size in world_sizes
    ],
)


@pytest.fixture(scope="module", autouse=True)
def _torch_is_installed():
    require_torch()


@pytest.fixture(scope="module")
def trajectory_of():
    """Return a function from a job's fields to what it produced; launches run once."""

    def get(**fields) -> problem.Trajectory:
        return reference.run_reference(problem.Job(**fields))

    return get


def max_differences(
    left: problem.Trajectory, right: problem.Trajectory
) -> tuple[np.ndarray, np.ndarray]:
    """Return the largest difference after every step: of parameters, of losses."""
    assert left.params.keys() == right.params.keys()
    per_leaf = []
    for name, array in left.params.items():
        other = right.params[name]
        assert array.shape == other.shape and array.dtype == other.dtype, name
        difference = array.astype(np.float64) - other
        per_leaf.append(np.abs(difference).reshape(problem.NUM_STEPS, -1).max(axis=1))
    losses = np.abs(left.losses.astype(np.float64) - right.losses)
    return np.max(per_leaf, axis=0), losses


def assert_same(left: problem.Trajectory, right: problem.Trajectory) -> None:
    """Compare every step with the bound of the trajectories' dtype."""
    assert left.losses.dtype == right.losses.dtype
    bound = BOUND[str(left.losses.dtype)]
    params, losses = max_differences(left, right)
    for step in range(problem.NUM_STEPS):
        # Written so that NaN fails.
        assert losses[step] <= bound, f"loss differs at step {step}"
        assert params[step] <= bound, f"parameters differ after step {step}"


@over_models
@over_optimizers
@over_workers
@pytest.mark.parametrize(("design", "torch_design"), PAIRS)
def test_jaxdp_equals_torch(
    trajectory_of, design, torch_design, world_size, optimizer, dtype, model
):
    same = dict(world_size=world_size, optimizer=optimizer, dtype=dtype, model=model)
    ours = trajectory_of(library="jax", design=design, **same)
    theirs = trajectory_of(library="torch", design=torch_design, **same)
    assert_same(ours, theirs)


@over_models
@over_dtypes
@over_optimizers
def test_single_worker_models_agree(trajectory_of, optimizer, dtype, model):
    """Without any collective: models, losses, optimizers and layouts are the same."""
    same = dict(
        design="single", world_size=1, optimizer=optimizer, dtype=dtype, model=model
    )
    ours = trajectory_of(library="jax", **same)
    theirs = trajectory_of(library="torch", **same)
    assert_same(ours, theirs)


@over_models
@over_optimizers
@over_workers
@pytest.mark.parametrize("design", problem.TORCH_DESIGNS)
def test_torch_design_equals_single_worker(
    trajectory_of, design, world_size, optimizer, dtype, model
):
    """The references compute the gradient of the global mean loss."""
    same = dict(library="torch", optimizer=optimizer, dtype=dtype, model=model)
    parallel = trajectory_of(design=design, world_size=world_size, **same)
    single = trajectory_of(design="single", world_size=1, **same)
    assert_same(parallel, single)


@over_models
@over_optimizers
@over_workers
@pytest.mark.parametrize("design", ["star", "ring"])
def test_torch_designs_agree(
    trajectory_of, design, world_size, optimizer, dtype, model
):
    same = dict(
        library="torch",
        world_size=world_size,
        optimizer=optimizer,
        dtype=dtype,
        model=model,
    )
    by_hand = trajectory_of(design=design, **same)
    ddp = trajectory_of(design="ddp", **same)
    assert_same(by_hand, ddp)


@over_models
@over_optimizers
@over_workers
@pytest.mark.parametrize(
    ("library", "design"),
    [("torch", design) for design in problem.TORCH_DESIGNS]
    + [("jax", design) for design in problem.JAX_DESIGNS],
)
def test_all_workers_end_bit_equal(
    trajectory_of, library, design, world_size, optimizer, dtype, model
):
    trajectory = trajectory_of(
        library=library,
        design=design,
        world_size=world_size,
        optimizer=optimizer,
        dtype=dtype,
        model=model,
    )
    for name, workers in trajectory.final.items():
        assert len(workers) == world_size
        last = trajectory.params[name][-1].tobytes()
        assert all(worker.tobytes() == last for worker in workers), name


@over_models
@over_dtypes
@over_optimizers
def test_comparison_notices_one_changed_number(trajectory_of, optimizer, dtype, model):
    same = dict(
        library="torch",
        design="ring",
        world_size=2,
        optimizer=optimizer,
        dtype=dtype,
        model=model,
    )
    plain, perturbed = trajectory_of(**same), trajectory_of(**same, perturbed=True)
    params, losses = max_differences(plain, perturbed)
    first = problem.PERTURBED_STEP
    assert not params[:first].any() and not losses[:first].any()
    assert params[first:].max() > BOUND[dtype]
    with pytest.raises(AssertionError, match="step"):
        assert_same(plain, perturbed)


@over_optimizers
@pytest.mark.parametrize("library", ["torch", "jax"])
def test_rounding_switches_no_relu(trajectory_of, library, optimizer):
    """At a kink a rounding error of 1e-7 changes a gradient by 1e-4.

    So no input of a ReLU in float64 may be as near 0 as float32 is to float64. The
    seed was chosen for that: five times further away.
    """
    same = dict(design="single", world_size=1, optimizer=optimizer, model="tiny_net")
    exact = relu_inputs(trajectory_of(library="torch", dtype="float64", **same))
    rounded = relu_inputs(trajectory_of(library=library, dtype="float32", **same))
    assert np.abs(exact).min() > 5 * np.abs(exact - rounded).max()


def relu_inputs(trajectory: problem.Trajectory) -> np.ndarray:
    """Return what enters the ReLU of `tiny_net` in every step but the first."""
    images = problem.make_inputs("tiny_net").inputs[1:].astype(trajectory.losses.dtype)
    padded = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    kernels = trajectory.params["conv/kernel"][:-1]
    biases = trajectory.params["conv/bias"][:-1, None, None, None]
    return np.einsum("sbhwcij,sijco->sbhwo", windows, kernels, optimize=True) + biases


def test_parameter_counts_are_not_divisible():
    counts = {
        model: sum(int(np.prod(shape)) for shape in shapes.values())
        for model, shapes in problem.SHAPES.items()
    }
    assert counts == {"mlp": 53, "tiny_net": 618}
    assert all(counts["mlp"] % size for size in problem.WORLD_SIZES["float64"])
    assert counts["tiny_net"] % 4


def test_missing_torch_skips_but_fails_in_ci(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("sys.version_info", (3, 11))
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="torch is not installed"):
        require_torch()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="a skipped parity test is a fail"):
        require_torch()
    monkeypatch.setattr("sys.version_info", (3, 12))
    with pytest.raises(pytest.skip.Exception, match="pinned for Python"):
        require_torch()


def test_unknown_job_is_refused():
    job = dataclasses.replace(problem.all_jobs()[0], world_size=5)
    with pytest.raises(ValueError, match=r"torch-ddp-n5-.* is not among the"):
        reference.run_reference(job)


def test_a_failing_process_shows_what_it_wrote(tmp_path):
    with pytest.raises(RuntimeError, match=r"(?s)exit code 1,.*No module named"):
        reference.run(["no_such_module"], {}, tmp_path)


def test_a_slow_process_is_ended(tmp_path):
    sleep = ["timeit", "--number=1", "--repeat=1", "import time; time.sleep(60)"]
    with pytest.raises(RuntimeError, match=r"within 0.2 s: exit code None"):
        reference.run(sleep, {}, tmp_path, timeout_s=0.2)
