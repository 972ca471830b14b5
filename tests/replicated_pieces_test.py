"""Scatter, replicate, parallel_apply and gather, one by one."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdp
from jaxdp.replicated import gather, parallel_apply, replicate, scatter
from tests.helpers import as_numpy, assert_bit_equal
from tests.replicated_helpers import compilations, ids_of, numbered, put
from tests.torch_reference.installed import require_torch

SHUFFLED = [3, 1, 0, 2]

over_dtypes = pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "int8", "uint32", "bool", "complex64"]
)


def sizes_by_hand(rows, devices):
    """`torch.chunk`: pieces of ceil(rows / devices) rows until none are left."""
    sizes = []
    while sum(sizes) < rows:
        sizes.append(min((rows + devices - 1) // devices, rows - sum(sizes)))
    return sizes


def sizes(rows, devices, dim=0):
    shape = [2, 2]
    shape[dim] = rows
    slices = scatter(numbered(*shape), range(devices), dim)
    return [part.shape[dim] for part in slices]


@pytest.mark.parametrize(
    ("rows", "devices", "expected"),
    [
        (66, 4, [17, 17, 17, 15]),
        (10, 4, [3, 3, 3, 1]),
        (9, 4, [3, 3, 3]),
        (3, 8, [1, 1, 1]),
        (8, 8, [1] * 8),
        (17, 8, [3, 3, 3, 3, 3, 2]),
        (5, 1, [5]),
        (1, 8, [1]),
    ],
)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_sizes_of_slices(rows, devices, expected, dim):
    """CA2: 66 rows on 4 devices are no error."""
    assert sizes(rows, devices, dim) == expected


@given(rows=st.integers(1, 70), devices=st.integers(1, 8))
def test_sizes_are_those_of_ceil(rows, devices):
    assert sizes(rows, devices) == sizes_by_hand(rows, devices)


@pytest.mark.torch
def test_sizes_are_those_of_torch_chunk():
    require_torch()
    import torch

    for rows in range(1, 71):
        for devices in range(1, 9):
            chunks = torch.arange(rows).chunk(devices)
            assert sizes(rows, devices) == [len(chunk) for chunk in chunks]


@given(
    rows=st.integers(1, 20),
    order=st.permutations(range(8)),
    devices=st.integers(1, 8),
    dim=st.sampled_from([0, 1, -2, -1]),
    output_device=st.integers(0, 7),
)
def test_gather_undoes_scatter(rows, order, devices, dim, output_device):
    shape = (rows, 3) if dim in (0, -2) else (3, rows)
    x = numbered(*shape)
    whole = gather(scatter(x, order[:devices], dim), output_device, dim)
    assert_bit_equal(whole, x)
    assert ids_of(whole) == output_device


PLACES: dict[str, Any] = {
    "numpy": lambda x: x,
    "strided": lambda x: np.repeat(x, 2, axis=0)[::2],
    "uncommitted": jnp.asarray,
    "committed": lambda x: put(x, 0),
    "elsewhere": lambda x: put(x, 6),
    "sharded": lambda x: jaxdp.shard_batch(x, reversed_mesh()),
    "replicated": lambda x: jax.device_put(x, NamedSharding(reversed_mesh(), P())),
}


def reversed_mesh():
    return Mesh(np.array(jax.devices()[:4][::-1]), ("data",))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("order", [[0, 1, 2, 3], SHUFFLED, [5, 2, 7]], ids=str)
def test_slices_keep_the_order_wherever_the_batch_lies(place, order):
    """CA10, ER-1: slice i is on device_ids[i], whatever order the batch had before."""
    x = numbered(8, 3)
    slices = scatter(PLACES[place](x), order)
    ends = np.cumsum(sizes_by_hand(8, len(order)))[:-1]
    assert_bit_equal(slices, np.split(x, ends))
    assert ids_of(slices) == order


def test_devices_are_ids_too():
    devices = [jax.devices()[i] for i in SHUFFLED]
    assert ids_of(scatter(numbered(8), devices)) == SHUFFLED
    assert ids_of(scatter(numbered(8), np.array(SHUFFLED))) == SHUFFLED
    assert ids_of(gather(scatter(numbered(8), devices), devices[1])) == 1


@over_dtypes
@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_dtypes_pass_through(dtype, as_array):
    x = as_array(numbered(10, start=0) % 7).astype(dtype)
    slices = scatter(x, SHUFFLED)
    assert_bit_equal(slices, np.split(as_numpy(x), [3, 6, 9]))
    assert_bit_equal(gather(slices, 5), x)


def test_keys_are_split_like_rows():
    keys = jax.random.split(jax.random.key(7), 10)
    slices = scatter(keys, SHUFFLED)
    assert_bit_equal(slices, np.split(as_numpy(keys), [3, 6, 9]))
    assert ids_of(slices) == SHUFFLED
    assert_bit_equal(gather(slices, 5), keys)


def test_one_key_becomes_another_for_every_replica():
    key = jax.random.key(7)
    first, second = (scatter((numbered(10), key), SHUFFLED) for _ in range(2))
    assert_bit_equal(first, second)
    keys = [part[1] for part in first]
    assert {part.shape for part in keys} == {()} and ids_of(keys) == SHUFFLED
    drawn = {as_numpy(part).tobytes() for part in [key, *keys]}
    assert len(drawn) == 5
    (_, other), *_ = scatter((numbered(10), jax.random.key(8)), SHUFFLED)
    assert as_numpy(other).tobytes() not in drawn


class Pair(NamedTuple):
    x: Any
    y: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Batch:
    x: Any
    name: str = dataclasses.field(default="", metadata={"static": True})


def test_only_arrays_of_a_tree_are_split():
    def function():
        pass

    constants = ["text", True, 3, 2.5, function, None, b"bytes", (4, object()), []]
    x, y, z = numbered(5, 2), numbered(5, start=50), numbered(5, 1, start=90)
    tree = {
        "pair": Pair((x, jnp.asarray(y))),
        "list": [constants, Batch(z, "static")],
    }
    slices = scatter(tree, [2, 0])
    assert [jax.tree.structure(part) for part in slices] == 2 * [
        jax.tree.structure(tree)
    ]
    for part, rows in zip(slices, [slice(0, 3), slice(3, 5)], strict=True):
        assert_bit_equal(part["pair"].x, (x[rows], y[rows]))
        same, batch = part["list"]
        pairs = zip(jax.tree.leaves(same), jax.tree.leaves(constants), strict=True)
        assert all(ours is given for ours, given in pairs)
        assert (type(batch), batch.name) == (Batch, "static")
        assert_bit_equal(batch.x, z[rows])


def test_arrays_of_the_caller_stay_as_they_were():
    x, y, w = numbered(8, 2), put(numbered(8), 3), put(numbered(3), 1)
    slices = scatter((x, y), SHUFFLED)
    replicate(w, SHUFFLED)
    del slices
    assert_bit_equal((x, y, w), (numbered(8, 2), numbered(8), numbered(3)))
    assert ids_of((y, w)) == (3, 1)


def pipeline(w, x, device_ids, output_device, dim=0):
    slices = scatter(x, device_ids, dim)
    replicas = replicate(w, device_ids[: len(slices)])
    outputs = parallel_apply(jnp.multiply, replicas, [(s,) for s in slices])
    return gather(outputs, output_device, dim)


def test_nothing_is_compiled_twice():
    w, x = put(2, 0, "f"), put(numbered(13), 0)
    gradient = jax.grad(lambda w, x: jnp.sum(pipeline(w, x, SHUFFLED, 5)), (0, 1))
    with compilations() as names:
        scatter(x, SHUFFLED)
        gather(scatter(x, SHUFFLED), 5)
    assert names.count("slices") == 1 and names.count("join") == 1
    gradient(w, x)
    with compilations() as names:
        for _ in range(3):
            scatter(x, SHUFFLED)
            gather(scatter(x, SHUFFLED), 5)
            gradient(w, x)
    assert names == []


def test_replicas_are_equal_copies():
    params = {
        "w": put(numbered(3, 2), 3),
        "half": put(numbered(2), 3, "bfloat16"),
        "key": jax.device_put(jax.random.key(1), jax.devices()[3]),
        "steps": put(7, 3, "i"),
        "host": numbered(4, start=20),
        "name": "text",
        "none": None,
    }
    replicas = replicate(params, SHUFFLED)
    names = [replica.pop("name") for replica in replicas]
    assert names == ["text"] * 4
    del params["name"]
    for replica, device in zip(replicas, SHUFFLED, strict=True):
        assert_bit_equal(replica, params)
        assert set(jax.tree.leaves(ids_of(replica))) == {device}
    shared = [replica["w"].unsafe_buffer_pointer() for replica in replicas]
    assert shared[0] == params["w"].unsafe_buffer_pointer()
    assert len(set(shared)) == 4


def test_replicas_of_nothing():
    assert replicate({}, [2, 0]) == [{}, {}]
    assert replicate({"name": "text"}, [2, 0]) == [{"name": "text"}] * 2


def test_parameters_from_elsewhere_are_copied_too():
    replicas = replicate(put(numbered(3), 6), [2, 0])
    assert ids_of(replicas) == [2, 0]
    assert_bit_equal(replicas, [numbered(3)] * 2)


@pytest.mark.parametrize("home", [3, 6], ids=["on-the-first", "elsewhere"])
def test_gradient_of_replicas_is_their_sum_on_the_first(home):
    """CA12: nothing is lost between a replica and the original."""
    replicas, back = jax.vjp(lambda w: replicate(w, SHUFFLED), put(numbered(3), home))
    assert ids_of(replicas) == SHUFFLED
    cotangents = [put(numbered(3) * 10**i, device) for i, device in enumerate(SHUFFLED)]
    (gradient,) = back(cotangents)
    assert gradient.tolist() == [1111, 2222, 3333]
    assert ids_of(gradient) == 3


def test_gradient_of_one_replica_reaches_the_original():
    def loss(w):
        return jnp.sum(replicate(w, SHUFFLED)[2]["w"] ** 2)

    gradient = jax.grad(loss)({"w": put(numbered(3), 3), "unused": put(1.0, 3, "f")})
    assert gradient["w"].tolist() == [2, 4, 6] and gradient["unused"] == 0
    assert ids_of(gradient) == {"w": 3, "unused": 3}


@pytest.mark.parametrize(("dtype", "ones"), [("bfloat16", 256), ("float16", 2048)])
def test_16_bit_gradients_are_rounded_once(dtype, ones):
    """`ones` + 1 is no number of the dtype, so that single additions would be lost."""
    _, back = jax.vjp(lambda w: replicate(w, range(5)), put(0, 0, dtype))
    values = [ones, 1, 1, 1, 1]
    (gradient,) = back([put(value, i, dtype) for i, value in enumerate(values)])
    assert gradient.dtype == dtype and gradient == ones + 4


def test_gradient_of_slices_returns_where_the_batch_was():
    def loss(x):
        slices = scatter({"x": x, "counts": np.arange(1, 11), "name": "a"}, SHUFFLED)
        weighted = [part["x"] * part["counts"] * 10**i for i, part in enumerate(slices)]
        return sum(jnp.sum(gather([part], 0)) for part in weighted)

    expected = [1, 2, 3, 40, 50, 60, 700, 800, 900, 10000]
    for x, home in [(put(numbered(10), 6), 6), (numbered(10), 3)]:
        gradient = jax.grad(loss)(x)
        assert gradient.tolist() == expected and ids_of(gradient) == home


def test_gradient_of_a_gathered_output_returns_to_each_device():
    parts = [put(numbered(3, 2), 3), put(numbered(1, 2), 1), put(numbered(2, 2), 0)]
    scalars = [put(i, device, "f") for i, device in enumerate([3, 1, 0])]

    def run(parts, scalars):
        outputs = [{"x": x, "s": s} for x, s in zip(parts, scalars, strict=True)]
        return gather(outputs, 5)

    whole, back = jax.vjp(run, parts, scalars)
    assert ids_of(whole) == {"x": 5, "s": 5}
    cotangent = numbered(6, 2, start=100)
    gradients = back({"x": put(cotangent, 5), "s": put([7, 8, 9], 5, "f")})
    assert_bit_equal(gradients[0], np.split(cotangent, [3, 4]))
    assert [float(s) for s in gradients[1]] == [7, 8, 9]
    assert ids_of(gradients) == ([3, 1, 0], [3, 1, 0])


def test_arrays_with_and_without_a_gradient_are_gathered_together():
    fixed = put(numbered(2, start=10), 1)
    counts = [put([1, 2], 0, "i"), put([3, 4], 1, "i")]

    def loss(x):
        whole, ints = gather([(x, counts[0]), (fixed, counts[1])], 4)
        return jnp.sum(whole * ints * np.arange(1, 5, dtype="f"))

    value, gradient = jax.value_and_grad(loss)(put([2, 3], 0, "f"))
    assert (value, gradient.tolist()) == (2 + 12 + 90 + 176, [1, 4])


@pytest.mark.parametrize("output_device", [1, 3, 5], ids="cpu:{}".format)
def test_outputs_are_joined_on_any_device(output_device):
    """CA9: it may be one of the replicas' devices, or another."""
    devices = [3, 1, 0]
    outputs = [
        {
            "rows": (put(numbered(n, 2, start=10 * n), device), None),
            "columns": [put(numbered(2, n, start=50 * n), device)],
            "scalar": put(n, device, "i"),
        }
        for n, device in zip([3, 1, 2], devices, strict=True)
    ]
    whole = gather([{"rows": output["rows"]} for output in outputs], output_device)
    rows, none = whole["rows"]
    assert none is None and rows[:, 0].tolist() == [30, 32, 34, 10, 20, 22]
    keys = ("columns", "scalar")
    columns = [{key: output[key] for key in keys} for output in outputs]
    along = gather(columns, output_device, 1)
    assert along["columns"][0][0].tolist() == [150, 151, 152, 50, 100, 101]
    assert along["scalar"].tolist() == [3, 1, 2]
    assert set(jax.tree.leaves(ids_of((whole, along)))) == {output_device}


