"""What tests of `Zero` share."""

import jax
import jax.numpy as jnp
import pytest

import jaxdp
from jaxdp.zero.shards import is_shard

CAP = 64 / 2**20  # splits the leaves of `contract.PARAMS`
over_stages = pytest.mark.parametrize("stage", [1, 2, 3])


def hybrid():
    """2 hosts of 4 devices."""
    return jax.make_mesh((2, 4), ("host", "device"))


def linear(gradients):
    """A loss whose gradient with respect to each parameter is a given constant."""

    def loss_fn(params, batch):
        products = jax.tree.map(lambda p, g: jnp.sum(p * g), params, gradients)
        return jnp.mean(batch) * sum(jax.tree.leaves(products))

    return loss_fn


def trained(stage, loss_fn, optimizer, params, batches, devices=2, **options):
    """The training, and its state after these batches."""
    train = jaxdp.data_parallel(
        loss_fn, optimizer, jaxdp.data_mesh(devices), jaxdp.Zero(stage), **options
    )
    state = train.init(params)
    for batch in batches:
        state, _ = train.step(state, batch)
    return train, state


def whole_state(state):
    """The optimizer state without parts, as a checkpoint keeps it."""
    return state.design.portable(state.params, state.opt_state).opt_state


def in_parts(tree):
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_shard) if is_shard(leaf)]


def elements_per_device(shard):
    """Of the first device; all have as many."""
    sizes = {each.data.size for each in shard.data.addressable_shards}
    assert len(sizes) == 1
    return sizes.pop()
