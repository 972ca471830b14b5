"""Precision: options, casts, and the loss scale against a plain re-implementation."""

import dataclasses
import functools
import math
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdp import precision as precision_module
from jaxdp.loss_scale import (
    LossScale,
    check_not_failed,
    first_nonfinite,
    next_loss_scale,
    unscaled,
)
from jaxdp.precision import LossScaleWarning, Precision

DYNAMIC = Precision("fp16", loss_scale="dynamic")
NAMES = ["params['a']", "params['b']", "params['c']"]


@functools.partial(jax.jit, static_argnums=0)
def after(precision, state, leaves):
    """The states after a series of steps; leaf -1 stands for a good step."""

    def advance(state, leaf_and_step):
        state = next_loss_scale(precision, state, *leaf_and_step)
        return state, state

    steps = jnp.arange(len(leaves), dtype=jnp.int32)
    return jax.lax.scan(advance, state, (jnp.asarray(leaves, jnp.int32), steps))[1]


def series(precision, leaves):
    """The loss scale after each step, by field."""
    states = after(precision, precision.initial(), np.asarray(leaves, np.int32))
    return {field: np.asarray(x).tolist() for field, x in states._asdict().items()}


def reference(precision, leaves):
    """PyTorch's rule in plain Python: `_amp_update_scale_`, with a cap and a floor."""
    scale, tracker, skipped, failed = precision.initial_scale, 0, 0, (-1, -1)
    found = {field: [] for field in LossScale._fields}
    for step, leaf in enumerate(leaves):
        if leaf >= 0:
            skipped += 1
            if scale == precision.min_scale and failed == (-1, -1):
                failed = step, leaf
            scale, tracker = (
                max(scale * precision.backoff_factor, precision.min_scale),
                0,
            )
        else:
            tracker += 1
            if tracker == precision.growth_interval:
                scale = min(scale * precision.growth_factor, precision.max_scale)
                tracker = 0
        scale = float(np.float32(scale))  # which is what keeps it
        row = (scale, tracker, skipped, *failed)
        for field, value in zip(LossScale._fields, row, strict=True):
            found[field].append(value)
    return found


@given(
    leaves=st.lists(st.sampled_from([-1, -1, -1, 0, 2]), min_size=40, max_size=40),
    options=st.sampled_from(
        [
            {},
            {"growth_interval": 1, "initial_scale": 2.0**22},
            {"growth_interval": 3, "initial_scale": 8.0, "max_scale": 24.0},
            {"growth_interval": 2, "backoff_factor": 0.25, "min_scale": 1024.0},
            {"growth_factor": 1.5, "backoff_factor": 0.75, "growth_interval": 2},
            {"initial_scale": 0.5, "min_scale": 0.125, "growth_interval": 4},
        ]
    ),
)
def test_any_series_of_overflows_follows_the_rule(leaves, options):
    precision = dataclasses.replace(DYNAMIC, **options)
    assert series(precision, leaves) == reference(precision, leaves)


def test_a_scripted_series_by_hand():
    precision = dataclasses.replace(
        DYNAMIC, initial_scale=8.0, growth_interval=2, min_scale=2.0, max_scale=16.0
    )
    #         good good bad good bad bad bad bad good good
    leaves = [-1, -1, 1, -1, 0, 2, 1, 0, -1, -1]
    assert series(precision, leaves) == {
        "scale": [8, 16, 8, 8, 4, 2, 2, 2, 2, 4],
        "good_steps": [1, 0, 0, 1, 0, 0, 0, 0, 1, 0],
        "skipped": [0, 0, 1, 1, 2, 3, 4, 5, 5, 5],
        "failed_step": [-1, -1, -1, -1, -1, -1, 6, 6, 6, 6],  # the first one stays
        "failed_leaf": [-1, -1, -1, -1, -1, -1, 1, 1, 1, 1],
    }


