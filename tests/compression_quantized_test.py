"""Bf16, Fp16 and Int8 against NumPy."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxdp
from jaxdp.compression import Bf16, BucketWire, Exact, Fp16, Int8
from tests.compression_helpers import gradients, run, sent_bytes, start

NARROW = {
    "bf16": (Bf16(), ml_dtypes.bfloat16, False),
    "fp16": (Fp16(), np.float16, False),
    "fp16-before": (Fp16(divide="before"), np.float16, True),
}


def rounded_twice(leaf, dtype, before):
    """The definition: contributions, summed in the order of ranks, and their mean."""
    devices = np.float32(len(leaf))
    total = np.zeros(leaf.shape[1:], np.float32)
    for own in leaf:
        total += (own / devices if before else own).astype(dtype).astype(np.float32)
    mean = total if before else total / devices
    return mean.astype(dtype).astype(np.float32)


@pytest.mark.parametrize("devices", [2, 3, 8], ids="n{}".format)
@pytest.mark.parametrize("given", NARROW.values(), ids=NARROW.keys())
def test_narrow_floats_are_rounded_twice_whatever_the_devices(given, devices):
    compression, dtype, before = given
    leaves = gradients(devices, shapes=[(5, 7)])
    leaves[0][:, 0, 0] = 3e-6  # subnormal in float16
    (ends,) = run(compression, [leaves]).means
    expected = rounded_twice(leaves[0], dtype, before)
    np.testing.assert_array_equal(ends[0][-1], expected)


@pytest.mark.parametrize(
    ("divide", "number", "mean"),
    [
        ("after", 16384, 16384),
        ("after", 2.0**-24, 2.0**-24),
        ("before", 16384, 16384),
        ("before", 2.0**-24, 0),
    ],
)
def test_float16_neither_overflows_nor_underflows(divide, number, mean):
    """AMP-1: eight times 16384 overflows, an eighth of 2**-24 is none."""
    leaves = [np.full((8, 1), number, np.float16)]
    (ends,) = run(Fp16(divide=divide), [leaves]).means
    assert ends[0].dtype == np.float16
    assert ends[0].tolist() == [[mean]] * 8


def test_divided_before_what_float16_has_no_number_for():
    leaves = [np.array([[2**18]] + 7 * [[0]], np.float32)]
    for compression, mean in ((Fp16(), np.inf), (Fp16(divide="before"), 2**15)):
        (ends,) = run(compression, [leaves]).means
        assert ends[0].tolist() == [[mean]] * 8


def test_a_narrow_float_loses_what_it_says():
    """Error feedback sees both roundings; the second, of rank 1's part, three times."""
    leaf = gradients(3, shapes=[(3,)])[0]
    found = run(Bf16(error_feedback=True), [[leaf]])
    bf16 = ml_dtypes.bfloat16
    lost = leaf - leaf.astype(bf16).astype("f")
    total = leaf.astype(bf16).astype("f").sum(0)
    lost[range(3), range(3)] += 3 * (total / 3 - rounded_twice(leaf, bf16, False))
    np.testing.assert_allclose(found.residuals[0][0], lost, rtol=0, atol=1e-6)


# Int8.


def encoded_int8(row, block):
    """The definition, a block at a time: integers times scales."""
    result = np.zeros_like(row)
    for start_ in range(0, len(row), block):
        part = row[start_ : start_ + block]
        if part.any():
            result[start_ : start_ + block] = np.round(part / scale(part)) * scale(part)
    return result


def scale(part):
    """A 127th of the largest magnitude, rounded up to bfloat16."""
    given = np.float32(np.abs(part).max() * (1 + 2.0**-8) / 127)
    rounded = given.astype(ml_dtypes.bfloat16).astype("f")
    assert 127 * rounded >= np.abs(part).max()
    return rounded


@pytest.mark.parametrize("devices", [2, 8], ids="n{}".format)
def test_int8_rounds_blocks_of_every_part(devices):
    """Part r of a leaf of 41 elements, padded to N equal parts, in blocks of 4."""
    leaf = gradients(devices, shapes=[(41,)])[0]
    parts = np.pad(leaf, ((0, 0), (0, -41 % devices))).reshape(devices, devices, -1)
    expected = []
    for part in range(devices):
        total = sum(encoded_int8(own[part], 4) for own in parts)
        expected.append(encoded_int8(total / np.float32(devices), 4))
    expected = np.concatenate(expected)[:41]
    (ends,) = run(Int8(block=4), [[leaf]]).means
    np.testing.assert_allclose(ends[0][0], expected, rtol=1e-6)


