"""Parameters that are gathered just before use, freed, and gathered again backward.

A gradient program is run operation by operation, in two passes: the forward one ends
with the loss. In each, a bucket of shards is gathered once, and nothing made of
parameters alone goes from one pass to the other, so XLA can free a bucket after its
last use in a pass. A parameter that a pass uses twice, such as a tied embedding, lives
in between: to gather it once more would move more than the 3 K bytes per step of
Rajbhandari et al., SC 2020, section 7.2.2.

What keeps XLA from merging the two gathers of a bucket, and from starting all gathers
at once, is a dependence on data that is never true: a shard is itself, unless a number
that the pass has just computed were above infinity. XLA drops its barriers before it
schedules, and knows of no number that it is not.
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal

from jaxdp.jaxprs import evaluate
from jaxdp.waiting import never
from jaxdp.zero.shards import Shard, is_shard
from jaxdp.zero.uses import Uses, uses
from jaxdp.zero.uses import order_of_use as order_of_use

Gather = Callable[[list[Shard]], list[jax.Array]]
Scatter = Callable[[Sequence[int], list[jax.Array]], list[Any]]
Pair = tuple[int, tuple[int, ...]]  # a position, and numbers
IN_FLIGHT = 1  # scatters that nothing waits for


def run_gathered(
    program: ClosedJaxpr,
    arguments: Sequence[Any],
    buckets: Sequence[Sequence[int]],
    loss: int | None,
    gather: Gather,
    prefetch: int = 1,
    results: Sequence[Sequence[int]] = (),
    scatter: Scatter | None = None,
    unneeded: Collection[int] = (),
) -> list[Any]:
    """Runs a gradient program on parameters that exist in shards only.

    Devices: inside `shard_map`; before and after, each holds its shards.

    Cost: each pass gathers what it uses, (N - 1) K / N bytes sent per device. At most
    `prefetch` + 1 buckets are whole at a time, and those still in use; of gradients, at
    most the bucket that is computed and `IN_FLIGHT` others.

    Args:
        program: Of `jax.value_and_grad`.
        arguments: For each argument an array, or a parameter's local shard.
        buckets: Numbers of arguments that are gathered together, of one dtype; each
            shard is in one of them.
        loss: The number of the result that ends the forward pass; None for one pass.
        gather: Makes whole arrays of local shards.
        prefetch: How many buckets are gathered ahead of the one in use.
        results: Numbers of results that are scattered together, gradients as a rule.
        scatter: What is done to these as soon as they exist, given their numbers: makes
            of each array something smaller, such as a shard of the mean over all
            devices. May be left out if `results` is.
        unneeded: Numbers of results that are not computed, nor what only they need.

    Returns:
        The results of the program, of this device's rows: whole, but in place of those
        that are scattered what `scatter` made of them, and None for unneeded ones.
    """
    plan = Plan.of(program, buckets, loss, results, unneeded)
    return _Run(plan, arguments, gather, prefetch, scatter).results()


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is gathered and scattered, and when.

    Attributes:
        uses: Of the parameters.
        starts: The number of the first operation of each pass, and that of all.
        gathers: For each pass, in order of use, pairs of the operation that needs the
            bucket first, and the arguments that are gathered: those of the bucket that
            the pass uses.
        scatters: In order, pairs of how many operations run before, and the results.
    """

    uses: Uses
    starts: tuple[int, ...]
    gathers: tuple[tuple[Pair, ...], ...]
    scatters: tuple[Pair, ...]

    @classmethod
    def of(
        cls,
        program: ClosedJaxpr,
        buckets: Sequence[Sequence[int]],
        loss: int | None,
        results: Sequence[Sequence[int]] = (),
        unneeded: Collection[int] = (),
    ) -> "Plan":
        """Plans a program; see `run_gathered`."""
        found = uses(program, {i for bucket in buckets for i in bucket}, unneeded)
        starts = sorted({0, found.forward(loss), found.end})
        gathers = []
        for first, end in itertools.pairwise(starts):
            at: dict[int, int] = {}
            for position, needed in enumerate(found.needed[first:end], first):
                for i in needed:
                    at.setdefault(i, position)
            used = [[i for i in bucket if i in at] for bucket in buckets]
            pairs = [(min(at[i] for i in b), tuple(b)) for b in used if b]
            gathers.append(tuple(sorted(pairs)))
        made = found.made()
        pairs = [(max(made[i] for i in b), tuple(b)) for b in results if len(b)]
        return cls(found, tuple(starts), tuple(gathers), tuple(sorted(pairs)))


