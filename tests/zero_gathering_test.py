import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec as P

import jaxdp
from jaxdp.program.memory.live import live_at_peak
from jaxdp.zero.gathering import Plan, order_of_use, run_gathered
from jaxdp.zero.shards import cut, is_shard
from tests.compilers import count, needs_compiler, shape

W = 6
ROWS = 24
NO_COMBINING = {
    "xla_gpu_all_gather_combine_threshold_bytes": 0,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 0,
}


def numbers(*sizes, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=sizes).astype(dtype) / 2


def layer(w, b, x):
    return jnp.tanh(x @ w + b[None])


def mlp(params, x):
    for w, b in params:
        x = layer(w, b, x)
    return jnp.mean(x**2)


def layers(count, dtype=np.float32):
    return [
        (numbers(W, W, seed=i, dtype=dtype), numbers(W, seed=50 + i, dtype=dtype))
        for i in range(count)
    ]


def whole_of(shards):
    """One all-gather of all parts."""
    assert len({s.data.dtype for s in shards}) == 1
    sizes = [s.data.size for s in shards]
    parts = lax.all_gather(jnp.concatenate([s.data for s in shards]), "data")
    parts = jnp.split(parts, np.cumsum(sizes)[:-1].tolist(), axis=1)
    return [
        part.reshape(-1)[: s.size].reshape(s.shape)
        for part, s in zip(parts, shards, strict=True)
    ]


def program_of(loss_fn, params, data):
    """Results: the loss, then the gradients."""

    def gradient(params, data):
        return jax.value_and_grad(loss_fn, allow_int=True)(params, *data)

    return jax.make_jaxpr(gradient)(params, data)


def is_cut(leaf):
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def pairs_of(leaves):
    """Buckets of two neighbours, of one dtype."""
    numbers = [i for i, x in enumerate(leaves) if is_cut(x)]
    for _, group in itertools.groupby(numbers, lambda i: jnp.result_type(leaves[i])):
        yield from grouped([*group])


def grouped(numbers, size=2):
    return [numbers[i : i + size] for i in range(0, len(numbers), size)]


