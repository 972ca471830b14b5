"""A proof, on the traced program, that gradients are summed over replicas exactly once.

The program of one device is interpreted over facts instead of numbers. For every value:
does it differ between devices; which gradients does it depend on, and how many times
has each been summed over the axis; is it equal on all devices only because something
was summed? Gradients are named as they leave the backward pass (`jaxdp.marks`). Three
faults follow, whatever `check_vma` says:

    already summed    a gradient is the same everywhere because the backward pass summed
    summed twice      a sum of something that was summed before
    forgotten         new parameters depend on a gradient never summed, or differ

A design that collects the gradients of all replicas and makes one of them in another
way than by a sum (a median, say) states so by `marks.aggregated`: it counts as a sum.

Limit: if the loss itself sums over the axis (synchronized BatchNorm, a global loss),
its transpose sums in the backward pass by right, and the first fault is not looked for.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Literal

from jaxdp import jaxprs, marks
from jaxdp.primitive import REPLICATED, SUMMING

SUMS = frozenset({"psum", "psum2", "psum_invariant", "reduce_scatter"})
LOCAL = frozenset({"axis_index", "pcast", "pvary", "shard_map"})
ALIKE = frozenset({"psum", "psum2", "psum_invariant", "pmax", "pmin", "all_gather"})


class Alike(str):
    """The name of a result that is the same on all devices and made of sums only."""


class Summed(str):
    """The name of a result of which each device has a part, made of sums only."""


@dataclasses.dataclass(frozen=True)
class Fact:
    """What is known of a value.

    Attributes:
        varies: It may differ between devices.
        summed_by: The sum over the axis that it comes from, if any.
        gradients: Pairs: a gradient it depends on, how often that has been summed.
    """

    varies: bool = False
    summed_by: str | None = None
    gradients: frozenset[tuple[str, int]] = frozenset()


def check_summed_once(
    program: ClosedJaxpr,
    axis_name: str,
    outputs: Sequence[Alike | Summed | None],
    loss_sums: Callable[[], bool],
) -> None:
    """Proves that a traced step sums its gradients exactly once.

    Args:
        program: A jaxpr with one `shard_map` over `axis_name`, and maybe other axes.
        axis_name: The mesh axis of the proof.
        outputs: For each output its name, as what it promises to be; None if it may be
            anything.
        loss_sums: Whether the loss itself sums over the axis; asked only when in doubt.

    Raises:
        ValueError: Names the output, the gradient and the fault.
    """
    (eqn,) = [e for e in program.jaxpr.eqns if e.primitive.name == "shard_map"]
    facts = [Fact(varies=axis_name in _names(s)) for s in eqn.params["in_specs"]]
    results = _Reader(axis_name, loss_sums).read(eqn.params["jaxpr"], facts)
    for name, fact in zip(outputs, results, strict=True):
        if name is None:
            continue
        forgotten = sorted(g for g, count in fact.gradients if count == 0)
        if forgotten:
            raise ValueError(
                f"data_parallel: the new {name} depends on the {forgotten[0]} of one "
                f"replica only. It must depend on the sum over axis {axis_name!r}: the "
                "design never sums that gradient. Sum it in `exchange`, with "
                "jaxdp.all_reduce or another collective of jaxdp."
            )
        if fact.varies and isinstance(name, Alike):
            raise ValueError(
                f"data_parallel: the new {name} may differ between the replicas on "
                f"axis {axis_name!r}. All must end with the same bits. Let a design "
                "end with jaxdp.all_reduce, all_gather or broadcast, and keep the "
                "rank out of the optimizer."
            )


class _Reader:
    """Interprets jaxprs over facts."""

    def __init__(self, axis_name: str, loss_sums: Callable[[], bool]):
        self.axis_name = axis_name
        self.loss_sums = functools.lru_cache(loss_sums)

    def read(self, jaxpr: Any, facts: Sequence[Fact]) -> list[Fact]:
        """Facts of the results, given those of the arguments; constants are alike."""
        jaxpr = jaxprs.opened(jaxpr)
        known = dict(zip(jaxpr.invars, facts, strict=True))

        def fact(atom):
            return Fact() if isinstance(atom, Literal) else known.get(atom, Fact())

        for eqn in jaxpr.eqns:
            results = self._apply(eqn, [fact(v) for v in eqn.invars])
            known.update(zip(eqn.outvars, results, strict=True))
        return [fact(v) for v in jaxpr.outvars]

    def _apply(self, eqn: Any, facts: list[Fact]) -> list[Fact]:
        """Facts of one equation's results."""
        name, params = eqn.primitive.name, eqn.params
        if name == "name":
            return [self._named(params["name"], facts[0])]
        if name == "jaxdp_collective":
            found = self._collective(params["collective"], join(facts))
            return found + [Fact()] * (len(eqn.outvars) - 1)  # that it is done
        if self.axis_name in jaxprs.mesh_axes(eqn):
            return [self._native(name, params, join(facts))] * len(eqn.outvars)
        if name == "cond":
            return self._cond(params["branches"], facts)
        if name == "scan":
            return self._scan(params, facts)
        if name == "while":
            return self._while(params, facts)
        if (program := jaxprs.called(eqn)) is not None:
            return self.read(program, facts)
        together = join(facts)
        # An unknown call: anything may depend on anything.
        for jaxpr in jaxprs.inner(eqn):
            results = self.read(jaxpr, [together] * len(jaxpr.invars))
            together = join([together, *results])
        return [together] * len(eqn.outvars)

    def _named(self, name: str, fact: Fact) -> Fact:
        """A value with one of the names of `jaxdp.marks`, or with any other."""
        if name.startswith(marks.GRADIENT):
            return self._gradient(name.removeprefix(marks.GRADIENT), fact)
        if name == marks.AGGREGATED + self.axis_name:
            return self._summed("an aggregation", fact)
        if name == marks.VALUE:
            return Fact(varies=fact.varies)
        if name == marks.CONSTANT:
            return Fact()
        for mark, remedy in marks.ALIKE.items():
            if name.startswith(mark):
                return self._alike(name.removeprefix(mark), fact, remedy)
        return fact

    def _gradient(self, name: str, fact: Fact) -> Fact:
        """A gradient as it leaves the backward pass."""
        if fact.summed_by and not fact.varies and not self.loss_sums():
            raise ValueError(
                f"data_parallel: the gradient of {name} is already summed over axis "
                f"{self.axis_name!r} when it leaves loss_fn, by {fact.summed_by} in "
                "its backward pass. The design sums it once more, so it would be too "
                "large by the number of devices. Remove that sum from loss_fn: "
                "data_parallel averages the gradients itself."
            )
        return Fact(fact.varies, None, frozenset({(f"gradient of {name}", 0)}))

    def _alike(self, name: str, fact: Fact, remedy: str) -> Fact:
        """A leaf that no design averages, before the exchange."""
        if fact.varies:
            raise ValueError(
                f"data_parallel: the new {name} may differ between the replicas on "
                f"axis {self.axis_name!r}. {remedy}"
            )
        return fact

    def _collective(self, collective: Any, fact: Fact) -> list[Fact]:
        """A collective of jaxdp."""
        if self.axis_name not in collective.axes:
            return [fact]
        if collective.kind in SUMMING:
            fact = self._summed(f"jaxdp.{collective.kind}", fact)
        alike = collective.kind in REPLICATED
        return [dataclasses.replace(fact, varies=not alike)]

    def _native(self, name: str, params: dict, fact: Fact) -> Fact:
        """A collective of `jax.lax`, or `axis_index`."""
        if name in SUMS:
            fact = self._summed(f"jax.lax.{name}", fact)
        grouped = params.get("axis_index_groups") is not None
        return dataclasses.replace(fact, varies=grouped or name not in ALIKE)

    def _summed(self, by: str, fact: Fact) -> Fact:
        """A sum over the axis."""
        twice = sorted(g for g, count in fact.gradients if count)
        if twice:
            raise ValueError(
                f"data_parallel: the {twice[0]} is summed over axis "
                f"{self.axis_name!r} twice, the second time by {by}. It must be "
                "summed exactly once, which the design does. Remove the other sum; "
                "if it is jaxdp.synchronize_gradients in the optimizer, drop it from "
                "the chain."
            )
        gradients = frozenset((g, count + 1) for g, count in fact.gradients)
        return Fact(fact.varies, by if fact.varies else fact.summed_by, gradients)

    def _cond(self, branches: Iterable, facts: list[Fact]) -> list[Fact]:
        """Either branch may run; a predicate that varies makes the results vary."""
        predicate, *operands = facts
        results = [self.read(branch, operands) for branch in branches]
        return [join([*parts, predicate]) for parts in zip(*results, strict=True)]

    def _scan(self, params: dict, facts: list[Fact]) -> list[Fact]:
        """A loop with a carry: facts of the carry grow until they are stable."""
        if "ft_in" in params:  # jax 0.12
            consts, carries, _ = map(len, params["ft_in"].unpack())
        else:
            consts, carries = params["num_consts"], params["num_carry"]
        carry = facts[consts : consts + carries]
        while True:
            given = [*facts[:consts], *carry, *facts[consts + carries :]]
            results = self.read(params["jaxpr"], given)
            grown = [join(pair) for pair in zip(carry, results[:carries], strict=True)]
            if grown == carry:
                return results
            carry = grown

    def _while(self, params: dict, facts: list[Fact]) -> list[Fact]:
        """As a scan; a condition that varies makes the results vary."""
        split = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        cond_consts, consts = facts[: split[0]], facts[split[0] : split[1]]
        carry = facts[split[1] :]
        while True:
            (goes_on,) = self.read(params["cond_jaxpr"], [*cond_consts, *carry])
            results = self.read(params["body_jaxpr"], [*consts, *carry])
            grown = [
                join([*pair, goes_on]) for pair in zip(carry, results, strict=True)
            ]
            if grown == carry:
                return carry
            carry = grown


