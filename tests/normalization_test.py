"""BatchNorm over replicas and masks, against NumPy and Flax on one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxdp
from tests.contract import waves


def on_replicas(function, mesh, *arrays):
    """`function` of each device's rows; its results of all devices, `[N, ...]`."""

    def body(*local):
        return jax.tree.map(lambda leaf: leaf[None], function(*local))

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    return jax.tree.map(np.asarray, jax.jit(mapped)(*arrays))


def expected_moments(x, mask=None):
    """Mean, biased variance and count in float64, over all axes but the last."""
    kept = np.asarray(x, np.float64)[slice(None) if mask is None else mask]
    kept = kept.reshape(-1, x.shape[-1])
    return kept.mean(0), kept.var(0), len(kept)


on_one_device = jax.jit(jaxdp.batch_moments, static_argnames="axis")


def assert_moments(moments, expected, rtol=1e-5):
    for got, wanted in zip(moments, expected, strict=True):
        np.testing.assert_allclose(got, np.broadcast_to(wanted, got.shape), rtol=rtol)


def data(*shape):
    """Distinct values with another mean and spread in each feature."""
    features = np.arange(1, shape[-1] + 1, dtype="f")
    return waves(*shape) * features + 3 * features


def some_rows(rows, seed=0):
    mask = np.random.default_rng(seed).random(rows) < 0.6
    mask[0] = True
    return mask


@pytest.mark.parametrize("shape", [(24, 5), (24, 3, 2, 5)], ids=["rows", "images"])
@pytest.mark.parametrize("masked", [True, False], ids=["masked", "whole"])
def test_moments_are_those_of_all_real_rows(mesh, shape, masked):
    x = data(*shape)
    mask = some_rows(24) if masked else None
    arrays = (x, mask) if masked else (x,)
    moments = on_replicas(
        lambda x, mask=None: jaxdp.batch_moments(x, mask, "data"), mesh, *arrays
    )
    assert_moments(moments, expected_moments(x, mask))
    for moment in moments:  # the same bits everywhere
        assert {row.tobytes() for row in moment} == {moment[0].tobytes()}


@pytest.mark.parametrize("masked", [True, False], ids=["masked", "whole"])
@pytest.mark.parametrize("axis", [1, 2, -1])
def test_features_may_be_on_another_axis(axis, masked):
    mask = some_rows(6) if masked else None
    x = data(6, 4, 2, 3)
    moments = on_one_device(np.moveaxis(x, -1, axis), mask, axis=axis)
    assert_moments(moments, expected_moments(x, mask))


def test_features_may_come_first_without_a_mask():
    x = data(6, 3)
    assert_moments(on_one_device(x.T, axis=0), expected_moments(x))


def test_masks_may_have_positions():
    x, mask = data(8, 5, 3), some_rows(40).reshape(8, 5)
    moments = on_replicas(
        lambda x, mask: jaxdp.batch_moments(x, mask, "data"),
        jaxdp.data_mesh(4),
        *(x, mask),
    )
    assert_moments(moments, expected_moments(x, mask))


def test_replicas_with_unequal_counts():
    """DA-1: Flax gives mean 3.5 and variance 2.75 for these."""
    x = np.array([[1.0], [3.0], [5.0], [0.0]], "f")
    mask = np.array([True, True, True, False])
    moments = on_replicas(
        lambda x, mask: jaxdp.batch_moments(x, mask, "data"),
        jaxdp.data_mesh(2),
        *(x, mask),
    )
    assert_moments(moments, ([3.0], [8 / 3], 3))


def test_replicas_without_rows():
    """DA-2: three rows on eight devices."""
    x, mask = data(8, 2), np.arange(8) < 3
    moments = on_replicas(
        lambda x, mask: jaxdp.batch_moments(x, mask, "data"),
        jaxdp.data_mesh(8),
        *(x, mask),
    )
    assert_moments(moments, expected_moments(x, mask))


