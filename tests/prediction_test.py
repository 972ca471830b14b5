"""Predicted steps: compiled for few devices, priced for many, and equal in between."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxdp
from jaxdp import algorithms, targets
from jaxdp.prediction import Model, compiled_step, predict, price
from jaxdp.prediction.links import communication_s, spread
from jaxdp.program.sized import SizedCollective, sized_collectives
from jaxdp.schedule import Schedule
from tests.compilers import needs_compiler

WIDTH, ROWS = 100, 12
SHAPE = jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32")
BATCH = jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")
# A link of 1 GB/s and 1 ms inside a host, of 0.1 GB/s and 3 ms between hosts.
INSIDE = targets.Link(name="inside", bytes_per_s=1e9, alpha_s=1e-3)
BETWEEN = targets.Link(name="between", bytes_per_s=1e8, alpha_s=3e-3)
HARDWARE = dataclasses.replace(
    targets.hardware("h100"), link=INSIDE, network=BETWEEN, devices_per_host=4
)


def loss_fn(params, batch):
    return jnp.mean(
        (jnp.tanh(batch["x"] @ params["w"]) @ params["v"] - batch["y"]) ** 2
    )


MODEL = Model(
    loss_fn,
    optax.sgd(0.1),
    params={"v": SHAPE, "w": SHAPE},
    batch={"x": BATCH, "y": BATCH},
)


@pytest.fixture
def mesh_of_2():
    return jaxdp.data_mesh(2)


def ring_of(elements, devices):
    return SizedCollective(algorithms.ring(devices), "all_reduce", elements, 4)


def test_a_star_over_hosts_by_hand():
    # 3 others in the root's host, 4 in each of 2 more; all one after another, twice.
    star = SizedCollective(algorithms.star(12), "all_reduce", 1000, 4)
    inside, between = 1e-3 + 4000 / 1e9, 3e-3 + 4000 / 1e8
    expected = 2 * (3 * inside + 8 * between)
    assert communication_s([star], 12, HARDWARE) == pytest.approx(expected, rel=1e-12)


def test_a_collective_is_resized_to_other_devices():
    # The buffer of 1,000 elements: 12 chunks of 84, 22 rounds over the slow link.
    expected = 22 * (3e-3 + 84 * 4 / 1e8)
    found = communication_s([ring_of(1000, 4)], 12, HARDWARE)
    assert found == pytest.approx(expected, rel=1e-12)


def test_gathered_shards_keep_their_size():
    gather = SizedCollective(algorithms.ring_all_gather(2), "all_gather", 250, 4)
    expected = 11 * (3e-3 + 1000 / 1e8)
    found = communication_s([gather], 12, HARDWARE)
    assert found == pytest.approx(expected, rel=1e-12)


def test_a_native_ring_uses_the_adapter_of_every_device():
    native = SizedCollective(None, "all-reduce", 1200, 4)
    expected = 22 * (3e-3 + 400 / 4e8)  # four adapters in a host
    found = communication_s([native], 12, HARDWARE)
    assert found == pytest.approx(expected, rel=1e-12)


def test_a_native_ring_shares_the_only_adapter():
    shared = dataclasses.replace(BETWEEN, shared=True)
    machine = dataclasses.replace(HARDWARE, network=shared)
    native = SizedCollective(None, "all-reduce", 1200, 4)
    expected = 22 * (3e-3 + 400 / 1e8)
    found = communication_s([native], 12, machine)
    assert found == pytest.approx(expected, rel=1e-12)


def test_one_device_sends_nothing():
    sent = [ring_of(1000, 4), SizedCollective(None, "all-reduce", 1200, 4)]
    assert communication_s(sent, 1, HARDWARE) == 0


def test_sized_collectives_count_turns_of_a_loop_and_take_the_larger_branch(mesh_of_2):
    def body(x):
        def turn(total, _):
            return total + jaxdp.all_reduce(x, "data"), None

        total, _ = jax.lax.scan(turn, jnp.zeros_like(x), length=3)

        def larger(x):
            return jaxdp.all_reduce(jnp.tile(x, 5), "data")[:7]

        return jax.lax.cond(
            x[0] > 0, larger, lambda x: jaxdp.all_reduce(x, "data"), total
        )

    mapped = jax.shard_map(
        body,
        mesh=mesh_of_2,
        in_specs=jax.P("data"),
        out_specs=jax.P(),
        check_vma=False,
    )
    found = sized_collectives(jax.make_jaxpr(mapped)(jnp.arange(14.0)))
    assert [(m.count, m.elements, m.itemsize) for m in found] == [(3, 8, 4), (1, 36, 4)]


def test_partial_sums_of_16_bits_are_wider(mesh_of_2):
    mapped = jax.shard_map(
        lambda x: jaxdp.all_reduce(x.astype(jnp.bfloat16), "data"),
        mesh=mesh_of_2,
        in_specs=jax.P("data"),
        out_specs=jax.P(),
    )
    (found,) = sized_collectives(jax.make_jaxpr(mapped)(jnp.arange(14.0)))
    assert (found.elements, found.itemsize, found.partial_itemsize) == (8, 2, 4)
    # 4 devices: chunks of 2; of 6 rounds the second and third carry partial sums.
    alpha_s, rate = INSIDE.alpha_s, INSIDE.bytes_per_s
    expected = 6 * alpha_s + (4 * 2 * 2 + 2 * 2 * 4) / rate
    assert communication_s([found], 4, HARDWARE) == pytest.approx(expected, rel=1e-12)


def test_sized_collectives_know_native_collectives(mesh_of_2):
    def body(x):
        return jax.lax.psum(x.astype(jnp.float16), "data")

    mapped = jax.shard_map(
        body, mesh=mesh_of_2, in_specs=jax.P("data"), out_specs=jax.P()
    )
    (found,) = sized_collectives(jax.make_jaxpr(mapped)(jnp.arange(14.0)))
    assert found == SizedCollective(None, "all-reduce", 7, 2)


def test_sized_collectives_refuse_an_endless_loop(mesh_of_2):
    def body(x):
        def turn(x):
            return jaxdp.all_reduce(x, "data")

        return jax.lax.while_loop(lambda x: x[0] < 9, turn, x)

    mapped = jax.shard_map(
        body, mesh=mesh_of_2, in_specs=jax.P("data"), out_specs=jax.P(), check_vma=False
    )
    with pytest.raises(ValueError, match="all_reduce in a while_loop"):
        sized_collectives(jax.make_jaxpr(mapped)(jnp.arange(14.0)))


def test_sized_collectives_refuse_permutes_without_a_schedule(mesh_of_2):
    mapped = jax.shard_map(
        lambda x: jax.lax.ppermute(x, "data", [(0, 1), (1, 0)]),
        mesh=mesh_of_2,
        in_specs=jax.P("data"),
        out_specs=jax.P("data"),
    )
    with pytest.raises(ValueError, match="ppermute outside of a schedule"):
        sized_collectives(jax.make_jaxpr(mapped)(jnp.arange(14.0)))


def test_sized_collectives_refuse_what_is_decided_at_run_time(mesh_of_2):
    def body(x, sizes):
        one = sizes[0]
        return jax.lax.ragged_all_to_all(x, x, one, one, one, one, axis_name="data")

    spec = jax.P("data")
    mapped = jax.shard_map(body, mesh=mesh_of_2, in_specs=spec, out_specs=spec)
    jaxpr = jax.make_jaxpr(mapped)(jnp.arange(14.0), jnp.ones((2, 2), int))
    with pytest.raises(ValueError, match="cannot count the primitive 'ragged_all"):
        sized_collectives(jaxpr)


def test_a_hand_made_schedule_has_no_other_sizes():
    ring = algorithms.ring(4)
    mine = Schedule("mine", 4, 4, ring.starts, ring.ends, ring.rounds)
    with pytest.raises(ValueError, match=r"mine.resized got 12 devices.* made for 4"):
        communication_s([SizedCollective(mine, "all_reduce", 1000, 4)], 12, HARDWARE)
    with pytest.raises(ValueError, match="resized got 3"):
        algorithms.ring_reduce_scatter(2).then(
            algorithms.ring_all_gather(2), "both"
        ).resized(3)


@pytest.mark.parametrize(
    "build",
    [
        algorithms.ring,
        algorithms.recursive_doubling,
        lambda n: algorithms.star(n, root=1),
        lambda n: algorithms.sharded_servers(n, 2, dedicated=True),
    ],
    ids=["ring", "doubling", "star", "servers"],
)
def test_schedules_can_be_built_for_other_devices(build):
    assert build(4).resized(7) == build(7)
    assert build(4).resized(7).resized(4) == build(4)


@pytest.mark.parametrize(
    ("devices", "hosts", "each"), [(3, None, 3), (4, None, 4), (8, None, 4), (8, 8, 1)]
)
def test_devices_are_spread_over_hosts(devices, hosts, each):
    assert spread(HARDWARE, devices, hosts).devices_per_host == each


def test_devices_that_do_not_divide_into_hosts_are_refused():
    with pytest.raises(ValueError, match=r"6 devices in 4 hosts.* Use 8 devices"):
        spread(HARDWARE, 6, 4)
    with pytest.raises(ValueError, match=r"10 devices in 3 hosts.* Use 12 devices"):
        spread(HARDWARE, 10, None)


def test_something_must_be_compiled():
    with pytest.raises(ValueError, match=r"devices=\[16\] and compile_up_to=8"):
        predict(jaxdp.RingAllReduce(), MODEL, 16)
    for devices in ([], [0, 4]):
        with pytest.raises(
            ValueError, match=rf"{re.escape(str(devices))}\. .*at least 1"
        ):
            predict(jaxdp.RingAllReduce(), MODEL, devices)


def test_hardware_without_a_chip_is_refused():
    mine = dataclasses.replace(HARDWARE, target="", name="mine")
    with pytest.raises(ValueError, match=r"'mine' without a target.*h100, h200"):
        predict(jaxdp.RingAllReduce(), MODEL, 2, hardware=mine)


def test_an_unknown_target_is_refused():
    with pytest.raises(ValueError, match=r"h1000.*h100, h200"):
        predict(jaxdp.RingAllReduce(), MODEL, 2, hardware="h1000")


@needs_compiler("h100")
@pytest.mark.parametrize(
    "design",
    [
        jaxdp.GatherToRoot(),
        jaxdp.RingAllReduce(bucket_cap_mb=0.03),
        jaxdp.AllReduce("recursive_doubling"),
        jaxdp.NativeAllReduce(bucket_cap_mb=0.03),
    ],
    ids=["root", "ring", "doubling", "native"],
)
def test_cost_and_compiled_program_agree_where_both_exist(design):
    few = predict(design, MODEL, (1, 4, 8, 12), hardware=HARDWARE, compile_up_to=8)
    all_compiled = predict(design, MODEL, 8, hardware=HARDWARE, compile_up_to=8)
    one, four, eight, twelve = few.rows
    assert [row.source for row in few.rows] == ["compiled"] * 3 + ["cost"]
    assert [row.hosts for row in few.rows] == [1, 1, 2, 3]
    assert one.communication_s == 0 and one.step_s == one.compute_s
    assert all_compiled.rows == (eight,)
    # At 8 the schedules' cost was found in the program, on both links.
    priced = dataclasses.replace(eight, compiled_step_s=None).cost_step_s
    assert priced == pytest.approx(eight.compiled_step_s, rel=1e-6)
    # At 4 it takes the share that was hidden at 8; links so slow leave nothing hidden.
    assert four.cost_step_s == pytest.approx(four.compiled_step_s, rel=0.02)
    assert twelve.step_s > eight.step_s
    assert twelve.compiled_step_s is None
    assert few.throughput(twelve) == pytest.approx(12 * ROWS / twelve.step_s)


@needs_compiler("h100")
def test_a_compiled_step_is_priced_on_other_hardware():
    step = compiled_step(jaxdp.RingAllReduce(), MODEL, 4)
    slow = dataclasses.replace(HARDWARE, memory_bytes_per_s=1e6)
    four, twelve = price([step], (12, 4), slow).rows
    assert (four.source, twelve.source) == ("compiled", "cost")
    assert four.compiled_step_s == step.report.timeline(slow).step_s
    assert four.compute_s > 100 * price([step], [4], HARDWARE).rows[0].compute_s
    assert four.communication_s == pytest.approx(
        communication_s(step.collectives, 4, HARDWARE), rel=1e-9
    )
    assert step.report.verify(step.train).kept
    assert step.rows == ROWS
