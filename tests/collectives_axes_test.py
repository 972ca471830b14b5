"""Collectives over several mesh axes: one row of ranks, the last axis first."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jaxdp
from jaxdp import algorithms
from tests import helpers

AXES = ("hosts", "devices")
over_checks = pytest.mark.parametrize(
    "check_vma", [True, False], ids=["checked", "unchecked"]
)


def mesh_of(*shape: int) -> Mesh:
    """A mesh of two axes, or of one."""
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    types = (AxisType.Auto,) * len(shape)
    return Mesh(devices, AXES[: len(shape)], axis_types=types)


def over(mesh: Mesh, fn, check_vma: bool = True, out=None):
    """`fn` on every device's entry of a stacked tree."""
    spec = P(mesh.axis_names)

    def body(x):
        result = jax.tree.map(lambda x: x[0], x)
        result = fn(result)
        return result if out is not None else jax.tree.map(lambda x: x[None], result)

    return jax.jit(
        jax.shard_map(
            body,
            mesh=mesh,
            in_specs=spec,
            out_specs=spec if out is None else out,
            check_vma=check_vma,
        )
    )


def values(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).standard_normal(shape).astype(np.float32)


@over_checks
@pytest.mark.parametrize("kind", helpers.KINDS)
def test_two_axes_are_one_row_of_ranks(kind, check_vma):
    """The same bits as on one axis of six; rank 4 is device 1 of host 1."""
    options = {"root": 4} if kind not in ("all_gather", *helpers.SUMS[:2]) else {}
    x = values(6, 6, 5)

    def result(mesh, names):
        run = functools.partial(getattr(jaxdp, kind), axis_name=names, **options)
        return over(mesh, run, check_vma)(x)

    helpers.assert_bit_equal(result(mesh_of(2, 3), AXES), result(mesh_of(6), "hosts"))


@over_checks
def test_another_order_than_the_meshs_is_refused(check_vma):
    """`lax.axis_index` counts in the tuple's order, `lax.ppermute` in the mesh's."""
    run = over(mesh_of(2, 3), lambda x: jaxdp.all_gather(x, AXES[::-1]), check_vma)
    with pytest.raises(
        ValueError, match=r"in the mesh's order.*\('hosts', 'devices'\)"
    ):
        run.lower(values(6, 2))


@over_checks
@pytest.mark.parametrize("axis", [0, 1])
def test_one_of_two_axes(axis, check_vma):
    x = values(6, 4)
    run = over(mesh_of(2, 3), lambda x: jaxdp.all_reduce(x, AXES[axis]), check_vma)
    sums = x.reshape(2, 3, 4).sum(axis, keepdims=True)
    expected = np.broadcast_to(sums, (2, 3, 4)).reshape(6, 4)
    np.testing.assert_allclose(run(x), expected, rtol=1e-6)


def test_a_tuple_of_one_axis_is_that_axis():
    x = values(4, 3)
    found = over(mesh_of(4), lambda x: jaxdp.all_reduce(x, ("hosts",)))(x)
    expected = over(mesh_of(4), lambda x: jaxdp.all_reduce(x, "hosts"))(x)
    helpers.assert_bit_equal(found, expected)


@pytest.mark.parametrize("algorithm", ["ring", "hierarchical", "native", "auto"])
@pytest.mark.parametrize("unroll", [True, False], ids=["unrolled", "rolled"])
def test_results_lose_both_axes_from_their_type(algorithm, unroll):
    """`out_specs=P()` is accepted under the check, forward and backward."""
    mesh, x = mesh_of(2, 3), values(6, 5)

    def mean(x):
        return jaxdp.all_reduce(x, AXES, algorithm, mean=True, unroll=unroll)

    run = over(mesh, mean, out=P())
    np.testing.assert_allclose(run(x), x.mean(0), rtol=1e-5, atol=1e-6)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(run(x) ** 2)))(x)
    expected = np.broadcast_to(2 * x.mean(0) / 6, x.shape)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)


