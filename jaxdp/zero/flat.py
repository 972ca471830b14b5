"""Programs without calls: one list of operations, run one by one.

What is jitted, or has a rule of its own for derivatives that have already been taken,
is a call inside a traced program. Its operations are what a reader wants to see.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal
from jax.interpreters import partial_eval

# Not rematerialization: what it computes again must not be found in the forward pass.
CALLS = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"}
)


def flattened(
    program: ClosedJaxpr, needed: Sequence[bool] | None = None
) -> ClosedJaxpr:
    """The program with its calls opened, and without operations that nothing needs.

    Args:
        program: Any.
        needed: For each result whether it stays one; None for all.
    """
    avals = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False))
        for a in program.in_avals
    ]
    flat = jax.make_jaxpr(lambda *args: _run(program, args))(*avals)
    kept = [True] * len(flat.jaxpr.outvars) if needed is None else [*needed]
    jaxpr, _ = partial_eval.dce_jaxpr(flat.jaxpr, kept, instantiate=True)
    return ClosedJaxpr(jaxpr, flat.consts)


def evaluate(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Runs one operation, in the scope that it was traced in.

    Args:
        eqn: Of a jaxpr.
        values: One for each of its `invars`.

    Returns:
        One value for each of its `outvars`.
    """
    with eqn.ctx.manager, _scope(eqn):
        found = eqn.primitive.bind(*values, **eqn.params)
    return list(found) if eqn.primitive.multiple_results else [found]


def _run(program: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """Runs a program, calls by running what they call."""
    jaxpr = program.jaxpr
    known = dict(zip(jaxpr.constvars, program.consts, strict=True))
    known |= dict(zip(jaxpr.invars, args, strict=True))

    def read(atom):
        return atom.val if isinstance(atom, Literal) else known[atom]

    for eqn in jaxpr.eqns:
        values = [read(v) for v in eqn.invars]
        if eqn.primitive.name in CALLS:
            (inner,) = (p for p in eqn.params.values() if isinstance(p, ClosedJaxpr))
            with _scope(eqn):
                results = _run(inner, values)
        else:
            results = evaluate(eqn, values)
        known.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


@contextlib.contextmanager
def _scope(eqn: Any) -> Iterator[None]:
    """The names under which an operation was traced."""
    name = str(eqn.source_info.name_stack)
    with jax.named_scope(name) if name else contextlib.nullcontext():
        yield
