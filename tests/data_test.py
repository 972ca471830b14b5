"""Splitting batches, and training on those that the devices do not divide."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdp
from jaxdp.data import PaddedBatch
from tests import contract
from tests.contract import over_designs

# Typed so that the checker lets them pass as mistakes.
UNKNOWN: Any = "wrap"
NO_MESH: Any = 4


def rows(count, start=1.0):
    """Distinct positive rows."""
    return (start + np.arange(2.0 * count)).reshape(count, 2).astype("f")


def test_every_rank_gets_its_slice(mesh):
    batch = {"x": rows(24), "y": np.arange(24), "none": None}
    sharded = jaxdp.shard_batch(batch, mesh)
    assert jax.tree.structure(sharded) == jax.tree.structure(batch)
    for name in ("x", "y"):
        leaf = sharded[name]
        assert leaf.sharding == NamedSharding(mesh, P("data"))
        assert leaf.dtype == jnp.asarray(batch[name]).dtype
        slices = np.split(batch[name], mesh.size)
        for rank, device in enumerate(mesh.devices.flat):
            (shard,) = [s for s in leaf.addressable_shards if s.device == device]
            np.testing.assert_array_equal(shard.data, slices[rank])


def test_arrays_of_other_devices_are_moved():
    mesh = jaxdp.data_mesh(4)
    other = jaxdp.data_mesh(jax.devices()[:3:-1])
    batch = [
        jax.device_put(rows(8), jax.devices()[7]),
        jaxdp.shard_batch(rows(8), other),
        jaxdp.shard_batch(rows(8), mesh),
    ]
    for leaf in jaxdp.shard_batch(batch, mesh):
        assert leaf.sharding == NamedSharding(mesh, P("data"))
        np.testing.assert_array_equal(leaf, rows(8))


def test_meshes_with_explicit_axes_are_accepted():
    mesh = jax.make_mesh((4,), ("rows",), devices=jax.devices()[:4])
    sharded = jaxdp.shard_batch(rows(8), mesh, axis_name="rows")
    np.testing.assert_array_equal(sharded, rows(8))
    assert sharded.sharding.shard_shape(sharded.shape) == (2, 2)


@pytest.mark.parametrize(
    ("count", "devices", "kept"), [(66, 4, 64), (19, 4, 16), (10, 4, 8), (12, 4, 12)]
)
def test_drop_leaves_out_the_last_rows(count, devices, kept):
    sharded = jaxdp.shard_batch(rows(count), jaxdp.data_mesh(devices), "drop")
    np.testing.assert_array_equal(sharded, rows(count)[:kept])


@pytest.mark.parametrize(
    ("count", "devices", "padded"),
    [(66, 4, 68), (19, 4, 20), (10, 4, 12), (12, 4, 12), (3, 8, 8), (1, 8, 8)],
)
@pytest.mark.parametrize("to", [np.asarray, jnp.asarray], ids=["host", "device"])
def test_pad_repeats_real_rows(count, devices, padded, to):
    mesh = jaxdp.data_mesh(devices)
    batch = jaxdp.shard_batch({"x": to(rows(count))}, mesh, remainder="pad")
    assert isinstance(batch, PaddedBatch) and isinstance(batch.mask, jax.Array)
    x = np.asarray(batch.batch["x"])
    assert x.shape == (padded, 2)
    np.testing.assert_array_equal(x[:count], rows(count))
    real = {row.tobytes() for row in rows(count)}
    assert {row.tobytes() for row in x[count:]} <= real
    np.testing.assert_array_equal(batch.mask, np.arange(padded) < count)
    for leaf in (batch.batch["x"], batch.mask):
        assert leaf.sharding == NamedSharding(mesh, P("data"))


@pytest.mark.parametrize("remainder", ["error", "drop"])
def test_whole_batches_get_no_mask(remainder):
    sharded = jaxdp.shard_batch(rows(8), jaxdp.data_mesh(4), remainder)
    assert isinstance(sharded, jax.Array)


@pytest.mark.parametrize(
    ("count", "devices", "message"),
    [
        pytest.param(
            66,
            4,
            r"66 rows for 4 devices .*66 = 4 x 16 \+ 2\..*remainder='pad' \(pads to 68 "
            r"rows.*remainder='drop' \(keeps 64 rows\), or a batch size .*64 or 68",
            id="66-on-4",
        ),
        pytest.param(19, 4, r"19 rows for 4 devices.*20 rows.*16 rows", id="19-on-4"),
        pytest.param(10, 4, r"10 rows for 4 devices.*12 rows.*8 rows", id="10-on-4"),
        pytest.param(3, 8, r"3 rows for 8 devices.*8 rows.*such as 8\.", id="3-on-8"),
    ],
)
def test_rows_that_the_devices_do_not_divide_are_refused(count, devices, message):
    """DA-7: the message has both numbers and the three remedies."""
    with pytest.raises(ValueError, match=f"shard_batch got a batch of {message}"):
        jaxdp.shard_batch(rows(count), jaxdp.data_mesh(devices))


def test_fewer_rows_than_devices_cannot_be_dropped():
    with pytest.raises(ValueError, match=r"3 rows for 8.*'drop'.*Use remainder='pad'"):
        jaxdp.shard_batch(rows(3), jaxdp.data_mesh(8), remainder="drop")


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        pytest.param({}, r"empty batch \(no arrays\)", id="no-leaves"),
        pytest.param({"x": None}, r"empty batch \(no arrays\)", id="none"),
        pytest.param({"x": rows(0)}, r"empty batch \(\['x'\]: 0 rows\)", id="no-rows"),
        pytest.param(
            {"x": rows(8), "y": np.ones(4)},
            r"different length: \['x'\]: 8 rows, \['y'\]: 4 rows",
            id="lengths",
        ),
        pytest.param(
            {"x": rows(8), "rate": 0.1, "z": np.float32(1)},
            r"leaves without axes: \['rate'\], \['z'\]\..*bind constants into loss_fn",
            id="scalars",
        ),
        pytest.param(np.float32(1), r"without axes: the batch\.", id="scalar"),
    ],
)
@pytest.mark.parametrize("remainder", ["error", "pad", "drop"])
def test_batches_that_cannot_be_split_are_refused(batch, message, remainder):
    with pytest.raises(ValueError, match=f"shard_batch got .*{message}"):
        jaxdp.shard_batch(batch, jaxdp.data_mesh(2), remainder)


@pytest.mark.parametrize("count", [8, 10], ids=["whole", "uneven"])
def test_an_unknown_remainder_is_refused(count):
    with pytest.raises(ValueError, match=r"remainder='wrap'\. It must be 'error', 'pa"):
        jaxdp.shard_batch(rows(count), jaxdp.data_mesh(4), UNKNOWN)


def test_a_mesh_is_required():
    with pytest.raises(TypeError, match=r"shard_batch got mesh=4\..*data_mesh"):
        jaxdp.shard_batch(rows(8), NO_MESH)


def root_loss(params, batch):
    """Infinite slope at zero: padding with zeros would give NaN in the gradient."""
    return jnp.sqrt(jnp.sum(params[None] * batch, axis=1))


def padded_loss(params, batch, mask):
    return jaxdp.masked_mean(root_loss(params, batch), mask)


@pytest.mark.parametrize(
    ("count", "devices"),
    [
        pytest.param(10, 4, id="10-on-4"),
        pytest.param(3, 8, id="3-on-8"),
    ],
)
@over_designs
def test_padded_rows_do_not_count(design, count, devices):
    """DA-1 and DA-2: loss and gradient of the real rows, with replicas without any."""
    params = np.array([1.0, 2.0], "f")
    batch = jaxdp.shard_batch(rows(count), jaxdp.data_mesh(devices), remainder="pad")
    new, metrics = contract.one_step(
        design, padded_loss, params, batch, devices=devices
    )
    loss, gradient = jax.value_and_grad(
        lambda params: jnp.mean(root_loss(params, rows(count)))
    )(params)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(new, params - gradient, rtol=1e-6)


def test_one_loss_function_serves_whole_and_uneven_batches():
    """Both are padded, so both have a mask."""
    mesh = jaxdp.data_mesh(4)
    for count in (12, 10):
        batch = jaxdp.shard_batch(rows(count), mesh, remainder="pad")
        _, metrics = contract.one_step(
            jaxdp.RingAllReduce(), padded_loss, np.ones(2, "f"), batch, devices=4
        )
        expected = root_loss(np.ones(2, "f"), rows(count)).mean()
        np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-6)


def test_a_bare_scalar_for_a_padded_batch_is_refused():
    batch = jaxdp.shard_batch(rows(10), jaxdp.data_mesh(4), remainder="pad")
    with pytest.raises(
        ValueError, match=r"padded batch.*3 rows per device.*masked_mea"
    ):
        contract.one_step(
            jaxdp.RingAllReduce(),
            lambda params, batch, mask: jnp.mean(root_loss(params, batch)),
            np.ones(2, "f"),
            batch,
            devices=4,
        )
