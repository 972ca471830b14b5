"""What becomes of single operations whose operands are shards.

A rule returns the results as `Value`s, or None: then the operation needs its operands
whole. An operation without a rule always does, so the tables below decide what is
cheap, never what is right.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxdp.jaxprs import evaluate
from jaxdp.zero.partition_values import Value, common_layers

Rule = Callable[[Any, Sequence[Value]], list[Value] | None]

# Element i of the result is made of the elements i of operands, and of scalars.
ELEMENTWISE = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    cbrt ceil clamp clz complex conj convert_element_type copy copy_p cos cosh digamma
    div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac
    imag integer_pow is_finite le lgamma log log1p logistic lt max min mul name ne neg
    nextafter not or polygamma population_count pow random_gamma_grad real
    reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient
    sub tan tanh xor zeta
""".split()


def bound(eqn: Any, operands: Sequence[Any], **changed: Any) -> list[Any]:
    """Runs an operation on other operands, with changed parameters."""
    return evaluate(eqn.replace(params={**eqn.params, **changed}), operands)


def elementwise(eqn: Any, values: Sequence[Value]) -> list[Value] | None:
    """On parts if any operand is in parts; on scalars if all operands are such."""
    axis, shape = values[0].axis, eqn.outvars[0].aval.shape
    if any(v.shape not in (shape, ()) for v in values):
        return None
    alike = [v for v in values if v.shape == shape]
    layers = common_layers(alike)
    if layers is not None:
        operands = [
            v.as_part(layers).data if v.shape == shape else v.as_whole() for v in values
        ]
        (result,) = bound(eqn, operands)
        return [Value(axis, shape, part=alike[0].as_part(layers).like(result))]
    if all(v.fill is not None for v in alike):
        (result,) = bound(eqn, [v.as_fill() for v in values])
        return [Value(axis, shape, fill=result)]
    return None


def in_order(eqn: Any, values: Sequence[Value]) -> list[Value] | None:
    """Another shape, the same elements in the same order: nothing to do."""
    return [values[0].reshaped(eqn.outvars[0].aval.shape)]


def passed(eqn: Any, values: Sequence[Value]) -> list[Value]:
    """The operands: inside `shard_map` there is nowhere else for them to be."""
    del eqn
    return list(values)


def broadcast(eqn: Any, values: Sequence[Value]) -> list[Value] | None:
    """One element for all stays one."""
    value, shape = values[0], eqn.outvars[0].aval.shape
    if value.size == math.prod(shape):
        return in_order(eqn, values)
    if value.fill is None and value.size != 1:
        return None
    return [Value(value.axis, shape, fill=value.as_fill())]


def transpose(eqn: Any, values: Sequence[Value]) -> list[Value] | None:
    """Only dims of one element move: the same elements in the same order."""
    shape = values[0].shape
    moved = [dim for dim in eqn.params["permutation"] if shape[dim] != 1]
    return in_order(eqn, values) if moved == sorted(moved) else None


def reduction(eqn: Any, values: Sequence[Value]) -> list[Value] | None:
    """Of all elements: of this device's first, then of one scalar per device."""
    (value,), shape = values, eqn.outvars[0].aval.shape
    if value.part is None or math.prod(shape) != 1 or not value.size:
        return None
    name, axis = eqn.primitive.name, value.axis
    part = axis.masked(value.part, _neutral(name, value.part.dtype))
    (result,) = bound(eqn, [part], axes=(0,))
    if name == "reduce_sum":
        result = axis.summed(result)
    else:
        (result,) = bound(eqn, [axis.collected(result)], axes=(0,))
    return [Value(axis, shape, whole=result.reshape(shape))]


def dot_product(eqn: Any, values: Sequence[Value]) -> list[Value] | None:
    """Of two arrays as vectors: of this device's parts first, then one sum."""
    left, right = values
    (contracted, _), layers = eqn.params["dimension_numbers"], common_layers(values)
    every = tuple(range(len(left.shape)))
    in_pairs = left.shape == right.shape and contracted == (every, every)
    if not in_pairs or not left.size or layers is None:
        return None
    parts = [left.axis.masked(value.as_part(layers), 0) for value in values]
    (partial,) = bound(eqn, parts, dimension_numbers=(((0,), (0,)), ((), ())))
    return [Value(left.axis, (), whole=left.axis.summed(partial))]


def _neutral(name: str, dtype: Any) -> Any:
    """The element that changes no result of a reduction."""
    if name in ("reduce_max", "reduce_min"):
        lowest = name == "reduce_max"
        if dtype == jnp.bool_:
            return not lowest
        if jnp.issubdtype(dtype, jnp.inexact):
            return -np.inf if lowest else np.inf
        return jnp.iinfo(dtype).min if lowest else jnp.iinfo(dtype).max
    if name == "reduce_and":
        return np.invert(np.zeros((), dtype))
    return 1 if name == "reduce_prod" else 0


REDUCTIONS = ("sum", "max", "min", "prod", "and", "or")
RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **{f"reduce_{kind}": reduction for kind in REDUCTIONS},
    "squeeze": in_order,
    "reshape": lambda eqn, values: (
        in_order(eqn, values) if eqn.params["dimensions"] is None else None
    ),
    **dict.fromkeys(("optimization_barrier", "reshard"), passed),
    "broadcast_in_dim": broadcast,
    "dot_general": dot_product,
    "transpose": transpose,
}