def test_variance_survives_large_means():
    """ST-9: E[x²] - E[x]² gives 0 here."""
    x = (1e4 + np.array([[-1.0], [1.0], [-1.0], [1.0]])).astype("f")
    moments = on_replicas(
        lambda x: jaxdp.batch_moments(x, axis_name="data"), jaxdp.data_mesh(2), x
    )
    assert_moments(moments, ([1e4], [1.0], 4))


def test_half_precision_is_summed_in_single():
    """ST-9: mean 5 and standard deviation 0.1, in steps of 1/32."""
    x = jnp.asarray(5 + 0.1 * waves(4096, 1), jnp.bfloat16)
    moments = on_replicas(
        lambda x: jaxdp.batch_moments(x, axis_name="data"), jaxdp.data_mesh(2), x
    )
    assert {moment.dtype for moment in moments} == {np.dtype("f")}
    assert_moments(moments, expected_moments(np.asarray(x)))


def test_groups_have_moments_of_their_own():
    x, mask = data(8, 2), np.array([1, 0, 0, 1, 1, 1, 0, 1], bool)
    mean, var, count = on_replicas(
        lambda x, mask: jaxdp.batch_moments(
            x, mask, "data", axis_index_groups=[[0, 1], [2, 3]]
        ),
        jaxdp.data_mesh(4),
        *(x, mask),
    )
    for ranks, rows in ((slice(0, 2), slice(0, 4)), (slice(2, 4), slice(4, 8))):
        moments = (mean[ranks], var[ranks], count[ranks])
        assert_moments(moments, expected_moments(x[rows], mask[rows]))


def test_no_rows_at_all():
    moments = on_one_device(data(4, 2), np.zeros(4, bool))
    assert_moments(moments, ([0, 0], [0, 0], 0))


def test_a_nan_in_padding_reaches_neither_moments_nor_gradient():
    x, mask = data(4, 2), np.arange(4) < 3
    x[3] = np.nan

    def total(x):
        mean, var, _ = jaxdp.batch_moments(x, mask)
        return jnp.sum(mean * var)

    value, gradient = jax.jit(jax.value_and_grad(total))(x)
    expected = expected_moments(x, mask)
    np.testing.assert_allclose(value, np.sum(expected[0] * expected[1]), rtol=1e-5)
    wanted = jax.jit(jax.grad(lambda x: jnp.sum(jnp.mean(x, 0) * jnp.var(x, 0))))(x[:3])
    np.testing.assert_allclose(gradient[:3], wanted, rtol=1e-4)
    np.testing.assert_array_equal(gradient[3], 0)


@pytest.mark.parametrize(
    ("x", "mask", "options", "error", "message"),
    [
        pytest.param(
            data(4, 2),
            np.ones(4, "f"),
            {},
            TypeError,
            r"mask of dtype float32\. .*bool\. Pass the `mask=`",
            id="dtype",
        ),
        pytest.param(
            data(4, 2),
            np.ones(3, bool),
            {},
            ValueError,
            r"\(4, 2\) with features on axis 1, and a mask of shape \(3,\).*"
            r"\(4,\) for rows",
            id="length",
        ),
        pytest.param(
            data(4, 2), np.ones((4, 2), bool), {}, ValueError, "before the f", id="wide"
        ),
        pytest.param(
            data(4, 3, 2),
            np.ones((4, 3), bool),
            {"axis": 1},
            ValueError,
            r"features on axis 1, and a mask of shape \(4, 3\)",
            id="axis",
        ),
        pytest.param(
            data(4, 2),
            np.array(True),
            {},
            ValueError,
            r"mask of shape \(\)",
            id="scalar",
        ),
        pytest.param(
            data(4, 2).astype("F"),
            None,
            {},
            TypeError,
            r"x of dtype complex64\. .*two features",
            id="complex",
        ),
    ],
)
def test_bad_input_is_refused(x, mask, options, error, message):
    with pytest.raises(error, match=f"batch_moments got .*{message}"):
        jaxdp.batch_moments(x, mask, **options)


