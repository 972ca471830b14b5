"""What the compiled steps of `Zero` send and hold, and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback

import jaxdp
from jaxdp import jaxprs
from tests import contract
from tests.compilers import text_of
from tests.contract import BATCHES, PARAMS
from tests.helpers import assert_replicas_bit_equal
from tests.zero_helpers import CAP, hybrid, in_parts, over_stages


@over_stages
def test_hosts_exchange_a_quarter(stage):
    """Inside a host 3 / 4 of K per gather or reduction; between them K / 4 of sums."""
    train = jaxdp.data_parallel(
        lambda w, x: jnp.mean((jnp.tanh(x @ w) @ w.T) ** 2),
        optax.adam(0.1),
        hybrid(),
        jaxdp.Zero(stage),
    )
    nbytes = 4 * 24  # 6 x 4 float32
    state, batch = train.init(contract.waves(6, 4)), contract.waves(8, 6)
    report = jaxdp.analyze(train.lower(state, batch).compile())
    inside, between = [0] * 8, [0] * 8
    for (source, target), sent in report.link_bytes.items():
        where = inside if source // 4 == target // 4 else between
        where[source] += sent
    gathers = 2 if stage == 3 else 1
    loss_inside, loss_between = 2 * 3 * 4, 2 * 4
    assert inside == [(1 + gathers) * nbytes * 3 // 4 + loss_inside] * 8
    assert between == [nbytes // 4 + loss_between] * 8


@functools.cache
def compiled(stage, prefetch=1):
    """The problem of all designs on three devices, by buckets; its state, too."""
    train = jaxdp.data_parallel(
        contract.loss_fn,
        optax.adam(0.01),
        jaxdp.data_mesh(3),
        jaxdp.Zero(stage, bucket_cap_mb=CAP, prefetch=prefetch),
    )
    state = train.init(PARAMS)
    return train.lower(state, BATCHES[0]).compile(), state


# Elements of a third of each leaf: bias 1, kernel 5, output 7, scale 1. The backward
# pass needs the last two only. 4 bytes in 2 rounds each, and 4 rounds for the loss.
SENT = {
    1: 4 * 2 * (14 + 14) + 4 * 4,
    2: 4 * 2 * (14 + 14) + 4 * 4,
    3: 4 * 2 * (14 + 14 + 8) + 4 * 4,
}


@pytest.mark.parametrize(
    ("stage", "prefetch"), [(1, 1), (2, 1), (3, 0), (3, 1), (3, 3)]
)
def test_rounds_and_bytes_are_those_of_reduce_scatter_and_gather(stage, prefetch):
    program, _ = compiled(stage, prefetch)
    report = jaxdp.analyze(program)
    assert {op.kind for op in report.collectives} == {"collective-permute"}
    assert report.sent_bytes == report.received_bytes == (SENT[stage],) * 3


@over_stages
def test_the_state_is_updated_in_place(stage):
    program, state = compiled(stage)
    header = text_of(program).splitlines()[0]
    assert header.count("may-alias") == len(jax.tree.leaves(state))


@over_stages
def test_a_device_holds_a_third_of_each_leaf_rounded_up(stage):
    _, state = compiled(stage)
    thirds = [1, 5, 7, 0, 1]
    moments, params = in_parts(state.opt_state), in_parts(state.params)
    for shards, copies in ((moments, 2), (params, int(stage == 3))):
        each = [shard.data.addressable_shards for shard in shards]
        sizes = [[s.data.size for s in of_leaf] for of_leaf in each]
        assert sizes == [[size] * 3 for size in thirds] * copies
    assert_replicas_bit_equal(state.opt_state.whole)


def loops(program):
    """The scans of a program, and of those inside."""
    for eqn in program.eqns:
        if eqn.primitive.name == "scan":
            yield eqn
        for inner in jaxprs.inner(eqn):
            yield from loops(inner)


@pytest.mark.parametrize(("stage", "summed"), [(1, 24), (2, 6), (3, 6)])
def test_micro_batches_are_summed_in_parts(stage, summed):
    """24 parameters on 4 devices; what stage 1 sums is whole."""
    train = jaxdp.data_parallel(
        lambda w, x: jnp.mean((x @ w) ** 2),
        optax.sgd(0.1),
        jaxdp.data_mesh(4),
        jaxdp.Zero(stage),
        accumulate=8,
    )
    state, batch = train.init(np.ones((6, 4), "f")), np.ones((64, 6), "f")
    (loop,) = loops(train.trace(state, batch).jaxpr)
    assert max(v.aval.size for v in loop.outvars) == summed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(stage=0), r"stage=0\. It must be 1 .*For stage 0.*RingAllReduce\(\)"),
        (dict(stage=4), r"stage=4\. It must be 1 .*2 .*or 3"),
        (dict(stage="3"), r"stage='3'\. It must be 1"),
        (dict(stage=True), r"stage=True\. It must be 1"),
        (dict(algorithm="tree"), r"algorithm='tree'\. It must be 'ring'.*'native'"),
        (dict(prefetch=-1), r"prefetch=-1\. .*at least 0.*Leave it out for 1"),
        (dict(prefetch=0.5), r"prefetch=0\.5\. .*at least 0"),
        (dict(bucket_cap_mb=0), r"bucket_cap_mb"),
        (dict(layers="ab", stage=3), r"layers='ab'.*tuple of names"),
        (dict(layers=("ab",)), r"layers=\('ab',\) with stage=1.*stage=3"),
    ],
    ids=str,
)
def test_options_that_are_refused(options, message):
    with pytest.raises(ValueError, match=f"Zero got .*{message}"):
        jaxdp.data_parallel(
            contract.loss_fn, optax.sgd(0.1), jaxdp.data_mesh(2), jaxdp.Zero(**options)
        )


def writes_a_log(updates, params):
    """What would happen once on every device."""
    del params
    io_callback(lambda x: None, None, updates, ordered=True)
    return updates


def counts_itself(updates, params):
    """What would happen at once, if tracing ran what has no operands."""
    del params
    io_callback(lambda: COUNTED.append(1), None)
    return updates


COUNTED: list[int] = []


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        pytest.param(
            optax.stateless(counts_itself), "its io_callback of nothing", id="count"
        ),
        pytest.param(
            optax.stateless(writes_a_log), r"its io_callback of .*\[3\]", id="effects"
        ),
        pytest.param(
            jaxdp.synchronize_gradients("data"), "axis_name='data'", id="collective"
        ),
    ],
)
def test_an_optimizer_without_remedy_is_refused(optimizer, message):
    with pytest.raises(ValueError, match=rf"Zero .*2 devices.*{message}.*RingAllRed"):
        contract.one_step(
            jaxdp.Zero(3),
            lambda w, x: jnp.mean(x) * jnp.sum(w),
            np.ones(3, "f"),
            np.ones(2, "f"),
            optimizer=optax.chain(optimizer, optax.sgd(1.0)),
        )
    assert not COUNTED
