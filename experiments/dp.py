"""What happens in one step of nn.DataParallel, stage by stage, and what does it move?

Command:   make experiment EXP=dp              ARGS="--devices 4 --batch-size 64"
Hardware:  any; without GPUs, 4 forced host devices.
Runtime:   about 15 s on two cores.

The model is TinyNet (convolution 3 to 16, ReLU, global average pool, linear 16 to 10;
618 parameters, Φ = 2,472 bytes) on 64 images of 32 x 32 x 3, SGD with momentum, run by
jaxdp.DataParallel: one program per device, started by one Python program. Beside it the
same step as one program over all devices, the design GatherToRoot.

Expected numbers, for N = 4 devices:
  parameters out, gradients in   (N - 1) Φ = 7,416 bytes each, per step
  batch out                      786,432 bytes, all rows from the host, once
  outputs in, gradients out      3/4 of 64 x 10 floats: 1,920 bytes each
  parameters after a step        as a single device's, to 1e-6 of the largest
  gradients                      their sum over replicas is the full batch's gradient,
                                 for 64 rows and for 66 = 17+17+17+15; the plain average
                                 of local means is not, for 66
  norm of each replica's         four different numbers before the reduction; after it
                                 the root has one, the others none
  device ids [3, 1, 0, 2]        the first quarter of the batch lies on device 3
"""

import dataclasses
from typing import Any

import jax
import numpy as np

import jaxdp
from experiments.harness import config as harness
from experiments.harness import devices, timing
from experiments.harness.result import Claim, Result, Rows
from experiments.ledger import catalogue
from experiments.parts import gradients, port, problem
from jaxdp import replicated

ORDER = (3, 1, 0, 2)  # device ids of claim CA10
EQUAL = 1e-5  # relative; sums of 10^5 float32 terms in another order differ by less


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(harness.Config):
    """Options of the experiment."""

    devices: int = 4  # how many
    batch_size: int = 64  # rows over all devices
    learning_rate: float = 0.1
    repeats: int = timing.REPEATS  # timed steps

    def check(self) -> None:
        """Checks the options."""
        super().check()
        self.check_repeats(self.repeats)
        self.check_divides(self.devices if self.tiny else self.batch_size)


@harness.full_precision
def run(config: Config) -> Result:
    """Answers the question."""
    batch_size = config.devices if config.tiny else config.batch_size
    repeats = 2 if config.tiny else config.repeats
    given = problem.tiny_net(batch_size, config.learning_rate)
    model = jaxdp.DataParallel(
        given.apply, given.params, device_ids=range(config.devices)
    )
    step = model.train_step(problem.mean_entropy, given.optimizer)
    found = port.traces(step, given, repeats)
    spmd = SPMD(given, config.devices)
    ends = {"DataParallel": one_step(step, given), "GatherToRoot": spmd.one_step()}
    moved = port.moved_rows(found[-1], given, config.devices)
    combined = combine(given, config.devices)
    norms = port.norm_rows(model, given)
    placed = placement(config.devices, batch_size)
    return Result(
        claims=[
            claim_sum(combined, given, step),
            claim_order(placed),
            claim_norms(norms),
            claim_broadcast(step, given),
        ],
        tables={
            "stages": port.stage_rows(found),
            "moved_in_a_step": moved,
            "whole_step": whole_step(step, given, spmd, found, repeats),
            "same_step_as_one_device": compare(ends, given),
            "gradient_norms": norms,
            "replica_gradients_against_full_batch": combined,
            "who_holds_which_rows": placed,
        },
        figures={
            "One step, by device": fastest(found).gantt(
                "One step, by device",
                "the fastest of the traced steps; thin bars: what arrives at the "
                f"device; {devices.label()}",
            )
        },
        programs={"GatherToRoot step": spmd.program, **port.programs(step, given)},
    )


class SPMD:
    """The same step as one program over all devices."""

    def __init__(self, given: problem.Problem, count: int):
        """Compiles it."""
        mesh = jaxdp.data_mesh(count)
        design = jaxdp.GatherToRoot()
        self.train = jaxdp.data_parallel(
            given.loss_fn, given.optimizer, mesh, design=design
        )
        self.batch = jaxdp.shard_batch((given.images, given.labels), mesh)
        self.params = given.params
        self.state = self.train.init(given.params)
        self.program = self.train.lower(self.state, self.batch).compile()

    def one_step(self) -> Any:
        """The parameters after one step."""
        state, _ = self.train.step(self.train.init(self.params), self.batch)
        return self.train.params(state)

    def __call__(self) -> Any:
        """A further step, to be timed."""
        self.state, metrics = self.train.step(self.state, self.batch)
        return metrics


def one_step(step: replicated.TrainStep, given: problem.Problem) -> Any:
    """The parameters after one step."""
    state, _ = step(step.init(), given.images, given.labels)
    return state.params


def compare(ends: dict[str, Any], given: problem.Problem) -> Rows:
    """Parameters after the step, next to a single device's."""
    _, updated = problem.on_one_device(given)
    return [
        {"run": run, "relative difference": gradients.difference(end, updated)}
        for run, end in ends.items()
    ]


