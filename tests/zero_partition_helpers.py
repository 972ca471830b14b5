"""Optimizers run twice: by optax on one device, and on shards of their arrays."""

import functools
import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdp
from jaxdp.zero.partition import on_shards, sharded_leaves
from jaxdp.zero.shards import cut, is_shard, whole

PyTree = Any
STEPS = 4


def numbers(shapes: dict[str, tuple], dtype: Any = None) -> dict[str, np.ndarray]:
    """Distinct numbers of both signs, all far from zero."""
    random = np.random.default_rng(len(shapes))

    def make(shape):
        values = random.uniform(0.5, 2, shape) * random.choice([-1.0, 1.0], shape)
        return np.asarray(values, dtype or np.float32)

    return {name: make(shape) for name, shape in shapes.items()}


def gradients_of(params: PyTree) -> list[PyTree]:
    """For each step others, an element's of the same sign: no sum cancels."""
    random = np.random.default_rng(7)
    signs = jax.tree.map(lambda x: random.choice([-1, 1], x.shape), params)

    def gradient(step):
        return jax.tree.map(
            lambda x, sign: np.asarray(
                (1 + step / 3) * sign * random.uniform(0.5, 1.5, x.shape), x.dtype
            ),
            params,
            signs,
        )

    return [gradient(step) for step in range(STEPS)]


def updated(optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """Gradients, parameters and state to updates, parameters and state."""

    def update(gradients, params, opt_state):
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return updates, optax.apply_updates(params, updates), opt_state

    return update


def on_one_device(
    optimizer: optax.GradientTransformation, params: PyTree, gradients: list[PyTree]
) -> Any:
    """Updates of the last step, parameters and state: optax alone."""
    update = jax.jit(updated(optimizer))
    result = None, params, jax.jit(optimizer.init)(params)
    for gradient in gradients:
        result = update(gradient, *result[1:])
    return result


def on_many(
    optimizer: optax.GradientTransformation,
    params: PyTree,
    gradients: list[PyTree],
    devices: int = 8,
    layers: int = 1,
) -> Any:
    """The same on shards, and put together; arrays of `layers` rows are cut by them."""
    mesh = jaxdp.data_mesh(devices)
    opt_state = jax.jit(optimizer.init)(params)
    flags = sharded_leaves(opt_state, params)

    def parts(tree, flags):
        return placed(jax.tree.map(part, tree, flags), mesh)

    def part(leaf, flag):
        pieces = layers if np.shape(leaf)[:1] == (layers,) else 1
        return cut(jnp.asarray(leaf), devices, pieces) if flag else leaf

    every = jax.tree.map(lambda leaf: True, params)
    state = parts(params, every), parts(opt_state, flags)
    step = stepper(updated(optimizer), state, mesh)
    result = None, *state
    for gradient in gradients:
        result = step(parts(gradient, every), *result[1:])
    check_padding(result)
    return together(result)


def stepper(update: Callable[..., Any], state: tuple[PyTree, PyTree], mesh: Any) -> Any:
    """The compiled update on shards."""

    def body(gradients, params, opt_state):
        sharded = params, params, opt_state
        return on_shards(update, (gradients, params, opt_state), sharded, "data")

    params, opt_state = specs(state)
    return jax.jit(
        jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(params, params, opt_state),
            out_specs=(params, params, opt_state),
            check_vma=False,  # on_shards asks for it
        )
    )


def specs(tree: PyTree) -> PyTree:
    """Where leaves lie: shards cut, others everywhere."""
    return jax.tree.map(
        lambda x: P("data") if is_shard(x) else P(), tree, is_leaf=is_shard
    )


def placed(tree: PyTree, mesh: Any) -> PyTree:
    """On the devices."""
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs(tree))
    return jax.device_put(tree, shardings)


def together(tree: PyTree) -> PyTree:
    """Whole arrays."""
    return jax.tree.map(
        lambda x: whole(x) if is_shard(x) else x, tree, is_leaf=is_shard
    )


def check_padding(tree: PyTree) -> None:
    """Fails unless padding is zero everywhere."""
    for leaf in jax.tree.leaves(tree, is_leaf=is_shard):
        if is_shard(leaf):
            again = cut(np.asarray(whole(leaf)), leaf.devices, leaf.layers)
            np.testing.assert_array_equal(np.asarray(leaf.data), again.data)


def assert_equal(found: PyTree, wanted: PyTree, tolerance: float = 0) -> None:
    """Fails unless structures, types and numbers agree.

    Args:
        found: A tree.
        wanted: The reference.
        tolerance: Relative to the largest element of a leaf.
    """
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    leaves = jax.tree_util.tree_leaves_with_path(wanted)
    for (path, leaf), other in zip(leaves, jax.tree.leaves(found), strict=True):
        name = jax.tree_util.keystr(path)
        assert (other.dtype, other.shape) == (leaf.dtype, leaf.shape), name
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf, other = jax.random.key_data(leaf), jax.random.key_data(other)
        leaf, other = np.asarray(leaf), np.asarray(other)
        wide = leaf.astype(np.result_type(leaf, np.float32))
        bound = tolerance * np.max(np.abs(wide), initial=0)
        np.testing.assert_allclose(
            other.astype(wide.dtype), wide, rtol=0, atol=bound, err_msg=name
        )


def factories(module: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """All optimizers of a module that need a learning rate or nothing."""
    for name, value in vars(module).items():
        if not isinstance(value, FunctionType | functools.partial):
            continue
        signature = inspect.signature(value)
        if "GradientTransformation" not in str(signature.return_annotation):
            continue
        required = [
            p.name
            for p in signature.parameters.values()
            if p.default is p.empty and p.kind is not p.VAR_POSITIONAL
        ]
        if required == ["learning_rate"]:
            yield name, lambda make=value: make(0.1)
        elif not required:
            yield name, value
