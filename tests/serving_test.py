"""Push, collect and pull of trees, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxdp
from jaxdp import algorithms, serving
from jaxdp.schedule import verify

SHAPES = {"a": (5, 3), "b": (), "c": (4,), "e": (0, 4)}
DTYPES = {"a": np.float32, "b": np.float32, "c": np.float16, "e": np.float32}
CASES = [
    (1, 1, False),
    (4, 1, False),
    (4, 3, False),
    (2, 1, True),
    (5, 2, True),
    (5, 3, True),
]
over_cases = pytest.mark.parametrize(("devices", "servers", "dedicated"), CASES)


def gradients(devices):
    """Distinct numbers that a sum of five keeps exact, in every dtype."""
    rng = np.random.default_rng(0)
    return {
        name: rng.integers(-50, 50, (devices, *shape)).astype(DTYPES[name])
        for name, shape in SHAPES.items()
    }


def run(body, devices, tree, out_specs):
    """Under `check_vma=True`, so that what is typed as replicated is proven so."""
    program = jax.shard_map(
        lambda tree: body(jax.tree.map(lambda x: x[0], tree)),
        mesh=jaxdp.data_mesh(devices),
        in_specs=P("data"),
        out_specs=out_specs,
    )
    return jax.jit(program)(tree)


@over_cases
def test_a_push_and_a_pull_average_the_workers(devices, servers, dedicated):
    tree = gradients(devices)

    def body(own):
        parts = serving.split(own, servers)
        part = serving.push(parts, "data", devices, servers, dedicated)
        pulled = serving.pull(part, "data", devices, servers)
        return serving.joined(pulled, own)

    result = run(body, devices, tree, P())
    first = servers if dedicated else 0
    for name, given in tree.items():
        expected = given[first:].astype(np.float64).mean(0)
        assert result[name].dtype == DTYPES[name]
        tolerance = 1e-3 if DTYPES[name] == np.float16 else 1e-6
        np.testing.assert_allclose(result[name], expected, rtol=tolerance)


@over_cases
def test_a_server_collects_its_part_of_every_worker(devices, servers, dedicated):
    tree = gradients(devices)

    def body(own):
        parts = serving.split(own, servers)
        apart = serving.collect(parts, "data", devices, servers, dedicated)
        return jax.tree.map(lambda x: x[None], apart)

    result = run(body, devices, tree, P("data"))
    first = servers if dedicated else 0
    for name, given in tree.items():
        flat = given[first:].reshape(devices - first, -1)
        padded = np.pad(flat, ((0, 0), (0, -flat.shape[1] % servers)))
        for server, part in enumerate(np.split(padded, servers, axis=1)):
            got = np.asarray(result[name][server]).reshape(part.shape)
            np.testing.assert_array_equal(got, part)
        assert not np.asarray(result[name][servers:]).any()  # they serve nothing


def test_narrow_sums_are_rounded_once():
    """AMP-1: eight times 16384 overflows float16, and its mean does not."""
    given = {"x": np.full((8, 2), 16384, np.float16)}

    def body(own):
        part = serving.push(serving.split(own, 2), "data", 8, 2, False)
        return serving.joined(serving.pull(part, "data", 8, 2), own)

    assert run(body, 8, given, P())["x"].tolist() == [16384, 16384]


@pytest.mark.parametrize(
    ("shape", "parts", "expected"),
    [
        ((5, 3), 1, (5, 3)),
        ((5, 3), 4, (1, 4)),
        ((7,), 2, (4,)),
        ((), 3, ()),
        ((0, 4), 2, (1, 0)),
        ((2, 2, 2), 8, (1, 1, 1)),
    ],
)
def test_parts_keep_the_number_of_dimensions(shape, parts, expected):
    assert serving.part_shape(shape, parts) == expected
    whole = jnp.arange(float(np.prod(shape))).reshape(shape) + 1
    cut = serving.split({"x": whole}, parts)
    assert cut["x"].shape == (parts, *expected)
    np.testing.assert_array_equal(serving.joined(cut, {"x": whole})["x"], whole)


def test_integers_stay_at_home():
    def body(own):
        return serving.push(
            {"n": own[None], "x": jnp.ones((1, 2))}, "data", 2, 1, False
        )

    result = run(body, 2, np.array([3, 5], np.int32), P("data"))
    assert result["n"].tolist() == [3, 5]
    assert result["x"].tolist() == [1, 1, 0, 0]  # on the server alone


def test_servers_have_no_gradient():
    def body(x):
        def loss(x):
            return jnp.sum(serving.pull(x, "data", 2, 1))

        return jax.grad(loss)(x)

    with pytest.raises(NotImplementedError, match=r"pull over 'data'.*no gradient"):
        run(body, 2, np.ones((2, 3), "f"), P("data"))


# The schedules.


@pytest.mark.parametrize("devices", range(1, 13))
def test_every_schedule_of_servers_is_proven(devices):
    for dedicated in (False, True):
        for servers in range(1, devices + 1 - dedicated):
            given = devices, servers, dedicated
            schedule = verify(algorithms.sharded_servers(*given))
            verify(algorithms.sharded_servers_collect(*given))
            assert len(schedule.rounds) <= 2
    assert (
        algorithms.sharded_servers(devices, 1).rounds == algorithms.star(devices).rounds
    )


def test_who_pushes_to_whom():
    """The table of jaxdp.algorithms."""
    (round_,) = algorithms.sharded_servers_push(4, 2).rounds
    assert [t.pairs for t in round_.transfers] == [
        ((1, 0), (2, 1)),
        ((2, 0), (3, 1)),
        ((3, 0), (0, 1)),
    ]
    (round_,) = algorithms.sharded_servers_push(4, 2, dedicated=True).rounds
    assert [(t.pairs, t.op) for t in round_.transfers] == [
        (((2, 0), (3, 1)), "replace"),
        (((3, 0), (2, 1)), "add"),
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((4, 5, False), r"servers=5 .*on 4 devices.*between 1 and 4"),
        ((4, 4, True), r"servers=4 .*between 1 and 3 servers that leave"),
        ((4, 0, False), r"servers=0"),
    ],
)
def test_schedules_refuse_too_many_servers(given, message):
    with pytest.raises(ValueError, match=message):
        algorithms.sharded_servers_push(*given)


def test_servers_as_an_all_reduce_of_ones_own():
    """A schedule is an algorithm of `jaxdp.all_reduce` like any other."""
    schedule = algorithms.sharded_servers(4, 3)
    program = jax.shard_map(
        lambda x: jaxdp.all_reduce(x, "data", algorithm=schedule),
        mesh=jaxdp.data_mesh(4),
        in_specs=P("data"),
        out_specs=P(),
    )
    given = np.arange(20.0, dtype="f").reshape(4, 5)
    np.testing.assert_array_equal(jax.jit(program)(given)[0], given.sum(0))
