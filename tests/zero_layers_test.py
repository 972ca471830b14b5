import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxdp
from jaxdp.designs.zero_state import initial
from jaxdp.program.memory.live import live_at_peak
from jaxdp.zero.layers import LayerShards, check_scanned, scan_layers
from jaxdp.zero.shards import cut, whole
from jaxdp.zero.wire import Wire
from tests.compilers import needs_compiler, shape, text_of

L, W, ROWS = 5, 6, 24


def numbers(*sizes, seed=0):
    return np.random.default_rng(seed).normal(size=sizes).astype(np.float32) / 2


def stack(layers=L, width=W, dtype=np.float32):
    return {
        "w": numbers(layers, width, width).astype(dtype),
        "b": numbers(layers, width, seed=1).astype(dtype),
    }


def layer(params, x):
    return jnp.tanh(x @ params["w"] + params["b"][None])


def loss_fn(stacked, x, **options):
    x = scan_layers(layer, stacked, x, **options)
    return jnp.mean(x.astype(jnp.float32) ** 2)


def by_hand(stacked, x):
    for i in range(len(stacked["w"])):
        x = layer({name: leaf[i] for name, leaf in stacked.items()}, x)
    return jnp.mean(x.astype(jnp.float32) ** 2)


def gradient(mesh, algorithm="ring", loss_fn=loss_fn):
    """Of the sum over devices of their losses; and each device's loss."""

    def body(shards, x):
        stacked = LayerShards.of(shards, Wire.over("data", algorithm))
        loss, gradients = jax.value_and_grad(loss_fn)(stacked, x)
        return loss[None], gradients.shards

    run = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(P("data"), P("data")),
        out_specs=(P("data"), P("data")),
        check_vma=False,
    )
    return jax.jit(run)


def cut_stack(stacked, devices):
    return {name: cut(x, devices, len(x)) for name, x in stacked.items()}


BY_HAND = jax.jit(jax.value_and_grad(by_hand))


def expected(stacked, x, devices):
    """A device after the other, whole."""
    rows = np.split(x, devices)
    each = [BY_HAND(stacked, r) for r in rows]
    losses = np.array([loss for loss, _ in each])
    return losses, jax.tree.map(lambda *g: sum(g), *[g for _, g in each])


@pytest.mark.parametrize("algorithm", ["ring", "native"])
def test_losses_and_sums_of_gradients(mesh, algorithm):
    check_gradient(mesh, algorithm)


@pytest.mark.parametrize(
    "options",
    [{"unroll": 2}, {"policy": jax.checkpoint_policies.dots_saveable}],
    ids=["unrolled", "products kept"],
)
def test_losses_and_sums_of_gradients_with(options):
    check_gradient(jaxdp.data_mesh(2), "native", **options)


def check_gradient(mesh, algorithm, **options):
    devices, x = mesh.size, numbers(ROWS, W, seed=2)
    run = gradient(mesh, algorithm, functools.partial(loss_fn, **options))
    losses, gradients = run(cut_stack(stack(), devices), x)
    wanted, sums = expected(stack(), x, devices)
    np.testing.assert_allclose(losses, wanted, rtol=1e-6)
    for name, shard in gradients.items():
        assert (shard.shape, shard.layers) == (stack()[name].shape, L)
        np.testing.assert_allclose(whole(shard), sums[name], rtol=1e-5, atol=1e-7)


def test_a_plain_stack_is_scanned_as_it_is():
    x = numbers(ROWS, W, seed=2)
    found = jax.jit(jax.value_and_grad(loss_fn))(stack(), x)
    wanted = BY_HAND(stack(), x)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
        *(found, wanted),
    )


