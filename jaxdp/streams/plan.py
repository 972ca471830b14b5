"""The gradient of one replica as segments, in the order of its buckets."""

import itertools
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Literal
from jax.sharding import PartitionSpec as P

from jaxdp import guard
from jaxdp.designs import Design
from jaxdp.loss import Contribution
from jaxdp.state import TrainState
from jaxdp.streams.meshes import Streams
from jaxdp.streams.programs import (
    REPLICA,
    REPLICATED,
    ROWS,
    Exchange,
    Layout,
    Packed,
    segment_program,
)
from jaxdp.streams.segments import Flat, Segment, cut
from jaxdp.trainer import Trainer

PyTree = Any


class Plan(NamedTuple):
    """What a step dispatches to make its averaged contribution.

    Attributes:
        parts: Segments of the gradient with their programs, in order.
        layout: What their buckets hold.
        given: Numbers of the values that are leaves of the state and the batch.
    """

    parts: tuple[tuple[Segment, Any], ...]
    layout: Layout
    given: tuple[int, ...]

    def __call__(self, state: TrainState, batch: PyTree, exchange: Exchange) -> Packed:
        """Dispatches all segments, and behind each the exchanges of its buckets."""
        values = self.values(state, batch)
        flats = []
        for segment, program in self.parts:
            made, written = program(*(values[number] for number in segment.reads))
            flats += [exchange(flat) for flat in made]
            values.update(zip(segment.writes, written, strict=True))
            for number in segment.spent:  # memory that the backward pass gives back
                del values[number]
        return Packed(tuple(flats), self.layout)

    def lowered(self, state: TrainState, batch: PyTree, exchange: Exchange):
        """The programs by name, in the order in which a step dispatches them."""
        values, found, exchanges = self.values(state, batch), {}, itertools.count(1)
        for i, (segment, program) in enumerate(self.parts, start=1):
            given = [values[number] for number in segment.reads]
            found[f"segment_{i}"] = program.lower(*given)
            made, written = jax.eval_shape(program, *given)
            values.update(zip(segment.writes, written, strict=True))
            for flat in made:
                found[f"exchange_{next(exchanges)}"] = exchange.lower(flat)
        return found

    def means(self) -> Packed:
        """Shapes of what a call returns."""
        types = self.layout.types
        flats = [
            jax.ShapeDtypeStruct(
                (sum(types[i].size for i in bucket),), types[bucket[0]].dtype
            )
            for bucket in self.layout.buckets
        ]
        return Packed(tuple(flats), self.layout)

    def values(self, state: TrainState, batch: PyTree) -> dict[int, Any]:
        """What the first segment can read."""
        return dict(zip(self.given, jax.tree.leaves((state, batch)), strict=True))


def plan(
    trainer: Trainer, streams: Streams, delay: int, state: TrainState, batch: PyTree
) -> Plan:
    """Traces the gradient of one replica and cuts it into segments.

    Without delay there is one segment per bucket. With it a step's gradient travels
    while the next computes, so there is one segment; loss and metrics travel alone and
    first, since callers want them in the step itself.

    Raises:
        ValueError: The loss communicates.
    """
    (axis_name,) = streams.compute.axis_names
    body = trainer.on_replicas(trainer.replica.contribution, P())
    program, shapes = jax.make_jaxpr(body, return_shape=True)(state, batch)
    if guard.talks_over(program, axis_name):
        raise ValueError(
            f"streams.data_parallel got a loss_fn that communicates over axis "
            f"{axis_name!r}. Its segments run on the compute stream, which must not "
            "wait for other devices. Remove the collective from loss_fn (axis_name= of "
            "BatchNorm is one), or use jaxdp.data_parallel."
        )
    types, structure = jax.tree.flatten(shapes)
    buckets = _buckets(trainer.replica.design, shapes, delay)
    layout = Layout(structure, tuple(types), buckets, streams.compute.size)
    flat, given = _flat(program)
    together = [buckets] if delay else [(bucket,) for bucket in buckets]
    segments = cut(flat, [sum(group, ()) for group in together])
    rows = set(given[len(jax.tree.leaves(state)) :])

    def lies(number):
        if number in rows:
            return ROWS
        return REPLICATED if number in given else REPLICA

    programs = [
        segment_program(segment, layout, group, lies, streams)
        for segment, group in zip(segments, together, strict=True)
    ]
    return Plan(tuple(zip(segments, programs, strict=True)), layout, given)


def _buckets(design: Design, shapes: Contribution, delay: int) -> tuple:
    """Which leaves travel together, without buckets of no elements."""
    leaves, count = jax.tree.leaves(shapes), len(jax.tree.leaves(shapes.gradients))
    parts = [range(count, len(leaves)), range(count)] if delay else [range(len(leaves))]
    buckets = []
    for part in parts:
        found = design.assign(
            [leaves[i] for i in part], [shapes.ready[i] for i in part]
        )
        buckets += [tuple(part[i] for i in bucket) for bucket in found]
    return tuple(b for b in buckets if any(leaves[i].size for i in b))


def _flat(program: ClosedJaxpr) -> tuple[Flat, tuple[int, ...]]:
    """What one replica runs, and the numbers of its arguments that are no constants."""
    (eqn,) = program.jaxpr.eqns  # the shard_map
    known = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    constants = [
        atom.val if isinstance(atom, Literal) else known.get(atom)
        for atom in eqn.invars
    ]
    flat = Flat.of(eqn.params["jaxpr"], constants)
    numbers = {
        atom: number
        for atom, number in zip(eqn.invars, flat.given, strict=True)
        if not isinstance(atom, Literal)
    }
    return flat, tuple(numbers[variable] for variable in program.jaxpr.invars)
