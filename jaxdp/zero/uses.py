"""Where a gradient program uses its parameters, in its forward and its backward pass.

An operation that only rewrites parameters (a cast, a transpose, a product of two of
them) is *derived*: it is no use by itself, and each pass does it again. Its result
would else live from one pass to the other, as long as a parameter that was never given
back. What reduces a parameter is small, counts as a use, and is done once.
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, Var

from jaxdp.zero.flat import flattened

SMALL = 2  # a reduction's result has at most 1 / SMALL of what it reads
# They copy numbers or fill in zeros, so one number of their result may be a constant.
MOVING = frozenset(
    {
        *("broadcast_in_dim", "concatenate", "convert_element_type", "copy", "pad"),
        *("dynamic_slice", "dynamic_update_slice", "gather", "reshape", "rev"),
        *("scatter", "scatter-add", "select_n", "slice", "squeeze", "transpose"),
    }
)
ENDING = frozenset({"add_any", "convert_element_type", "reshape", "transpose"})


@dataclasses.dataclass(frozen=True)
class _Origin:
    """What a value is computed from.

    Attributes:
        derived: For a derived value, the parameters; empty for every other.
        parameters: Whether any parameter is behind it.
        data: Whether any other argument is.
    """

    derived: frozenset[int] = frozenset()
    parameters: bool = False
    data: bool = False


@dataclasses.dataclass(frozen=True)
class Uses:
    """A flat program, and what its operations need of the parameters.

    Attributes:
        program: With its calls opened.
        results: For each result of the original the value; None if it was left out.
        needed: For each operation, and at last for the results, the numbers of the
            arguments that it needs whole; none for what is derived.
        makers: The operation that makes each derived value.
        paced: For each operation, the number of a result that no one can know before
            the operation has run: it depends on parameters and on data. None if it
            has none.
    """

    program: ClosedJaxpr
    results: tuple[Any, ...]
    needed: tuple[frozenset[int], ...]
    makers: dict[Any, Any]
    paced: tuple[int | None, ...]

    @property
    def end(self) -> int:
        """After all operations, and after what the results need."""
        return len(self.needed)

    def of(self, number: int) -> list[int]:
        """Where an argument is needed."""
        return [i for i, needed in enumerate(self.needed) if number in needed]

    def made(self) -> list[int]:
        """How many operations must have run before each result exists.

        Those that are derived exist when everything has run and is gathered.
        """
        jaxpr = self.program.jaxpr
        makers = {v: i + 1 for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
        makers |= dict.fromkeys([*self.makers, *jaxpr.invars], self.end)
        return [makers.get(v, 0) if isinstance(v, Var) else 0 for v in self.results]

    def crossing(self, first: int, position: int) -> list[Any]:
        """Values through which a later operation depends on earlier ones.

        Args:
            first: The operation that is the first of the earlier ones.
            position: The one that is the first of the later ones.

        Returns:
            Numbers with a fraction that the earlier ones make and the later ones read,
            without what only adds up to a result.
        """
        eqns, ending = self.program.jaxpr.eqns, self._ending
        read = {
            v
            for i, eqn in enumerate(eqns[position:], position)
            if i not in ending
            for v in eqn.invars
            if not isinstance(v, Literal)
        }
        return [
            v
            for eqn in eqns[first:position]
            for v in eqn.outvars
            if v in read and v not in self.makers and _is_inexact(v)
        ]

    @functools.cached_property
    def _ending(self) -> set[int]:
        """The last operations on results: sums and other shapes."""
        found, others = set(), set()  # operations, and what the others read
        for i, eqn in reversed([*enumerate(self.program.jaxpr.eqns)]):
            if eqn.primitive.name in ENDING and others.isdisjoint(eqn.outvars):
                found.add(i)
            else:
                others |= {v for v in eqn.invars if not isinstance(v, Literal)}
        return found

    def forward(self, loss: int | None) -> int:
        """How many operations the forward pass has, given the result that ends it."""
        made = None if loss is None else self.results[loss]
        for i, eqn in enumerate(self.program.jaxpr.eqns):
            if any(made is v for v in eqn.outvars):
                return i + 1
        return self.end


def uses(
    program: ClosedJaxpr,
    numbers: Collection[int],
    unneeded: Collection[int] = (),
) -> Uses:
    """Reads a program.

    Args:
        program: Of `value_and_grad`.
        numbers: The arguments that are parameters.
        unneeded: The results that are left out, and what only they need.
    """
    kept = [i not in unneeded for i in range(len(program.out_avals))]
    program = flattened(program, kept)
    outvars = iter(program.jaxpr.outvars)
    results = tuple(next(outvars) if keep else None for keep in kept)
    known, needed, makers, paced = {}, [], {}, []
    for i, v in enumerate(program.jaxpr.invars):
        is_parameter = i in numbers
        derived = frozenset([i]) if is_parameter else frozenset()
        known[v] = _Origin(derived, is_parameter, not is_parameter)

    def origin(atom):
        return _Origin() if isinstance(atom, Literal) else known.get(atom, _Origin())

    for eqn in program.jaxpr.eqns:
        behind = [origin(v) for v in eqn.invars]
        result = _joined(behind)
        if result.derived and not _stays_derived(eqn, result):
            needed.append(result.derived)
            result = dataclasses.replace(result, derived=frozenset())
        else:
            needed.append(frozenset())
        if result.derived:
            makers |= dict.fromkeys(eqn.outvars, eqn)
        known |= dict.fromkeys(eqn.outvars, result)
        paced.append(_paced(eqn, result))
    needed.append(_joined([origin(v) for v in program.jaxpr.outvars]).derived)
    return Uses(program, results, tuple(needed), makers, tuple(paced))


def order_of_use(program: ClosedJaxpr, numbers: Sequence[int]) -> list[int]:
    """Arguments in the order in which a program uses them first.

    Args:
        program: Of `value_and_grad`.
        numbers: The arguments that are parameters.

    Returns:
        `numbers`, sorted; at the end those that are never used.
    """
    found = uses(program, numbers)
    return sorted(numbers, key=lambda i: min(found.of(i), default=found.end))


def _joined(origins: Sequence[_Origin]) -> _Origin:
    """What is behind any of them."""
    return _Origin(
        functools.reduce(frozenset.union, (o.derived for o in origins), frozenset()),
        any(o.parameters for o in origins),
        any(o.data for o in origins),
    )


def _stays_derived(eqn: Any, result: _Origin) -> bool:
    """Whether an operation that reads parameters only rewrites them."""
    if result.data or eqn.effects:
        return False
    if not eqn.primitive.name.startswith(("reduce_", "arg")):
        return True
    read = max(_size(v) for v in eqn.invars)
    return SMALL * max(_size(v) for v in eqn.outvars) > read


def _paced(eqn: Any, result: _Origin) -> int | None:
    """The first result that tells that the operation has run."""
    if eqn.primitive.name in MOVING or not (result.parameters and result.data):
        return None
    for i, v in enumerate(eqn.outvars):
        if _size(v) and _is_inexact(v):
            return i
    return None


def _is_inexact(atom: Any) -> bool:
    """Whether a value has numbers with a fraction."""
    dtype = getattr(atom.aval, "dtype", bool)
    return jnp.issubdtype(dtype, jnp.inexact)


def _size(atom: Any) -> int:
    """Elements of a value."""
    return math.prod(getattr(atom.aval, "shape", ()))