@pytest.mark.parametrize("algorithm", ["ring", "native"])
def test_sums_of_narrow_gradients_are_made_in_float32(algorithm):
    """256 and 8 ones: in bfloat16, each one alone would be lost."""

    def loss(stacked, x):
        return jnp.sum(scan_layers(lambda w, y: y + w, stacked, x * 0) * x)

    x = np.ones(8, jnp.bfloat16)
    x[0] = 256
    shards = cut(np.zeros((2, 1), jnp.bfloat16), 8, 2)
    _, gradients = gradient(jaxdp.data_mesh(8), algorithm, loss)(shards, x)
    assert whole(gradients).astype(np.float32).tolist() == [[264.0], [264.0]]


def test_leaves_may_have_any_shape_and_dtype():
    def layer(params, x):
        shift, scale, (empty, w) = params
        x = jnp.roll(x, shift[0], axis=1) * scale + jnp.sum(empty)
        return x @ w.astype(x.dtype)

    def loss(floats, x, shift):
        scale, empty, w = floats.shards
        stacked = LayerShards.of((shift, scale, (empty, w)), floats.wire)
        return jnp.mean(scan_layers(layer, stacked, x) ** 2)

    def plain(floats, x, shift):
        scale, empty, w = floats
        return jnp.mean(scan_layers(layer, (shift, scale, (empty, w)), x) ** 2)

    shift = np.array([[1, 2, 3], [4, 5, 6]])
    floats = [
        *(numbers(2), numbers(2, 0, 3)),
        numbers(2, W, W, seed=3).astype(jnp.bfloat16),
    ]
    x = numbers(4, W, seed=2)
    kept = cut(shift, 2, 2)

    def body(shards, kept, x):
        of = functools.partial(loss, shift=kept)
        stacked = LayerShards.of(shards, Wire("data"))
        return jax.grad(of)(stacked, x).shards

    run = jax.shard_map(
        body,
        mesh=jaxdp.data_mesh(2),
        in_specs=(P("data"), P("data"), P()),
        out_specs=P("data"),
        check_vma=False,
    )
    found = jax.jit(run)([cut(f, 2, 2) for f in floats], kept, x)
    wanted = jax.grad(plain)(floats, x, shift)
    for shard, leaf in zip(found, wanted, strict=True):
        assert shard.dtype == leaf.dtype
        half = whole(shard).astype(np.float32) / 2  # both devices have the same rows
        tolerance = 1e-2 if leaf.dtype == jnp.bfloat16 else 1e-5
        np.testing.assert_allclose(half, leaf.astype(np.float32), rtol=tolerance)


BIG, DEEP = 256, 16
LAYER = 4 * (BIG * BIG + BIG)


@functools.cache
def compiled(platform, algorithm):
    mesh = jaxdp.data_mesh(8)
    shards = jax.eval_shape(
        functools.partial(cut_stack, devices=8),
        {"w": shape(DEEP, BIG, BIG), "b": shape(DEEP, BIG)},
    )
    x = shape(64, BIG)
    if platform == "cpu":
        return gradient(mesh, algorithm).lower(shards, x).compile()
    return jaxdp.compile_for(gradient(mesh, algorithm), shards, x, target=platform)


PLATFORMS = pytest.mark.parametrize(
    "platform", ["cpu", pytest.param("h100", marks=needs_compiler("h100"))]
)


@PLATFORMS
@pytest.mark.parametrize("algorithm", ["ring", "native"])
def test_a_few_layers_are_whole_at_once(platform, algorithm):
    module = jaxdp.analyze(compiled(platform, algorithm)).module
    assert module is not None
    alive = live_at_peak(module)
    # The gradients, DEEP / 8 of a layer, are there once more as the loop makes them.
    total = sum(v.nbytes for v in alive if not v.shape.startswith("s8"))
    assert total / LAYER < 2 * DEEP / 8 + 3


@PLATFORMS
def test_gathers_and_reductions_are_in_the_loops(platform):
    report = jaxdp.analyze(compiled(platform, "native"))
    assert report.static_count("all-gather") == 2  # one in each loop
    assert report.count("all-gather") == 2 * DEEP
    assert report.static_count("reduce-scatter") == 1
    (sent,) = {*report.sent_bytes}
    assert sent == 3 * 7 * DEEP * LAYER // 8
    ring = jaxdp.analyze(compiled(platform, "ring"))
    assert ring.static_count("collective-permute") == 3 * 7
    assert {*ring.sent_bytes} == {sent}
    assert "while" in text_of(compiled(platform, "ring"))