def whole_step(
    step: replicated.TrainStep,
    given: problem.Problem,
    spmd: SPMD,
    found: list[replicated.Trace],
    repeats: int,
) -> Rows:
    """Times whole steps in turns, and says how many replicas run at a time."""
    state = step.init()

    def one_more():
        nonlocal state  # donated
        state, metrics = step(state, given.images, given.labels)
        return state, metrics

    times = timing.interleaved(
        {"DataParallel": one_more, "GatherToRoot": spmd}, repeats
    )
    at_work = {"DataParallel": port.replicas_at_work(found)}
    return [
        {
            "step": run,
            "programs": "one per device" if run in at_work else "one over all devices",
            "replicas at work in forward": at_work.get(run, ""),
            **times[run]._asdict(),
        }
        for run in times
    ]


def fastest(found: list[replicated.Trace]) -> replicated.Trace:
    """The trace that the machine disturbed least."""
    return min(found, key=lambda trace: max(r.end_ms for r in trace.records))


def combine(given: problem.Problem, count: int) -> Rows:
    """Combines replicas' gradients, for the batch and for an uneven one."""
    rows, even = [], len(given.labels)
    uneven = max(even, 4 * count) + max(1, count // 2)  # 66 = 17+17+17+15
    for size in (even, uneven):
        images, labels = problem.random_batch(size)
        rows += gradients.combine(given.losses, given.params, images, labels, count)
    return rows


def placement(count: int, batch_size: int) -> Rows:
    """Scatters a batch over devices in another order, and reads back who holds what."""
    order = ORDER if count >= len(ORDER) else tuple(reversed(range(count)))
    rows = []
    for i, part in enumerate(replicated.scatter(np.arange(batch_size), order)):
        (holder,) = part.devices()
        rows.append(
            {
                "slice": i,
                "rows": f"{int(part[0])} to {int(part[-1])}",
                "expected on device": order[i],
                "lies on device": holder.id,
            }
        )
    return rows


def claim_sum(
    combined: Rows, given: problem.Problem, step: replicated.TrainStep
) -> Claim:
    """CA1."""
    found = {
        (row["rows"], row["combination"]): row["relative difference"]
        for row in combined
    }
    sums = [v for (_, way), v in found.items() if way == gradients.SUM]
    plain = [v for (_, way), v in found.items() if way == gradients.PLAIN]
    gradient, _ = problem.on_one_device(given)
    reduced = port.root_gradient(step.model, given)
    executed = gradients.difference(reduced, gradient)
    return Claim(
        id="CA1",
        claim=catalogue.text("CA1"),
        expected=f"1 (sum) or {1 / len(step.model.devices):g} (average)",
        measured=round(gradients.share(reduced, gradient), 6),
        unit="times the full batch's gradient",
        verdict="partly" if max(*sums, executed) < EQUAL else "refuted",
        why="The second passage holds: what the main device reduces is a plain sum of "
        "the replicas' gradients of the global mean loss, equal to the full batch's "
        f"gradient up to rounding: off by {executed:.1e} in the executed reduction, "
        f"and by {sums[-1]:.1e} for {combined[-1]['rows']} rows. The first is right "
        "as arithmetic only: gradients of local means must be weighted by their rows. "
        f"Their plain average is off by {plain[-1]:.1e} for those rows.",
    )


def claim_order(placed: Rows) -> Claim:
    """CA10."""
    holds = all(row["expected on device"] == row["lies on device"] for row in placed)
    order, found = (
        ", ".join(str(row[column]) for row in placed)
        for column in ("expected on device", "lies on device")
    )
    return Claim(
        id="CA10",
        claim=catalogue.text("CA10"),
        expected=placed[0]["expected on device"],
        measured=placed[0]["lies on device"],
        unit=f"is the device with the first of {len(placed)} slices",
        verdict="holds" if holds else "refuted",
        why=f"A batch of row numbers scattered to device_ids=[{order}], and every "
        f"device's array read back: the slices lie, in order, on devices {found}.",
    )


def claim_norms(norms: Rows) -> Claim:
    """CA11."""
    before = [row["before the reduction"] for row in norms]
    after = [row["after an all-reduce"] for row in norms]
    spread = max(before) / min(before)
    return Claim(
        id="CA11",
        claim=catalogue.text("CA11"),
        expected=1.0,
        measured=spread,
        unit="largest norm over smallest, before the reduction",
        verdict="refuted" if spread > 1.01 else "holds",
        why="Each replica's real gradient, read on its device, is that of its own "
        f"rows: norms {', '.join(f'{value:.4g}' for value in before)}. After the "
        "reduction only the root has a gradient, so there is nothing to compare; an "
        f"all-reduce does leave {len(set(after))} norm on {len(after)} devices. The "
        "script prints one tensor once for each device, so its check cannot fail.",
    )


def claim_broadcast(step: replicated.TrainStep, given: problem.Problem) -> Claim:
    """CA16."""
    steps = 3
    state = step.init()
    with step.model.trace() as trace:
        for _ in range(steps):
            state, _ = step(state, given.images, given.labels)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(given.params))
    others = len(step.model.devices) - 1
    copies = trace.moved("2 replicate", "parameters") / size / steps
    order = list(dict.fromkeys(record.stage for record in trace.records))
    last = trace.records[-1].stage
    return Claim(
        id="CA16",
        claim=catalogue.text("CA16"),
        expected=float(others),
        measured=copies,
        unit="copies of the parameters sent per step",
        verdict="partly" if copies == others and last == "8 optimizer" else "refuted",
        why="The second passage holds, as in PyTorch: the last event of a step is "
        f"'{last}', and the copies leave at '{order[2]}' of the next one. "
        "_sync_params_and_buffers belongs to DistributedDataParallel. Traffic is the "
        f"same either way: N - 1 = {others} copies in each of {steps} steps.",
    )
