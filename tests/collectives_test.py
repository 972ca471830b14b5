"""The collectives give the right values, bit for bit, in every mode and on every N."""

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import flax.core
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxdp
from jaxdp import algorithms
from jaxdp.schedule import Round, Schedule, Transfer, simulate
from tests import helpers

over_cases = pytest.mark.parametrize(
    ("kind", "algorithm"), helpers.CASES, ids=map("-".join, helpers.CASES)
)
over_modes = pytest.mark.parametrize("mode", helpers.MODES)
over_checks = pytest.mark.parametrize(
    "check_vma", [True, False], ids=["checked", "unchecked"]
)


def sample(devices: int, *shape: int, dtype: Any = jnp.float32, seed: int = 0):
    """`[devices, *shape]`: values of many magnitudes, distinct per rank and element."""
    rng = np.random.default_rng([seed, devices, *shape])
    full = (devices, *shape)
    values = rng.standard_normal(full) * 2.0 ** rng.integers(-8, 8, full)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return (values + 1j * rng.standard_normal(full)).astype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        return (16777217 + np.arange(values.size).reshape(full)).astype(dtype)
    if dtype == jnp.bool:
        return rng.random(full) < 0.5
    return values.astype(dtype)


def sample_tree(devices: int, *leading: int, small: bool = False) -> dict:
    """Mixed dtypes and shapes; every leaf is `[devices, *leading, ...]`."""
    leaf = functools.partial(sample, devices, *leading)
    tree = {
        "float32": (leaf(), leaf(3), [leaf(5, 7, seed=1)]),
        "int32": leaf(3, dtype=jnp.int32),
        "empty": leaf(0, 2),
        "none": None,
    }
    if small:
        return tree
    return tree | {
        "bfloat16": leaf(4, 3, dtype=jnp.bfloat16),
        "float16": leaf(5, dtype=jnp.float16),
        "complex64": leaf(2, 3, dtype=jnp.complex64),
        "bool": leaf(9, dtype=jnp.bool),
    }


def schedule_of(devices: int, starts, ends, *rounds: Round) -> Schedule:
    """A schedule of one's own, all chunks placed alike."""
    chunks = 1 + max(c for r in rounds for t in r.transfers for c in t.chunks)
    return Schedule("mine", devices, chunks, starts * chunks, ends * chunks, rounds)


def rotation(devices: int) -> Schedule:
    """An all-reduce of one's own: everybody passes everything on, in two chunks."""
    pairs = tuple((r, (r + 1) % devices) for r in range(devices))
    everyone = (tuple(range(devices)),)
    to_root = [
        Round(tuple(Transfer(((r, r - 1),), (chunk,), "add") for chunk in range(2)))
        for r in range(devices - 1, 0, -1)
    ]
    from_root = [
        Round(tuple(Transfer((pairs[r],), (chunk,), "replace") for chunk in range(2)))
        for r in range(devices - 1)
    ]
    return schedule_of(devices, everyone, everyone, *to_root, *from_root)


class Layer(NamedTuple):
    kernel: Any
    bias: Any


@over_cases
def test_every_collective_ends_with_the_right_bits(mesh, kind, algorithm):
    n = mesh.size
    root = n // 2
    leading = (n,) if kind == "scatter" else ()
    tree = sample_tree(n, *leading, small=n == 8)
    run = helpers.per_device(helpers.collective(kind, algorithm, root), mesh)
    expected = helpers.reference(kind, algorithm, tree, root)
    helpers.assert_bit_equal(run(tree), expected)


@pytest.mark.parametrize("mode", ["unchecked", "pmap"])
def test_all_collectives_give_the_same_bits_in_every_mode(mesh, mode):
    n = mesh.size
    root = n // 2
    tree, blocks = sample_tree(n, small=True), sample_tree(n, n, small=True)

    def fn(tree, blocks):
        return [
            helpers.collective(kind, algorithm, root)(
                blocks if kind == "scatter" else tree
            )
            for kind, algorithm in helpers.CASES
        ]

    expected = [
        helpers.reference(kind, algorithm, blocks if kind == "scatter" else tree, root)
        for kind, algorithm in helpers.CASES
    ]
    run = helpers.per_device(fn, mesh, mode)
    helpers.assert_bit_equal(run(tree, blocks), expected)


