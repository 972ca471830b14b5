"""Programs without calls: one list of operations, run one by one.

What is jitted, or has a rule of its own for derivatives that have already been taken,
is a call inside a traced program. Its operations are what a reader wants to see.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal
from jax.interpreters import partial_eval

from jaxdp import jaxprs


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


def _run(program: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """Runs a program, calls by running what they call."""
    jaxpr = program.jaxpr
    known = dict(zip(jaxpr.constvars, program.consts, strict=True))
    known |= dict(zip(jaxpr.invars, args, strict=True))

    def read(atom):
        return atom.val if isinstance(atom, Literal) else known[atom]

    for eqn in jaxpr.eqns:
        values = [read(v) for v in eqn.invars]
        if (called := jaxprs.plain_call(eqn)) is not None:
            with jaxprs.scope(eqn):
                results = _run(called, values)
        else:
            results = jaxprs.evaluate(eqn, values)
        known.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]