def join(facts: Iterable[Fact]) -> Fact:
    """What is known of a value computed from these."""
    facts = list(facts)
    return Fact(
        any(f.varies for f in facts),
        next((f.summed_by for f in facts if f.summed_by), None),
        frozenset().union(*(f.gradients for f in facts)),
    )


def talks_over(program: ClosedJaxpr, axis_name: str) -> bool:
    """Whether devices of the axis wait for each other anywhere in a traced program."""
    return _has(program, axis_name, lambda name: name not in LOCAL)


def sums_over(program: ClosedJaxpr, axis_name: str) -> bool:
    """Whether a traced program sums anything over the axis."""
    return _has(program, axis_name, SUMS.__contains__)


def _has(program: Any, axis_name: str, counts: Callable[[str], bool]) -> bool:
    """Whether anything in a program, over the axis, is a collective that counts.

    Those of jaxdp always do; of JAX's primitives over the axis, `counts` says which.
    """
    for eqn in jaxprs.equations(program):
        collective = eqn.params.get("collective")
        if collective is not None and axis_name in collective.axes:
            return True
        if axis_name in jaxprs.mesh_axes(eqn) and counts(eqn.primitive.name):
            return True
    return False


def _names(spec: Any) -> set:
    """The mesh axes that a PartitionSpec splits over."""
    return {
        name
        for part in spec
        for name in (part if isinstance(part, tuple) else (part,))
        if name is not None
    }