class Both:
    """A program on shards, and on whole parameters; results of all devices."""

    def __init__(self, loss_fn, params, *data, devices=4, prefetch=1, buckets=None):
        leaves = jax.tree.leaves(params)
        self.program = program_of(loss_fn, params, self.rows(data, devices))
        self.buckets = [*pairs_of(leaves)] if buckets is None else buckets
        self.gathered = []
        mesh = jaxdp.data_mesh(devices)
        shards = [cut(x, devices) if is_cut(x) else x for x in leaves]
        specs = [P("data") if is_cut(x) else P() for x in leaves]

        def gather(parts):
            self.gathered.append([s.shape for s in parts])
            return whole_of(parts)

        def sharded(leaves, data):
            arguments = [*leaves, *jax.tree.leaves(data)]
            return self.stacked(
                run_gathered(self.program, arguments, self.buckets, 0, gather, prefetch)
            )

        def plain(leaves, data):
            return self.stacked(
                jaxpr_as_fun(self.program)(*leaves, *jax.tree.leaves(data))
            )

        def on_mesh(body, specs):
            body = jax.shard_map(
                body,
                mesh=mesh,
                in_specs=(specs, P("data")),
                out_specs=P("data"),
                check_vma=False,
            )
            return jax.jit(body)

        self.compiled = on_mesh(sharded, specs).lower(shards, data).compile()
        self.found = self.compiled(shards, data)
        self.expected = on_mesh(plain, P())(leaves, data)

    def rows(self, data, devices):
        return jax.tree.map(lambda x: x[: x.shape[0] // devices], data)

    def stacked(self, results):
        """One entry per device, without gradients of integers."""
        return [x[None] for x in results if x.dtype != jax.dtypes.float0]

    def check(self, rtol=0.0):
        for found, expected in zip(self.found, self.expected, strict=True):
            assert found.dtype == expected.dtype
            np.testing.assert_allclose(found, expected, rtol=rtol)


@jax.custom_vjp
def doubled(w):
    return 2 * w


doubled.defvjp(lambda w: (2 * w, None), lambda _, g: (2 * g,))


def tied(params, x):
    table, w = params
    hidden = jnp.tanh(x @ table) @ w
    return jnp.mean((hidden @ table.T) ** 2)


def scanned(params, x):
    x, _ = lax.scan(lambda x, p: (layer(p[0], p[1], x), None), x, params)
    return jnp.mean(x**2)


def conditional(params, x):
    (w, b), (v, c) = params
    x = lax.cond(jnp.sum(x) > 0, lambda: layer(w, b, x), lambda: layer(v, c, x))
    y = lax.fori_loop(0, 3, lambda _, y: y + lax.stop_gradient(layer(v, c, y)), x)
    return jnp.mean(x * y)


def regularized(params, x):
    return mlp(params, x) + 0.1 * sum(jnp.sum(p**2) for p in jax.tree.leaves(params))


def normalized(params, x):
    for w, b in params:
        x = layer(w / jnp.sqrt(jnp.sum(w**2, axis=0, keepdims=True)), b, x)
    return jnp.mean(x**2)


def noisy(params, x, keys):
    key = keys[0]
    for i, (w, b) in enumerate(params):
        kept = jax.random.bernoulli(jax.random.fold_in(key, i), 0.5, x.shape)
        x = layer(w, b, x) * kept
    return jnp.mean(x**2)


def with_integers(params, x):
    offset, w, scale = params
    return jnp.mean(jnp.roll(x, offset[0], axis=1) @ w) * jnp.exp(scale)


def unused(params, x):
    return mlp(params[:1], x)


def rematerialized(params, x):
    for w, b in params:
        x = jax.checkpoint(layer)(w, b, x)
    return jnp.mean(x**2)


STACKED = (numbers(3, W, W), numbers(3, W, seed=9))
CASES: dict[str, tuple[Any, Any]] = {
    "layers": (mlp, layers(4)),
    "tied": (tied, [numbers(W, W), numbers(W, W, seed=1)]),
    "jitted": (jax.jit(mlp), layers(3)),
    "rule of its own": (
        lambda p, x: mlp([(doubled(w), doubled(b)) for w, b in p], x),
        layers(2),
    ),
    "remat": (rematerialized, layers(3)),
    "remat of all": (jax.checkpoint(mlp), layers(3)),
    "scan": (scanned, STACKED),
    "cond and while": (conditional, layers(2)),
    "16 bits": (
        lambda p, x: mlp(p, x.astype(jnp.bfloat16)).astype(jnp.float32),
        layers(3, jnp.bfloat16),
    ),
    "cast to 16 bits": (
        lambda p, x: mlp(
            *jax.tree.map(lambda a: a.astype(jnp.bfloat16), (p, x))
        ).astype(jnp.float32),
        layers(3),
    ),
    "two dtypes": (mlp, [*layers(1), *layers(1, jnp.bfloat16), *layers(1)]),
    "regularized": (regularized, layers(3)),
    "normalized": (normalized, layers(3)),
    "integers, scalars": (
        with_integers,
        [np.array([1, 2]), numbers(W, W), np.float32(0.3)],
    ),
    "no elements": (
        lambda p, x: mlp(p[1:], x) + jnp.sum(p[0]),
        [numbers(0, W), *layers(1)],
    ),
    "unused": (unused, layers(2)),
    "parameters alone": (lambda p, x: sum(jnp.sum(w**3) for w, _ in p), layers(2)),
}


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_whole_parameters(name):
    # What is derived of parameters may be computed in other fusions.
    rtol = 1e-4 if name == "normalized" else 0.0
    Both(*CASES[name], numbers(ROWS, W, seed=7)).check(rtol)


@pytest.mark.parametrize("prefetch", [0, 2, 9])
@pytest.mark.parametrize("devices", [1, 3, 8])
def test_on_any_number_of_devices_and_buckets_ahead(devices, prefetch):
    x = numbers(ROWS, W, seed=7)
    Both(mlp, layers(4), x, devices=devices, prefetch=prefetch).check()


def test_a_key_is_an_argument_like_others():
    keys = jax.random.split(jax.random.key(3), 4)
    Both(noisy, layers(2), numbers(ROWS, W), keys).check()


def test_numbers_that_are_no_numbers_stay_such():
    x = numbers(ROWS, W, seed=7)
    x[3, 2], x[20, 1] = np.nan, np.inf
    both = Both(mlp, layers(3), x)
    both.check()
    assert np.isnan(both.found[0]).tolist() == [True, False, False, False]


def test_each_pass_gathers_what_it_uses_in_order_of_use():
    both = Both(mlp, layers(3), numbers(ROWS, W))
    w, b = (W, W), (W,)
    # Biases are not needed backward, and nor is the first layer at all.
    assert both.gathered == [[w, b], [w, b], [w, b], [w], [w]]
    assert count(both.compiled, "all-gather") == 5


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("regularized", 6),  # backward all, for the weights' own gradients
        ("unused", 1),
        ("tied", 2),
        ("cast to 16 bits", 5),
        ("jitted", 5),
        ("remat", 6),
        ("scan", 2),
    ],
)
def test_how_many_gathers(name, expected):
    both = Both(*CASES[name], numbers(ROWS, W))
    assert len(both.gathered) == expected
    assert count(both.compiled, "all-gather") == expected


