"""What loss functions may return, and the refusals of everything else."""

from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp.loss import check_loss, divided, split_loss, with_weight


def test_masked_mean_counts_real_rows():
    values = jnp.array([[1.0, 2.0], [3.0, 4.0], [50.0, 60.0]])
    mean = jaxdp.masked_mean(values, jnp.array([True, True, False]))
    assert mean == (10, 4)
    assert divided(mean) == 2.5


def test_masked_mean_of_no_real_row_is_zero_over_zero():
    assert jaxdp.masked_mean(jnp.array([1.0, 2.0]), jnp.zeros(2, bool)) == (0, 0)


def test_a_nan_in_a_padded_row_stays_there():
    def total(values):
        return jaxdp.masked_mean(values, jnp.array([True, False])).total

    value, gradient = jax.value_and_grad(total)(jnp.array([2.0, jnp.nan]))
    assert value == 2
    assert gradient.tolist() == [1, 0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_masked_mean_sums_16_bit_values_in_float32(dtype):
    """bfloat16 cannot count to 257, and float16 not to 70000."""
    rows = 70001
    values, mask = jnp.ones(rows, dtype), jnp.ones(rows, bool)
    mean = jaxdp.masked_mean(values, mask)
    assert mean == (rows, rows)
    assert mean.total.dtype == mean.weight.dtype == jnp.float32
    gradient = jax.grad(lambda v: jaxdp.masked_mean(v, mask).total)(values)
    assert gradient.dtype == dtype


@pytest.mark.parametrize(
    ("values", "mask", "message"),
    [
        ((4,), np.ones(3, bool), r"shape \(4,\) and a mask of shape \(3,\)"),
        ((4, 2), np.ones((4, 2), bool), r"\(4, 2\) and a mask of shape \(4, 2\)"),
        ((), np.ones(2, bool), r"values of shape \(\) and a mask of shape \(2,\)"),
        ((2,), np.ones(2, "f"), r"shape \(2,\) and dtype float32.*one bool per row"),
    ],
    ids=["length", "axes", "scalar", "dtype"],
)
def test_masked_mean_refuses_other_masks(values, mask, message):
    with pytest.raises(ValueError, match=f"masked_mean got .*{message}"):
        jaxdp.masked_mean(jnp.ones(values), jnp.asarray(mask))


AUX = jaxdp.Aux(metrics={"a": 1.0})


@pytest.mark.parametrize(
    ("output", "total", "weight", "aux"),
    [
        pytest.param(jnp.float32(2), 2, None, jaxdp.Aux(), id="scalar"),
        pytest.param(2.0, 2, None, jaxdp.Aux(), id="python"),
        pytest.param(np.float32(2), 2, None, jaxdp.Aux(), id="numpy"),
        pytest.param((jnp.float32(2), AUX), 2, None, AUX, id="scalar-aux"),
        pytest.param(jaxdp.Mean(jnp.float32(2), 4), 2, 4, jaxdp.Aux(), id="mean"),
        pytest.param(
            (jaxdp.Mean(jnp.float32(2), jnp.int32(4)), AUX), 2, 4, AUX, id="mean-aux"
        ),
    ],
)
def test_losses(output, total, weight, aux):
    loss, found = split_loss(output)
    assert loss == (total, weight)
    assert jnp.issubdtype(loss.total.dtype, jnp.floating)
    assert weight is None or loss.weight.dtype == jnp.float32
    assert found == aux


@pytest.mark.parametrize(
    ("output", "message"),
    [
        pytest.param(None, "NoneType as its loss", id="none"),
        pytest.param({"loss": 1.0}, "dict as its loss", id="dict"),
        pytest.param((1.0, {"a": 1}), "tuple as its loss", id="tuple"),
        pytest.param((1.0, AUX, AUX), "tuple as its loss", id="triple"),
        pytest.param([1.0], "list as its loss", id="list"),
        pytest.param("1", "str as its loss", id="string"),
        pytest.param(jaxdp.Mean(1.0, [1]), "list as its weight", id="weight"),
        pytest.param(jnp.int32(1), "a loss of dtype int32", id="integer"),
        pytest.param(jnp.array(True), "a loss of dtype bool", id="bool"),
        pytest.param(jnp.complex64(1), "a loss of dtype complex64", id="complex"),
        pytest.param(jaxdp.Mean(1, 2), "a loss of dtype int32", id="integer-mean"),
    ],
)
def test_other_types_are_refused(output, message):
    with pytest.raises(TypeError, match=f"loss_fn returned {message}.*must"):
        split_loss(output)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        pytest.param(jnp.ones(3), r"a loss of shape \(3,\).*jnp\.mean", id="vector"),
        pytest.param(jnp.ones((1, 1)), r"a loss of shape \(1, 1\)", id="matrix"),
        pytest.param(
            jaxdp.Mean(1.0, jnp.ones(2)), r"a weight of shape \(2,\)", id="weight"
        ),
    ],
)
def test_losses_that_are_no_scalar_are_refused(output, message):
    with pytest.raises(ValueError, match=f"loss_fn returned {message}"):
        split_loss(output)


