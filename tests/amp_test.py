"""Mixed precision end to end: the cases AMP-1 to AMP-9, over the designs."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxdp
from jaxdp.compression import Bf16, PowerSGD
from jaxdp.precision import Precision
from tests.helpers import assert_bit_equal, assert_replicas_bit_equal

BUCKETS = {"bucket_cap_mb": 16 / 2**20, "first_bucket_mb": None}
DESIGNS = {
    "root": jaxdp.GatherToRoot(root=1),
    "ring": jaxdp.RingAllReduce(**BUCKETS),
    "star": jaxdp.AllReduce("star"),
    "native": jaxdp.NativeAllReduce(),
    "native-buckets": jaxdp.NativeAllReduce(**BUCKETS),
    "bf16": jaxdp.RingAllReduce(compression=Bf16()),
    "powersgd": jaxdp.RingAllReduce(compression=PowerSGD(1)),
}
over_designs = pytest.mark.parametrize("design", DESIGNS.values(), ids=DESIGNS)
EXACT = {name: DESIGNS[name] for name in ("root", "ring", "native")}
over_exact = pytest.mark.parametrize("design", EXACT.values(), ids=EXACT)
RING = DESIGNS["ring"]

DTYPES = {"f32": np.dtype("f4"), "fp16": np.dtype("f2"), "bf16": np.dtype(jnp.bfloat16)}
ONE = optax.sgd(1.0)


def product(params, batch):
    """A loss whose gradient is the batch: one row on each device."""
    products = jax.tree.map(lambda w, x: (w * x[0]).astype(jnp.float32), params, batch)
    return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(products))


def program(
    precision, *, design=RING, devices=4, loss_fn=product, optimizer=ONE, **options
):
    mesh = jaxdp.data_mesh(devices)
    return jaxdp.data_parallel(
        loss_fn, optimizer, mesh, design, precision=precision, **options
    )


def dynamic(compute="bf16", **options):
    return Precision(compute, loss_scale="dynamic", **options)


@over_exact
@pytest.mark.parametrize("params", ["f32", "fp16"])
def test_amp_1_sums_of_fp16_gradients_neither_overflow_nor_underflow(design, params):
    columns = [np.full(8, 16384), np.full(8, 2.0**-24), np.arange(8)]
    batch = np.stack(columns, axis=1).astype(np.float32)
    precision = dynamic("fp16", params=params, initial_scale=2.0)
    train = program(precision, design=design, devices=8)
    state, metrics = train.step(train.init(jnp.zeros(3)), batch)
    new = train.params(state)
    assert new.dtype == DTYPES[params]
    np.testing.assert_array_equal(-new, [16384, 2.0**-24, 3.5])
    assert not metrics["skipped"] and state.loss_scale.scale == 2


@pytest.mark.parametrize("params", ["f32", "fp16"])
def test_gradients_are_unscaled_by_more_than_fp16_can_hold(params):
    precision = dynamic("fp16", params=params)  # 65,536 is infinite in float16
    train = program(precision, loss_fn=lambda *given: product(*given) / 16, devices=2)
    batch = np.array([[8, 2.0**-20], [9, 2.0**-18]], np.float32)
    state, metrics = train.step(train.init(jnp.zeros(2)), batch)
    assert not metrics["skipped"]
    expected = (batch.mean(0) / 16).astype(DTYPES[params])
    np.testing.assert_array_equal(-train.params(state), expected)


@over_exact
def test_amp_2_norms_do_not_overflow(design):
    """The sum of four squares of 300 does, in float16."""
    clipped = optax.chain(optax.clip_by_global_norm(1.0), ONE)
    precision = Precision("fp16", loss_scale=64.0)
    train = program(precision, design=design, devices=2, optimizer=clipped)
    batch = np.full((2, 4), 300, np.float32)
    state, metrics = train.step(train.init(jnp.zeros(4)), batch)
    assert not metrics["skipped"]
    np.testing.assert_allclose(-train.params(state), np.full(4, 0.5), rtol=1e-6)


RATE: Any = np.array(1e-3, jnp.bfloat16)
OPTIMIZERS = {
    "float": optax.adam(1e-3),
    "array": optax.adam(RATE),
    "wider-array": optax.chain(optax.scale(np.array(1e-3, "f4")), optax.trace(0.9)),
}


@pytest.mark.parametrize("params", ["f32", "bf16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_amp_3_dtypes_stay_and_nothing_compiles_again(optimizer, params, caplog):
    train = program(dynamic(params=params), devices=2, optimizer=optimizer)
    state = train.init({"a": jnp.ones(3), "b": jnp.ones(())})
    types = [(x.dtype, x.weak_type, x.shape) for x in jax.tree.leaves(state)]
    batch = {"a": np.ones((2, 3), np.float32), "b": np.ones(2, np.float32)}
    with jax.log_compiles():
        for _ in range(3):
            state, _ = train.step(state, batch)
            new = [(x.dtype, x.weak_type, x.shape) for x in jax.tree.leaves(state)]
            assert new == types
    compiled = [m for m in caplog.messages if "XLA compilation of jit(_step)" in m]
    assert len(compiled) == 1


def test_amp_4_tame_gradients_keep_the_scale_finite():
    precision = dynamic("fp16", growth_factor=10.0, growth_interval=1)
    train = program(
        precision,
        loss_fn=lambda p, batch: p**2 + 0 * batch.sum(),
        optimizer=optax.sgd(0.1),
    )
    state, scales = train.init(jnp.ones(())), []
    for _ in range(70):
        state, metrics = train.step(state, np.ones(4, np.float32))
        scales.append(float(metrics["loss_scale"]))
    assert scales[0] == 65536 and max(scales) <= 2**24 and min(scales) >= 1
    assert np.isfinite(float(train.params(state)))
    assert state.step + state.loss_scale.skipped == 70


def test_amp_4_gradients_that_stay_infinite_end_the_run():
    train = program(dynamic("fp16", initial_scale=4.0), devices=2)
    state = train.init({"a": jnp.ones(2), "b": jnp.ones(3)})
    good = {"a": np.ones((2, 2), np.float32), "b": np.ones((2, 3), np.float32)}
    bad = good | {"b": np.full((2, 3), np.inf, np.float32)}
    batches = [good, *[bad] * 200]
    message = r"train\.step got .*floor, 1, when step 3 overflowed; 3 .*params\['b'\]"
    with pytest.raises(FloatingPointError, match=message):
        for batch in batches:
            before = jax.block_until_ready(state)
            state, metrics = train.step(state, batch)
    assert state is before and metrics["skipped"]  # five steps, and no sixth
    assert state.step == 1 and state.loss_scale.scale == 1
    with pytest.raises(FloatingPointError, match=r"train\.params got"):
        train.params(state)


def test_a_fixed_scale_counts_and_goes_on():
    train = program(Precision("fp16", loss_scale=8.0), devices=2)
    state = train.init(jnp.ones(2))
    for value in (np.nan, 9000.0, 0.5, np.inf):  # 8 x 9,000 is infinite in float16
        batch = np.full((2, 2), value, np.float32)
        state, metrics = train.step(jax.block_until_ready(state), batch)
        assert bool(metrics["skipped"]) == (value != 0.5)
        assert metrics["loss_scale"] == 8
    assert (state.step, state.loss_scale.skipped) == (1, 3)
    np.testing.assert_array_equal(train.params(state), [0.5, 0.5])


@over_exact
def test_amp_5_clipping_sees_what_is_unscaled(design):
    clipped = optax.chain(optax.clip_by_global_norm(1.0), ONE)
    updates = []
    for scale in (None, 1024.0, 2.0**-20):
        precision = Precision("f32", loss_scale=scale)
        train = program(precision, design=design, devices=2, optimizer=clipped)
        state, update = train.init(jnp.zeros(2)), []
        for row in ([0.3, 0.4], [3.0, 4.0]):  # of norms 0.5 and 5
            before = train.params(state)
            state, _ = train.step(state, np.array([row] * 2, np.float32))
            update.append(np.asarray(before - train.params(state)))
        updates.append(update)
        assert_bit_equal(update, updates[0])
    expected = np.array([[0.3, 0.4], [0.6, 0.8]], np.float32)
    np.testing.assert_array_equal(updates[0][0], expected[0])
    np.testing.assert_allclose(updates[0][1], expected[1], rtol=1e-6)


PARAMS = {
    "a": np.arange(1, 6, dtype=np.float32),
    "b": np.arange(6, 15, dtype=np.float32).reshape(3, 3),
}


def rows(replicas, start):
    """One row for each replica, all of them different."""
    return {
        name: start
        + np.arange(replicas * x.size, dtype=np.float32).reshape(replicas, *x.shape)
        / 64
        for name, x in PARAMS.items()
    }


def counting(params, batch, model_state):
    """Counts its calls, and keeps a mean that differs between replicas."""
    new = {"count": model_state["count"] + 1, "mean": jnp.mean(batch["a"])}
    return product(params, batch), jaxdp.Aux(model_state=new)


@over_designs
def test_amp_6_one_bad_element_on_one_replica_skips_the_step_everywhere(design):
    """Nothing but the loss scale moves, and the run goes on as if it had not been."""
    optimizer = optax.chain(
        optax.adam(0.1), optax.scale_by_schedule(optax.linear_schedule(1.0, 0.5, 9))
    )
    options = {"design": design, "devices": 3, "model_state": "mean"}
    train = program(dynamic(), loss_fn=counting, optimizer=optimizer, **options)

    def init():
        return train.init(PARAMS, model_state={"count": np.int32(7), "mean": 0.5})

    state, clean = init(), init()
    before = jax.device_get(state)
    for skipped, bad in enumerate((np.inf, np.nan), start=1):
        poisoned = rows(3, 1.0)
        poisoned["b"][2, 1, 0] = bad
        state, metrics = train.step(state, poisoned)
        assert metrics["skipped"] and metrics["loss_scale"] == 2.0 ** (17 - skipped)
        assert_replicas_bit_equal((metrics["skipped"], state.loss_scale, state.params))
        after = jax.device_get(state)
        scale = after.loss_scale
        found = (scale.scale, scale.good_steps, scale.skipped, scale.failed_step)
        assert found == (2.0 ** (16 - skipped), 0, skipped, -1)
        for field in ("step", "params", "opt_state", "model_state"):
            assert_bit_equal(getattr(after, field), getattr(before, field))
    for start in (2.0, 3.0):
        state, metrics = train.step(state, rows(3, start))
        clean, clean_metrics = train.step(clean, rows(3, start))
        assert not metrics["skipped"] and metrics["loss_scale"] == 16384
        assert metrics["loss"] == clean_metrics["loss"]
    for field in ("step", "params", "model_state", "opt_state"):
        assert_bit_equal(getattr(state, field), getattr(clean, field))
    assert state.step == 2 and state.model_state["count"] == 9


def test_amp_6_an_overflow_of_the_sum_alone_is_an_overflow():
    """Every replica is finite, and so is the mean; the sum in float32 is not."""
    train = program(dynamic("f32", initial_scale=1.0), devices=4)
    state, metrics = train.step(
        train.init(jnp.zeros(2)), np.full((4, 2), 3e38, np.float32)
    )
    assert metrics["skipped"]
    np.testing.assert_array_equal(state.params, 0)


@over_exact
def test_amp_7_replicas_with_other_scales_take_the_same_step(design):
    """Each divides its gradients by its own scale, before they are summed."""
    train = program(dynamic(), design=design, devices=2, optimizer=optax.adam(0.1))
    state, alike = train.init(PARAMS), train.init(PARAMS)
    sharding = state.loss_scale.scale.sharding
    parts = [
        jax.device_put(np.float32(scale), device)
        for scale, device in zip(
            (65536, 16384), sharding.mesh.devices.flat, strict=True
        )
    ]
    scale = jax.make_array_from_single_device_arrays((), sharding, parts)
    loss_scale = state.loss_scale._replace(scale=scale)
    state = dataclasses.replace(state, loss_scale=loss_scale)
    for start in (1.0, 2.0):
        state, _ = train.step(state, rows(2, start))
        alike, _ = train.step(alike, rows(2, start))
    assert_replicas_bit_equal(state.params)
    assert_bit_equal((state.params, state.opt_state), (alike.params, alike.opt_state))


MOVES = re.compile(
    r"stablehlo\.(collective_permute|all_reduce|all_gather|all_to_all|collective_broad)"
)


def closed(text, start):
    """The text in the parentheses that open at `start`."""
    depth = 0
    for end in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        if not depth:
            return text[start:end]
    raise AssertionError


def conditional_collectives(text):
    """Collectives in whatever a conditional of a lowered program may or may not run."""
    functions = re.split(r"func\.func \w* ?@(\w+)", text)
    bodies = dict(zip(functions[1::2], functions[2::2], strict=True))
    pending = [
        closed(text, match.end() - 1)
        for match in re.finditer(r'"stablehlo\.(?:case|if)"\([^)]*\) \(', text)
    ]
    found, seen = [], set()
    while pending:
        part = pending.pop()
        found += MOVES.findall(part)
        called = set(re.findall(r"call @(\w+)", part)) - seen
        seen |= called
        pending += [bodies[name] for name in called]
    return found


@pytest.mark.parametrize("nested", [False, True], ids=["inline", "called"])
def test_amp_8_collectives_in_conditionals_are_found(nested):
    def total(x):
        return jax.lax.psum(x, "data")

    def body(x):
        return jax.lax.cond(x[0] > 0, jax.jit(total) if nested else total, abs, x)

    mesh, spec = jaxdp.data_mesh(2), P("data")
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    text = jax.jit(mapped).lower(jnp.ones(2)).as_text()
    assert conditional_collectives(text) == ["all_reduce"]


@over_designs
def test_amp_8_no_replica_decides_alone_whether_to_communicate(design):
    train = program(dynamic(), design=design, devices=2, optimizer=optax.adam(0.1))
    text = train.lower(train.init(PARAMS), rows(2, 1.0)).as_text()
    assert MOVES.search(text)
    assert not conditional_collectives(text)


def test_amp_9_small_updates_arrive_in_master_weights():
    step = optax.sgd(6e-4)
    for params, expected in (("f32", 0.94), ("bf16", 1.0)):
        seen = []
        train = program(Precision("bf16", params), devices=2, optimizer=step)
        state = train.init(jnp.ones(2))
        for _ in range(100):
            state, metrics = train.step(state, np.ones((2, 2), np.float32))
            seen.append(float(metrics["loss"]) / 2)
        np.testing.assert_allclose(train.params(state), expected, rtol=1e-5)
        assert seen[0] == 1
        last = float(np.float32(1 - 99 * 6e-4).astype(jnp.bfloat16))
        assert seen[-1] == (last if params == "f32" else 1)


def test_amp_9_micro_batches_accumulate_in_float32():
    """In bfloat16, 256 + 1 = 256."""
    precision = Precision("bf16", "bf16")
    train = program(precision, devices=1, accumulate=1000)
    state, _ = train.step(train.init(jnp.zeros(3)), np.ones((1000, 3), np.float32))
    params = train.params(state)
    assert params.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(params, np.float32), -1)


HIDDEN = {"w": np.sin(np.arange(20.0)).reshape(5, 4), "v": np.cos(np.arange(4.0))}


def network(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w"])
    return jnp.mean((hidden @ params["v"] - batch["y"]).astype(jnp.float32) ** 2)


@pytest.mark.parametrize(("compute", "accumulate"), [("bf16", 1), ("fp16", 2)])
def test_a_step_is_the_mean_of_16_bit_gradients_on_float32_weights(compute, accumulate):
    """Slices of rows as the replicas and micro-batches see them, averaged by NumPy."""
    optimizer = optax.adam(0.1)
    train = program(
        dynamic(compute, initial_scale=64.0, growth_interval=2),
        loss_fn=network,
        devices=3,
        optimizer=optimizer,
        accumulate=accumulate,
    )
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), HIDDEN)
    state = train.init(params)
    opt_state = optimizer.init(params)

    def low(tree):
        return jax.tree.map(lambda x: jnp.asarray(x, DTYPES[compute]), tree)

    slope = jax.jit(jax.value_and_grad(lambda p, rows: network(low(p), low(rows))))
    for step in range(5):
        x = np.sin(step + np.arange(60.0)).reshape(12, 5).astype(np.float32)
        batch = {"x": x, "y": np.sum(x, axis=1)}
        parts = [
            jax.tree.map(lambda x, i=i: np.split(x, 3 * accumulate)[i], batch)
            for i in range(3 * accumulate)
        ]
        losses, gradients = zip(*(slope(params, part) for part in parts), strict=True)
        mean = jax.tree.map(lambda *g: np.mean(g, axis=0), *gradients)
        updates, opt_state = optimizer.update(mean, opt_state, params)
        params = optax.apply_updates(params, updates)
        state, metrics = train.step(state, batch)
        np.testing.assert_allclose(metrics["loss"], np.mean(losses), rtol=1e-5)
        assert metrics["loss_scale"] == 64 * 2 ** (step // 2)
    new = train.params(state)
    assert {x.dtype for x in jax.tree.leaves(new)} == {np.dtype(np.float32)}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), new, params)


def test_padded_rows_and_the_loss_scale_go_together():
    def masked(params, batch, mask):
        return jaxdp.masked_mean((batch @ params).astype(jnp.float32), mask)

    mesh, found = jaxdp.data_mesh(4), []
    x = np.arange(12.0, dtype=np.float32).reshape(6, 2) / 4
    for precision in (Precision("bf16"), dynamic(), Precision("bf16", loss_scale=3.0)):
        train = program(precision, loss_fn=masked)
        batch = jaxdp.shard_batch(x, mesh, remainder="pad")
        state, _ = train.step(train.init(jnp.zeros(2)), batch)
        found.append(train.params(state))
        np.testing.assert_allclose(-found[-1], x.mean(0), rtol=1e-6)
    assert_bit_equal(found[0], found[1])  # powers of two are exact


def test_batches_are_cast_only_if_asked_to():
    seen = []

    def spy(params, batch):
        seen.append((params.dtype, batch["x"].dtype, batch["i"].dtype))
        return product(params, batch["x"]) + 0 * batch["i"].sum()

    batch = {"x": np.ones((2, 2), np.float32), "i": np.ones(2, np.int32)}
    for cast in (True, False):
        train = program(Precision("bf16", cast_batch=cast), loss_fn=spy, devices=2)
        train.step(train.init(jnp.ones(2)), batch)
        dtype = jnp.bfloat16 if cast else np.float32
        assert set(seen) == {(np.dtype(jnp.bfloat16), np.dtype(dtype), np.dtype("i4"))}
        seen.clear()


def test_servers_that_refuse_single_pushes_take_no_loss_scale():
    with pytest.raises(ValueError, match=r"loss scale and ParameterServer.*bf16"):
        program(dynamic(), design=jaxdp.ParameterServer())
    train = program(Precision("bf16"), design=jaxdp.ParameterServer())
    state, metrics = train.step(train.init(jnp.zeros(2)), np.ones((4, 2), np.float32))
    np.testing.assert_array_equal(-train.params(state), 1)
    assert state.loss_scale is None and "skipped" not in metrics