def test_defaults_are_those_of_pytorch():
    leaves = [-1] * 1999 + [0] + [-1] * 2000 + [-1] * 2000
    scales = series(DYNAMIC, leaves)["scale"]
    assert scales[1998:2000] == [65536, 32768]
    assert scales[3998:4000] == [32768, 65536]
    assert scales[5998:] == [65536, 131072]


def test_tame_gradients_stop_at_the_cap_and_bad_ones_at_the_floor():
    tame = dataclasses.replace(DYNAMIC, growth_factor=10.0, growth_interval=1)
    scales = series(tame, [-1] * 70)["scale"]
    assert scales[:3] == [655360, 6553600, 2**24] and set(scales[2:]) == {2**24}
    widest = dataclasses.replace(tame, max_scale=float(np.finfo(np.float32).max))
    assert np.isfinite(series(widest, [-1] * 70)["scale"]).all()
    bad = series(DYNAMIC, [0] * 200)
    assert bad["scale"][14:17] == [2, 1, 1] and bad["scale"][-1] == 1
    assert bad["skipped"][-1] == 200
    assert bad["failed_step"][15:18] == [-1, 16, 16] and bad["failed_step"][-1] == 16
    assert bad["failed_leaf"][-1] == 0


def test_a_fixed_scale_stays_and_counts():
    found = series(Precision("fp16", loss_scale=48.0), [-1, 2, -1, 0, 1])
    assert found["scale"] == [48] * 5
    assert found["skipped"] == [0, 1, 1, 2, 3]
    assert set(found["failed_step"]) == set(found["failed_leaf"]) == {-1}


def test_a_state_of_a_longer_interval_grows_at_once():
    state = DYNAMIC.initial()
    assert state is not None
    state = state._replace(good_steps=jnp.asarray(9, jnp.int32))
    shorter = dataclasses.replace(DYNAMIC, growth_interval=4)
    found = next_loss_scale(shorter, state, jnp.asarray(-1), jnp.asarray(0))
    assert (float(found.scale), int(found.good_steps)) == (131072, 0)


def test_types_stay_the_same_from_step_to_step():
    for precision in (DYNAMIC, Precision("fp16", loss_scale=1024)):
        state = precision.initial()
        assert state is not None
        types = [(x.dtype, x.weak_type, x.shape) for x in state]
        expected = [(jnp.float32, False, ())] + [(jnp.int32, False, ())] * 4
        assert types == expected
        new = next_loss_scale(precision, state, jnp.int32(0), jnp.int32(5))
        assert [(x.dtype, x.weak_type, x.shape) for x in new] == expected


BAD = (np.nan, np.inf, -np.inf)


@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16], ids=str)
def test_the_first_leaf_that_is_not_finite(bad, dtype):
    leaves = [np.full(3, 7), np.full((2, 5), 6e4), np.full((), 5), np.full(4, -2)]
    leaves = [leaf.astype(dtype) for leaf in leaves]
    assert first_nonfinite(leaves) == -1
    for index, first in ((3, 3), (1, 1), (2, 1), (0, 0)):  # as they come
        leaves[index].reshape(-1)[-1] = bad
        found = jax.jit(first_nonfinite)(leaves)
        assert (int(found), found.dtype) == (first, jnp.int32)


def test_leaves_without_elements_and_complex_ones():
    assert first_nonfinite([]) == -1
    assert first_nonfinite([jnp.zeros((0, 3)), jnp.ones(2)]) == -1
    assert (
        first_nonfinite([jnp.zeros(0), jnp.array([1 + 2j, complex(0, math.inf)])]) == 1
    )


def test_a_failed_run_is_told_where_and_what_to_do():
    state = LossScale(*map(jnp.asarray, (0.5, 0, 9, 41, 1)))
    message = re.compile(
        r"train\.step got .*floor, 0\.5, when step 41 overflowed; 9 step\(s\).*"
        r"that of params\['b'\]\. Look for .*learning rate.*bf16.*min_scale=",
        re.DOTALL,
    )
    with pytest.raises(FloatingPointError, match=message):
        check_not_failed(state, NAMES, "train.step")
    first = state._replace(failed_step=jnp.asarray(0), failed_leaf=jnp.asarray(0))
    with pytest.raises(FloatingPointError, match=r"when step 0 .*params\['a'\]"):
        check_not_failed(first, NAMES, "train.step")