@pytest.mark.parametrize("kind", helpers.SUMS)
def test_means_are_divided_before_they_are_rounded(kind):
    algorithm = "star" if kind == "reduce" else "ring"
    tree = sample_tree(4)
    run = helpers.collective(kind, algorithm, mean=True)
    expected = helpers.reference(kind, algorithm, tree, mean=True)
    helpers.assert_bit_equal(
        helpers.per_device(run, jaxdp.data_mesh(4))(tree), expected
    )


def test_a_mean_over_three_is_off_by_an_ulp_at_most():
    """XLA multiplies by the rounded reciprocal: exact for powers of two only."""
    x = sample(3, 50)
    run = helpers.collective("all_reduce", "ring", mean=True)
    expected = helpers.reference("all_reduce", "ring", x, mean=True)
    chex.assert_trees_all_close(
        helpers.per_device(run, jaxdp.data_mesh(3))(x), expected, rtol=2.0**-22, atol=0
    )


@pytest.mark.parametrize("value", [16384.0, 2.0**-24], ids=["large", "small"])
@pytest.mark.parametrize("algorithm", ["ring", "star"])
def test_float16_means_neither_overflow_nor_underflow(algorithm, value):
    """AMP-1: sum-then-divide in float16 gives inf, divide-then-sum gives 0."""
    x = np.full((8, 5), value, np.float16)
    run = helpers.collective("all_reduce", algorithm, mean=True)
    helpers.assert_bit_equal(helpers.per_device(run, jaxdp.data_mesh(8))(x), x)


@pytest.mark.parametrize("algorithm", ["ring", "star"])
def test_all_reduce_is_the_simulator_bit_for_bit(mesh, algorithm):
    n = mesh.size
    schedule = algorithms.build("all_reduce", algorithm, n)
    x = sample(n, 7 * schedule.chunks)
    *_, ends = simulate(schedule, x.reshape(n, schedule.chunks, 7))
    run = helpers.per_device(helpers.collective("all_reduce", algorithm), mesh)
    helpers.assert_bit_equal(run(x), ends.reshape(x.shape))


@pytest.mark.parametrize("algorithm", ["ring", "star"])
def test_all_reduce_is_close_to_the_exact_sum(mesh, algorithm):
    x = sample(mesh.size, 1000)
    run = helpers.per_device(helpers.collective("all_reduce", algorithm), mesh)
    exact = x.astype(np.float64).sum(0)
    # N - 1 additions, each off by at most half an ulp of a partial sum, which is at
    # most the sum of the magnitudes.
    bound = (mesh.size - 1) * 2.0**-24 * np.abs(x).astype(np.float64).sum(0)
    assert (np.abs(np.asarray(run(x)) - exact) <= bound).all()


@over_checks
@pytest.mark.parametrize(
    ("kind", "algorithm"), [c for c in helpers.CASES if c[0] in helpers.REPLICATED]
)
def test_replicated_results_are_accepted_as_such(mesh, check_vma, kind, algorithm):
    """CO-7: `out_specs=P()`, and all replicas hold the same bits."""
    tree = {"w": sample(mesh.size, 5, 7), "b": sample(mesh.size, dtype=jnp.bfloat16)}
    fn = helpers.collective(kind, algorithm)
    result = helpers.replicated(fn, mesh, check_vma)(tree)
    helpers.assert_replicas_bit_equal(result)
    expected = helpers.reference(kind, algorithm, tree)
    helpers.assert_bit_equal(result, jax.tree.map(lambda x: x[0], expected))


@pytest.mark.parametrize("kind", ["reduce_scatter", "reduce", "gather"])
def test_varying_results_are_not_accepted_as_replicated(kind):
    fn = helpers.collective(kind, "ring" if kind == "reduce_scatter" else "star")
    with pytest.raises(ValueError, match="out_specs"):
        helpers.replicated(fn, jaxdp.data_mesh(2))(sample(2, 4))


@over_checks
def test_collectives_run_without_jit(check_vma):
    x = sample(3, 5)
    run = jax.shard_map(
        lambda x: jaxdp.all_reduce(x[0], "data"),
        mesh=jaxdp.data_mesh(3),
        in_specs=P("data"),
        out_specs=P(),
        check_vma=check_vma,
    )
    helpers.assert_bit_equal(run(x), helpers.ring_order_sum(x))


