"""A Flax NNX module as a pure function and its parameters."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

PyTree = Any


def functional(
    make: Callable[[nnx.Rngs], nnx.Module], seed: int
) -> tuple[Callable[[PyTree, Any], jax.Array], PyTree]:
    """Makes a module and splits it.

    Args:
        make: The module's class.
        seed: Of its parameters.

    Returns:
        `apply(params, x)`, and the parameters as plain nested dictionaries.
    """
    # One program that makes all parameters, instead of one for each.
    module = nnx.jit(lambda: make(nnx.Rngs(seed)))()
    graphdef, params = nnx.split(module, nnx.Param)

    def apply(params: PyTree, x: Any) -> jax.Array:
        state = nnx.State(params)
        return nnx.merge(graphdef, state)(x)

    return apply, nnx.to_pure_dict(params)
