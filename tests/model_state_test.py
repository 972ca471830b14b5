"""What becomes of a model state where replicas differ: the policies."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdp
from tests.contract import over_kinds
from tests.helpers import assert_replicas_bit_equal

ROWS = np.array([1.0, 5.0, 2.0, 10.0], "f")  # means 3 and 6 on two replicas
START = {"mean": np.float32(0.5), "count": np.int32(7)}


def loss_fn(w, x, model_state, mask=None):
    """The state is the mean of the rows, and the number of batches."""
    mask = jnp.ones(x.shape, bool) if mask is None else mask
    total = jnp.sum(jnp.where(mask, x, 0))
    mean = total / jnp.maximum(jnp.sum(mask), 1)
    new = {"mean": mean, "count": model_state["count"] + 1}
    return jaxdp.masked_mean(w * x, mask), jaxdp.Aux(model_state=new)


def trained(policy: Any, steps=1, design=None, rows=ROWS, devices=2, **options):
    mesh = jaxdp.data_mesh(devices)
    design = design or jaxdp.RingAllReduce()
    train = jaxdp.data_parallel(
        loss_fn, optax.sgd(0.1), mesh, design, model_state=policy, **options
    )
    state = train.init(np.float32(1), model_state=START)
    for _ in range(steps):
        state, _ = train.step(state, rows)
    return train, state


@pytest.mark.parametrize(
    ("policy", "mean"), [("mean", 4.5), ("broadcast", 3.0), ("per_replica", 3.0)]
)
@over_kinds
def test_what_survives(design, policy, mean):
    train, state = trained(policy, steps=3, design=design(2))
    kept = train.model_state(state)
    assert (kept["mean"], kept["count"]) == (mean, 10)
    assert kept["count"].dtype == jnp.int32
    if policy != "per_replica":
        assert_replicas_bit_equal(state.model_state)
        assert state.model_state["mean"].shape == ()


def test_per_replica_keeps_all_of_them():
    _, state = trained("per_replica", steps=2)
    assert state.model_state["mean"].tolist() == [3, 6]
    assert state.model_state["count"].tolist() == [9, 9]
    assert len(state.model_state["mean"].sharding.device_set) == 2


def test_without_a_policy_replicas_must_not_differ():
    message = (
        r"model_state\['mean'\] may differ .*got no policy.*'mean' .*'broadcast' "
        r".*'per_replica' .*axis_name= of BatchNorm"
    )
    with pytest.raises(ValueError, match=message):
        trained(None)


def test_unknown_policies_are_refused():
    with pytest.raises(ValueError, match=r"model_state='average'\. It must be one of"):
        trained("average")


def test_synchronized_states_need_no_policy_and_send_nothing_more():
    """ST-8: Flax's BatchNorm with axis_name; mean 1 and variance 1 on both."""
    norm = nnx.BatchNorm(
        1, momentum=0.0, axis_name="data", use_fast_variance=False, rngs=nnx.Rngs(0)
    )
    graphdef, params, rest = nnx.split(norm, nnx.Param, ...)

    def loss_fn(params, x, model_state):
        norm = nnx.merge(graphdef, params, model_state)
        loss = jnp.mean(norm(x) ** 2)
        return loss, jaxdp.Aux(model_state=nnx.state(norm, nnx.Not(nnx.Param)))

    train = jaxdp.data_parallel(loss_fn, optax.sgd(0.1), jaxdp.data_mesh(2))
    state = train.init(params, model_state=rest)
    x = np.array([[0], [0], [2], [2]], "f")
    sent = [
        jaxdp.analyze(t.lower(t.init(params, model_state=rest), x).compile()).sent_bytes
        for t in (
            train,
            jaxdp.data_parallel(
                loss_fn, optax.sgd(0.1), jaxdp.data_mesh(2), model_state="mean"
            ),
        )
    ]
    assert sent[0][0] < sent[1][0]
    state, _ = train.step(state, x)
    kept = train.model_state(state)
    assert (kept["mean"].get_value(), kept["var"].get_value()) == (1, 1)
    assert_replicas_bit_equal(state.model_state)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("policy", "expected"),
    [("mean", [2.0]), ("broadcast", [2.0]), ("per_replica", [2.0, 0.5, 0.5, 0.5])],
)
def test_replicas_without_rows_keep_theirs(policy, expected, accumulate):
    """One row on four replicas: the others have seen nothing."""
    mesh = jaxdp.data_mesh(4)
    rows = jaxdp.shard_batch(np.array([2], "f"), mesh, "pad", accumulate=accumulate)
    _, state = trained(policy, rows=rows, devices=4, accumulate=accumulate)
    assert np.ravel(state.model_state["mean"]).tolist() == expected


def test_micro_batches_hand_it_on():
    """Two batches of one replica each: the counter sees both, the mean the last."""
    train, state = trained("broadcast", accumulate=2)
    kept = train.model_state(state)
    assert (kept["mean"], kept["count"]) == (5, 9)
    train, state = trained("mean", accumulate=2)
    assert train.model_state(state)["mean"] == (5 + 10) / 2


def test_integers_that_differ_follow_the_first_replica():
    def loss_fn(w, x, model_state):
        return jnp.mean(w * x), jaxdp.Aux(model_state=jnp.sum(x > 4))

    policies: list[Any] = ["broadcast", "per_replica"]
    for policy in policies:
        train = jaxdp.data_parallel(
            loss_fn, optax.sgd(0.1), jaxdp.data_mesh(2), model_state=policy
        )
        state = train.init(np.float32(1), model_state=np.int32(0))
        state, _ = train.step(state, np.array([5, 1, 7, 8], "f"))
        assert train.model_state(state) == 1
        assert train.model_state(state).dtype == jnp.int32


@pytest.mark.parametrize("policy", ["broadcast", "per_replica"])
def test_dedicated_servers_follow_the_first_worker(policy):
    design = jaxdp.ParameterServer(2, dedicated=True)
    train, state = trained(policy, design=design, rows=ROWS, devices=4, steps=2)
    kept = train.model_state(state)
    assert (kept["mean"], kept["count"]) == (3, 9)


def test_typed_keys_and_none_are_kept_per_replica():
    def loss_fn(w, x, model_state):
        key = jax.random.fold_in(model_state["key"], x[0].astype(int))
        return jnp.mean(w * x), jaxdp.Aux(model_state={"key": key, "none": None})

    train = jaxdp.data_parallel(
        loss_fn, optax.sgd(0.1), jaxdp.data_mesh(2), model_state="per_replica"
    )
    start = {"key": jax.random.key(1), "none": None}
    state = train.init(np.float32(1), model_state=start)
    state, _ = train.step(state, np.array([3, 4], "f"))
    expected = jax.random.fold_in(jax.random.key(1), 3)
    got = train.model_state(state)["key"]
    np.testing.assert_array_equal(
        jax.random.key_data(got), jax.random.key_data(expected)
    )


def test_copies_survive_the_next_step():
    train, state = trained("mean")
    kept = train.model_state(state)
    train.step(state, ROWS)
    assert kept["mean"] == 4.5