@over_checks
def test_one_axis_of_a_mesh_with_two(check_vma):
    x = sample(8, 5).reshape(2, 4, 5)
    devices = np.array(jax.devices()).reshape(2, 4)
    mesh = jax.sharding.Mesh(devices, ("data", "model"))
    run = jax.shard_map(
        lambda x: jaxdp.all_reduce(x[0], "data"),
        mesh=mesh,
        in_specs=P("data", "model"),
        out_specs=P("model"),
        check_vma=check_vma,
    )
    helpers.assert_bit_equal(jax.jit(run)(x), x[0] + x[1])


def test_a_reversed_mesh_has_reversed_ranks():
    x = sample(4, 5)
    mesh = jaxdp.data_mesh(jax.devices()[3::-1])
    run = helpers.per_device(helpers.collective("broadcast", "star", 1), mesh)
    helpers.assert_bit_equal(run(x), np.broadcast_to(x[1], x.shape))


@over_modes
def test_bfloat16_is_summed_in_float32_and_rounded_once(mode):
    """CO-1: adding in bfloat16 hop by hop gives 256 to 264, and replicas differ."""
    mesh = jaxdp.data_mesh(8)
    ones = np.array([256, 1, 1, 1, 1, 1, 1, 1], jnp.bfloat16)
    tenths = (0.1 * np.arange(1, 9)).astype(np.float32)
    run = helpers.per_device(helpers.collective("all_reduce", "ring"), mesh, mode)
    total = helpers.as_numpy(run((ones, tenths)))
    np.testing.assert_array_equal(total[0], np.full(8, 264, jnp.bfloat16))
    assert len({x.tobytes() for x in total[1]}) == 1
    chex.assert_trees_all_close(
        total[1], np.full(8, 3.6, np.float32), rtol=8 * 2.0**-24, atol=0.0
    )


@pytest.mark.parametrize("kind", helpers.SUMS)
def test_what_has_no_gradient_is_not_summed(kind):
    """CO-2: integers beyond float32, small integers that would wrap, bools, keys."""
    tree = {
        "w": np.arange(16, dtype=np.float32).reshape(8, 2),
        "n": np.full(8, 16777217, np.int32),
        "small": np.full(8, 100, np.int8),
        "mask": np.arange(8) % 3 == 0,
        "key": jax.random.split(jax.random.key(0), 8),
    }
    algorithm = "star" if kind == "reduce" else "ring"
    fn = helpers.collective(kind, algorithm, mean=True)
    result = helpers.per_device(fn, jaxdp.data_mesh(8))(tree)
    for name in ("n", "small", "mask", "key"):
        helpers.assert_bit_equal(result[name], helpers.as_numpy(tree[name]))
    assert result["key"].dtype == tree["key"].dtype
    assert not np.array_equal(result["w"], tree["w"])


@pytest.mark.parametrize(
    ("kind", "algorithm"), [c for c in helpers.CASES if c[0] not in helpers.SUMS]
)
def test_keys_and_small_dtypes_move_as_they_are(kind, algorithm):
    leading = (3,) if kind == "scatter" else ()
    tree = {
        "key": jax.random.split(jax.random.key(1), (3, *leading)),
        "rbg": jax.random.split(jax.random.key(1, impl="rbg"), (3, *leading, 2)),
        "float8": sample(3, *leading, 4, dtype=jnp.float8_e4m3fn),
        "int4": sample(3, *leading, 4).astype(jnp.int4),
        "nan": np.full((3, *leading, 2), np.nan, np.float32),
    }
    result = helpers.per_device(
        helpers.collective(kind, algorithm, 1), jaxdp.data_mesh(3)
    )(tree)
    expected = helpers.reference(kind, algorithm, helpers.as_numpy(tree), 1)
    helpers.assert_bit_equal(result, expected)
    assert result["rbg"].dtype == tree["rbg"].dtype


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_float8_is_summed_in_float32(dtype):
    x = sample(3, 7).astype(dtype)
    run = helpers.per_device(
        helpers.collective("all_reduce", "ring"), jaxdp.data_mesh(3)
    )
    expected = helpers.reference("all_reduce", "ring", x)
    helpers.assert_bit_equal(run(x), expected)