class _Run:
    """One evaluation of a plan.

    Attributes:
        known: Values, other than those of `whole`.
        whole: Parameters and what is derived of them, in this pass.
        pace: What the program has computed last. At first its largest argument, as a
            rule the batch: or XLA would take the first gathers of each micro-batch out
            of the loop over them, and keep what they give.
        flying: Of each scatter that nothing has waited for, one of its results.
    """

    def __init__(
        self,
        plan: Plan,
        arguments: Sequence[Any],
        gather: Gather,
        prefetch: int,
        scatter: Scatter | None,
    ):
        self.plan, self.prefetch = plan, prefetch
        self.gather, self.scatter = gather, scatter
        self.jaxpr = plan.uses.program.jaxpr
        named = [*zip(self.jaxpr.invars, arguments, strict=True)]
        self.shards = [x for _, x in named]
        self.known = {v: x for v, x in named if not is_shard(x)}
        self.known |= zip(self.jaxpr.constvars, plan.uses.program.consts, strict=True)
        self.whole: dict[Any, Any] = {}
        self.pace = _largest([x for x in arguments if not is_shard(x)])
        self.flying: list[Any] = []
        self.scattered: dict[int, Any] = {}

    def results(self) -> list[Any]:
        """Runs all passes."""
        scatters = _by_position(self.plan.scatters)
        starts = self.plan.starts
        for i, gathers in enumerate(self.plan.gathers):
            self.whole = {}
            due = _by_position(self._due(gathers))
            for position in range(starts[i], starts[i + 1]):
                for numbers in scatters.get(position, ()):
                    self._scatter(numbers)
                    if position > max(due, default=0):
                        self._hold(starts[i], position)
                for numbers in due.get(position, ()):
                    self._gather(numbers)
                if position < len(self.jaxpr.eqns):
                    self._run(position, self.jaxpr.eqns[position])
        for numbers in scatters.get(self.plan.uses.end, ()):
            self._scatter(numbers)
        found = dict.fromkeys(range(len(self.plan.uses.results)))
        for i, v in enumerate(self.plan.uses.results):
            if v is not None and i not in self.scattered:
                found[i] = self._read(v)
        return [*(found | self.scattered).values()]

    def _due(self, gathers: Sequence[Pair]) -> list[Pair]:
        """When each bucket is gathered: before the first use of an earlier one."""
        ahead = self.prefetch
        return [(gathers[max(j - ahead, 0)][0], b) for j, (_, b) in enumerate(gathers)]

    def _gather(self, numbers: Sequence[int]) -> None:
        """Gathers shards, not before what was computed and scattered last."""
        shards = after([self.shards[i] for i in numbers], self.pace + self._landed())
        # On GPUs XLA keeps barriers until it has fused. Without, a bias that it reads
        # once more backward would be read from the whole bucket, which so stays.
        arrays = lax.optimization_barrier(self.gather(shards))
        for i, array in zip(numbers, arrays, strict=True):
            self.whole[self.jaxpr.invars[i]] = array

    def _scatter(self, numbers: Sequence[int]) -> None:
        """Scatters results that exist from here on."""
        assert self.scatter is not None
        whole = [self._read(self.plan.uses.results[i]) for i in numbers]
        # Or the last addition would wait for the update, and whole gradients with it.
        found = lax.optimization_barrier(self.scatter(numbers, whole))
        self.scattered.update(zip(numbers, found, strict=True))
        self.flying += [x for x in jax.tree.leaves(found) if x.size][:1]

    def _hold(self, first: int, position: int) -> None:
        """Lets what comes wait for what was scattered, where no gather does."""
        waits = self._landed()
        if waits:
            early = never(waits)
            for v in self.plan.uses.crossing(first, position):
                self.known[v] = jnp.where(early, 0, self.known[v])

    def _landed(self) -> list[Any]:
        """What must have been scattered before anything else starts."""
        landed = self.flying[: -IN_FLIGHT or None]
        self.flying = self.flying[len(landed) :]
        return landed

    def _run(self, position: int, eqn: Any) -> None:
        """Runs an operation, unless it is derived: those run when they are read."""
        if any(v in self.plan.uses.makers for v in eqn.outvars):
            return
        found = evaluate(eqn, [self._read(v) for v in eqn.invars])
        self.known.update(zip(eqn.outvars, found, strict=True))
        paced = self.plan.uses.paced[position]
        if paced is not None:
            self.pace = [found[paced]]

    def _read(self, atom: Any) -> Any:
        """A value; derived ones are made of what this pass has gathered."""
        if isinstance(atom, Literal):
            return atom.val
        if atom in self.known:
            return self.known[atom]
        if atom not in self.whole:
            maker = self.plan.uses.makers[atom]
            found = evaluate(maker, [self._read(v) for v in maker.invars])
            self.whole.update(zip(maker.outvars, found, strict=True))
        return self.whole[atom]


def after(shards: Sequence[Shard], values: Sequence[jax.Array]) -> list[Shard]:
    """Shards, but not before values exist."""
    if not values:
        return [*shards]
    early = never(values)
    return [shard.like(jnp.where(early, 0, shard.data)) for shard in shards]


def _largest(arrays: Sequence[Any]) -> list[Any]:
    """The array with most numbers, if there are any."""
    numbers = [x for x in arrays if jnp.issubdtype(x.dtype, jnp.number) and x.size]
    return [max(numbers, key=lambda x: x.size)] if numbers else []


def _by_position(pairs: Sequence[Pair]) -> dict[int, list[tuple[int, ...]]]:
    """What is due at each position, in order."""
    due: dict[int, list[tuple[int, ...]]] = {}
    for position, numbers in pairs:
        due.setdefault(position, []).append(numbers)
    return due
