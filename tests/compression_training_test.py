"""Compressions inside `data_parallel`: the guard's proof, residuals, skipped steps."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.compression import Bf16, Compression, Int8, PowerSGD, TopK, Travelled
from tests import contract

COMPRESSIONS = {
    "bf16": Bf16(),
    "int8": Int8(stochastic=True),
    "topk": TopK(0.2),
    "powersgd": PowerSGD(1, start_step=2, inner=Bf16()),
}


def training(compression, devices=2, optimizer=None, **options):
    """Of the problem of all designs, in several buckets."""
    design = jaxdp.RingAllReduce(bucket_cap_mb=64 / 2**20, compression=compression)
    mesh = jaxdp.data_mesh(devices)
    optimizer = optimizer or optax.sgd(0.1)
    return jaxdp.data_parallel(contract.loss_fn, optimizer, mesh, design, **options)


@pytest.mark.parametrize("compression", COMPRESSIONS.values(), ids=COMPRESSIONS.keys())
def test_the_guard_proves_that_gradients_are_summed_once(compression):
    train = training(compression)
    train.lower(train.init(contract.PARAMS), contract.BATCHES[0])


@dataclasses.dataclass(frozen=True)
class Forgetful(Compression):
    """Gathers, or does not, and says nothing to the guard."""

    gathers: bool

    def mean(self, leaves, states, wire):
        means = leaves
        if self.gathers:
            means = [x.mean(0) for x in wire.gather(leaves)]
        return Travelled(means, leaves, states)


@pytest.mark.parametrize("gathers", [False, True], ids=["own", "gathered"])
def test_the_guard_refuses_what_is_not_of_all_replicas(gathers):
    train = training(Forgetful(gathers))
    with pytest.raises(ValueError, match=r"gradient of .* of one replica only"):
        train.lower(train.init(contract.PARAMS), contract.BATCHES[0])


def test_int8_with_error_feedback_trains_as_exact_gradients_do():
    train = training(Int8(block=16), devices=3)
    state = train.init(contract.PARAMS)
    for batch in contract.BATCHES:
        state, _ = train.step(state, batch)
    history, _ = contract.on_one_device(
        contract.loss_fn, optax.sgd(0.1), contract.PARAMS, contract.BATCHES
    )
    found, expected = train.params(state), history[-1]
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(initial=0), found, expected)
    assert 0 < max(jax.tree.leaves(moved)) < 2e-3  # a step moves them by 0.1


def test_what_cannot_be_compressed_is_refused_at_the_start():
    params = {"w": np.ones(3, "f")}
    with pytest.raises(ValueError, match=r"\['w'\] \(3,\) is no matrix"):
        training(PowerSGD(4)).init(params)


def test_what_error_feedback_keeps_is_one_entry_per_replica():
    train = training(Int8(block=16))
    state = train.init(contract.PARAMS)
    state, _ = train.step(state, contract.BATCHES[0])
    kept = state.opt_state.residuals["output"][0]
    assert kept.shape == (2, 3, 7)
    assert bool(jnp.any(kept[0] != kept[1]))