def test_order_of_use_is_that_of_the_program():
    def loss_fn(params, x):
        return mlp([params[2], params[0]], x)

    program = program_of(loss_fn, layers(3), (numbers(3, W),))
    assert order_of_use(program, range(6)) == [4, 5, 0, 1, 2, 3]


def test_the_forward_pass_ends_with_the_loss():
    program = program_of(mlp, layers(2), (numbers(3, W),))
    buckets = [[0, 1], [2, 3]]
    forward, backward = Plan.of(program, buckets, 0).gathers
    assert [b for _, b in forward] == [(0, 1), (2, 3)]
    assert [b for _, b in backward] == [(2,)]
    (only,) = Plan.of(program, buckets, None).gathers
    assert [b for _, b in only] == [(0, 1), (2, 3)]


def curved(params, x):
    """XLA computes the argument of the sine again for the cosine, backward."""
    for w, b in params:
        x = jnp.sin((x @ w) * b[None])
    return jnp.mean(x**2)


def step(stage, devices, mesh, algorithm, loss_fn=mlp, leaves_each=2):
    """Reduce-scatters each gradient as it appears; gathers, if parameters are cut."""
    kinds = {"native": (native_gather, native_scatter), "ring": (ring, ring_scatter)}
    gather, scatter = kinds[algorithm]

    def body(params, x):
        leaves, structure = jax.tree.flatten(params, is_leaf=is_shard)
        like = structure.unflatten(
            jax.ShapeDtypeStruct(s.shape, s.dtype) for s in leaves
        )
        program = program_of(loss_fn, like, (x,))
        buckets = grouped([*range(len(leaves))], leaves_each)
        results = [[i + 1 for i in bucket] for bucket in buckets]
        loss, *parts = run_gathered(
            *(program, [*leaves, x], buckets if stage == 3 else [], 0, gather, 1),
            *(results, scatter),
        )
        return lax.pmean(loss, "data"), parts

    specs = P("data") if stage == 3 else P(), P("data")
    run = jax.shard_map(
        body, mesh=mesh, in_specs=specs, out_specs=(P(), P("data")), check_vma=False
    )
    return jax.jit(run)


def native_gather(shards):
    return whole_of(shards)


def native_scatter(_, leaves):
    devices = lax.axis_size("data")
    return [
        lax.psum_scatter(
            jnp.pad(x.reshape(-1), (0, -x.size % devices)), "data", tiled=True
        )
        for x in leaves
    ]


def ring(shards):
    like = [jax.ShapeDtypeStruct(s.shape, s.dtype) for s in shards]
    like = [jnp.zeros(x.shape, x.dtype) for x in like]
    return jaxdp.all_gather([s.data for s in shards], "data", like=like)


def ring_scatter(_, leaves):
    return jaxdp.reduce_scatter(leaves, "data")


WIDE = 512
DEEP = 12
LAYER = 4 * (WIDE * WIDE + WIDE)


def step_args(stage, devices):
    params = [(shape(WIDE, WIDE), shape(WIDE)) for _ in range(DEEP)]
    if stage == 3:
        params = jax.eval_shape(
            lambda p: jax.tree.map(lambda x: cut(x, devices), p), params
        )
    return params, shape(8 * devices, WIDE)


@functools.cache
def on_cpu(algorithm, stage=3):
    run = step(stage, 8, jaxdp.data_mesh(8), algorithm)
    return run.lower(*step_args(stage, 8)).compile()


@functools.cache
def on_gpus(algorithm, stage=3, devices=8, **more):
    mesh = jaxdp.targets.mesh("h100", devices)
    return jaxdp.compile_for(
        step(stage, devices, mesh, algorithm, **more),
        *step_args(stage, devices),
        target="h100",
        devices=devices,
        compiler_options=NO_COMBINING,
    )


def layers_alive(compiled):
    """Values of a layer's size at the peak; not what a library works in."""
    module = jaxdp.analyze(compiled).module
    assert module is not None
    alive = live_at_peak(module)
    return sum(v.nbytes for v in alive if not v.shape.startswith("s8")) / LAYER


PLATFORMS = pytest.mark.parametrize(
    "compiled",
    [
        pytest.param(on_cpu, id="cpu"),
        pytest.param(on_gpus, marks=needs_compiler("h100"), id="h100"),
    ],
)


# Gradients in parts are 12 / 8 of a layer; a ring has chunks in flight.
@PLATFORMS
@pytest.mark.parametrize(("algorithm", "most"), [("ring", 8), ("native", 5)])
def test_a_few_layers_are_whole_at_once(compiled, algorithm, most):
    assert layers_alive(compiled(algorithm)) < most


@PLATFORMS
@pytest.mark.parametrize(("algorithm", "most"), [("ring", 5), ("native", 3)])
def test_a_few_gradients_are_whole_at_once_if_parameters_are(compiled, algorithm, most):
    assert layers_alive(compiled(algorithm, stage=2)) < most


