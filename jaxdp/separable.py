"""Whether a function treats elements one by one, so that it may run on parts of a tree.

Adam does; clipping by the global norm does not: on a part it would see the norm of the
part, and train another model without a word. No list of names can know, since
optimizers are chains of functions. So the function is tried on a small tree, whole and
cut in two, with gradients of very different sizes and a NaN; and traced with the true
shapes, whole and as parts, since Python may choose by shape what it computes.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr

from jaxdp import jaxprs
from jaxdp.buckets import same_types
from jaxdp.serving import part_shape

PyTree = Any
SCALES = (1.0, 1e-9, 1e9)  # of the gradients of three updates
LENGTH = 6  # elements of a leaf, cut in two


def mixing_of_optimizer(
    optimizer: optax.GradientTransformation, params: PyTree, parts: int
) -> str | None:
    """Why an optimizer cannot run on parts of these parameters; None if it can."""

    def updates(trees):
        params, *gradients = trees
        state, results = optimizer.init(params), []
        update = optax.with_extra_args_support(optimizer).update
        for gradient in gradients:
            result, state = update(gradient, state, params, staleness=jnp.int32(2))
            results.append(result)
        return results

    def tree(seed, scale=1.0, bad=False):
        return _numbers(params, seed, scale, bad)

    small = [tree(0), *(tree(i, scale) for i, scale in enumerate(SCALES, 1))]
    small.append(tree(len(small), bad=True))
    return _mixing(updates, small, [params] * 2, parts, several=True)


def mixing_of_aggregate(
    aggregate: Callable[[PyTree], PyTree], params: PyTree, workers: int, parts: int
) -> str | None:
    """Why an aggregate cannot run on parts of these gradients; None if it can."""
    stacked = [_numbers(params, i, 10.0 ** (3 * i)) for i in range(workers)]
    small = jax.tree.map(lambda *leaves: jnp.stack(leaves), *stacked)
    return _mixing(aggregate, small, params, parts, (workers,))


def check_aggregate(
    aggregate: Callable[[PyTree], PyTree], params: PyTree, workers: int, parts: int
) -> None:
    """Refuses an aggregate that does not return one gradient.

    Raises:
        ValueError: Its result has another structure, or other shapes or dtypes.
    """
    wanted = _true_shapes(params, parts)
    stacked = _true_shapes(params, parts, (workers,))
    got = jax.eval_shape(aggregate, stacked)
    if not same_types(got, wanted):
        raise ValueError(
            f"ParameterServer got an aggregate that makes {_described(got)} of the "
            f"gradients of {workers} workers. It receives leaves with a leading axis "
            f"of {workers} and must return the same tree without it: "
            f"{_described(wanted)}. Reduce every leaf over axis 0, and no other."
        )


def _mixing(
    function: Callable[[PyTree], PyTree],
    small: PyTree,
    true: PyTree,
    parts: int,
    leading: tuple[int, ...] = (),
    several: bool = False,
) -> str | None:
    """Compares the results of the whole with those of its halves.

    If there are `several` results, they are a list, and a leaf is named without its
    place in that.
    """
    function = jax.jit(function)
    trees = [small, *(_half(small, half, len(leading)) for half in (0, 1))]
    try:
        whole, *halves = map(function, trees)
    except Exception as error:  # whatever it does, it does it on parts only
        return f"trying it on small parts raised {type(error).__name__} ({error})"
    for (path, leaf), *pieces in zip(
        jax.tree_util.tree_leaves_with_path(whole),
        *map(jax.tree.leaves, halves),
        strict=True,
    ):
        together = np.concatenate(pieces, -1) if leaf.ndim else pieces[0]
        tolerance = 64 * float(jnp.finfo(leaf.dtype).eps)
        if not np.allclose(together, leaf, tolerance, 0, equal_nan=True):
            name = jax.tree_util.keystr(path[several:])
            return f"an element of {name or 'the only leaf'} depends on others"
    shapes = [_true_shapes(true, count, leading) for count in (1, parts)]
    programs = [_operations(jax.make_jaxpr(function)(tree)) for tree in shapes]
    if programs[0] != programs[1]:
        return "what it computes depends on the shapes of the leaves"
    return None


def _numbers(like: PyTree, seed: int, scale: float, bad: bool = False) -> PyTree:
    """Distinct numbers in leaves of `LENGTH` elements; one of them NaN if `bad`."""
    random = np.random.default_rng(seed)

    def make(leaf):
        shape = (1,) * (np.ndim(leaf) - 1) + (LENGTH,) if np.ndim(leaf) else ()
        most = float(jnp.finfo(jnp.result_type(leaf)).max) / 8
        numbers = np.clip(scale * random.normal(size=shape), -most, most)
        if bad and numbers.size > 1:
            numbers[..., -1] = np.nan
        return jnp.asarray(numbers, jnp.result_type(leaf))

    return jax.tree.map(make, like)


def _half(tree: PyTree, half: int, leading: int) -> PyTree:
    """The first or second half of every leaf; scalars as they are."""
    return jax.tree.map(
        lambda leaf: jnp.split(leaf, 2, -1)[half] if leaf.ndim > leading else leaf,
        tree,
    )


def _true_shapes(tree: PyTree, parts: int, leading: tuple[int, ...] = ()) -> PyTree:
    """A part of every leaf, with more axes in front."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            (*leading, *part_shape(np.shape(leaf), parts)), jnp.result_type(leaf)
        ),
        tree,
    )


def _described(tree: PyTree) -> str:
    """Shapes and dtypes of the leaves, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return ", ".join(
        f"{jax.tree_util.keystr(path) or 'one array'} {leaf.dtype}{list(leaf.shape)}"
        for path, leaf in leaves
    )


def _operations(program: ClosedJaxpr) -> list[str]:
    """Names of all primitives, in order."""
    return [eqn.primitive.name for eqn in jaxprs.equations(program)]