def test_a_run_that_goes_on_passes():
    state = DYNAMIC.initial()
    assert state is not None
    check_not_failed(state, NAMES, "train.step")
    checked = jax.jit(lambda state: check_not_failed(state, NAMES, "") or state.scale)
    assert checked(state) == 65536


def mixed():
    """Leaves of every kind."""
    return {
        "f32": jnp.array([1.0 + 2**-20, -0.1]),
        "f16": jnp.array([3.0], jnp.float16),
        "bf16": jnp.array(5.0, jnp.bfloat16),
        "int": jnp.array([2**24 + 1]),
        "bool": jnp.array([True, False]),
        "complex": jnp.array([1 + 2j]),
        "key": jax.random.key(3),
        "f8": jnp.array([0.5], jnp.float8_e4m3fn),
        "none": None,
    }


@pytest.mark.parametrize("dtype", ["f32", "bf16", "fp16"])
@pytest.mark.parametrize("method", ["to_params", "to_compute"])
def test_casts_touch_only_real_floats(method, dtype):
    other = "fp16" if dtype == "f32" else "f32"
    options = {"to_params": (other, dtype), "to_compute": (dtype, other)}[method]
    given, cast = mixed(), getattr(Precision(*options, loss_scale=2.0), method)
    found = jax.jit(cast)(given)
    target = {"f32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}[dtype]
    for name in ("f32", "f16", "bf16", "f8"):
        assert found[name].dtype == target
        expected = np.asarray(given[name]).astype(target)
        np.testing.assert_array_equal(np.asarray(found[name]), expected)
    for name in ("int", "bool", "complex", "key"):
        assert found[name].dtype == given[name].dtype
        assert (found[name] == given[name]).all()
    assert found["none"] is None
    assert cast({"python": 3.0, "text": "a"}) == {"python": 3.0, "text": "a"}


def test_gradients_are_those_of_the_master_weights():
    cast = Precision("bf16").to_compute
    slope = jax.grad(lambda w: jnp.sum(cast(w)[0].astype(jnp.float32) ** 2))
    (gradient,) = slope([jnp.array([1.0 + 2**-20, 3.0])])
    assert gradient.dtype == jnp.float32
    np.testing.assert_array_equal(gradient, [2, 6])  # at the weights as bf16 has them


def test_gradients_are_unscaled_in_float32():
    """65,536 is infinite in float16; powers of two are exact."""
    leaves = {
        "f16": np.array([3.0, 2.0**-24, np.inf], np.float16),
        "f32": np.array([0.1, 7], np.float32),
        "c64": np.array([1 + 2j], np.complex64),
    }
    given = jax.tree.map(jnp.asarray, leaves)
    found = unscaled(given, jnp.float32(65536))
    for name, leaf in leaves.items():
        assert found[name].dtype == leaf.dtype
        wide = leaf.astype(np.complex64 if name == "c64" else np.float32)
        np.testing.assert_array_equal(found[name], (wide / 65536).astype(leaf.dtype))
    assert unscaled(given, None) is given


def test_64_bit_needs_jax_to_keep_it():
    precision = Precision("f64", "f64")
    for cast in (precision.to_params, precision.to_compute):
        with pytest.raises(ValueError, match=r"'f64'.*jax_enable_x64.*'f32'"):
            cast([jnp.ones(2)])
    with jax.enable_x64(True):
        assert precision.to_params([jnp.ones(2, jnp.float32)])[0].dtype == jnp.float64


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("f32", "f32"),
        ("f16", "fp16"),
        ("bfloat16", "bf16"),
        ("float16", "fp16"),
        (np.float64, "f64"),
        (np.dtype(np.float16), "fp16"),
        (jnp.bfloat16, "bf16"),
        (jnp.dtype(jnp.bfloat16), "bf16"),
    ],
    ids=str,
)
def test_dtypes_have_one_name(given, name):
    made = Precision(given, given, loss_scale=2.0)
    assert (made.compute, made.params) == (name, name)
    assert made == Precision(name, name, loss_scale=2.0)
    assert hash(made) == hash(Precision(name, name, loss_scale=2.0))
    assert f"compute='{name}'" in repr(made)