@pytest.mark.parametrize(
    ("weight", "value", "pair"),
    [
        pytest.param(None, 3.0, (3, None), id="unweighted"),
        pytest.param(4.0, 3.0, (12, 4), id="weighted"),
        pytest.param(4.0, 3, (12, 4), id="count"),
        pytest.param(4.0, jaxdp.Mean(3, 2), (3, 2), id="own-weight"),
    ],
)
def test_with_weight(weight, value, pair):
    mean = with_weight(jaxdp.Mean(1.0, weight), value)
    assert mean == pair
    assert mean.total.dtype == jnp.float32


def test_divided_keeps_the_dtype():
    mean = divided(jaxdp.Mean(jnp.bfloat16(3), jnp.float32(2)))
    assert (mean, mean.dtype) == (1.5, jnp.bfloat16)
    assert divided(jaxdp.Mean(jnp.float32(3), None)) == 3


STATE = {"a": np.zeros(2), "b": 1}


@pytest.mark.parametrize(
    ("loss", "aux", "arguments", "message"),
    [
        pytest.param(
            jaxdp.Mean(1.0, None),
            jaxdp.Aux(),
            {"mask": np.ones(3, bool)},
            r"bare scalar for a padded batch.* 3 rows per device.*masked_mean",
            id="bare-scalar",
        ),
        pytest.param(
            jaxdp.Mean(1.0, 2.0),
            jaxdp.Aux(model_state=STATE),
            {},
            r"a model_state, and train\.init got none.*Pass model_state=",
            id="unexpected-state",
        ),
        pytest.param(
            jaxdp.Mean(1.0, 2.0),
            jaxdp.Aux(model_state={"a": np.zeros(2)}),
            {"model_state": STATE},
            r"another model_state than it received: model_state\['b'\] is missing\. ",
            id="part-of-the-state",
        ),
        pytest.param(
            jaxdp.Mean(1.0, 2.0),
            jaxdp.Aux(model_state={**STATE, "a": np.zeros(3)}),
            {"model_state": STATE},
            r"model_state\['a'\] had shape \(2,\) and has \(3,\)\. ",
            id="grown-state",
        ),
        pytest.param(
            jaxdp.Mean(1.0, 2.0),
            jaxdp.Aux(model_state={**STATE, "c": 2.0}),
            {"model_state": STATE},
            r"model_state\['c'\] is new\. ",
            id="more-state",
        ),
        pytest.param(
            jaxdp.Mean(1.0, 2.0),
            jaxdp.Aux(model_state=OrderedDict(STATE)),
            {"model_state": STATE},
            r"it was PyTreeDef\(\{'a'.* and is PyTreeDef\(.*OrderedDict",
            id="same-leaves-in-another-container",
        ),
        pytest.param(
            jaxdp.Mean(1.0, 2.0),
            jaxdp.Aux(metrics={"loss": 1.0}),
            {},
            r"a metric named 'loss'.*Rename it",
            id="metric-named-loss",
        ),
    ],
)
def test_check_loss(loss, aux, arguments, message):
    with pytest.raises(ValueError, match=f"loss_fn returned .*{message}"):
        check_loss(loss, aux, arguments)