def test_float64_stays_float64():
    with jax.enable_x64(True):
        x = np.random.default_rng(0).standard_normal((3, 7))
        run = helpers.per_device(
            helpers.collective("all_reduce", "ring"), jaxdp.data_mesh(3)
        )
        expected = np.broadcast_to(helpers.ring_order_sum(x), x.shape)
        helpers.assert_bit_equal(run(x), expected)


@pytest.mark.parametrize(("kind", "algorithm"), helpers.CASES)
def test_float0_passes_through(kind, algorithm):
    """CO-2: `grad(allow_int=True)` gives float0 for integers."""

    def fn(x):
        params = {"w": x, "n": jnp.arange(2)}
        gradient = jax.grad(lambda p: (p["w"] ** 2).sum(), allow_int=True)(params)
        result = helpers.collective(kind, algorithm)(gradient)
        assert result["n"].dtype == jax.dtypes.float0
        assert result["n"].shape == (2,)
        return result["w"]

    x = sample(2, 2)
    result = helpers.per_device(fn, jaxdp.data_mesh(2))(x)
    helpers.assert_bit_equal(result, helpers.reference(kind, algorithm, 2 * x))


@over_cases
def test_empty_trees_come_back_and_cost_nothing(kind, algorithm):
    """CO-3."""

    def fn(x):
        for tree in ({}, None, [None, ()], {"a": None, "b": {}}):
            assert helpers.collective(kind, algorithm)(tree) == tree
        return x

    run = helpers.per_device(fn, jaxdp.data_mesh(2))
    assert helpers.permutes(helpers.compiled_text(run, sample(2))) == []


def test_none_beside_arrays():
    """CO-3."""
    tree = {"a": None, "b": np.ones((8, 2), np.float32)}
    run = helpers.collective("all_reduce", "ring")
    result = helpers.per_device(run, jaxdp.data_mesh(8))(tree)
    helpers.assert_bit_equal(result, {"a": None, "b": 8 * tree["b"]})


@pytest.mark.parametrize("devices", [1, 2, 3, 5, 7, 8])
def test_leaves_smaller_than_the_device_count(devices):
    """CO-4: `lax.psum_scatter` refuses these; padding must not leak."""
    tree = {
        "s": sample(devices),
        "v": sample(devices, 3),
        "m": sample(devices, 5, 7),
    }

    def fn(tree):
        shards = jaxdp.reduce_scatter(tree, "data")
        gathered = jaxdp.all_gather(shards, "data", like=tree)
        return jaxdp.all_reduce(tree, "data"), gathered, lax.psum(tree, "data")

    mesh = jaxdp.data_mesh(devices)
    reduced, gathered, psum = helpers.replicated(fn, mesh, check_vma=False)(tree)
    for result in (reduced, gathered):
        chex.assert_trees_all_equal_shapes_and_dtypes(result, psum)
        # Up to 8 values below 2**10 in two orders of addition.
        chex.assert_trees_all_close(result, psum, rtol=1e-6, atol=1e-3)


def test_dtypes_are_not_mixed_in_one_bucket():
    """CO-5: 2 * 1000 + 4 * 10 + 2 * 3 bytes, times 2 (N - 1) / N for a ring."""
    n = 8
    tree = (
        np.zeros((n, 1000), jnp.bfloat16),
        np.zeros((n, 10), np.float32),
        np.zeros((n, 3), np.float16),
    )
    run = helpers.per_device(
        helpers.collective("all_reduce", "ring"), jaxdp.data_mesh(n)
    )
    permutes = helpers.permutes(helpers.compiled_text(run, tree))
    assert len(permutes) == 3 * 2 * (n - 1)
    # Chunks are padded to 125, 2 and 1 elements. Own and complete chunks travel in the
    # leaf's dtype, N of 2 (N - 1) rounds; the N - 2 rounds of partial sums in float32.
    per_leaf = [(2, 125), (4, 2), (2, 1)]
    expected = sum(c * (width * n + 4 * (n - 2)) for width, c in per_leaf)
    assert sum(p.nbytes for p in permutes) == expected
    assert [x.dtype for x in run(tree)] == [x.dtype for x in tree]