def test_every_replica_computes_on_its_device():
    def apply_fn(params, x, *, power, scale=1.0):
        return {"y": params["w"] * x**power * scale, "w": params["w"]}

    replicas = replicate({"w": put(2, 3, "f")}, SHUFFLED)
    inputs = [(part,) for part in scatter(numbered(10), SHUFFLED)]
    keywords = [{"power": 2, "scale": part} for part in scatter(numbered(10), SHUFFLED)]
    outputs = parallel_apply(apply_fn, replicas, inputs, keywords)
    assert [ids_of(output) for output in outputs] == [
        {"y": device, "w": device} for device in SHUFFLED
    ]
    assert gather(outputs, 3)["y"].tolist() == (2 * numbered(10) ** 3).tolist()
    assert [float(output["w"]) for output in outputs] == [2] * 4


def test_replicas_may_differ():
    replicas = [put(10, 2, "f"), put(100, 0, "f")]
    inputs = [(put([1, 2], 2, "f"),), (put([3], 0, "f"),)]
    keywords: list[dict[str, Any]] = [{"add": 1}, {"add": None}]

    def apply_fn(w, x, add):
        return w * x + (1000 if add is None else add)

    outputs = parallel_apply(apply_fn, replicas, inputs, keywords)
    assert [output.tolist() for output in outputs] == [[11, 21], [1300]]


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_the_pieces_together_have_a_gradient(dim):
    x = numbered(5, 5)
    weights = numbered(5, 5, start=7)

    def loss(w, x):
        return jnp.sum(pipeline(w, x, SHUFFLED, 5, dim) ** 2 * weights)

    arguments = (put(3, 3, "f"), put(x, 6))
    gradients = jax.grad(loss, (0, 1))(*arguments)
    assert gradients[0] == 6 * np.sum(x**2 * weights)
    np.testing.assert_array_equal(gradients[1], 18 * x * weights)
    assert ids_of(gradients) == (3, 6)


def test_outputs_without_a_cotangent_count_nothing():
    """Two outputs, one of them dropped before it is gathered."""

    def loss(w):
        replicas = replicate(w, [3, 1])
        inputs = [(part,) for part in scatter(numbered(3), [3, 1])]
        outputs = parallel_apply(lambda w, x: (w * x, w**2 * x), replicas, inputs)
        return jnp.sum(gather([first for first, _ in outputs], 5))

    gradient = jax.grad(loss)(put(2, 3, "f"))
    assert gradient == 6 and ids_of(gradient) == 3
