"""Gradients through collectives equal those of the explicit linear map.

A collective is linear: over all devices it is one matrix, from N * L inputs to N * M
outputs, built here in NumPy. Without the check of varying axes every device's output is
a variable of its own, as for `lax.psum`; with it a replicated output is one variable.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxdp
from jaxdp.schedule import Round, Schedule, Transfer
from tests import helpers

over_cases = pytest.mark.parametrize(
    ("kind", "algorithm"), helpers.CASES, ids=map("-".join, helpers.CASES)
)
over_checks = pytest.mark.parametrize(
    "check_vma", [True, False], ids=["checked", "unchecked"]
)


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def shape_of(kind: str, devices: int) -> tuple[int, ...]:
    return (devices, 2) if kind == "scatter" else (5,)


def matrix(kind: str, algorithm: str, devices: int, root: int, mean: bool = False):
    """The linear map over all devices, `[N, M..., N, L...]`."""
    shape = (devices, *shape_of(kind, devices))
    basis = np.eye(int(np.prod(shape)), dtype=np.float32).reshape(-1, *shape)
    columns = [helpers.reference(kind, algorithm, x, root, mean) for x in basis]
    full = np.stack(columns, axis=-1)
    return full.reshape(*full.shape[:-1], *shape)


def apply(linear: np.ndarray, x: np.ndarray) -> np.ndarray:
    return np.tensordot(linear, x, axes=x.ndim)


def transposed(linear: np.ndarray, cotangent: np.ndarray) -> np.ndarray:
    return np.tensordot(cotangent, linear, axes=cotangent.ndim)


def assert_close(actual, expected) -> None:
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    # Sums of up to 16 products of numbers of magnitude 1 in float32.
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


VARYING = P("data")


def sharded(fn, mesh, check_vma, in_specs: Any = VARYING, out_specs: Any = VARYING):
    return jax.jit(
        jax.shard_map(
            fn,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=check_vma,
        )
    )


@over_checks
@over_cases
def test_forward_and_transposed_maps(mesh, check_vma, kind, algorithm):
    """`jvp` is the map; `vjp` and `linear_transpose`, inside, are its transpose."""
    n = mesh.size
    root = n // 2
    linear = matrix(kind, algorithm, n, root)
    collective = helpers.collective(kind, algorithm, root)
    one_variable = check_vma and kind in helpers.REPLICATED
    shape = (n, *shape_of(kind, n))
    x, tangent = values(*shape, seed=1), values(*shape, seed=2)
    cotangent = values(*linear.shape[one_variable : linear.ndim - x.ndim], seed=3)

    def fn(x, tangent, cotangent):
        x, tangent = x[0], tangent[0]
        cotangent = cotangent if one_variable else cotangent[0]
        primal, out_tangent = jax.jvp(collective, (x,), (tangent,))
        _, vjp = jax.vjp(collective, x)
        (by_vjp,) = vjp(cotangent)
        (by_transpose,) = jax.linear_transpose(collective, x)(cotangent)
        return jax.tree.map(
            lambda y: y[None], (primal, out_tangent, by_vjp, by_transpose)
        )

    specs = (P("data"), P("data"), P() if one_variable else P("data"))
    run = sharded(fn, mesh, check_vma, in_specs=specs)
    primal, out_tangent, by_vjp, by_transpose = run(x, tangent, cotangent)
    assert_close(primal, apply(linear, x))
    assert_close(out_tangent, apply(linear, tangent))
    expected = transposed(linear[0] if one_variable else linear, cotangent)
    assert_close(by_vjp, expected)
    assert_close(by_transpose, expected)


@over_checks
@over_cases
def test_gradient_of_the_whole_program(check_vma, kind, algorithm):
    """Differentiated outside `shard_map`, first and second order."""
    devices = 3
    mesh, root = jaxdp.data_mesh(devices), devices // 2
    linear = matrix(kind, algorithm, devices, root)
    shape = (devices, *shape_of(kind, devices))
    x, direction = values(*shape, seed=1), values(*shape, seed=2)
    is_replicated = kind in helpers.REPLICATED
    weights = values(*linear.shape[is_replicated : linear.ndim - x.ndim], seed=3)

    def body(x):
        result = helpers.collective(kind, algorithm, root)(x[0] ** 2)
        return result if is_replicated else result[None]

    run = sharded(body, mesh, check_vma, out_specs=P() if is_replicated else P("data"))
    dense = linear[0] if is_replicated else linear

    def loss(x):
        return (weights * jnp.sin(run(x))).sum()

    @jax.jit
    def derivatives(x):
        def directional(x):
            return (jax.grad(loss)(x) * direction).sum()

        first, forward = jax.jvp(jax.grad(loss), (x,), (direction,))
        return first, forward, jax.grad(directional)(x)

    y, tangent = apply(dense, x**2), apply(dense, 2 * x * direction)
    pulled = transposed(dense, weights * np.cos(y))
    bent = transposed(dense, -weights * np.sin(y) * tangent)
    second = 2 * direction * pulled + 2 * x * bent
    for actual, expected in zip(
        derivatives(x), (2 * x * pulled, second, second), strict=True
    ):
        # sin and cos of y, at most about 30 and known to 1e-6.
        np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-4)


@over_checks
@pytest.mark.parametrize("algorithm", ["ring", "star"])
@pytest.mark.parametrize("weights", ["own", "common"])
def test_all_reduce_differentiates_like_psum(check_vma, algorithm, weights):
    """Inside `shard_map`, with weights that vary over devices and that do not."""
    x, w = values(3, 5, seed=1), values(3, 5, seed=2)

    def gradients(reduce):
        def fn(x, w):
            w = w[0] if weights == "own" else jnp.arange(5.0)

            def loss(x):
                return (w * jnp.sin(reduce(x))).sum()

            first = jax.grad(loss)(x[0])
            second = jax.grad(lambda x: (jax.grad(loss)(x) ** 2).sum())(x[0])
            return first[None], second[None]

        return sharded(fn, jaxdp.data_mesh(3), check_vma)(x, w)

    ours = gradients(lambda x: jaxdp.all_reduce(x, "data", algorithm))
    theirs = gradients(lambda x: lax.psum(x, "data"))
    for actual, expected in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@over_checks
@pytest.mark.parametrize("kind", helpers.SUMS)
def test_gradients_of_means(check_vma, kind):
    algorithm = "star" if kind == "reduce" else "ring"
    linear = matrix(kind, algorithm, 3, 0, mean=True)
    one_variable = check_vma and kind in helpers.REPLICATED
    cotangent = values(*linear.shape[one_variable : linear.ndim - 2], seed=3)

    def fn(x, cotangent):
        cotangent = cotangent if one_variable else cotangent[0]
        _, vjp = jax.vjp(helpers.collective(kind, algorithm, mean=True), x[0])
        return vjp(cotangent)[0][None]

    specs = (P("data"), P() if one_variable else P("data"))
    run = sharded(fn, jaxdp.data_mesh(3), check_vma, in_specs=specs)
    expected = transposed(linear[0] if one_variable else linear, cotangent)
    assert_close(run(values(3, 5), cotangent), expected)


@pytest.mark.parametrize("value", [16384.0, 2.0**-24], ids=["large", "small"])
def test_gradients_of_float16_means_neither_overflow_nor_underflow(value):
    """AMP-1 on the way back: cotangents are summed, then divided, in float32."""

    def fn(x, cotangent):
        mean = helpers.collective("all_reduce", "ring", mean=True)
        _, vjp = jax.vjp(mean, x[0])
        return vjp(cotangent[0])[0][None]

    cotangent = np.full((8, 5), value, np.float16)
    run = sharded(fn, jaxdp.data_mesh(8), check_vma=False)
    helpers.assert_bit_equal(run(np.ones_like(cotangent), cotangent), cotangent)


@over_checks
@over_cases
def test_narrow_gradients_flow(check_vma, kind, algorithm):
    """The bits that travel have no derivative; the values have."""
    shape = (2, *shape_of(kind, 2))
    dtypes = (jnp.bfloat16, jnp.float16, jnp.float8_e5m2)

    def loss(tree):
        result = helpers.collective(kind, algorithm)(tree)
        return sum(leaf.astype(jnp.float32).sum() for leaf in result)

    def fn(tree):
        gradient = jax.grad(loss)([x[0] for x in tree])
        return [x[None] for x in gradient]

    tree = [np.ones(shape, dtype) for dtype in dtypes]
    gradient = sharded(fn, jaxdp.data_mesh(2), check_vma)(tree)
    linear = matrix(kind, algorithm, 2, 0)
    if check_vma and kind in helpers.REPLICATED:
        linear = linear[:1]
    expected = linear.sum(axis=tuple(range(linear.ndim - len(shape))))
    assert expected.any()
    helpers.assert_bit_equal(gradient, [expected.astype(dtype) for dtype in dtypes])


@over_checks
@over_cases
def test_vmap_and_its_gradient(check_vma, kind, algorithm):
    """Batched along axis 1, and the gradient of that."""
    devices, batch = 3, 4
    shape = shape_of(kind, devices)
    x = values(devices, shape[0], batch, *shape[1:], seed=1)
    linear = matrix(kind, algorithm, devices, 0)
    collective = helpers.collective(kind, algorithm)

    def fn(x):
        batched = jax.vmap(collective, in_axes=1, out_axes=0)

        def loss(x):
            return collective(x).sum()

        gradients = jax.vmap(jax.grad(loss), in_axes=1)
        return batched(x[0])[None], gradients(x[0])[None]

    run = sharded(fn, jaxdp.data_mesh(devices), check_vma)
    result, gradients = run(x)
    if check_vma and kind in helpers.REPLICATED:
        ones = transposed(
            linear[0], np.ones(linear.shape[1 : linear.ndim - x.ndim + 1])
        )
    else:
        ones = transposed(linear, np.ones(linear.shape[: linear.ndim - x.ndim + 1]))
    for i in range(batch):
        assert_close(result[:, i], apply(linear, x[:, :, i]))
        assert_close(gradients[:, i], ones.astype(np.float32))


@over_checks
def test_a_batch_takes_as_many_rounds_as_one(check_vma):
    mesh = jaxdp.data_mesh(4)
    collective = helpers.collective("all_reduce", "ring")
    run = sharded(lambda x: jax.vmap(collective)(x[0])[None], mesh, check_vma)
    found = helpers.permutes(helpers.compiled_text(run, values(4, 3, 8)))
    assert [(p.dtype, p.elements) for p in found] == [("f32", 3 * 2)] * 6


@over_checks
@over_cases
def test_hessians(check_vma, kind, algorithm):
    """Forward over reverse under `vmap`: types of varying axes must survive both."""
    shape = shape_of(kind, 2)
    x = values(2, *shape, seed=1)
    linear = matrix(kind, algorithm, 2, 0)

    def fn(x):
        def loss(x):
            return (helpers.collective(kind, algorithm)(x) ** 2).sum()

        return jax.hessian(loss)(x[0])[None]

    hessian = sharded(fn, jaxdp.data_mesh(2), check_vma)(x)
    # Every device perturbs its own input along the same unit vector at once and reads
    # its own part of the gradient: sum the blocks of 2 F^T F over who perturbs.
    flat = linear.reshape(-1, x.size)
    if check_vma and kind in helpers.REPLICATED:
        flat = flat[: len(flat) // 2]
    blocks = (2 * flat.T @ flat).reshape(2, x[0].size, 2, x[0].size).sum(2)
    assert_close(hessian, blocks.reshape(2, *shape, *shape))


@over_checks
def test_inside_scan_and_remat(check_vma):
    """Three layers of reduce-scatter, all-gather and matmul, rematerialised."""
    devices, layers = 3, 3
    x, weights = values(devices, 5, seed=1), values(layers, 5, 5, seed=2) / 4

    def fn(x, weights):
        @jax.checkpoint
        def layer(x, weight):
            shard = jaxdp.reduce_scatter(jnp.tanh(x), "data", mean=True)
            whole = jaxdp.all_gather(shard, "data", like=x)
            return x + whole @ weight, whole.sum()

        def loss(x):
            last, sums = lax.scan(layer, x, weights)
            return (last**2).sum() + sums.sum()

        return jax.grad(loss)(x[0])[None]

    def dense(x):
        total = jnp.zeros(devices)
        for weight in weights:
            whole = jnp.tanh(x).mean(0)
            total = total + whole.sum()
            x = x + (whole @ weight)[None]
        return x, total

    def dense_loss(x):
        last, total = dense(x)
        return (last**2).sum() + total.sum()

    run = sharded(fn, jaxdp.data_mesh(devices), check_vma, in_specs=(P("data"), P()))
    np.testing.assert_allclose(
        run(x, weights), jax.grad(dense_loss)(x), rtol=1e-4, atol=1e-4
    )


@over_checks
def test_several_leaves_and_dtypes_at_once(check_vma):
    """Integers get float0; the sum's gradient is that of each leaf alone."""
    tree = {
        "w": values(2, 3),
        "z": values(2, 2).astype(np.complex64),
        "b": values(2, 4).astype(jnp.bfloat16),
        "n": np.ones((2, 2), np.int32),
        "none": None,
    }

    def fn(tree):
        def loss(tree):
            summed = jaxdp.all_reduce(tree, "data")
            return (
                summed["w"].sum() * 2
                + jnp.abs(summed["z"]).sum()
                + summed["b"].astype(jnp.float32).sum() * 3
            )

        gradient = jax.grad(loss, allow_int=True)(jax.tree.map(lambda x: x[0], tree))
        assert gradient.pop("n").dtype == jax.dtypes.float0
        return jax.tree.map(lambda x: x[None], gradient)

    gradient = sharded(fn, jaxdp.data_mesh(2), check_vma)(tree)
    copies = 1 if check_vma else 2
    total = tree["z"].sum(0)
    slope = np.broadcast_to(copies * (total / np.abs(total)).conj(), (2, 2))
    assert_close(gradient["w"], np.full((2, 3), 2 * copies, np.float32))
    assert_close(gradient["b"], np.full((2, 4), 3 * copies, jnp.bfloat16))
    assert_close(gradient["z"], slope)
    assert gradient["none"] is None