def test_complex_descent_keeps_the_imaginary_part():
    """CO-6: 20 steps towards 1 + 1j on 4 devices."""

    def fn(w):
        def loss(w):
            return jnp.abs(w - (1 + 1j)) ** 2

        def step(_, w):
            gradient = jaxdp.all_reduce(jax.grad(loss)(w), "data", mean=True)
            return w - 0.1 * gradient.conj()

        return lax.fori_loop(0, 20, step, w)

    start = np.zeros(4, np.complex64)
    w = helpers.per_device(fn, jaxdp.data_mesh(4), "unchecked")(start)
    expected = np.full(4, 0.98847 + 0.98847j, np.complex64)
    # The known value has five digits.
    chex.assert_trees_all_close(np.asarray(w), expected, rtol=0.0, atol=1e-5)


def test_one_device_is_the_identity_without_communication():
    """CO-8: XLA would keep a permute {{0,0}}."""
    for kind, algorithm in helpers.CASES:
        x = sample(1, 1, 5)
        run = helpers.per_device(
            helpers.collective(kind, algorithm), jaxdp.data_mesh(1)
        )
        assert helpers.permutes(helpers.compiled_text(run, x)) == []
        assert np.asarray(run(x)).tobytes() == x.tobytes()


def test_gathered_shards_are_the_reduced_tree(mesh):
    """`all_gather(reduce_scatter(x), like=x)` is `all_reduce(x)`, other leaves kept."""
    tree = sample_tree(mesh.size) | {
        "key": jax.random.split(jax.random.key(0), mesh.size)
    }

    def fn(tree):
        shards = jaxdp.reduce_scatter(tree, "data")
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
        return jaxdp.all_gather(shards, "data", like=like)

    result = helpers.per_device(fn, mesh)(tree)
    host = helpers.as_numpy(tree)
    shards = helpers.reference("reduce_scatter", "ring", host)

    def whole(shard, leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return leaf
        flat = shard.reshape(-1)[: leaf[0].size].reshape(leaf.shape[1:])
        return np.broadcast_to(flat, leaf.shape)

    helpers.assert_bit_equal(result, jax.tree.map(whole, shards, host))


def test_key_order_changes_neither_program_nor_result():
    """ER-2."""
    a, b = sample(4, 3), sample(4, 5, seed=1)
    run = helpers.per_device(
        helpers.collective("all_reduce", "ring"), jaxdp.data_mesh(4)
    )
    ab, ba = {"a": a, "b": b}, {"b": b, "a": a}
    assert run.lower(ab).as_text() == run.lower(ba).as_text()
    helpers.assert_bit_equal(run(ab), run(ba))


CONTAINERS: dict[str, Callable] = {
    "list": lambda a, b: [a, b],
    "named_tuple": lambda a, b: Layer(a, b),
    "frozen_dict": lambda a, b: flax.core.FrozenDict({"a": a, "b": {"c": b}}),
    "int_keys": lambda a, b: {1: a, 2: (b, None)},
}


@pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS)
def test_containers_come_back(container):
    """ER-2."""
    tree = container(sample(4, 3), sample(4, 5, seed=1))
    run = helpers.per_device(
        helpers.collective("all_reduce", "ring"), jaxdp.data_mesh(4)
    )
    helpers.assert_bit_equal(run(tree), helpers.reference("all_reduce", "ring", tree))


def test_python_numbers_and_numpy_arrays_are_leaves():
    def fn(x):
        tree = {"x": x, "y": 1.5, "n": 3, "z": np.ones(2)}
        return jaxdp.all_reduce(tree, "data")

    result = helpers.replicated(fn, jaxdp.data_mesh(4))(np.ones((4, 3), np.float32))
    assert {k: np.asarray(v).tolist() for k, v in result.items()} == {
        "x": [4, 4, 4],
        "y": 6,
        "n": 3,
        "z": [4, 4],
    }


def test_a_schedule_of_ones_own_is_an_algorithm(mesh):
    n = mesh.size
    x = sample(n, 7)
    schedule = rotation(n) if n > 1 else algorithms.ring(1)
    run = helpers.per_device(helpers.collective("all_reduce", schedule), mesh)
    total = x[n - 1]
    for rank in range(n - 2, -1, -1):
        total = total + x[rank]
    helpers.assert_bit_equal(run(x), np.broadcast_to(total, x.shape))


