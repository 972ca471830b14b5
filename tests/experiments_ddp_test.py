"""What the experiment `ddp` reads from programs, by hand-counted numbers."""

import jax
import numpy as np
import optax
import pytest

import jaxdp
from experiments.parts import ddp_accumulation, ddp_buckets

SIZES = ddp_buckets.Sizes(layers=3, width=8, rows=2)
ONE_LAYER = 1.01 * SIZES.layer_mb


@pytest.fixture(autouse=True)
def allow_rank_promotion():
    with jax.numpy_rank_promotion("allow"):  # as when run by hand
        yield


@pytest.fixture(scope="module")
def steps():
    mesh = jaxdp.data_mesh(4)
    with jax.numpy_rank_promotion("allow"):
        return {
            overlap: ddp_buckets.step(mesh, SIZES, ONE_LAYER, overlap)
            for overlap in (True, False)
        }


def test_sizes():
    assert SIZES.layer_mb == (8 * 8 + 8) * 4 / 2**20
    assert SIZES.backward_matmuls == 5


@pytest.mark.parametrize("overlap", [True, False])
def test_as_many_rings_as_buckets(steps, overlap):
    row = ddp_buckets.compiled(steps[overlap], 4)
    assert row["buckets planned"] == row["rings compiled"] == 4
    assert row["permutes"] == row["expected permutes"] == 24
    assert row["largest bucket_bytes"] <= ONE_LAYER * 2**20


def test_buckets_wait_for_more_and_more_of_the_backward_pass(steps):
    """One product for the last layer's weights, then one more of dx for each."""
    early = ddp_buckets.waiting(steps[True], SIZES)
    assert early == sorted(early)
    assert early[0] < early[-1] < SIZES.backward_matmuls
    assert ddp_buckets.waiting(steps[False], SIZES) == [SIZES.backward_matmuls] * 4


def test_the_network_is_trained_by_its_gradient():
    params, batch = ddp_buckets.make(SIZES, 2)
    train = ddp_buckets.training(jaxdp.data_mesh(2), jaxdp.RingAllReduce())
    state, _ = train.step(train.init(params), batch)
    gradient = jax.grad(ddp_buckets.loss_fn)(params, batch)
    expected = optax.apply_updates(params, jax.tree.map(lambda g: -g, gradient))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
        train.params(state),
        expected,
    )


def test_micro_batches_divide_the_bytes_of_a_row():
    table = ddp_accumulation.rows(jaxdp.data_mesh(2), SIZES)
    per_row = [next(v for k, v in row.items() if "per row" in k) for row in table]
    assert sorted(set(per_row), reverse=True) == per_row