def module(features=3, kind: Any = jaxdp.BatchNorm, **options):
    """A BatchNorm with distinct parameters and running averages."""
    norm = kind(features, rngs=nnx.Rngs(0), **{"momentum": 0.8} | options)
    values = {
        name: (1.5 + 0.3 * start + waves(features)).astype(variable[...].dtype)
        for start, (name, variable) in enumerate(nnx.state(norm).items())
    }
    nnx.update(norm, jax.tree.map(jnp.asarray, values))
    return norm


@nnx.jit
def call(norm, x, mask=None):
    return norm(x, mask=mask)


def averages(norm):
    return np.asarray(norm.mean[...]), np.asarray(norm.var[...])


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        pytest.param({}, (8, 3), id="rows"),
        pytest.param({}, (8, 4, 4, 3), id="images"),
        pytest.param({"axis": 1}, (8, 3, 4), id="axis-1"),
        pytest.param({"use_scale": False, "use_bias": False}, (8, 3), id="bare"),
        pytest.param({"use_scale": False}, (8, 3), id="bias"),
        pytest.param({"epsilon": 0.5, "momentum": 0.25}, (8, 3), id="numbers"),
        pytest.param({"dtype": jnp.bfloat16}, (8, 3), id="bf16"),
        pytest.param({"param_dtype": jnp.bfloat16}, (8, 3), id="bf16-params"),
    ],
)
def test_it_is_the_batch_norm_of_flax(options, shape):
    """Output, running averages and what it holds, in training and in inference."""
    x = data(*shape)
    ours = module(**options)
    flax = module(kind=nnx.BatchNorm, use_fast_variance=False, **options)
    assert jax.tree.structure(nnx.to_pure_dict(nnx.state(ours))) == jax.tree.structure(
        nnx.to_pure_dict(nnx.state(flax))
    )
    tolerance = 2e-2 if options.get("dtype") else 1e-5
    for training in (True, False):
        for norm in (ours, flax):
            norm.set_attributes(use_running_average=not training)
        y, wanted = call(ours, x), call(flax, x)
        assert y.dtype == wanted.dtype and y.shape == wanted.shape
        np.testing.assert_allclose(
            np.asarray(y, "f"), np.asarray(wanted, "f"), rtol=tolerance, atol=tolerance
        )
        for got, expected in zip(averages(ours), averages(flax), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5)
            assert got.dtype == expected.dtype


def test_inference_takes_running_averages_only():
    norm = module(axis_name="data")  # which does not exist here
    before = averages(norm)
    mask = np.arange(4) < 2
    y = norm(data(4, 3), use_running_average=True, mask=mask)
    expected = (data(4, 3) - before[0]) / np.sqrt(before[1] + 1e-5)
    expected = expected * np.asarray(norm.scale[...]) + np.asarray(norm.bias[...])
    np.testing.assert_allclose(y, expected, rtol=1e-5)
    np.testing.assert_array_equal(averages(norm), before)
    norm.eval()
    np.testing.assert_array_equal(norm(data(4, 3)), y)


def test_a_module_that_says_nothing_asks():
    norm = module(use_running_average=None)
    with pytest.raises(ValueError, match="use_running_average"):
        norm(data(4, 3))


def test_running_averages_follow_momentum_and_biased_variance():
    norm = module(momentum=0.9)
    old_mean, old_var = averages(norm)
    x, mask = data(6, 3), np.arange(6) < 4
    call(norm, x, mask)
    mean, var, _ = expected_moments(x, mask)
    np.testing.assert_allclose(norm.mean[...], 0.9 * old_mean + 0.1 * mean, rtol=1e-6)
    np.testing.assert_allclose(norm.var[...], 0.9 * old_var + 0.1 * var, rtol=1e-6)


def test_a_batch_without_rows_leaves_running_averages_alone():
    norm = module()
    before = averages(norm)
    y = call(norm, data(4, 3), np.zeros(4, bool))
    assert np.isfinite(y).all()
    np.testing.assert_array_equal(averages(norm), before)


