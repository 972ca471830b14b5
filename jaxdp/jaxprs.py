"""Reading traced programs, and running them one operation after the other."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxprs_in_params

# Operations that call a program and do nothing else. Not rematerialization: what it
# computes again must not be found in the forward pass.
CALLS = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"}
)


def opened(jaxpr: Any) -> Jaxpr:
    """The jaxpr without its constants."""
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def inner(eqn: Any) -> list[Jaxpr]:
    """The programs inside an operation."""
    return [opened(jaxpr) for jaxpr in jaxprs_in_params(eqn.params)]


def equations(program: Any) -> Iterator[Any]:
    """All operations, those of inner programs after what runs them."""
    for eqn in opened(program).eqns:
        yield eqn
        for jaxpr in inner(eqn):
            yield from equations(jaxpr)


def mesh_axes(eqn: Any) -> tuple[str, ...]:
    """The mesh axes that an operation of JAX runs over; none for one of this device."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    axes = axes if isinstance(axes, tuple | list) else (axes,)
    return tuple(axis for axis in axes if isinstance(axis, str))  # not dimensions


def called(eqn: Any) -> Jaxpr | None:
    """The program that an operation only calls, argument by argument."""
    programs = inner(eqn)
    if len(programs) == 1 and len(programs[0].invars) == len(eqn.invars):
        return programs[0]
    return None


def plain_call(eqn: Any) -> ClosedJaxpr | None:
    """The program that an operation of `CALLS` calls; None for others."""
    if eqn.primitive.name not in CALLS:
        return None
    (program,) = (p for p in eqn.params.values() if isinstance(p, ClosedJaxpr))
    return program


def evaluate(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Runs one operation, in the scope that it was traced in.

    Args:
        eqn: Of a jaxpr.
        values: One for each of its `invars`.

    Returns:
        One value for each of its `outvars`.
    """
    params = eqn.primitive.get_bind_params(eqn.params)
    with eqn.ctx.manager, scope(eqn):
        found = eqn.primitive.bind(*values, **params)
    return list(found) if eqn.primitive.multiple_results else [found]


@contextlib.contextmanager
def scope(eqn: Any) -> Iterator[None]:
    """The names under which an operation was traced."""
    name = str(eqn.source_info.name_stack)
    with jax.named_scope(name) if name else contextlib.nullcontext():
        yield
