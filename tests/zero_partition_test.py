"""Optimizers on shards of their arrays, against optax on one device."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P
from optax import contrib

import jaxdp
from jaxdp.zero.partition import on_shards, sharded_leaves, unpartitionable
from jaxdp.zero.shards import Shard, cut, is_shard, whole
from tests.helpers import compiled_text
from tests.zero_partition_helpers import (
    assert_equal,
    factories,
    gradients_of,
    numbers,
    on_many,
    on_one_device,
    placed,
    stepper,
    updated,
)

SHAPES = {"m": (5, 3), "v": (10,)}
AWKWARD = {"s": (), "one": (1,), "empty": (0, 4), "m": (17, 16), "v": (10,)}

# They are given the loss, or make nothing of nothing.
NEED_MORE = {
    *("lbfgs", "polyak_sgd", "scale_by_polyak", "momo", "momo_adam", "sophia"),
    *("reduce_on_plateau", "scale_by_muon", "chain", "named_chain"),
}


def _matrices(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def _labels(params):
    return {name: "frozen" if name == "v" else "trained" for name in params}


def _every_second(step, **extra_args):
    del extra_args
    return step % 2 == 1


def _all():
    """Optimizers; their last parts only where no other contains them."""
    found = dict(factories(optax)) | dict(factories(contrib))
    for name, make in found.items():
        if name not in NEED_MORE and name.removeprefix("scale_by_") not in {
            *found.keys() - {name}
        }:
            yield name, make


ALL = dict(_all())
COMBINED = {
    "clip-global": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "clip-adaptive": optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)),
    "clip-block": optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1)),
    "factored": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "masked": optax.masked(optax.adam(0.1), _matrices),
    "decay-of-matrices": optax.adamw(0.1, weight_decay=0.1, mask=_matrices),
    "partition": optax.partition(
        {"trained": optax.lamb(0.1), "frozen": optax.set_to_zero()}, _labels
    ),
    "several-steps": optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)), 2
    ).gradient_transformation(),
    "conditionally": optax.conditionally_transform(
        optax.normalize_by_update_norm(), _every_second
    ),
    "if-finite": optax.apply_if_finite(optax.adam(0.1), 3),
    "schedule": optax.sgd(optax.cosine_decay_schedule(0.1, 10), momentum=0.9),
    "hyperparameters": optax.inject_hyperparams(optax.adam)(0.1),
    "noise": optax.add_noise(0.1, 0.5, jax.random.key(3)),
    "flat": optax.flatten(optax.adam(0.1)),
    "mechanic": contrib.mechanize(optax.sgd(0.1)),
    "history": optax.chain(optax.scale_by_lbfgs(memory_size=2), optax.scale(-0.1)),
}


@pytest.mark.parametrize("make", ALL.values(), ids=ALL.keys())
def test_every_optimizer_of_optax_is_right(make):
    """In float64, where nothing but the order of sums makes a difference."""
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        params = numbers(SHAPES, np.float64)
        with warnings.catch_warnings(action="ignore"):  # some are deprecated
            given = make(), params, gradients_of(params)
        assert_equal(on_many(*given), on_one_device(*given), 1e-12)


@pytest.mark.parametrize("optimizer", COMBINED.values(), ids=COMBINED.keys())
def test_combined_optimizers_are_right(optimizer):
    with jax.enable_x64(True):
        params = numbers(SHAPES, np.float64)
        given = optimizer, params, gradients_of(params)
        assert_equal(on_many(*given), on_one_device(*given), 1e-12)


@pytest.mark.parametrize(
    "optimizer",
    [optax.adamw(0.1), optax.lion(0.1)],
    ids=["adamw", "lion"],
)
def test_elementwise_optimizers_are_equal_bit_for_bit(optimizer):
    """Arrays of any shape; XLA divides a scalar by a scalar in another way.

    Tests compile without LLVM's fused multiply-adds, which depend on how loops are cut.
    """
    params = {**numbers(AWKWARD), "half": numbers({"x": (6,)}, jnp.bfloat16)}
    del params["s"]
    given = optimizer, params, gradients_of(params)
    assert_equal(on_many(*given), on_one_device(*given))


def test_any_number_of_devices(mesh):
    with jax.enable_x64(True):
        params = numbers(AWKWARD, np.float64)
        given = optax.lamb(0.1), params, gradients_of(params)
        assert_equal(on_many(*given, mesh.size), on_one_device(*given), 1e-12)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.complex64])
def test_other_types(dtype):
    params = numbers({"m": (3, 5), "s": ()}, dtype)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    given = optimizer, params, gradients_of(params)
    tolerance = 4 * float(jnp.finfo(dtype).eps)
    assert_equal(on_many(*given), on_one_device(*given), tolerance)


@pytest.mark.parametrize(
    "optimizer",
    [optax.lamb(0.1), optax.adafactor(0.1, min_dim_size_to_factor=2)],
    ids=["norms", "factors"],
)
def test_layers_that_are_cut_one_by_one(optimizer):
    with jax.enable_x64(True):
        params = numbers({"stack": (3, 4, 5), "bias": (3, 7), "v": (10,)}, np.float64)
        given = optimizer, params, gradients_of(params)
        assert_equal(on_many(*given, 8, layers=3), on_one_device(*given), 1e-12)


def test_parts_that_are_cut_differently():
    x, y = (np.arange(12.0).reshape(3, 4) + i for i in (1, 20))
    shards = cut(jnp.asarray(x), 8, layers=3), cut(jnp.asarray(y), 8)
    run = jax.shard_map(
        lambda given: on_shards(lambda x, y: (x * y, y), given, (given[1], given[0]),
                                "data"),
        mesh=jaxdp.data_mesh(8), in_specs=P("data"), out_specs=P("data"),
        check_vma=False,
    )  # fmt: skip
    product, other = jax.jit(run)(shards)
    assert (product.layers, other.layers) == (1, 3)
    np.testing.assert_array_equal(whole(product), x * y)
    np.testing.assert_array_equal(whole(other), y)


@pytest.mark.parametrize("params", [{}, np.array([1, -2, 3], "f"), np.float32(2)])
def test_trees_of_one_array_or_none(params):
    given = optax.lamb(0.1), params, gradients_of(params)
    assert_equal(on_many(*given), on_one_device(*given), 1e-6)


def test_norms_of_each_leaf():
    """LAMB, by hand: the norm of a leaf, times 0.1, in the direction of Adam."""
    params = {"a": np.full(4, 10, "f"), "b": np.full(4, 0.1, "f")}
    gradients = [{"a": np.full(4, 0.1, "f"), "b": np.full(4, 5, "f")}]
    updates, *_ = on_many(optax.lamb(0.1), params, gradients)
    np.testing.assert_allclose(updates["a"], np.full(4, -1.0), rtol=1e-5)
    np.testing.assert_allclose(updates["b"], np.full(4, -0.01), rtol=1e-5)


def test_factored_statistics_stay_factored():
    params = {"w": np.ones((256, 256), "f")}
    state = jax.eval_shape(optax.adafactor(0.1).init, params)
    sizes = sum(leaf.size for leaf in jax.tree.leaves(state) if leaf.ndim)
    assert sizes == 256 + 256 + 1
    assert not any(jax.tree.leaves(sharded_leaves(state, params)))


def test_clipping_sees_the_norm_of_everything():
    params = {"w": np.zeros(2, "f")}
    gradients = [{"w": np.array([3, 4], "f")}]
    updates, *_ = on_many(optax.clip_by_global_norm(1.0), params, gradients, 2)
    np.testing.assert_allclose(updates["w"], [0.6, 0.8], rtol=1e-6)


def test_whole_leaves_count_once():
    """Norms 0.8 of what is whole, and 5 of 3 in parts and 4 whole."""
    mesh, clip = jaxdp.data_mesh(4), optax.clip_by_global_norm(1.0)

    def clipped(gradients):
        return clip.update(gradients, clip.init(gradients))[0]

    def body(single, shard, other):
        alone = on_shards(clipped, (single,), False, "data")
        return alone, on_shards(clipped, ((shard, other),), (True, False), "data")

    shard = cut(jnp.float32([3]), 4)
    run = jax.shard_map(
        body, mesh=mesh, in_specs=(P(), P("data"), P()),
        out_specs=(P(), (P("data"), P())), check_vma=False,
    )  # fmt: skip
    alone, (part, other) = jax.jit(run)(jnp.float32(0.8), shard, jnp.float32([4]))
    assert alone == np.float32(0.8)
    np.testing.assert_allclose([*whole(part), *other], [0.6, 0.8], rtol=1e-6)


@pytest.mark.parametrize("name", ["rmsprop", "lamb"])
def test_devices_without_any_element_do_no_harm(name):
    """0 / 0 in their padding reaches neither norms nor the verdict on finiteness."""
    inner = {"rmsprop": optax.rmsprop(0.1, eps=0), "lamb": optax.lamb(0.1)}[name]
    params = numbers({"x": (2,), "s": ()})
    gradients = gradients_of(params)
    optimizer = optax.chain(optax.apply_if_finite(inner, 3), _refusing_nan())
    given = optimizer, params, gradients
    found, wanted = on_many(*given), on_one_device(*given)
    assert_equal(found, wanted, 1e-6)
    assert found[2][0].last_finite and np.isfinite(found[1]["x"]).all()


def _refusing_nan():
    """Divides by whether all updates are finite."""

    def update(updates, state, params=None):
        del params
        finite = [jnp.isfinite(x).all() for x in jax.tree.leaves(updates)]
        factor = 1 / jnp.stack(finite).all().astype(jnp.float32)
        return jax.tree.map(lambda x: x * factor, updates), state

    return optax.GradientTransformation(lambda params: (), update)


def test_one_gradient_that_is_not_finite_stops_all():
    params = numbers(SHAPES)
    gradients = gradients_of(params)
    gradients[1]["v"][-1] = np.inf
    given = optax.apply_if_finite(optax.adam(0.1), 3), params, gradients
    found = on_many(*given)
    assert_equal(found, on_one_device(*given), 1e-6)
    assert found[2].total_notfinite == 1


def _reductions(x, i, b):
    """All that may be made of one array, with its padding next to it."""
    square = x.reshape(3, 3)
    return {
        "sum": x.sum(), "max": (x - 9).max(), "min": (x + 9).min(), "prod": x.prod(),
        "nan": jnp.where(x == x[4], jnp.nan, x).max(), "keepdims": square.sum((0, 1)),
        "dot": jnp.vdot(x, 1 / x), "trace": jnp.einsum("ij,ij->", square, square.T),
        "imax": (i - 99).max(), "imin": (i + 99).min(), "any": i.any(),
        "all": (i != 0).all(), "or": jax.lax.reduce_or(i, (0,)),
        "and": jax.lax.reduce_and(i | 64, (0,)), "none": (b & (i < 0)).any(),
        "every": (b | (i > 0)).all(), "argmax": x.argmax(), "rows": square.sum(0),
        "cumsum": x.cumsum(), "sorted": jnp.sort(-x), "transposed": square.T,
        "dot2": square @ square, "scan": jax.lax.fori_loop(0, 3, lambda _, y: y * x, x),
        "row": x[None, :].T, "noise": jax.random.normal(jax.random.key(1), (9,)) + x,
        "padded": jnp.pad(x, 1), "branch": jax.lax.cond(
            x.sum() > 0, lambda: (x, jnp.ones(9)), lambda: (jnp.zeros(9), x)
        ),
    }  # fmt: skip


def test_operations_of_all_kinds(mesh):
    """Whole again, and once more cut where the shape allows it."""
    x = np.array([1.5, -0.5, 3, 0.25, 2, -4, 1, 7, -2], "f")
    i, b = np.arange(1, 10, dtype=np.int32), np.arange(9) % 2 == 0
    wanted = jax.jit(_reductions)(x, i, b)
    for sharded in (False, jax.tree.map(lambda leaf: leaf.size >= 9, wanted)):
        spec = P() if sharded is False else jax.tree.map(
            lambda flag: P("data") if flag else P(), sharded
        )  # fmt: skip
        run = jax.shard_map(
            lambda *given, sharded=sharded: on_shards(
                _reductions, given, sharded, "data"
            ),
            mesh=mesh, in_specs=P("data"), out_specs=spec, check_vma=False,
        )  # fmt: skip
        given = [cut(jnp.asarray(leaf), mesh.size) for leaf in (x, i, b)]
        found = jax.tree.map(
            lambda leaf: whole(leaf) if is_shard(leaf) else leaf,
            jax.jit(run)(*given),
            is_leaf=is_shard,
        )
        assert_equal(found, wanted, 1e-6)
    np.testing.assert_allclose(wanted["dot"], 9, rtol=1e-6)
    assert np.isnan(found["nan"]) and found["or"] == 15 and found["and"] == 64


def _text(optimizer, shape):
    """The compiled update of one array on 8 devices."""
    mesh = jaxdp.data_mesh(8)
    params = {"w": jnp.ones(shape)}
    opt_state = optimizer.init(params)
    flags = sharded_leaves(opt_state, params)
    opt_state = jax.tree.map(lambda x, f: cut(x, 8) if f else x, opt_state, flags)
    shard = {"w": cut(params["w"], 8)}
    state = placed((shard, opt_state), mesh)
    step = stepper(updated(optimizer), state, mesh)
    return compiled_text(step, state[0], *state)


COLLECTIVE = r"= \(?(\w+\[[\d,]*\])\S* (all-\w+|collective-\w+|reduce-scatter)\("


def test_elementwise_optimizers_communicate_nothing():
    text = _text(optax.adamw(0.1), (61, 67))  # padded to 8 x 511
    assert not re.findall(COLLECTIVE, text)
    assert "f32[511]" in text
    assert not re.findall(r"\[(61,67|67,61|4087|4088|8,511)\]", text)


def test_norms_are_sums_of_scalars():
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(0.1))
    text = _text(optimizer, (61, 67))
    found = re.findall(COLLECTIVE, text)
    assert found and set(found) == {("f32[]", "all-reduce")}
    assert not re.findall(r"\[(61,67|67,61|4087|4088|8,511)\]", text)


def test_products_of_matrices_are_made_of_gathered_ones():
    text = _text(contrib.muon(0.1), (61, 67))
    assert ("f32[1,511]", "collective-permute") in re.findall(COLLECTIVE, text)


def test_which_leaves_of_a_state_are_cut():
    params = {"a": np.ones((2, 3), "f"), "b": {"a": np.ones(3, "f")}, "n": np.ones(())}
    optimizer = optax.MultiSteps(
        optax.chain(optax.masked(optax.adam(0.1), _matrices), optax.trace(0.9)), 2
    )
    state = optimizer.init(params)
    flags = sharded_leaves(state, params)
    assert jax.tree.structure(flags) == jax.tree.structure(state)
    cut_paths = {
        jax.tree_util.keystr(path)
        for path, flag in jax.tree_util.tree_leaves_with_path(flags)
        if flag
    }
    adam = ".inner_opt_state[0].inner_state[0]"
    assert cut_paths == {
        *(f"{adam}.{moment}['a']" for moment in ("mu", "nu")),
        *(f".inner_opt_state[1].trace{name}" for name in ("['a']", "['b']['a']")),
        *(f".acc_grads{name}" for name in ("['a']", "['b']['a']")),
        *(".inner_opt_state[1].trace['n']", ".acc_grads['n']"),
    }


def test_paths_decide_before_shapes():
    """The state of b/a has the shape of a, and is none of a's."""
    params = {"a": np.ones(3), "b": {"a": np.ones((3, 2))}}
    state = {"sums": {"a": np.ones(3), "b": {"a": np.ones(3)}}, "a": np.ones(1)}
    flags = {"sums": {"a": True, "b": {"a": False}}, "a": False}
    assert sharded_leaves(state, params) == flags


