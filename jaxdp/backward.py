"""What a traced gradient tells: when each gradient is ready, and which are needed.

DistributedDataParallel learns the order of its buckets from hooks that fire as
gradients arrive (Li et al., VLDB 2020, section 3.2.3). Here the backward pass is a
program before it runs, so the order is read from it, for any loss function.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import ClosedJaxpr, Literal
from jax.interpreters import partial_eval

from jaxdp.jaxprs import called

PyTree = Any
LOOPS = frozenset({"scan", "while", "cond"})  # their results come all at once
RESHAPING = frozenset(  # no work of their own: XLA does them where it makes or reads
    {"broadcast_in_dim", "convert_element_type", "pvary", "reshape", "transpose"}
)


def readiness(program: ClosedJaxpr) -> list[int]:
    """When each result of a program is ready.

    Args:
        program: A traced function.

    Returns:
        For each result, how many operations stand before it in the program, those of
        inner calls counted one by one, since XLA inlines them. 0 for what needs none.
        Another shape or dtype of a value is ready when that is: casts of all gradients
        may stand at the end of a program.
    """
    return _Clock().read(program.jaxpr, [0] * len(program.jaxpr.invars))


class _Clock:
    """Counts the operations of a program in order."""

    def __init__(self):
        self.now = 0

    def read(self, jaxpr: Any, times: Sequence[int]) -> list[int]:
        """When the results are ready, given when the arguments are."""
        known = dict(zip(jaxpr.invars, times, strict=True))

        def time(atom):
            return 0 if isinstance(atom, Literal) else known.get(atom, 0)

        for eqn in jaxpr.eqns:
            inner = None if eqn.primitive.name in LOOPS else called(eqn)
            if eqn.primitive.name in RESHAPING:
                results = [max(map(time, eqn.invars))]
            elif inner is None:
                self.now += 1
                results = [self.now] * len(eqn.outvars)
            else:
                results = self.read(inner, [time(v) for v in eqn.invars])
            known.update(zip(eqn.outvars, results, strict=True))
        return [time(v) for v in jaxpr.outvars]


def zeros(program: ClosedJaxpr) -> list[bool]:
    """Which results are zero whatever the arguments: gradients of what is unused."""
    jaxpr = program.jaxpr
    return _zeros(jaxpr, [False] * len(jaxpr.invars))


def _zeros(jaxpr: Any, given: Sequence[bool]) -> list[bool]:
    known = dict(zip(jaxpr.invars, given, strict=True))

    def zero(atom):
        if isinstance(atom, Literal):
            return jnp.ndim(atom.val) == 0 and atom.val == 0
        return known.get(atom, False)

    for eqn in jaxpr.eqns:
        inputs = [zero(v) for v in eqn.invars]
        inner = None if eqn.primitive.name in LOOPS else called(eqn)
        if eqn.primitive.name in RESHAPING:
            known[eqn.outvars[0]] = inputs[0]
        elif inner is not None:
            known.update(zip(eqn.outvars, _zeros(inner, inputs), strict=True))
    return [bool(zero(v)) for v in jaxpr.outvars]


def read_gradients(
    optimizer: optax.GradientTransformation, params: PyTree
) -> list[bool]:
    """Which gradients an optimizer reads: not those that it sets to zero.

    `optax.set_to_zero`, alone or for the frozen labels of `optax.partition`, looks at
    no gradient. `optax.masked` passes on what it masks out, and so it is read.

    Args:
        optimizer: The optimizer.
        params: The parameters, or their shapes.

    Returns:
        For each leaf, whether anything depends on its gradient.
    """

    def update(gradients, state, params, staleness):
        extended = optax.with_extra_args_support(optimizer)
        return extended.update(gradients, state, params, staleness=staleness)

    state = jax.eval_shape(optimizer.init, params)
    staleness = jax.ShapeDtypeStruct((), jnp.int32)
    program = jax.make_jaxpr(update)(params, state, params, staleness)
    count = len(jax.tree.leaves(params))
    _, used = partial_eval.dce_jaxpr(program.jaxpr, [True] * len(program.out_avals))
    return list(used[:count])