@pytest.mark.parametrize(("kind", "algorithm"), helpers.CASES)
def test_standard_schedules_are_accepted_as_objects(kind, algorithm):
    x = sample(3, 3, 2)
    schedule = algorithms.build(kind, algorithm, 3)
    run = helpers.per_device(helpers.collective(kind, schedule), jaxdp.data_mesh(3))
    helpers.assert_bit_equal(run(x), helpers.reference(kind, algorithm, x))


dtypes = st.sampled_from(
    [jnp.float32, jnp.bfloat16, jnp.float16, jnp.complex64, jnp.int32, jnp.bool]
)
shapes = st.lists(st.integers(0, 5), max_size=2).map(tuple)
trees = st.recursive(
    st.tuples(shapes, dtypes) | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=6,
)


@hypothesis.settings(max_examples=15)
@hypothesis.given(
    devices=st.integers(1, 8), tree=trees, case=st.sampled_from(helpers.CASES[:5])
)
def test_any_tree_on_any_number_of_devices(devices, tree, case):
    kind, algorithm = case

    def is_leaf(x):
        return isinstance(x, tuple)

    arrays = jax.tree.map(
        lambda leaf: sample(devices, *leaf[0], dtype=leaf[1]), tree, is_leaf=is_leaf
    )
    if not jax.tree.leaves(arrays):
        return
    mesh = jaxdp.data_mesh(devices)
    run = helpers.per_device(helpers.collective(kind, algorithm), mesh)
    helpers.assert_bit_equal(run(arrays), helpers.reference(kind, algorithm, arrays))


def in_shard_map(fn, devices: int = 4):
    """Traces `fn` on a device's `[5]` share, and fails if that fails."""
    x = jax.ShapeDtypeStruct((devices, 5), jnp.float32)
    return helpers.per_device(fn, jaxdp.data_mesh(devices)).lower(x)


@pytest.mark.parametrize(("kind", "algorithm"), helpers.CASES)
def test_unknown_algorithms_are_refused(kind, algorithm):
    del algorithm
    known = ", ".join(map(repr, sorted(algorithms.SCHEDULES[kind])))
    if kind == "all_reduce":
        others = {"auto", "hierarchical", "native"}
        known = ", ".join(map(repr, sorted({*algorithms.SCHEDULES[kind], *others})))
    message = rf"{kind} got algorithm='best'.*\[{known}\], or a jaxdp.schedule"
    with pytest.raises(ValueError, match=message):
        in_shard_map(helpers.collective(kind, "best"))


@pytest.mark.parametrize("kind", helpers.KINDS)
def test_unknown_axes_are_refused(kind):
    message = rf"{kind} got axis_name='dta', and no axis .*'dta'.*jax.pmap.*Call"
    with pytest.raises(ValueError, match=message):
        in_shard_map(lambda x: getattr(jaxdp, kind)(x, "dta"))


@pytest.mark.parametrize("kind", helpers.KINDS)
@pytest.mark.parametrize("where", ["nowhere", "jit", "vmap"])
def test_calls_outside_shard_map_and_pmap_are_refused(kind, where):
    x = np.ones((4, 4), np.float32)

    def call(x):
        return getattr(jaxdp, kind)(x, "data")

    calls = {
        "nowhere": lambda: call(x),
        "jit": lambda: jax.jit(call)(x),
        "vmap": lambda: jax.vmap(call, axis_name="data")(x),
    }
    with pytest.raises(ValueError, match=rf"{kind} got axis_name='data', and no axis"):
        calls[where]()


@pytest.mark.parametrize("kind", helpers.KINDS)
@pytest.mark.parametrize("axis_name", [(), ["data", "model"], None, ("data", None)])
def test_lists_of_axes_and_none_are_refused(kind, axis_name):
    message = rf"{kind} got axis_name={re.escape(repr(axis_name))}.*or a tuple"
    with pytest.raises(TypeError, match=message):
        in_shard_map(lambda x: getattr(jaxdp, kind)(x, axis_name))


