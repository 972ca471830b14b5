"""The port of `nn.DataParallel` under observation: times, transfers, gradients.

`N` devices, the first of them the root; `Φ` bytes of parameters.
"""

import statistics
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxdp
from experiments.harness import devices, show
from experiments.harness.result import Rows
from experiments.parts.problem import Problem, mean_entropy
from jaxdp import replicated
from jaxdp.replicated import observe
from jaxdp.replicated.devices import name

PyTree = Any
WARM_UP = 2


def traces(
    step: replicated.TrainStep, given: Problem, repeats: int
) -> list[replicated.Trace]:
    """The traces of `repeats` steps, after steps that compile."""
    state = step.init()
    found = []
    with show.progress("tracing steps", repeats) as advance:
        for repeat in range(-WARM_UP, repeats):
            jax.block_until_ready(state)
            with step.model.trace() as trace:
                state, _ = step(state, given.images, given.labels)
            if repeat >= 0:
                found.append(trace)
                advance()
    return found


def stage_rows(found: Sequence[replicated.Trace]) -> Rows:
    """Every record with the median of its times; records come in one order."""
    label = f"medians of {len(found)} steps; {devices.label()}"
    return [
        {
            "stage": records[0].stage,
            "where": where(records[0]),
            "largest array": records[0]
            .shape.replace(" and ", " + ")
            .removesuffix(" more"),
            "moved_bytes": records[0].nbytes,
            "start_ms": statistics.median(each.start_ms for each in records),
            "median_ms": statistics.median(each.duration_ms for each in records),
            "label": label,
        }
        for records in zip(*(trace.records for trace in found), strict=True)
    ]


def where(record: replicated.Record) -> str:
    """The link of a transfer, the device of a program."""
    if record.is_transfer and record.source != record.target:
        return f"{record.source} to {record.target}"
    return record.target


def moved_rows(trace: replicated.Trace, given: Problem, count: int) -> Rows:
    """What a step moved, beside what N devices should move."""
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(given.params))
    outputs = 4 * 10 * len(given.labels)  # ten float32 for each row
    far = outputs - outputs // count  # the root's part is there already
    expected = [
        ("2 replicate", "parameters", "(N - 1) Φ", (count - 1) * size),
        ("3 scatter", "batch", "every row, once", given.images.nbytes),
        ("5 gather", "received outputs", "outputs of N - 1", far),
        ("7 scatter back", "output gradients", "outputs of N - 1", far),
        ("8 reduce", "received gradients", "(N - 1) Φ", (count - 1) * size),
    ]
    return [
        {
            "stage": stage,
            "what": what,
            "expected": words,
            "expected_bytes": nbytes,
            "moved_bytes": trace.moved(stage, what),
        }
        for stage, what, words, nbytes in expected
    ]


def replicas_at_work(found: Sequence[replicated.Trace]) -> float:
    """How many replicas run forward at a time, while any does; the median of steps."""
    counts = []
    for trace in found:
        spans = [
            (record.start_ms, record.end_ms)
            for record in trace.records
            if record.stage == "4 forward"
        ]
        whole = max(end for _, end in spans) - min(start for start, _ in spans)
        counts.append(sum(end - start for start, end in spans) / whole)
    return statistics.median(counts)


class Programs:
    """An observer that keeps the first program of every stage."""

    def __init__(self):
        """Starts empty."""
        self.lowered: dict[str, jax.stages.Lowered] = {}

    def see(self, event: observe.Event) -> None:
        """Keeps a program."""
        if event.lower is not None and event.stage not in self.lowered:
            self.lowered[event.stage] = event.lower()

    def settle(self) -> None:
        """Nothing is under way."""


def programs(
    step: replicated.TrainStep, given: Problem
) -> dict[str, jax.stages.Compiled]:
    """The programs that a step starts, those of replicas on the first device only."""
    kept = Programs()
    with observe.observed_by(kept):
        step(step.init(), given.images, given.labels)
    return {stage: lowered.compile() for stage, lowered in kept.lowered.items()}


def replica_gradients(model: jaxdp.DataParallel, given: Problem) -> list[PyTree]:
    """The gradient of the global loss in every replica, on its device."""
    slices = replicated.scatter(given.images, model.devices)
    copies = replicated.replicate(model.params, model.devices[: len(slices)])
    labels = jax.device_put(given.labels, model.output_device)

    def loss(copies):
        inputs = [(part,) for part in slices]
        outputs = replicated.parallel_apply(given.apply, copies, inputs)
        return mean_entropy(replicated.gather(outputs, model.output_device), labels)

    return jax.grad(loss)(copies)


def root_gradient(model: jaxdp.DataParallel, given: Problem) -> PyTree:
    """The gradient that the reduction leaves on the root."""

    def loss(params):
        return mean_entropy(model.apply(params, given.images), given.labels)

    return jax.grad(loss)(model.params)


def norm_rows(model: jaxdp.DataParallel, given: Problem) -> Rows:
    """The norm of the gradient on every device: before, and after two reductions."""
    own = replica_gradients(model, given)
    reduced = norm(root_gradient(model, given))
    everywhere = all_reduced(own, model.devices)
    return [
        {
            "device": name(device),
            "before the reduction": norm(own[i]),
            "after gather-to-root": f"{reduced:.9g}" if i == 0 else "no gradient",
            "after an all-reduce": norm(everywhere[i]),
        }
        for i, device in enumerate(model.devices)
    ]


def all_reduced(trees: Sequence[PyTree], order: Sequence[Any]) -> list[PyTree]:
    """What a ring all-reduce leaves on every device."""
    mesh = jaxdp.data_mesh(list(order))
    stacked = jax.tree.map(lambda *leaves: np.stack(jax.device_get(leaves)), *trees)

    def body(tree):
        total = jaxdp.all_reduce(jax.tree.map(lambda x: x[0], tree), "data")
        return jax.tree.map(lambda x: x[None], total)

    spec = P("data")
    ring = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)
    summed = jax.device_get(jax.jit(ring)(stacked))
    leaves, structure = jax.tree.flatten(summed)
    return [jax.tree.unflatten(structure, own) for own in zip(*leaves, strict=True)]


def norm(tree: PyTree) -> float:
    """Euclidean norm over all leaves, in float64."""
    flat = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)]
    return float(np.linalg.norm(np.concatenate(flat)))