@pytest.mark.parametrize("field", ["compute", "params"])
@pytest.mark.parametrize(
    "given",
    ["fp8", "", None, 16, np.int32, "int8", np.longdouble, np.complex64, []],
    ids=repr,
)
def test_other_dtypes_are_refused(field, given):
    options = {"compute": "bf16", field: given}
    message = f"{field}={re.escape(repr(given))}.*'f32', 'bf16', 'fp16', 'f64'.*Use"
    with pytest.raises(ValueError, match=message):
        Precision(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_scale": "static"}, "loss_scale='static'.*'dynamic', None"),
        ({"loss_scale": 0.0}, r"loss_scale=0\.0"),
        ({"loss_scale": -2}, "loss_scale=-2"),
        ({"loss_scale": True}, "loss_scale=True"),
        ({"loss_scale": math.nan}, "loss_scale=nan"),
        ({"loss_scale": math.inf}, "loss_scale=inf"),
        ({"loss_scale": 1e-40}, "loss_scale=1e-40.*normal"),
        ({"min_scale": 0}, "min_scale=0.*default, 1"),
        ({"min_scale": "1"}, "min_scale='1'"),
        ({"max_scale": math.inf}, "max_scale=inf"),
        ({"max_scale": 0.5}, r"max_scale=0\.5.*at least min_scale=1\."),
        (
            {"initial_scale": 2.0**25},
            r"33554432\.0.*from min_scale=1 to max_scale=1.67",
        ),
        ({"initial_scale": 0.5}, r"initial_scale=0\.5.*default, 65536"),
        ({"growth_factor": 1.0}, r"growth_factor=1\.0.*above 1"),
        ({"growth_factor": 1 + 1e-9}, "above 1"),  # in float32 it is 1
        ({"growth_factor": math.inf}, "growth_factor=inf"),
        ({"backoff_factor": 1.0}, r"backoff_factor=1\.0.*below 1"),
        ({"backoff_factor": 1 - 1e-9}, "below 1"),
        ({"backoff_factor": 0}, "backoff_factor=0.*above 0"),
        ({"growth_interval": 0}, "growth_interval=0.*default, 2000"),
        ({"growth_interval": 2.0}, r"growth_interval=2\.0.*whole number"),
        ({"growth_interval": 2**31}, r"from 1 to 2\^31 - 1"),
    ],
    ids=str,
)
def test_numbers_out_of_their_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Precision("bf16", **options)


def test_float16_without_a_loss_scale_warns_once():
    precision_module._warn_once.cache_clear()
    with pytest.warns(LossScaleWarning, match=r"2\*\*-25.*loss_scale='dynamic'.*bf16"):
        Precision("fp16")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Precision(np.float16)
        dataclasses.replace(DYNAMIC, loss_scale=None)
    assert not caught


def test_the_warning_points_to_its_cause_and_others_get_none():
    precision_module._warn_once.cache_clear()
    Precision("bf16")
    Precision("fp16", loss_scale=8.0)
    with pytest.warns(LossScaleWarning) as caught:
        Precision("f16")
    assert caught[0].filename == __file__


def test_no_loss_scale_keeps_no_state():
    assert Precision("bf16").initial() is None


def test_what_the_docstring_says_of_float16():
    tiny = np.array([2.0**-25, 1.5 * 2.0**-25], np.float32).astype(np.float16)
    assert tiny.tolist() == [0, 2.0**-24]
    assert np.float32(65504).astype(np.float16) == 65504
    one = np.float32(1).astype(jnp.bfloat16)
    lost, kept = (np.float32(1 + u).astype(jnp.bfloat16) for u in (2**-8, 1.1 * 2**-8))
    assert lost == one and kept > one
