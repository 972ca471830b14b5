"""The batches of an epoch: which rows, on which devices, in which shape."""

import math
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdp
from jaxdp.data import PaddedBatch
from tests.contract import waves

ROWS = 66
SCALAR: Any = np.float32(1)  # typed so that the checker lets it pass as a mistake


def data(rows=ROWS):
    """Distinct inputs, and labels."""
    return {"x": waves(rows, 3), "y": np.arange(rows) * 7 % 4}


def devices_of(array: Any):
    """The devices that have rows, in order."""
    return [shard.device for shard in array.addressable_shards]


@pytest.mark.parametrize(
    ("size", "devices", "accumulate", "padded_rows"),
    [(16, 4, 1, 16), (10, 4, 1, 12), (10, 4, 2, 16), (10, 8, 3, 24), (1, 2, 1, 2)],
)
def test_batches_fill_devices_and_micro_batches(size, devices, accumulate, padded_rows):
    mesh = jaxdp.data_mesh(devices)
    sampler = jaxdp.Sampler(ROWS, size, seed=4)
    batches = list(jaxdp.epoch_batches(data(), sampler, mesh, accumulate=accumulate))
    chosen = list(sampler.epoch(0))
    assert len(batches) == len(chosen)
    for padded, rows in zip(batches, chosen, strict=True):
        assert isinstance(padded, PaddedBatch)
        mask = np.asarray(padded.mask)
        assert mask.shape == (padded_rows,) and mask.dtype == bool
        np.testing.assert_array_equal(mask[:size], rows.mask)
        assert not mask[size:].any()
        chosen_rows = np.resize(rows.indices, padded_rows)
        for name, leaf in padded.batch.items():
            assert leaf.sharding == NamedSharding(mesh, P("data"))
            np.testing.assert_array_equal(leaf, data()[name][chosen_rows])


@pytest.mark.parametrize("servers", [1, 2])
def test_servers_that_do_not_work_get_no_rows(servers):
    mesh = jaxdp.data_mesh(4)
    design = jaxdp.ParameterServer(servers=servers, dedicated=True)
    values = np.arange(1.0, 8.0, dtype="f")
    sampler = jaxdp.Sampler(7, 7)
    (padded,) = jaxdp.epoch_batches(values, sampler, mesh, design=design)
    workers = 4 - servers
    assert len(padded.mask) == math.ceil(7 / workers) * workers
    assert devices_of(padded.mask) == jax.devices()[servers:4]
    train = jaxdp.data_parallel(
        lambda params, batch, mask: jaxdp.masked_mean(params * batch, mask),
        optax.sgd(1.0),
        mesh,
        design,
    )
    state, metrics = train.step(train.init(np.float32(1)), padded)
    assert float(metrics["loss"]) == 4 and float(train.params(state)) == -3


def test_meshes_of_two_axes():
    mesh = jax.make_mesh((2, 3), ("worker", "device"), devices=jax.devices()[:6])
    design = jaxdp.ParameterServer()
    (padded,) = jaxdp.epoch_batches(data(7), jaxdp.Sampler(7, 7), mesh, design=design)
    assert padded.mask.shape == (12,) and devices_of(padded.mask) == jax.devices()[:6]
    shards: Any = padded.batch["x"]  # two rows on each of the six
    assert [shard.data.shape for shard in shards.addressable_shards] == [(2, 3)] * 6
    with pytest.raises(ValueError, match="epoch_batches got a mesh with axes"):
        jaxdp.epoch_batches(data(7), jaxdp.Sampler(7, 7), mesh)


def test_remainders_that_do_not_pad():
    mesh = jaxdp.data_mesh(4)
    for remainder, sizes in (("drop", [8, 8]), ("keep", [8, 8, 4])):
        options: Any = {"remainder": remainder}
        sampler = jaxdp.Sampler(19, 8, **options)
        batches = list(jaxdp.epoch_batches(data(19), sampler, mesh))
        assert [len(padded.mask) for padded in batches] == sizes
        real = sum(int(padded.mask.sum()) for padded in batches)
        assert real == (16 if remainder == "drop" else 19)


def test_the_position_is_that_of_the_next_batch():
    """Nothing is read ahead, so a checkpoint skips nothing."""
    sampler = jaxdp.Sampler(ROWS, 16)
    mesh = jaxdp.data_mesh(4)
    for number, _ in enumerate(jaxdp.epoch_batches(data(), sampler, mesh), start=1):
        assert sampler.state()["batch"] == number % 5
    assert sampler.state()["epoch"] == 1
    list(jaxdp.epoch_batches(data(), sampler, mesh, epoch=7))
    assert (sampler.state()["epoch"], sampler.state()["batch"]) == (1, 0)


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        pytest.param(
            data(65),
            {},
            r"sampler of 66 rows, .*\['x'\]: 65 rows, \['y'\]: 65 rows\..*number of ro",
            id="length",
        ),
        pytest.param(
            data() | {"z": np.ones(67)}, {}, r"lengths: \['z'\]: 67 rows\.", id="leaf"
        ),
        pytest.param(SCALAR, {}, r"lengths: the data: no rows\.", id="scalar"),
        pytest.param(
            data(), {"accumulate": 0}, r"accumulate=0\. .*at least 1", id="accumulate"
        ),
    ],
)
def test_bad_input_is_refused(batch, options, message):
    """At the call, and not at the first batch."""
    sampler = jaxdp.Sampler(ROWS, 16)
    with pytest.raises(ValueError, match=f"epoch_batches got .*{message}"):
        jaxdp.epoch_batches(batch, sampler, jaxdp.data_mesh(4), **options)