@pytest.mark.parametrize("kind", ["reduce", "broadcast", "gather", "scatter"])
@pytest.mark.parametrize("root", [4, -1])
def test_roots_out_of_range_are_refused(kind, root):
    message = rf"{kind} got root={root} on 4 devices.*from 0 to 3: choose"
    with pytest.raises(ValueError, match=message):
        in_shard_map(helpers.collective(kind, "star", root))


def test_scatter_names_all_leaves_with_another_leading_axis():
    tree = {
        "good": np.ones((4, 2)),
        "short": np.ones((3, 2)),
        "deep": [np.ones(()), np.ones((5,), np.int32)],
    }
    message = (
        r"scatter got leaves whose leading axis is not the 4 devices on axis 'data': "
        r"\['deep'\]\[0\] \(\), \['deep'\]\[1\] \(5,\), \['short'\] \(3, 2\)\. Stack"
    )
    with pytest.raises(ValueError, match=message):
        in_shard_map(lambda x: jaxdp.scatter(tree, "data"))
    with pytest.raises(ValueError, match=r"'data': the array \(5,\)\. Stack"):
        in_shard_map(lambda x: jaxdp.scatter(x, "data"))


def test_all_gather_refuses_a_like_of_another_structure():
    message = r"shards of structure .*'a': \*.* and a `like` of structure .*'b': \*"
    with pytest.raises(ValueError, match=message):
        in_shard_map(lambda x: jaxdp.all_gather({"a": x}, "data", like={"b": x}))


def test_all_gather_names_all_shards_that_do_not_fill_like():
    def fn(x):
        like = {"a": x, "b": np.ones((3, 7)), "n": np.ones(3, np.int32)}
        shards = {"a": x[:2], "b": x, "n": x[:1].astype(jnp.int32)}
        return jaxdp.all_gather(shards, "data", like=like)

    message = (
        r"`like` on 4 devices: \['b'\] has 5 elements, not ceil\(21 / 4\) = 6\. Pass"
    )
    with pytest.raises(ValueError, match=message):
        in_shard_map(fn)

    def whole(x):
        return jaxdp.all_gather({"a": x, "b": x[:1]}, "data", like={"a": x, "b": x})

    message = (
        r"\['a'\] has 5 elements, not ceil\(5 / 4\) = 2; "
        r"\['b'\] has 1 elements, not ceil\(5 / 4\) = 2"
    )
    with pytest.raises(ValueError, match=message):
        in_shard_map(whole)


@pytest.mark.parametrize(
    ("kind", "schedule", "message"),
    [
        (
            "all_reduce",
            algorithms.ring(3),
            r"the schedule ring\(3\) for 3 devices.*must run on 4 devices",
        ),
        (
            "all_reduce",
            algorithms.ring_reduce_scatter(4),
            r"the schedule ring_reduce_scatter\(4\) .*ends on \(\(0,\), \(1",
        ),
        (
            "reduce",
            algorithms.star_reduce(4, root=2),
            r"reduce got .*root=2\) .*ends on \(\(2,\),\).* end on \(\(0,\),\)",
        ),
        (
            "gather",
            algorithms.ring_all_gather(4),
            r"gather got the schedule ring_all_gather\(4\)",
        ),
        (
            "all_reduce",
            Schedule("none", 4, 1, ((0, 1, 2, 3),), ((0, 1, 2, 3),), ()),
            r"none: after the last round \(0 in all\) device 0 lacks .* \[1, 2, 3\]",
        ),
    ],
    ids=["other_devices", "other_ends", "other_root", "other_kind", "not_proven"],
)
def test_schedules_that_do_something_else_are_refused(kind, schedule, message):
    with pytest.raises(ValueError, match=message):
        in_shard_map(helpers.collective(kind, schedule))


def test_chunks_are_free_only_where_the_whole_buffer_moves_alike():
    """On one device every placement looks alike; a scatter still has one row."""
    twice = Schedule("twice", 1, 2, ((0,), (0,)), ((0,), (0,)), ())
    in_shard_map(helpers.collective("all_reduce", twice), devices=1)
    with pytest.raises(
        ValueError, match=r"reduce_scatter got the schedule twice for 1"
    ):
        in_shard_map(helpers.collective("reduce_scatter", twice), devices=1)