@pytest.mark.parametrize(("shape", "cuts"), [((3,), [False, True]), ((), [False] * 2)])
def test_the_state_of_a_single_array(shape, cuts):
    state = jax.eval_shape(optax.scale_by_adam().init, np.ones(shape, "f"))
    flags = sharded_leaves(state, np.ones(shape, "f"))
    assert [flags.count, flags.mu] == cuts


def _acting(act):
    """A gradient transformation that acts on each leaf."""
    return lambda updates: jax.tree.map(act, updates)


def _called_back(x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return io_callback(lambda y: y, shape, x)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (_called_back, r"io_callback of float32\[5,3\] would act once on every device"),
        (lambda x: jax.lax.psum(x, "data"), r"raised NameError .*data"),
        (lambda x: jaxdp.all_reduce(x, "data"), r"raised ValueError .*data"),
        (jax.jit(_called_back), r"io_callback of float32\[5,3\]"),
        (lambda x: jax.lax.cond(x.sum() > 0, _called_back, lambda x: x, x), "io_call"),
    ],
    ids=["io_callback", "psum", "all_reduce", "jitted", "branch"],
)
def test_what_cannot_run_on_every_device_is_named(act, message):
    why = unpartitionable(_acting(act), numbers(SHAPES))
    assert why is not None and re.search(message, why)


