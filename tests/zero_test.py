"""Options at every stage, hybrid sharding, and what the compiled programs hold.

That stages train as one device does, whatever the number of devices, is in
`designs_test.py`; known faults are in `zero_cases_test.py`.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback

import jaxdp
from jaxdp import jaxprs
from jaxdp.zero.shards import is_shard
from tests import contract
from tests.contract import BATCHES, PARAMS
from tests.helpers import assert_replicas_bit_equal

over_stages = pytest.mark.parametrize("stage", [1, 2, 3])
CAP = 64 / 2**20  # splits the leaves of PARAMS
ROWS = 17  # of 24: three replicas with two micro-batches pad one row
STEPS = 3
MODEL_STATE = {"mean": np.float32(0), "count": np.int32(0)}

# Options of a training, or of a design. Largest difference of a parameter after 3 steps
# of Adam: float32 rounds sums in another order; 16 bits round gradients to 2**-8 or
# 2**-11, and a step moves parameters by 0.01.
OPTIONS = {
    "accumulate": dict(accumulate=2),
    "bf16": dict(precision=jaxdp.Precision("bf16")),
    "fp16-dynamic": dict(precision=jaxdp.Precision("fp16", loss_scale="dynamic")),
    "bf16-accumulate": dict(precision=jaxdp.Precision("bf16"), accumulate=2),
    "int8": dict(compression=jaxdp.compression.Int8(block=16)),
    "topk-accumulate": dict(compression=jaxdp.compression.TopK(0.5), accumulate=2),
    "mean": dict(model_state="mean"),
    "broadcast-accumulate": dict(model_state="broadcast", accumulate=2),
    "per-replica": dict(model_state="per_replica"),
    "padded": dict(padded=True),
    "padded-accumulate": dict(padded=True, accumulate=2),
    "rng-accumulate": dict(rng=True, accumulate=2),
    "all": dict(
        padded=True,
        rng=True,
        accumulate=2,
        model_state="mean",
        precision=jaxdp.Precision("bf16", loss_scale=2.0**10),
        compression=jaxdp.compression.Bf16(),
    ),
}
BOUND = {"bf16": 1e-3, "fp16": 2e-4, "f32": 3e-6}


def loss_fn(params, batch, mask=None, rng=None, model_state=None):
    """The problem of all designs, with whatever else a loss may be given."""
    hidden = batch["x"] @ params["hidden"]["kernel"] + params["hidden"]["bias"][None]
    if rng is not None:
        hidden = hidden * jax.random.bernoulli(rng, 0.8, hidden.shape)
    predicted = params["scale"] * jnp.tanh(hidden) @ params["output"][0]
    rows = jnp.mean((predicted - batch["y"]) ** 2, axis=1).astype(jnp.float32)
    loss = rows.mean() if mask is None else jaxdp.masked_mean(rows, mask)
    if model_state is None:
        return loss
    seen = {"mean": jnp.mean(batch["x"]).astype(jnp.float32)}
    count = model_state["count"] + 1
    return loss, jaxdp.Aux(model_state=seen | {"count": count})


def after_steps(design, mesh, padded=False, rng=False, **options):
    """Training, state and metrics after `STEPS` steps."""
    train = jaxdp.data_parallel(loss_fn, optax.adam(0.01), mesh, design, **options)
    state = train.init(
        PARAMS,
        rng=jax.random.key(3) if rng else None,
        model_state=MODEL_STATE if options.get("model_state") else None,
    )
    metrics = {}
    for batch in BATCHES[:STEPS]:
        if padded:
            batch = jax.tree.map(lambda x: x[:ROWS], batch)
            accumulate = options.get("accumulate", 1)
            batch = jaxdp.shard_batch(batch, mesh, "pad", accumulate=accumulate)
        state, metrics = train.step(state, batch)
    return train, state, metrics


@functools.cache
def without_parts(name):
    """The same options where every device keeps everything."""
    options = dict(OPTIONS[name])
    design = jaxdp.RingAllReduce(
        bucket_cap_mb=CAP, compression=options.pop("compression", None)
    )
    train, state, metrics = after_steps(design, jaxdp.data_mesh(3), **options)
    params, kept = train.params(state), train.model_state(state)
    return jax.tree.map(np.asarray, (params, kept, state.loss_scale, metrics))


@pytest.mark.parametrize("name", OPTIONS)
@over_stages
def test_options_mean_what_they_mean_without_parts(stage, name):
    options = dict(OPTIONS[name])
    design = jaxdp.Zero(
        stage, bucket_cap_mb=CAP, compression=options.pop("compression", None)
    )
    train, state, metrics = after_steps(design, jaxdp.data_mesh(3), **options)
    params, kept, scale, expected_metrics = without_parts(name)
    precision = options.get("precision")
    bound = BOUND[precision.compute if precision else "f32"]
    chex.assert_trees_all_close(train.params(state), params, rtol=0, atol=bound)
    chex.assert_trees_all_equal_shapes_and_dtypes(train.params(state), params)
    chex.assert_trees_all_close(train.model_state(state), kept, rtol=1e-6)
    chex.assert_trees_all_equal(state.loss_scale, scale)
    chex.assert_trees_all_close(metrics, expected_metrics, rtol=0, atol=bound)
    assert_replicas_bit_equal((train.params(state), metrics, state.step))
    moved = np.abs(params["output"][0] - PARAMS["output"][0])
    assert moved.max() > 0.02  # more than any bound


@over_stages
def test_an_overflow_on_one_replica_is_skipped_by_all(stage):
    """Parts of parameters, moments and residuals keep their bits."""
    train = jaxdp.data_parallel(
        lambda p, b: loss_fn(p, b) * b["factor"][0],
        optax.adam(0.01),
        jaxdp.data_mesh(3),
        jaxdp.Zero(stage, compression=jaxdp.compression.TopK(0.5)),
        precision=jaxdp.Precision("f32", loss_scale="dynamic"),
    )
    state = train.init(PARAMS)

    def step(state, factors):
        batch = BATCHES[0] | {"factor": np.repeat(np.asarray(factors, "f"), 8)}
        return train.step(state, batch)

    state, metrics = step(state, [1, 1, 1])
    assert not metrics["skipped"]
    before = jax.tree.map(np.asarray, state)
    state, metrics = step(state, [1, np.inf, 1])
    assert metrics["skipped"]
    after = jax.tree.map(np.asarray, state)
    for name in ("step", "params", "opt_state"):
        chex.assert_trees_all_equal(getattr(after, name), getattr(before, name))
    assert (after.loss_scale.scale, after.loss_scale.skipped) == (32768, 1)


def hybrid(inner=4, outer=2):
    return jax.make_mesh((outer, inner), ("host", "device"))


@over_stages
def test_shards_in_hosts_train_as_shards_over_all(stage):
    """HSDP: 8 devices as 2 hosts of 4."""
    design = jaxdp.Zero(stage, bucket_cap_mb=CAP)
    train, state, metrics = after_steps(design, hybrid(), accumulate=3)
    flat, other, expected = after_steps(design, jaxdp.data_mesh(8), accumulate=3)
    chex.assert_trees_all_close(
        train.params(state), flat.params(other), rtol=0, atol=BOUND["f32"]
    )
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-6)
    assert_replicas_bit_equal((train.params(state), metrics))
    for shard in parts_of(state):
        copies: dict[str, set] = {}
        for each in shard.data.addressable_shards:
            copies.setdefault(str(each.index), set()).add(each.data.tobytes())
        assert len(copies) == (4 if shard.size else 1)
        assert all(len(bits) == 1 for bits in copies.values())


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


def parts_of(tree):
    leaves = jax.tree.leaves(tree, is_leaf=is_shard)
    return [leaf for leaf in leaves if is_shard(leaf)]


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
    header = program.as_text().splitlines()[0]
    assert header.count("may-alias") == len(jax.tree.leaves(state))


@over_stages
def test_a_device_holds_a_third_of_each_leaf_rounded_up(stage):
    _, state = compiled(stage)
    thirds = [1, 5, 7, 0, 1]
    moments, params = parts_of(state.opt_state), parts_of(state.params)
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
    first = loop.params["num_consts"]
    carried = loop.invars[first : first + loop.params["num_carry"]]
    assert max(v.aval.size for v in carried) == summed


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


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
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
