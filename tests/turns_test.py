"""Buckets that take turns: who waits for whom, the bits, and what XLA hides."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxdp
from jaxdp import targets
from jaxdp.collectives import all_reduce_in_turn
from jaxdp.program.dependence import dependence
from jaxdp.turns import Turns
from tests.compilers import needs_compiler, text_of
from tests.contract import waves

DEVICES, WIDTH, LAYERS = 4, 16, 6
CAP = 2 * WIDTH * WIDTH * 4 / 2**20  # MiB of two layers, so three buckets
ROUNDS = 2 * (DEVICES - 1)
PARAMS = {f"layer {i}": waves(WIDTH, WIDTH, start=i) / 4 for i in range(LAYERS)}
BATCH = {"x": waves(2 * DEVICES, WIDTH), "y": waves(2 * DEVICES, WIDTH, start=0.4)}


def loss_fn(params, batch):
    x = batch["x"]
    for weight in params.values():
        x = jnp.tanh(x @ weight)
    return jnp.mean((x - batch["y"]) ** 2)


def ring(**options):
    return jaxdp.RingAllReduce(CAP, first_bucket_mb=None, **options)


def training(design, devices=DEVICES):
    mesh = jaxdp.data_mesh(devices)
    return jaxdp.data_parallel(loss_fn, optax.adam(0.1), mesh, design)


@functools.cache
def waits(in_flight):
    """For each bucket, the buckets of which its first round waits for the last one."""
    train = training(ring(in_flight=in_flight))
    program = train.lower(train.init(PARAMS), BATCH).compile()
    found = dependence(program)
    rounds: dict[int, list[str]] = {}
    for name, op in found.collectives.items():
        (number,) = re.findall(r"bucket_(\d+)", op.op_name)
        rounds.setdefault(int(number), []).append(name)
    ordered = {
        number: sorted(names, key=lambda name: len(found.waits_for[name] & {*names}))
        for number, names in rounds.items()
    }
    assert [len(names) for names in ordered.values()] == [ROUNDS] * len(ordered)
    return {
        number: {
            other
            for other, theirs in ordered.items()
            if other != number and theirs[-1] in found.waits_for[names[0]]
        }
        for number, names in sorted(ordered.items())
    }


@pytest.mark.parametrize(
    ("in_flight", "expected"),
    [
        (None, {1: set(), 2: set(), 3: set(), 4: set()}),
        (1, {1: set(), 2: {1}, 3: {1, 2}, 4: {1, 2, 3}}),
        (2, {1: set(), 2: set(), 3: {1}, 4: {2}}),
        (3, {1: set(), 2: set(), 3: set(), 4: {1}}),
    ],
)
def test_a_bucket_waits_until_few_enough_travel(in_flight, expected):
    """One bucket is the loss alone; the layers are three."""
    assert waits(in_flight) == expected


def test_one_is_the_number_unless_one_asks():
    assert ring() == ring(in_flight=1)


@pytest.mark.parametrize("unroll", [True, False], ids=["unrolled", "rolled"])
@pytest.mark.parametrize(
    "algorithm", ["ring", "bidirectional_ring", "halving_doubling", "star"]
)
def test_turns_change_no_bits(algorithm, unroll):
    results = []
    for in_flight in (None, 1, 2):
        design = jaxdp.AllReduce(
            algorithm, CAP, None, unroll=unroll, in_flight=in_flight
        )
        train = training(design, 3)  # no power of two
        state = train.init(PARAMS)
        batch = {name: x[:6] for name, x in BATCH.items()}
        for _ in range(3):
            state, metrics = train.step(state, batch)
        results.append((train.params(state), metrics["loss"]))
    jax.tree.map(np.testing.assert_array_equal, results[0], results[1])
    jax.tree.map(np.testing.assert_array_equal, results[0], results[2])


@pytest.mark.parametrize("check_vma", [True, False])
def test_sums_are_those_of_all_reduce_and_typed_alike(check_vma):
    trees = [
        {"a": waves(DEVICES, 5, start=i), "empty": np.zeros((DEVICES, 0), "f")}
        for i in range(4)
    ]

    def body(trees):
        turns = Turns(1)
        how = "data", "ring", False, None
        return [all_reduce_in_turn(turns, tree, *how) for tree in trees]

    run = jax.shard_map(
        body,
        mesh=jaxdp.data_mesh(DEVICES),
        in_specs=P("data"),
        out_specs=P() if check_vma else P("data"),
        check_vma=check_vma,
    )
    for tree, found in zip(trees, jax.jit(run)(trees), strict=True):
        expected = tree["a"].astype("d").sum(0)
        for row in np.asarray(found["a"]):
            np.testing.assert_allclose(row, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("in_flight", [0, -3])
@pytest.mark.parametrize("design", [jaxdp.RingAllReduce, jaxdp.AllReduce])
def test_nothing_in_flight_is_refused(design, in_flight):
    message = rf"{design.__name__} got in_flight={in_flight}\. At least 1 bucket.*None"
    with pytest.raises(ValueError, match=message):
        training(design(in_flight=in_flight))


def test_xla_is_told_to_estimate_transfers_only_where_buckets_take_turns():
    name = "xla_gpu_enable_analytical_latency_estimator"
    assert ring().compiler_options("cuda")[name] is True
    assert name not in ring(in_flight=None).compiler_options("cuda")
    assert name not in ring().compiler_options("cpu")


@needs_compiler("h100")
def test_on_h100_rings_that_take_turns_hide_behind_the_backward_pass():
    """16 layers of 2048 x 2048, 16,384 rows a device: 278 us a product, 19 a round.

    Kernels run in order, and an addition stands between two rounds of a reduce-scatter:
    so no more rounds are beside products than there are products, 32 for 70 rounds.
    """
    width, rows = 2048, 16384
    weight = jax.ShapeDtypeStruct((width, width), jnp.bfloat16)
    row = jax.ShapeDtypeStruct((8 * rows, width), jnp.bfloat16)
    params = {f"{i:02}": weight for i in range(16)}
    batch = {"x": row, "y": row}
    design = jaxdp.RingAllReduce(bucket_cap_mb=32.0)
    exposed, steps = [], []
    for in_flight in (None, 1):
        train = jaxdp.data_parallel(
            loss_fn,
            optax.sgd(0.1),
            targets.mesh("h100", 8),
            dataclasses.replace(design, in_flight=in_flight),
        )
        program = jaxdp.compile_for(train.step, params, batch)
        assert " while(" not in text_of(program)
        timeline = jaxdp.analyze(program).timeline("h100")
        exposed.append(timeline.exposed_fraction)
        steps.append(timeline.step_s)
    assert exposed[1] < 0.6 * exposed[0]
    assert steps[1] < steps[0]