@over_checks
@pytest.mark.parametrize("kind", ["reduce", "broadcast"])
def test_the_gradient_of_a_schedule_of_ones_own_with_several_chunks(check_vma, kind):
    """The transpose runs the standard schedule, which has one chunk."""
    pair, op = ((1, 0), "add") if kind == "reduce" else ((0, 1), "replace")
    rounds = tuple(Round((Transfer((pair,), (c,), op),)) for c in range(3))
    all_of_them, root_only = ((0, 1),) * 3, ((0,),) * 3
    places = (all_of_them, root_only)
    starts, ends = places if kind == "reduce" else places[::-1]
    schedule = Schedule("in three", 2, 3, starts, ends, rounds)
    weights = values(5)

    def fn(x):
        def loss(x):
            return (weights * helpers.collective(kind, schedule)(x)).sum()

        return jax.grad(loss)(x[0])[None]

    gradient = sharded(fn, jaxdp.data_mesh(2), check_vma)(values(2, 5, seed=1))
    if kind == "reduce":
        expected = np.stack([weights, weights])
    else:
        expected = np.stack([weights * (1 if check_vma else 2), 0 * weights])
    assert_close(gradient, expected)


@over_checks
@over_cases
def test_what_gradients_send(check_vma, kind, algorithm):
    """As much as the collective itself, or nothing where the result is one variable."""
    n = 4

    def permutes(fn):
        run = sharded(fn, jaxdp.data_mesh(n), check_vma)
        return helpers.permutes(
            helpers.compiled_text(run, values(n, *shape_of(kind, n)))
        )

    collective = helpers.collective(kind, algorithm)
    forward = permutes(lambda x: collective(x[0])[None])
    backward = permutes(lambda x: jax.grad(lambda x: collective(x).sum())(x[0])[None])
    if check_vma and kind in helpers.REPLICATED:
        assert backward == []
    else:
        assert len(backward) == len(forward)
        assert {p.dtype for p in backward} == {"f32"}