def split(norm, dtype="f"):
    """A module as a function of its parameters, and these; averages of a dtype."""
    graphdef, params, rest = nnx.split(norm, nnx.Param, ...)
    rest = jax.tree.map(lambda leaf: leaf.astype(dtype), nnx.to_pure_dict(rest))

    def merged(params):
        return nnx.merge(graphdef, nnx.State(params), nnx.State(rest))

    return merged, nnx.to_pure_dict(params)


def test_running_averages_have_no_gradient():
    merged, params = split(module())

    def moved(params):
        norm = merged(params)
        norm(data(4, 3) * params["scale"][None])
        return jnp.sum(norm.mean[...] + norm.var[...])

    np.testing.assert_array_equal(jax.jit(jax.grad(moved))(params)["scale"], 0)


@pytest.mark.parametrize(
    ("options", "means", "variances"),
    [
        pytest.param({"axis_name": "data"}, [1, 1], [1, 1], id="synchronized"),
        pytest.param(
            {"axis_name": "data", "axis_index_groups": [[0], [1]]},
            *([0, 2], [0, 0]),
            id="groups",
        ),
        pytest.param({}, [0, 2], [0, 0], id="local"),
    ],
)
def test_statistics_of_replicas(options, means, variances):
    """ST-8."""
    x = np.array([[0.0], [0.0], [2.0], [2.0]], "f")

    def statistics(x):
        norm = module(1, momentum=0.0, **options)
        norm(x)
        return norm.mean[...], norm.var[...]

    mean, var = on_replicas(statistics, jaxdp.data_mesh(2), x)
    np.testing.assert_allclose(mean[:, 0], means, atol=1e-6)
    np.testing.assert_allclose(var[:, 0], variances, atol=1e-6)


@pytest.mark.parametrize(
    ("devices", "real", "wide", "tolerance"),
    [
        pytest.param(8, 3, False, 1e-5, id="3-on-8-float32"),
        pytest.param(2, 17, False, 1e-5, id="17-on-2-float32"),
        pytest.param(8, 3, True, 1e-13, id="3-on-8-float64"),
        pytest.param(2, 17, True, 1e-13, id="17-on-2-float64"),
        pytest.param(3, 24, True, 1e-13, id="24-on-3-float64"),
    ],
)
def test_gradients_are_those_of_one_device(devices, real, wide, tolerance):
    """Of parameters and of every row, to Flax's BatchNorm of the real rows alone."""
    with jax.enable_x64(wide):
        dtype = jnp.float64 if wide else jnp.float32
        x, mask = np.asarray(data(24, 2, 3), dtype), np.arange(24) < real
        weights = np.asarray(waves(24, 2, 3, start=0.4), dtype)
        options = {"epsilon": 0.1, "param_dtype": dtype}
        ours, params = split(module(axis_name="data", **options))
        flax = module(kind=nnx.BatchNorm, use_fast_variance=False, **options)
        flax, _ = split(flax, dtype)

        def loss(params, x, weights, mask):
            y = ours(params)(x, mask=mask)
            return jnp.sum(jnp.where(mask[:, None, None], jnp.tanh(y) * weights, 0))

        def local(x, weights, mask):
            gradient, rows = jax.grad(loss, (0, 1))(params, x, weights, mask)
            return jax.lax.psum(gradient, "data"), rows

        def alone(params, x):
            return jnp.sum(jnp.tanh(flax(params)(x)) * weights[:real])

        whole, by_row = on_replicas(local, jaxdp.data_mesh(devices), x, weights, mask)
        expected, rows = jax.jit(jax.grad(alone, (0, 1)))(params, x[:real])
        for name, wanted in expected.items():
            atol = tolerance * np.abs(wanted).max()
            np.testing.assert_allclose(whole[name][0], wanted, rtol=0, atol=atol)
        by_row = by_row.reshape(x.shape)
        np.testing.assert_allclose(by_row[:real], rows, rtol=0, atol=tolerance)
        np.testing.assert_array_equal(by_row[real:], 0)
