"""PowerSGD against NumPy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxdp.compression import Bf16, Exact, PowerSGD
from tests.compression_helpers import exact_means, gradients, run, sent_bytes

RANK = 2


def low_rank(steps, q):
    """Vogels et al., algorithms 1 and 2, on one matrix: means, and memories.

    The error of a replica is its own: what P Q_w' leaves of its matrix.
    """
    memory = np.zeros_like(steps[0])
    for matrices in steps:
        given = matrices + memory
        p, _ = np.linalg.qr((given @ q).mean(0))
        own = np.swapaxes(given, 1, 2) @ p
        q = own.mean(0)
        memory = given - p @ np.swapaxes(own, 1, 2)
        yield p @ q.T, memory


@pytest.mark.parametrize("devices", [2, 4, 8], ids="n{}".format)
def test_steps_are_those_of_the_paper(devices):
    shapes = [(9, 7), (2, 3, 8), (5,)]  # the second is a matrix of 6 x 8
    compression = PowerSGD(RANK)
    with jax.enable_x64(True):
        steps = [gradients(devices, t, shapes, np.float64) for t in range(4)]
        found = run(compression, steps)
        seeds = [np.asarray(compression.seed_matrix((n, RANK), float)) for n in (7, 8)]
    for i, (rows, columns) in enumerate([(9, 7), (6, 8)]):
        matrices = [leaves[i].reshape(devices, rows, columns) for leaves in steps]
        for step, (mean, memory) in enumerate(low_rank(matrices, seeds[i])):
            end, kept = (x[step][i] for x in (found.means, found.residuals))
            assert end.dtype == np.float64
            np.testing.assert_allclose(
                end[0].reshape(mean.shape), mean, rtol=0, atol=1e-12
            )
            np.testing.assert_allclose(
                kept.reshape(memory.shape), memory, rtol=0, atol=1e-12
            )
    for leaves, ends in zip(steps, found.means, strict=True):  # a bias travels whole
        np.testing.assert_allclose(ends[2][0], leaves[2].mean(0), rtol=1e-14)


def test_nothing_is_lost_of_a_mean_of_low_rank():
    rng = np.random.default_rng(0)
    thin = rng.standard_normal((3, 12, RANK)) @ rng.standard_normal((RANK, 10))
    leaves = [thin.astype("f")]  # of rank 2 each, with the same rows
    (ends,) = run(PowerSGD(RANK), [leaves]).means
    np.testing.assert_allclose(ends[0][0], exact_means(leaves)[0], atol=1e-5)


def test_a_zero_gradient_does_not_end_a_matrix():
    """Its Q is zero, and must not stay so."""
    leaves = gradients(2, shapes=[(6, 5)])
    found = run(PowerSGD(1, error_feedback=False), [[0 * leaves[0]], *[leaves] * 3])
    assert not found.means[0][0].any()
    left = exact_means(leaves)[0] - found.means[-1][0][0]
    singular = np.linalg.svd(exact_means(leaves)[0], compute_uv=False)
    assert np.linalg.norm(left) < 1.1 * np.linalg.norm(singular[1:])


def test_before_the_first_step_everything_travels_exactly():
    steps = [gradients(2, step, [(6, 5), (3,)]) for step in range(3)]
    late = run(PowerSGD(1, start_step=2), steps)
    for step in (0, 1):
        for end, mean in zip(late.means[step], exact_means(steps[step]), strict=True):
            np.testing.assert_allclose(end[0], mean, rtol=1e-6, atol=1e-7)
        assert not any(residual.any() for residual in late.residuals[step])
    (fresh,) = run(PowerSGD(1), steps[2:]).means
    np.testing.assert_allclose(late.means[2][0], fresh[0], rtol=1e-6)
    assert late.residuals[2][0].any()


def test_factors_travel_as_the_inner_compression_says():
    """Both factors, and whole leaves; what they lose is kept."""
    leaves = gradients(2, shapes=[(6, 8), (3,)])
    compression = PowerSGD(RANK, inner=Bf16())
    found = run(compression, [leaves])
    narrow = functools.partial(np.asarray, dtype=ml_dtypes.bfloat16)

    def mean(arrays):
        return narrow(narrow(arrays).astype("f").mean(0)).astype("f")

    seed = np.asarray(compression.seed_matrix((8, RANK), np.float32))
    p, _ = np.linalg.qr(mean(leaves[0] @ seed))
    q = mean(np.swapaxes(leaves[0], 1, 2) @ p)
    np.testing.assert_allclose(found.means[0][0][0], p @ q.T, rtol=1e-2, atol=2e-2)
    np.testing.assert_array_equal(found.means[0][1][0], mean(leaves[1]))
    kept = np.asarray(found.states[0][0].q)
    np.testing.assert_array_equal(kept, narrow(kept).astype("f"))


@dataclasses.dataclass(frozen=True)
class Counting(Exact):
    """Counts its calls for every array."""

    def init(self, leaf):
        return jnp.zeros((), jnp.int32)

    def mean(self, leaves, states, wire):
        travelled = super().mean(leaves, states, wire)
        return travelled._replace(states=[state + 1 for state in states])


def test_states_of_the_inner_compression_are_kept():
    leaves = gradients(2, shapes=[(6, 8), (3,)])
    found = run(PowerSGD(RANK, inner=Counting()), [leaves] * 2)
    factor, whole = found.states[-1]
    assert [int(count) for count in (*factor.inner, whole)] == [2, 2, 2]


# What is sent.


def test_bytes_on_the_wire():
    """N = 2: rank x (rows + columns) numbers and whole leaves, there and back."""
    leaves = gradients(2, shapes=[(12, 20), (3, 3, 2, 16), (6,)])
    numbers = RANK * (12 + 20) + RANK * (18 + 16) + 6
    assert sent_bytes(PowerSGD(RANK), leaves) == 2 * 4 * numbers / 2
    assert sent_bytes(PowerSGD(RANK, inner=Bf16()), leaves) == 2 * 2 * numbers / 2


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((12, 20), (12, 20)),
        ((3, 3, 16, 32), (144, 32)),
        ((4, 12, 48), (48, 48)),
        ((48, 4, 12), (48, 48)),
        ((4, 4), None),  # 2 x (4 + 4) = 16 is no less than 16
        ((4, 5), (4, 5)),  # 18 < 20
        ((1, 900), None),
        ((900,), None),
        ((), None),
        ((0, 4), None),
    ],
)
def test_matrices_of_leaves(shape, expected):
    assert PowerSGD(2).matrix_shape(shape) == expected


# Bad input.


def test_a_rank_that_makes_no_matrix_smaller():
    params = {"w": np.ones((4, 6), "f"), "b": np.ones(6, "f")}
    PowerSGD(2).check(params)  # 20 < 24
    with pytest.raises(ValueError, match=r"rank=3, and no parameter that it makes sm"):
        PowerSGD(3).check(params)
    with pytest.raises(
        ValueError, match=r"\['w'\] \(4, 6\): 3 x \(4 \+ 6\) = 30 >= 24"
    ):
        PowerSGD(3).check(params)
    with pytest.raises(ValueError, match=r"\['b'\] \(6,\) is no matrix"):
        PowerSGD(1).check({"b": params["b"]})


def test_seeds_are_of_the_option():
    first, other = (PowerSGD(1, seed=seed).seed_matrix((5, 1), "f") for seed in (0, 1))
    assert not np.array_equal(first, other)