@functools.partial(jax.jit, static_argnums=0)
def round_trip(compression, row):
    """A row, encoded and decoded."""
    encoded = compression.encode([row[None]], jax.random.split(jax.random.key(0), 1))
    assert encoded.dtype == jnp.int8
    return compression.decode(encoded, row.shape, row.dtype)[0][0]


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
def test_int8_errs_by_half_a_scale_at_most(stochastic):
    """By a whole one, if it rounds at random."""
    row = np.random.default_rng(0).standard_normal(1000).astype("f")
    row[130] = 500.0  # an outlier spoils its own block only
    row[20] = -6.0  # the largest magnitude may be negative
    back = np.asarray(round_trip(Int8(64, stochastic=stochastic), row))
    scales = [scale(row[i : i + 64]) for i in range(0, 1000, 64)]
    errors = [np.abs((back - row)[i : i + 64]).max() for i in range(0, 1000, 64)]
    most = 1.0 if stochastic else 0.5
    assert (np.array(errors) <= most * np.array(scales) * (1 + 1e-5)).all()
    assert max(errors) > 0.9 * most * max(scales)


@pytest.mark.parametrize("size", [1e-45, 1e-40, 1e-37, 1e-30, 1e38])
def test_int8_of_every_magnitude(size):
    row = np.array([1.0, -0.5, 0.25, 0.0], "f") * np.float32(size)
    back = np.asarray(round_trip(Int8(4), row))
    assert np.isfinite(back).all()
    assert np.abs(back - row).max() <= max(np.float32(size) / 127, 2e-36)
    assert not round_trip(Int8(4), np.zeros(4, "f")).any()


def test_stochastic_rounding_is_unbiased():
    row = np.array([1.0, 0.3012, -0.7777, 1e-4], "f")
    keys = jax.random.split(jax.random.key(3), 20_000)
    compression = Int8(4, stochastic=True)

    @jax.jit
    def round_trips(keys):
        encode = functools.partial(compression.encode, [jnp.asarray(row)[None]])
        rows = jax.vmap(lambda key: encode(key[None])[0])(keys)
        return compression.decode(rows, [4], row.dtype)[0]

    back = np.asarray(round_trips(keys), np.float64)
    deviation = scale(row) / 2 / np.sqrt(len(keys))  # at most, of the mean
    np.testing.assert_allclose(back.mean(0), row, rtol=0, atol=5 * deviation)
    assert len(np.unique(back[:, 1])) == 2  # the two neighbours
    nearest = round_trip(Int8(4), row)
    assert abs(nearest[1] - row[1]) > 10 * deviation  # which rounding to nearest is not


def test_keys_differ_between_steps_replicas_phases_and_parameters():
    """And not between buckets."""

    @functools.partial(
        jax.shard_map, mesh=jaxdp.data_mesh(2), in_specs=P(), out_specs=P("data")
    )
    def keys(step):
        wires = [
            BucketWire("data", step, jax.random.key(0), numbers)
            for numbers in ([3, 8], [8])
        ]
        made = [wire.keys(draw) for wire in wires for draw in (0, 1)]
        inner = wires[0].only([1], 0).keys(0)  # as PowerSGD does
        return jax.random.key_data(jnp.concatenate([*made, inner]))[None]

    steps = [np.asarray(jax.jit(keys)(np.int32(step))) for step in (0, 1)]
    every = np.stack(steps).reshape(4, 7, -1)  # by step and rank
    np.testing.assert_array_equal(every[:, [1, 3]], every[:, [4, 5]])
    distinct = np.unique(every[:, [0, 1, 2, 3, 6]].reshape(20, -1), axis=0)
    assert len(distinct) == 20


def test_equal_numbers_are_rounded_differently():
    """In one block, in another, and in another leaf."""
    row = np.full((1, 128), 0.3, "f")
    row[:, ::64] = 1.0
    keys = jax.random.split(jax.random.key(0), 2)
    encoded = Int8(64, stochastic=True).encode([jnp.asarray(row)] * 2, keys)
    blocks = np.asarray(encoded)[0, :256].reshape(4, 64)
    for block in blocks:
        assert set(block[1:]) == {37, 38}
    assert len(np.unique(blocks, axis=0)) == 4


# What is sent.


def test_bytes_on_the_wire():
    """N = 4; 10 x 6 numbers are padded to nothing, 7 to 8, one to 4."""
    leaves = gradients(4, shapes=[(10, 6), (7,), ()])
    ring = sent_bytes(Exact(), leaves)
    assert ring == 2 * 3 * 4 * 17  # 60 + 7 + 1 in 4 chunks of 17, each in 4 bytes
    narrow = 2 * 3 * 2 * (15 + 2 + 1)
    assert sent_bytes(Bf16(), leaves) == sent_bytes(Fp16(), leaves) == narrow
    scales = 2 * (4 + 1 + 1)  # of blocks of 4
    assert sent_bytes(Int8(block=4), leaves) == 2 * 3 * ((15 + 2 + 1) + scales)
    whole = [leaves[0]]  # which needs no padding
    assert 2 * sent_bytes(Bf16(), whole) == sent_bytes(Exact(), whole)


def test_scales_are_a_128th_of_the_integers():
    leaves = gradients(2, shapes=[(64, 64)])
    quarter = sent_bytes(Exact(), leaves) / 4
    assert sent_bytes(Int8(), leaves) == quarter * (1 + 2 / 256)


def test_nothing_is_kept_for_a_parameter():
    leaves = gradients(2)
    assert start(Int8(), leaves)[1] == [(), ()]