def program(loss_fn, params, x):
    return jax.make_jaxpr(jax.value_and_grad(loss_fn))(params, x)


def in_mesh(check):
    """Runs a check on two devices' parts, as a loss finds them."""

    def body(shards, x):
        check({"blocks": LayerShards.of(shards, Wire("data")), "head": x[0]}, x)
        return x

    run = jax.shard_map(
        body,
        mesh=jaxdp.data_mesh(2),
        in_specs=P("data"),
        out_specs=P("data"),
        check_vma=False,
    )
    jax.eval_shape(run, cut_stack(stack(), 2), numbers(ROWS, W))


def scanned(params, x):
    return loss_fn(params["blocks"], x) + jnp.sum(params["head"])


def test_layers_that_are_only_scanned_pass():
    def check(params, x):
        loss = program(scanned, params, x)
        check_scanned(loss, [0, 1], ["b", "w"])
        low = program(
            lambda p, x: scanned(jax.tree.map(lambda a: a.astype("bfloat16"), p), x),
            *(params, x.astype("bfloat16")),
        )
        check_scanned(low, [0, 1], ["b", "w"])

    in_mesh(check)


def test_layers_that_are_decayed_by_the_loss_are_refused():
    def decayed(params, x):
        return scanned(params, x) + sum(jnp.sum(p**2) for p in jax.tree.leaves(params))

    def check(params, x):
        message = r"loss_fn computes \w+ of params\['blocks'\]\['b'\], which Zero has"
        names = ["params['blocks']['b']", "params['blocks']['w']"]
        with pytest.raises(ValueError, match=message):
            check_scanned(program(decayed, params, x), [0, 1], names)

    in_mesh(check)


@pytest.mark.parametrize(
    "use",
    [
        lambda blocks: blocks["w"],
        lambda blocks: jnp.sum(blocks),
        lambda blocks: [*blocks],
        lambda blocks: 2 * blocks,
        lambda blocks: np.asarray(blocks),
    ],
    ids=["key", "sum", "iterate", "multiply", "numpy"],
)
def test_layers_that_are_used_directly_are_refused(use):
    def check(params, x):
        del x
        message = (
            r"used stacked layers \(\['b'\] \(5, 6\), \['w'\] \(5, 6, 6\)\).*"
            r"jaxdp\.scan_layers\(layer, stacked, carry\)"
        )
        with pytest.raises(TypeError, match=message):
            use(params["blocks"])

    in_mesh(check)


@pytest.mark.parametrize(
    ("stacked", "shapes"),
    [
        ({"a": np.ones((3, 2)), "b": np.ones((4, 2))}, r"\(3, 2\), \(4, 2\)"),
        ({"a": np.float32(1)}, r"\(\)"),
        ({"a": np.ones((0, 2))}, r"\(0, 2\)"),
        ({}, "none"),
    ],
    ids=["lengths", "scalar", "no layers", "no leaves"],
)
def test_what_is_no_stack_is_refused(stacked, shapes):
    message = rf"leaves of shapes: {shapes}\. All must be \[L, \.\.\.\]"
    with pytest.raises(ValueError, match=message):
        scan_layers(layer, stacked, np.ones((2, 2)))


def test_a_state_is_cut_as_its_own_parameter_is():
    """The path of head/layers/w ends with that of layers/w, which is a stack."""
    params = {"layers": {"w": numbers(4, 6)}, "head": {"layers": {"w": numbers(4, 6)}}}
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params["layers"])]
    stacks = [(jax.tree_util.DictKey("layers"), *path) for path in paths]
    trace = initial(optax.trace(0.9), params, 2, stacks).shards.trace
    assert trace["layers"]["w"].layers == 4
    assert trace["head"]["layers"]["w"].layers == 1
