"""What makes XLA wait: a dependence on data that is never true.

XLA drops its barriers before it schedules, and knows of no number that it is not above
infinity.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp import marks


def never(values: Sequence[jax.Array]) -> jax.Array:
    """`[]`, False: whether the first number of any array is above infinity.

    Args:
        values: At least one, each with an element.
    """
    firsts = [lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(()) for x in values]
    above = [jnp.real(x).astype(jnp.float32) > jnp.inf for x in firsts]
    return marks.constant(functools.reduce(jnp.logical_or, above))
