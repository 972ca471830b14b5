"""What every compression promises, a user's own included."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.compression import (
    Bf16,
    Compression,
    Exact,
    Fp16,
    Int8,
    PowerSGD,
    TopK,
    Travelled,
)
from tests.compression_helpers import exact_means, gradients, program, run, start


@dataclasses.dataclass(frozen=True)
class Sign(Compression):
    """A user's own: signs, and their mean magnitude; neither knows NaN."""

    error_feedback: bool = True

    def mean(self, leaves, states, wire):
        signs = [jnp.where(x > 0, 1, -1).astype(jnp.int8) for x in leaves]
        scales = [jnp.nan_to_num(jnp.abs(x)).mean() for x in leaves]
        pairs = zip(wire.gather(signs), wire.gather(scales), strict=True)
        means = [jnp.tensordot(scale, sign, 1) / wire.devices for sign, scale in pairs]
        sent = [sign * scale for sign, scale in zip(signs, scales, strict=True)]
        return Travelled(wire.aggregated(means), sent, states)


COMPRESSIONS = {
    "bf16": Bf16(error_feedback=True),
    "int8-stochastic": Int8(block=16, stochastic=True),
    "topk": TopK(0.2),
    "powersgd": PowerSGD(2),
    "powersgd-int8": PowerSGD(2, inner=Int8(block=16)),
    "sign": Sign(),
}
over_compressions = pytest.mark.parametrize(
    "compression", COMPRESSIONS.values(), ids=COMPRESSIONS.keys()
)
DEVICES = 3
STEPS = [gradients(DEVICES, step) for step in range(3)]


@over_compressions
def test_replicas_end_with_the_same_bits_of_the_mean_of_what_was_sent(compression):
    found = run(compression, STEPS)
    residuals = jax.tree.map(np.zeros_like, STEPS[0])
    for leaves, ends, kept in zip(STEPS, found.means, found.residuals, strict=True):
        for leaf, end, before, after in zip(leaves, ends, residuals, kept, strict=True):
            assert (end.dtype, end.shape) == (leaf.dtype, leaf.shape)
            for replica in end:
                np.testing.assert_array_equal(replica, end[0])
            sent = leaf.astype(np.float64) + before - after
            size = np.abs(leaf).max()
            np.testing.assert_allclose(sent.mean(0), end[0], rtol=0, atol=1e-6 * size)
        residuals = kept


@pytest.mark.parametrize("name", ["bf16", "int8-stochastic", "topk", "powersgd"])
def test_leaves_do_not_depend_on_their_bucket(name):
    """Bit for bit, over steps: all that is random goes by the parameter."""
    together = run(COMPRESSIONS[name], STEPS)
    apart = run(COMPRESSIONS[name], STEPS, ((1,), (0,)))
    for one, other in zip(together, apart, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)


@over_compressions
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
def test_what_is_not_finite_reaches_everybody(compression, bad):
    leaves = gradients(DEVICES)
    leaves[0][2].flat[5] = bad
    leaves[1][1].flat[-1] = bad
    (ends,) = run(compression, [leaves]).means
    for replica in (*ends[0], *ends[1]):
        assert not np.isfinite(replica).all()


@over_compressions
def test_error_feedback_catches_up(compression):
    """The mean over steps nears the true mean; without, it would stay where it is."""
    leaves = STEPS[0]
    found = run(compression, [leaves] * 60)
    for i, mean in enumerate(exact_means(leaves)):
        applied = np.mean([ends[i][0] for ends in found.means], axis=0, dtype=float)
        error = np.abs(applied - mean).max()
        first = np.abs(found.means[0][i][0] - mean).max()
        assert error <= 0.75 * first + 1e-6 * np.abs(leaves[i]).max()


def test_what_all_end_with_is_typed_as_replicated():
    """`check_vma=True` accepts the means as `P()`, and a step in a condition."""
    for compression in (Int8(), TopK(0.2), PowerSGD(2, start_step=1, inner=Bf16())):
        step_fn = program(compression, 2, ((0, 1),), check_vma=True)
        leaves = gradients(2)
        step_fn.trace(np.int32(0), leaves, *start(compression, leaves))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, np.float64], ids=str)
def test_dtypes_are_kept_and_sums_are_wide(dtype):
    """0.25 is not lost beside 1024; float64 stays float64."""
    with jax.enable_x64(True):
        leaves = [np.array([[1024], [0.25], [-1024], [0.5]]).astype(dtype)]
        for compression in (Exact(), Bf16(), TopK(1.0)):
            (ends,) = run(compression, [leaves]).means
            assert ends[0].dtype == dtype
            assert ends[0].astype(float).tolist() == [[0.1875]] * 4


def test_leaves_without_elements():
    leaves = [np.zeros((2, 0, 4), "f"), np.ones((2, 3), "f")]
    for compression in (Int8(), TopK(0.5), PowerSGD(1)):
        (ends,) = run(compression, [leaves]).means
        assert ends[0].shape == (2, 0, 4)
        assert np.isfinite(ends[1]).all()


def test_one_device_rounds_too():
    leaves = [np.array([[1.0, 0.3001]], "f")]
    found = run(Bf16(error_feedback=True), [leaves])
    end = float(jnp.bfloat16(0.3001))
    assert found.means[0][0].tolist() == [[1.0, end]]
    np.testing.assert_allclose(found.residuals[0][0], [[0.0, 0.3001 - end]], atol=1e-7)


# Bad input.


@pytest.mark.parametrize("dtype", ["int32", "complex64", "bool"])
def test_only_real_floating_leaves_are_compressed(dtype):
    params = {"w": np.ones((3, 2), "f"), "n": [np.ones(2, dtype)]}
    for compression in (Bf16(), TopK(0.1), PowerSGD(1), Sign()):
        with pytest.raises(
            TypeError, match=rf"not real floating: \['n'\]\[0\] {dtype}"
        ):
            compression.check(params)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TopK(0.0), r"ratio=0\.0\. It is the share"),
        (lambda: TopK(1.01), r"ratio=1\.01"),
        (lambda: Int8(block=0), r"block=0\. .* at least 1"),
        (lambda: dataclasses.replace(Fp16(), divide="between"), r"divide='between'"),
        (lambda: PowerSGD(0), r"rank=0 .* at least 1"),
        (lambda: PowerSGD(1, start_step=-1), r"start_step=-1"),
    ],
)
def test_options_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@dataclasses.dataclass(frozen=True)
class Wrong(Compression):
    """Forgets something."""

    what: str

    def mean(self, leaves, states, wire):
        means = wire.mean(leaves)
        if self.what == "means":
            return Travelled(means[:1], leaves, states)
        if self.what == "sent":
            return Travelled(means, [x.reshape(-1) for x in leaves], states)
        return Travelled(means, leaves, [])


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("means", r"means of shapes \[\(3,\)\]\. .*\[\(3,\), \(2, 2\)\]"),
        ("sent", r"sent of shapes \[\(3,\), \(4,\)\]"),
        ("states", r"0 states for 2 leaves"),
    ],
)
def test_what_a_compression_returns_is_checked(what, message):
    leaves = [np.ones((2, 3), "f"), np.ones((2, 2, 2), "f")]
    with pytest.raises(ValueError, match=message):
        run(Wrong(what), [leaves])
