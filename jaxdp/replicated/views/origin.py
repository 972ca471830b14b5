"""Where a NaN comes from: a program evaluated equation by equation.

A NaN in a result is followed back, through the equations that passed it on, to the one
that made it out of good numbers. One that no result depends on, such as that of the
branch which `jnp.where` drops, is never met.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jaxdp import jaxprs
from jaxdp.replicated.devices import Device
from jaxdp.replicated.views.places import layer_of, source_of, trace

Arrays = list[Any]
Kinds = tuple[str, ...]

# Equations that are entered; the rest are evaluated as one: `cond`, `while`, and a
# `scan` that could not be unrolled.
ENTERED = jaxprs.CALLS | {"remat", "remat2", "checkpoint"}


class Origin(NamedTuple):
    """The equation that made a NaN.

    Attributes:
        kind: "nan" or "inf".
        operation: The name of its primitive.
        layer: The innermost Flax module that was being called; empty for none.
        source: File, line and function; empty if no line of the user's led there.
        is_backward: Whether it belongs to the transposed half of a gradient.
    """

    kind: str
    operation: str
    layer: str
    source: str
    is_backward: bool


class Value(NamedTuple):
    """An array, with what is wrong with it and which equation made it."""

    array: Any
    bad: str | None = None
    maker: "Made | None" = None


class Made(NamedTuple):
    """An equation that was evaluated.

    Attributes:
        order: How many came before.
        eqn: The equation.
        callers: The calls around it, outermost first.
        bad: Its inputs that are bad, without those that no equation made.
    """

    order: int
    eqn: Any
    callers: tuple[Any, ...]
    bad: list[Value]


def check(arrays: Sequence[Any], kinds: Kinds) -> list[str | None]:
    """What is wrong with each array: "nan", "inf" or None.

    Args:
        arrays: All on one device; those without fractions are never bad.
        kinds: What to look for.
    """
    places = [i for i, array in enumerate(arrays) if _is_inexact(array)]
    found: list[str | None] = [None] * len(arrays)
    marks = jax.device_get(_marks([arrays[i] for i in places])) if places else []
    for i, mark in zip(places, marks, strict=True):
        found[i] = next((kind for kind in kinds if mark[kind]), None)
    return found


def find(
    function: Callable[..., Any], arrays: Arrays, device: Device, kinds: Kinds
) -> Origin | None:
    """Evaluates `function(arrays)` on a device, and explains the NaN in its results.

    Args:
        function: Any that JAX can trace. Results are all leaves it returns.
        arrays: On the device.
        device: Where constants go.
        kinds: What to look for.

    Returns:
        Of the equations from which the bad results come the first; None if no result is
        bad.
    """
    program = trace(function, arrays)
    count = iter(range(1 << 62))
    given = [Value(array) for array in jax.tree.leaves(arrays)]
    with jax.default_device(device):
        results = _evaluate(program.jaxpr, program.consts, given, kinds, (), count)
    sources = list(_sources(results))
    if not sources:
        return None
    kind, made = min(sources, key=lambda source: source[1].order)
    scopes = [str(eqn.source_info.name_stack) for eqn in (*made.callers, made.eqn)]
    return Origin(
        kind,
        made.eqn.primitive.name,
        layer_of(scopes),
        source_of((made.eqn, *reversed(made.callers))),
        scopes[0].startswith("transpose("),
    )


def _evaluate(
    jaxpr: Any,
    consts: Sequence[Any],
    given: Sequence[Value],
    kinds: Kinds,
    callers: tuple[Any, ...],
    count: Iterator[int],
) -> list[Value]:
    """The results of a program, and how each came about."""
    known: dict[Any, Value] = dict(
        zip(jaxpr.constvars, map(Value, consts), strict=True)
    )
    known.update(zip(jaxpr.invars, given, strict=True))

    def read(atom):
        return Value(atom.val) if isinstance(atom, Literal) else known[atom]

    for eqn in jaxpr.eqns:
        values = [read(atom) for atom in eqn.invars]
        inner = _called(eqn)
        if inner is not None:
            body, own = getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())
            path = (*callers, eqn)
            made = _evaluate(body, own, values, kinds, path, count)
        else:
            made = _run(eqn, values, kinds, callers, next(count))
        known.update(zip(eqn.outvars, made, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _called(eqn: Any) -> Any:
    """The program that an equation only calls."""
    if eqn.primitive.name not in ENTERED:
        return None
    return eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))


def _run(
    eqn: Any, values: list[Value], kinds: Kinds, callers: tuple[Any, ...], order: int
) -> list[Value]:
    """Evaluates one equation."""
    made = jaxprs.evaluate(eqn, [value.array for value in values])
    maker = Made(order, eqn, callers, [value for value in values if value.bad])
    bad = check(made, kinds)
    return [Value(a, b, maker if b else None) for a, b in zip(made, bad, strict=True)]


def _sources(results: list[Value]) -> Iterator[tuple[str, Made]]:
    """The equations from which bad values come, with what they made."""
    seen: set[int] = set()
    waiting = [value for value in results if value.bad]
    while waiting:
        value = waiting.pop()
        if value.maker is None or value.maker.order in seen:
            continue
        seen.add(value.maker.order)
        waiting += value.maker.bad
        if not value.maker.bad:
            yield str(value.bad), value.maker


def _is_inexact(array: Any) -> bool:
    """Whether it can hold a NaN."""
    return hasattr(array, "dtype") and jnp.issubdtype(array.dtype, jnp.inexact)


@jax.jit
def _marks(arrays: Arrays) -> list[dict[str, jax.Array]]:
    """Whether there is a NaN in each array, and whether an infinity."""
    tests = {"nan": jnp.isnan, "inf": jnp.isinf}
    return [
        {kind: jnp.any(test(array)) for kind, test in tests.items()} for array in arrays
    ]