def test_collectives_are_named_where_their_axis_is_bound():
    found = []

    def body(x):
        for act in (jax.lax.psum, jaxdp.all_reduce):
            found.append(unpartitionable(lambda y, act=act: act(y, "data"), x))
        return x

    mesh = jaxdp.data_mesh(2)
    run = jax.shard_map(
        body, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    jax.eval_shape(run, np.ones(2, "f"))
    assert re.search(r"psum\S* of float32\[1\] uses the devices of a mesh", found[0])
    assert "uses the devices of a mesh" in found[1]


def test_what_is_shown_is_whole(capfd):
    def show(x):
        jax.debug.print("{x}", x=x)
        return x

    assert unpartitionable(_acting(show), numbers(SHAPES)) is None
    params = {"x": np.array([1, 2, 3], "f")}
    optimizer = optax.stateless(lambda updates, _: _acting(show)(updates))
    on_many(optimizer, params, [params], 2)
    jax.effects_barrier()
    assert capfd.readouterr().out.splitlines() == ["[1. 2. 3.]"] * 2


def test_an_axis_must_be_bound():
    shard = Shard(jnp.ones(2), (2,), 1)
    with pytest.raises(ValueError, match="on_shards got axis_name='data'"):
        on_shards(lambda x: x, (shard,), True, "data")
