"""Which arrays a backward program gets from its forward program, and which it does not.

A program's results are new buffers. So what was an input already is not returned but
given again, and what is one number everywhere (such as the zeros that `relu` selects
from) is made again.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Literal


class Input(NamedTuple):
    """The forward program's input of this index."""

    index: int


class Kept(NamedTuple):
    """The array of this index among those that the forward program returns."""

    index: int


class Full(NamedTuple):
    """One number everywhere."""

    value: Any
    shape: tuple[int, ...]
    dtype: Any


Origin = Input | Kept | Full


def origins(jaxpr: Any, wanted: Sequence[Any]) -> tuple[list[Origin], list[int]]:
    """Where each wanted result of a program comes from.

    Args:
        jaxpr: The program.
        wanted: Some of its results.

    Returns:
        An origin for each, and which of them must be returned.
    """
    inputs = {var: i for i, var in enumerate(jaxpr.invars)}
    found: list[Origin] = []
    returned: list[int] = []
    for i, atom in enumerate(wanted):
        source = _source(jaxpr, atom)
        if isinstance(source, Full):
            found.append(source)
        elif source in inputs:
            found.append(Input(inputs[source]))
        else:
            found.append(Kept(len(returned)))
            returned.append(i)
    return found, returned


def _source(jaxpr: Any, atom: Any) -> Any:
    """The variable that an atom is equal to, or the number that it is everywhere."""
    makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    while True:
        if isinstance(atom, Literal):
            return Full(np.asarray(atom.val).item(), *_type(atom))
        eqn = makers.get(atom)
        if eqn is None:
            return atom
        if eqn.primitive.name in ("broadcast_in_dim", "convert_element_type"):
            operand = _source(jaxpr, eqn.invars[0])
            if not isinstance(operand, Full):
                return atom
            return Full(operand.value, *_type(atom))
        if eqn.primitive.name not in ("jit", "pjit"):
            return atom
        body = eqn.params["jaxpr"].jaxpr
        inner = _source(body, body.outvars[eqn.outvars.index(atom)])
        if isinstance(inner, Full):
            return inner
        if inner not in body.invars:
            return atom
        atom = eqn.invars[body.invars.index(inner)]


def _type(atom: Any) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype."""
    return atom.aval.shape, atom.aval.dtype