@needs_compiler("h100")
def test_nothing_backward_reads_what_was_gathered_forward():
    # Buckets of two layers; the biases would keep all of them.
    compiled = on_gpus("native", loss_fn=curved, leaves_each=4)
    assert layers_alive(compiled) < 7


@needs_compiler("h100")
def test_a_few_layers_are_whole_at_once_on_many_gpus():
    assert layers_alive(on_gpus("native", devices=64)) < 3


@PLATFORMS
def test_bytes_are_those_of_two_gathers_and_a_reduction(compiled):
    matrix, bias = WIDE * WIDE // 8 * 4, WIDE // 8 * 4
    parts = DEEP * (matrix + bias) + (DEEP - 1) * matrix + DEEP * (matrix + bias)
    loss = 2 * 7 * 4
    for algorithm in ("ring", "native"):
        (sent,) = {*jaxdp.analyze(compiled(algorithm)).sent_bytes}
        assert sent == 7 * parts + loss


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_are_scattered_as_they_appear(stage):
    params, x = layers(4), numbers(ROWS, W, seed=7)
    given = jax.tree.map(lambda p: cut(p, 4), params) if stage == 3 else params
    loss, parts = step(stage, 4, jaxdp.data_mesh(4), "native")(given, x)
    each = [jax.value_and_grad(mlp)(params, rows) for rows in np.split(x, 4)]
    np.testing.assert_allclose(loss, np.mean([loss for loss, _ in each]), rtol=1e-6)
    total = jax.tree.map(lambda *g: sum(g), *[g for _, g in each])
    for found, expected in zip(parts, jax.tree.leaves(total), strict=True):
        assert found.size == -(-expected.size // 4) * 4
        found = found[: expected.size].reshape(expected.shape)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_what_is_scattered_in_one_call():
    """In the order in which the last of a bucket appears; derived ones at the end."""
    calls = []

    def scatter(numbers, leaves):
        calls.append((tuple(numbers), [x.shape for x in leaves]))
        return leaves

    def loss_fn(params, x):
        unread, *rest = params
        return mlp(rest, x) + jnp.sum(unread**2)

    params = [numbers(3), *layers(2)]
    program = program_of(loss_fn, params, (numbers(3, W),))
    arguments = [*jax.tree.leaves(params), numbers(3, W)]
    results = [[2, 1], [4, 5], [3]]
    found = run_gathered(program, arguments, [], 0, native_gather, 0, results, scatter)
    assert [numbers for numbers, _ in calls] == [(4, 5), (3,), (2, 1)]
    expected = jaxpr_as_fun(program)(*arguments)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_what_only_unneeded_results_need_is_not_computed():
    params, x = layers(4), numbers(3, W)
    program = program_of(mlp, params, (x,))
    arguments = [*jax.tree.leaves(params), x]

    def run(*arguments):
        return run_gathered(
            *(program, arguments, [], 0, native_gather), unneeded=range(1, 7)
        )

    loss, *gradients = run(*arguments)
    assert [g is None for g in gradients] == [True] * 6 + [False] * 2
    np.testing.assert_allclose(loss, mlp(params, x), rtol=1e-6)
    found = jax.make_jaxpr(run)(*arguments)
    products = [e for e in found.jaxpr.eqns if e.primitive.name == "dot_general"]
    assert len(products) == 4 + 1  # one of the last layer's two backward


@pytest.mark.parametrize("cast", [np.float32, np.int32], ids=["floats", "integers"])
def test_each_micro_batch_gathers_for_itself(cast):
    """XLA would take gathers that depend on no batch out of the loop."""
    params = layers(3)
    x = np.arange(2 * 4 * W).reshape(2, 4, W).astype(cast)

    def loss_fn(params, x):
        return mlp(params, x.astype(jnp.float32))

    def body(shards, x):
        program = program_of(loss_fn, params, (x[0],))
        buckets = grouped([*range(6)])

        def micro(total, x):
            arguments = [*jax.tree.leaves(shards, is_leaf=is_shard), x]
            found = run_gathered(program, arguments, buckets, 0, native_gather)
            return jax.tree.map(jnp.add, total, found), None

        zeros = [jnp.zeros(a.shape, a.dtype) for a in program.out_avals]
        return [x[None] for x in lax.scan(micro, zeros, x)[0]]

    run = jax.shard_map(
        body,
        mesh=jaxdp.data_mesh(2),
        in_specs=(P("data"), P(None, "data")),
        out_specs=P("data"),
        check_vma=False,
    )
    shards = jax.tree.map(lambda p: cut(p, 2), params)
    compiled = jax.jit(run).lower(shards, x).compile()
    assert jaxdp.analyze(compiled).count("all-gather") == 2 * 5