def test_hierarchical_is_its_schedule():
    """Its pairs and messages, in the program: 2 x 3 devices."""
    run = over(mesh_of(2, 3), lambda x: jaxdp.all_reduce(x, AXES, "hierarchical"))
    found = helpers.permutes(helpers.compiled_text(run, values(6, 12)))
    schedule = algorithms.hierarchical(6, hosts=2)
    assert len(found) == len(schedule.rounds) == 2 * (3 - 1) + 2 * (2 - 1)
    inside, across = "{0,1},{1,2},{2,0},{3,4},{4,5},{5,3}", "{0,3},{1,4},{2,5}"
    assert [inside in p.pairs for p in found] == [True, True, False, False, True, True]
    assert sum(across in p.pairs for p in found) == 2
    assert [p.elements for p in found] == [4, 4, 2, 2, 4, 4]


@pytest.mark.parametrize(
    ("names", "shape", "message"),
    [
        ("hosts", (4,), "'hierarchical' on one axis, of 4 devices.*two axes"),
        (("hosts",), (4,), r"on axes of sizes \(4,\), of 4 devices.*two axes"),
        (
            ("hosts", "data"),
            (2, 2),
            r"\('hosts', 'data'\), and no axis.*'data' is bound",
        ),
        (("hosts", "hosts"), (2, 2), r"once, in the mesh's order.*\('hosts',\)"),
    ],
)
def test_hierarchical_needs_two_axes(names, shape, message):
    run = over(mesh_of(*shape), lambda x: jaxdp.all_reduce(x, names, "hierarchical"))
    with pytest.raises(ValueError, match=message):
        run.lower(values(4, 3))


def test_hierarchical_refuses_three_axes():
    devices = np.array(jax.devices()[:8]).reshape(2, 2, 2)
    mesh = Mesh(devices, ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
    x = values(8, 3)
    ring = over(mesh, lambda x: jaxdp.all_reduce(x, ("a", "b", "c")))
    np.testing.assert_allclose(ring(x)[0], x.sum(0), rtol=1e-5, atol=1e-6)
    run = over(mesh, lambda x: jaxdp.all_reduce(x, ("a", "b", "c"), "hierarchical"))
    with pytest.raises(ValueError, match=r"on axes of sizes \(2, 2, 2\), of 8 dev"):
        run.lower(x)


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w"])
    return jnp.mean((hidden @ params["v"] - batch["y"]) ** 2)


def trained(mesh: Mesh, design, steps: int = 3):
    """Parameters and losses after some steps of Adam."""
    train = jaxdp.data_parallel(loss_fn, optax.adam(0.05), mesh, design)
    params = {"w": values(3, 5), "v": values(5)}
    state, losses = train.init(params), []
    for step in range(steps):
        rng = np.random.default_rng(step)
        batch = {
            "x": rng.standard_normal((12, 3)).astype(np.float32),
            "y": rng.standard_normal(12).astype(np.float32),
        }
        state, metrics = train.step(state, batch)
        losses.append(metrics["loss"])
    return train.params(state), np.array(losses)


@pytest.mark.parametrize("unroll", [True, False], ids=["unrolled", "rolled"])
@pytest.mark.parametrize("algorithm", ["hierarchical", "ring", "halving_doubling"])
def test_designs_train_over_two_axes_as_on_one_device(algorithm, unroll):
    design = jaxdp.AllReduce(algorithm, unroll=unroll)
    found = trained(mesh_of(2, 3), design)
    expected = trained(jaxdp.data_mesh(1), jaxdp.RingAllReduce())
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        found,
        expected,
    )


def test_a_schedule_for_all_devices_of_two_axes():
    design = jaxdp.AllReduce(algorithms.hierarchical(6, hosts=2))
    helpers.assert_bit_equal(
        trained(mesh_of(2, 3), design),
        trained(mesh_of(2, 3), jaxdp.AllReduce("hierarchical")),
    )
    wrong = jaxdp.AllReduce(algorithms.ring(3))
    with pytest.raises(ValueError, match="must run on 6 devices"):
        trained(mesh_of(2, 3), wrong)


def test_designs_refuse_what_needs_other_axes():
    with pytest.raises(ValueError, match="'hierarchical' on one axis, of 4 devices"):
        trained(jaxdp.data_mesh(4), jaxdp.AllReduce("hierarchical"))
    bf16 = jaxdp.AllReduce("ring", compression=jaxdp.compression.Bf16())
    shape = re.escape("mesh of shape (2, 3)")
    with pytest.raises(ValueError, match=f"{shape}. Compressed gradients travel"):
        trained(mesh_of(2, 3), bf16)
