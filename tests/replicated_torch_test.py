"""`jaxdp.DataParallel` equals nn.DataParallel, value by value, over ten steps.

`torch.nn.DataParallel` needs CUDA. Its place is taken by replicas written by hand in
one torch process, and by plain torch on whole batches where that is the same model.
"""

import dataclasses
import itertools

import numpy as np
import pytest

from tests.torch_reference import replicated_problem as problem
from tests.torch_reference import replicated_reference
from tests.torch_reference.installed import require_torch

pytestmark = pytest.mark.torch

# Largest absolute difference of any number that a run produced.
#
# float64: measured 4e-15, for inputs of the ReLU, which reach 8.
#
# float32: where numbers reach 8, one rounding costs up to 2**-22 = 2.4e-7. A logit
# takes about 20 of them in a row in each library (sums of 18 and of 36 products,
# BatchNorm, exponentials), so 40 * 2**-22 = 1e-5 if all go the wrong way. Parameters
# and statistics, below 4, are written ten times: 20 * 2**-23 = 2.4e-6. Measured: 3.9e-6
# for outputs, 2.4e-7 for parameters and statistics. The least mistake that could hide
# costs more: a running variance n / (n - 1) too large is 1.5e-4 off after one step. It
# holds as long as no ReLU switches in one dtype only, see
# `test_rounding_switches_no_relu`.
BOUND = {"float64": 1e-10, "float32": 1e-5}

ALL = problem.all_runs()
over_jax_runs = pytest.mark.parametrize(
    "run", [run for run in ALL if run.library == "jax"], ids=str
)


@pytest.fixture(scope="module", autouse=True)
def _torch_is_installed():
    require_torch()


def made_by(run: problem.Run, **changes) -> problem.Arrays:
    """Return what a run produced, or one that differs from it in these fields."""
    return replicated_reference.run_reference(dataclasses.replace(run, **changes))


def torch_of(run: problem.Run, design: str = "replicas") -> problem.Arrays:
    """Return what torch produced for the same case."""
    return made_by(run, library="torch", design=design)


def difference(left: np.ndarray, right: np.ndarray) -> float:
    """Return the largest difference, of arrays that otherwise are alike."""
    assert left.shape == right.shape and left.dtype == right.dtype
    return float(np.abs(left.astype(np.float64) - right).max())


def assert_same(ours: problem.Arrays, theirs: problem.Arrays, dtype: str) -> None:
    """Compare all that torch produced."""
    assert theirs.keys() <= ours.keys()
    for name, array in theirs.items():
        # Written so that NaN fails.
        assert difference(ours[name], array) <= BOUND[dtype], f"{name} differs"


@over_jax_runs
def test_equals_replicas_by_hand(run):
    theirs = torch_of(run)
    kinds = {name.split("/")[0] for name in theirs}
    assert {"after", "gradients", "losses", "outputs", "predicted", "replicas"} <= kinds
    assert ("after/norm/var" in theirs) == problem.HAS_BUFFERS[run.model]
    assert_same(made_by(run), theirs, run.dtype)


@pytest.mark.parametrize(
    "run",
    [run for run in ALL if run.library == "jax" and not problem.HAS_BUFFERS[run.model]],
    ids=str,
)
def test_without_batch_norm_equals_the_full_batch(run):
    assert_same(made_by(run), torch_of(run, "full"), run.dtype)


@over_jax_runs
def test_gradient_through_a_call(run):
    """`jax.value_and_grad` of `model.apply`, against the first step of torch."""
    ours, theirs = made_by(run), torch_of(run)
    names = {name.removeprefix("apply/") for name in ours if name.startswith("apply/")}
    per_step = {
        name
        for name in theirs
        if name.startswith(("gradients/", "losses", "outputs", "hidden", "after/norm"))
    }
    trained = {f"after/norm/{leaf}" for leaf in ("scale", "bias")}
    assert names == per_step - trained
    for name in names:
        rows = problem.SCHEDULES[run.schedule][0]
        first = theirs[name][:rows] if name in problem.PER_ROW else theirs[name][0]
        assert difference(ours[f"apply/{name}"], first) <= BOUND[run.dtype], name


@pytest.mark.parametrize("run", [run for run in ALL if run.design != "full"], ids=str)
def test_gradients_of_replicas_differ_and_their_sum_is_the_gradient(run):
    made = made_by(run)
    for name in problem.SHAPES[run.model]:
        replicas, total = made[f"replicas/{name}"], made[f"gradients/{name}"][0]
        assert difference(replicas.sum(axis=0), total) <= BOUND[run.dtype]
        for left, right in itertools.combinations(replicas, 2):
            assert difference(left, right) > 100 * BOUND["float32"]
        if not problem.HAS_BUFFERS[run.model]:
            full = torch_of(run, "full")[f"gradients/{name}"][0]
            assert difference(replicas.sum(axis=0), full) <= BOUND[run.dtype]


@pytest.mark.parametrize(
    ("schedule", "sizes"),
    [
        ("64", [16, 16, 16, 16]),
        ("66", [17, 17, 17, 15]),
        ("10", [3, 3, 3, 1]),
        ("3", [1, 1, 1]),
        ("66-10", [17, 17, 17, 15]),
    ],
    ids=list(problem.SCHEDULES),
)
@pytest.mark.parametrize(
    ("library", "design"), [("torch", "replicas"), ("jax", "function")]
)
def test_slices(library, design, schedule, sizes):
    run = next(run for run in ALL if run.model == "mlp" and run.schedule == schedule)
    made = made_by(run, library=library, design=design)
    assert made["sizes"].tolist() == sizes
    assert len(made["replicas/out/bias"]) == len(sizes)


@pytest.mark.parametrize("library", ["torch", "jax"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("schedule", problem.SCHEDULES)
def test_batch_norm_of_the_full_batch_is_another_model(library, optimizer, schedule):
    """So the replicas' own statistics matter, and the comparison can fail."""
    run = next(
        run
        for run in ALL
        if (run.model, run.schedule, run.optimizer, run.library)
        == ("norm_net", schedule, optimizer, library)
    )
    made, full = made_by(run), torch_of(run, "full")
    if library == "torch":
        made = torch_of(run, "replicas")
    for name in ("after/norm/mean", "after/norm/var", "gradients/conv/kernel"):
        assert difference(made[name], full[name]) > 0.001
    with pytest.raises(AssertionError, match="differs"):
        assert_same(made, full, run.dtype)


@over_jax_runs
def test_comparison_notices_one_changed_number(run):
    theirs = torch_of(run)
    for name in theirs:
        changed = theirs[name].copy()
        changed.flat[-1] += 2 if name == "sizes" else 2 * BOUND[run.dtype]
        with pytest.raises(AssertionError, match=f"{name} differs"):
            assert_same(theirs | {name: changed}, theirs, run.dtype)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize(("library", "design"), [("torch", "replicas"), ("jax", "nnx")])
def test_rounding_switches_no_relu(library, design, optimizer):
    """At a kink a rounding error of 1e-6 changes a gradient by 1e-4."""
    run = problem.Run(
        library="torch",
        design="replicas",
        model="norm_net",
        schedule=problem.TAIL,
        optimizer=optimizer,
        dtype="float64",
    )
    exact = made_by(run)["hidden"]
    rounded = made_by(run, library=library, design=design, dtype="float32")["hidden"]
    assert np.abs(exact).min() > 5 * np.abs(exact - rounded).max()
