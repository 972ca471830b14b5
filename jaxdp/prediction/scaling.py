"""How a design scales: step times for 1 to 1,024 devices that nobody has to own.

Up to some number of devices the step is compiled for the chip and its schedule replayed
(`ProgramReport.timeline`). Beyond, compilation takes long, and the step is priced by
the schedules that it is made of: computation as in the largest compiled program,
communication by `jaxdp.cost`, and of it the share hidden that was hidden there. Where
both exist, both are given, so that they can be compared.

Weak scaling: every device has the same rows, whatever the number of devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from jaxdp import targets
from jaxdp.designs import Design
from jaxdp.prediction.links import communication_s, spread
from jaxdp.prediction.model import Model
from jaxdp.prediction.step import CompiledStep, compiled_step
from jaxdp.program.sized import SizedCollective
from jaxdp.program.timeline import Timeline
from jaxdp.targets import Hardware


@dataclass(frozen=True)
class Predicted:
    """The step with one number of devices.

    Attributes:
        devices: N.
        hosts: How many hosts they are in.
        step_s: Seconds of a step, from `source`.
        compute_s: What its computation takes.
        communication_s: What its communication takes, hidden or not.
        exposed_s: What communication adds to the step.
        source: "compiled" or "cost".
        compiled_step_s: From the compiled program; None where it was not compiled.
        cost_step_s: From the schedules.
    """

    devices: int
    hosts: int
    step_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    source: Literal["compiled", "cost"]
    compiled_step_s: float | None
    cost_step_s: float


@dataclass(frozen=True)
class Prediction:
    """The step of a design from few devices to many.

    Attributes:
        hardware: For what; hosts are full where several are needed.
        rows: One for each number of devices.
        rows_per_device: Rows of a device's batch.
    """

    hardware: Hardware
    rows: tuple[Predicted, ...]
    rows_per_device: int

    def throughput(self, row: Predicted) -> float:
        """Rows a second, over all devices."""
        return row.devices * self.rows_per_device / row.step_s


def predict(
    design: Design,
    model: Model,
    devices: int | Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
    hosts: int | None = None,
    hardware: str | Hardware = "h100",
    *,
    compile_up_to: int = 8,
) -> Prediction:
    """Predicts step times of a design for any number of devices.

    Cost: one compilation for each number of devices up to `compile_up_to`.

    Args:
        design: A design that sends by schedules that exist for every N, or by native
            collectives. Its options are the same for every N.
        model: What is trained.
        devices: Numbers of devices.
        hosts: In how many hosts; None for as few as `hardware.devices_per_host` allows.
        hardware: A target such as "h100", or `jaxdp.targets.hardware(...)` with links
            of your choice.
        compile_up_to: The largest number of devices to compile for.

    Returns:
        A row for each number of devices, in rising order. Above `compile_up_to` the
        padding of a bucket is that of the largest compiled program: less than so many
        elements.

    Raises:
        ValueError: No devices, no number of them up to `compile_up_to`, devices that
            do not divide into hosts, hardware of an unknown chip, or a design whose
            schedules exist for its own devices alone.
        ModuleNotFoundError: The compiler is not installed; see `targets.compile_for`.
    """
    machine = targets.hardware(hardware)
    counts = sorted({devices} if isinstance(devices, int) else set(devices))
    known = [n for n in counts if n <= compile_up_to]
    if not counts or counts[0] < 1:
        raise ValueError(
            f"predict got devices={counts}. Each is a number of devices, at least 1. "
            "Leave it out for 1 to 1024."
        )
    if not known:
        raise ValueError(
            f"predict got devices={counts} and compile_up_to={compile_up_to}. At least "
            f"one number from 1 to {compile_up_to} is needed, to know what computation "
            f"takes. Add one, or raise compile_up_to to {counts[0]}."
        )
    if not machine.target:
        raise ValueError(
            f"predict got hardware {machine.name!r} without a target. It compiles the "
            f"step for a chip, one of {', '.join(targets.NAMES)}. Make it with "
            "jaxdp.targets.hardware(target, ...), and replace what differs."
        )
    steps = []
    for n in known:
        count = spread(machine, n, hosts)
        given = {"target": machine.target, "hosts": n // count.devices_per_host}
        steps.append(compiled_step(design, model, n, **given))
    return price(steps, counts, machine, hosts)


def price(
    steps: Sequence[CompiledStep],
    devices: Sequence[int],
    hardware: str | Hardware,
    hosts: int | None = None,
) -> Prediction:
    """Predicts step times from steps that are compiled already, on any hardware.

    A program of one chip may be priced on another: XLA would fuse otherwise there, so
    what it computes is that of its own chip, at the other's speed.

    Args:
        steps: Of one design and model, from `compiled_step`.
        devices: Numbers of devices.
        hardware: As in `predict`.
        hosts: As in `predict`.

    Returns:
        A row for every number of devices.

    Raises:
        ValueError: As `predict`.
    """
    machine = targets.hardware(hardware)
    programs = {}
    for step in steps:
        timeline = step.report.timeline(spread(machine, step.devices, hosts))
        programs[step.devices] = _Program(timeline, step.collectives)
    largest = programs[max(programs)]
    rows = [_row(n, programs.get(n), largest, machine, hosts) for n in sorted(devices)]
    return Prediction(machine, tuple(rows), steps[0].rows)


class _Program(NamedTuple):
    """A compiled step on some hardware, and what it sends."""

    timeline: Timeline
    collectives: tuple[SizedCollective, ...]


def _row(
    devices: int,
    program: _Program | None,
    largest: _Program,
    machine: Hardware,
    hosts: int | None,
) -> Predicted:
    """One number of devices, from its own program if there is one."""
    machine = spread(machine, devices, hosts)
    sent = (program or largest).collectives
    priced_s = communication_s(sent, devices, machine)
    known = largest.timeline
    hidden_s = min(priced_s * _hidden_share(known), known.compute_s)
    exposed_s = priced_s - hidden_s
    priced = Predicted(
        devices=devices,
        hosts=devices // machine.devices_per_host,
        step_s=known.compute_s + exposed_s,
        compute_s=known.compute_s,
        communication_s=priced_s,
        exposed_s=exposed_s,
        source="cost",
        compiled_step_s=None,
        cost_step_s=known.compute_s + exposed_s,
    )
    if program is None:
        return priced
    found = program.timeline
    return replace(
        priced,
        step_s=found.step_s,
        compute_s=found.compute_s,
        communication_s=found.communication_s,
        exposed_s=found.exposed_s,
        source="compiled",
        compiled_step_s=found.step_s,
    )


def _hidden_share(timeline: Timeline) -> float:
    """The share of communication that adds nothing to the step."""
    if not timeline.communication_s:
        return 0.0
    return max(0.0, 1 - timeline.exposed_fraction)
