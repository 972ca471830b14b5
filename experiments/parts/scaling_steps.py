"""Steps compiled once, then priced on any hardware, for any number of devices.

`jaxdp.predict` does the same for one piece of hardware: it compiles for each. Here the
program of one chip is replayed with the figures of others; and a step of `DataParallel`
is priced, which is no single program.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np

import jaxdp
from experiments.harness import show
from jaxdp import algorithms, targets
from jaxdp.cost import native_s, time_s
from jaxdp.jaxprs import opened
from jaxdp.prediction import GPU_OPTIONS, Model
from jaxdp.prediction.links import spread
from jaxdp.program import ProgramReport, analyze
from jaxdp.program.messages import Message, messages
from jaxdp.schedule import Schedule
from jaxdp.targets import Hardware

TARGET = "h100"


class Step(NamedTuple):
    """A step of a design, compiled for some devices of one host.

    Attributes:
        report: The program.
        devices: How many it is for.
        sent: Its collectives.
    """

    report: ProgramReport
    devices: int
    sent: tuple[Message, ...]


class Priced(NamedTuple):
    """A step on some hardware; milliseconds.

    Attributes:
        devices: N.
        compute_ms: What a device computes.
        communication_ms: What its communication takes, hidden or not.
        exposed_ms: What that adds to the step.
    """

    devices: int
    compute_ms: float
    communication_ms: float
    exposed_ms: float

    @property
    def step_ms(self) -> float:
        """Of the whole step."""
        return self.compute_ms + self.exposed_ms


def parameters(model: Model) -> int:
    """How many it has."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(model.params))


def compiler() -> str | None:
    """What steps are compiled for; None, with a remedy, for the devices at hand."""
    problem = targets.missing(TARGET)
    if not problem:
        return TARGET
    show.console.print(f"{problem} Steps are compiled for the devices at hand instead.")
    return None


def compiled(
    design: jaxdp.Design, model: Model, devices: int, target: str | None
) -> Step:
    """Compiles a step.

    Args:
        design: Which.
        model: What is trained, with the rows of one device.
        devices: N, all in one host.
        target: What for; None for the devices at hand.
    """
    mesh = targets.mesh(target, devices) if target else jaxdp.data_mesh(devices)
    train = model.training(design, mesh)
    arguments = model.state(train), model.global_batch(devices)
    if target is None:
        program = train.lower(*arguments).compile()
    else:
        given = {"target": target, "devices": devices, "compiler_options": GPU_OPTIONS}
        program = targets.compile_for(train.step, *arguments, **given)
    sent = messages(opened(train.trace(*arguments).jaxpr))
    return Step(analyze(program), devices, sent)


def all_reduce(step: Step, machine: Hardware, counts: Sequence[int]) -> list[Priced]:
    """A design that every device takes part in alike.

    With as many devices as the program is for, it is replayed. Communication of others
    is priced by its schedules, and the share of it hidden that was hidden there.

    Args:
        step: Compiled.
        machine: What it runs on.
        counts: Numbers of devices.
    """
    timeline = step.report.timeline(spread(machine, step.devices, None))
    known = [timeline.compute_s, timeline.communication_s, timeline.exposed_s]
    compute_s, communication_s, exposed_s = known
    share = max(0.0, 1 - exposed_s / communication_s) if communication_s else 0.0
    found = []
    for n in counts:
        if n != step.devices:
            hosts = spread(machine, n, None)
            communication_s = sum(_message_s(each, n, hosts) for each in step.sent)
            exposed_s = communication_s - min(share * communication_s, compute_s)
        else:
            _, communication_s, exposed_s = known
        found.append(_in_ms(n, compute_s, communication_s, exposed_s))
    return found


def data_parallel(
    elements: int, compute_s: float, machine: Hardware, counts: Sequence[int]
) -> list[Priced]:
    """`nn.DataParallel`: gradients into one device, parameters out of it.

    All of it is exposed: the sum waits for the backward pass, the next forward pass for
    the parameters.

    Args:
        elements: Parameters, in float32.
        compute_s: What a device computes.
        machine: What it runs on.
        counts: Numbers of devices.
    """
    found = []
    for n in counts:
        hosts = spread(machine, n, None)
        star_s = time_s(algorithms.star(n), elements, 4, hosts)
        found.append(_in_ms(n, compute_s, star_s, star_s))
    return found


def _message_s(message: Message, devices: int, machine: Hardware) -> float:
    """Seconds of one collective, as often as it runs."""
    if message.schedule is None:
        given = message.kind, message.elements, message.itemsize
        return message.count * native_s(*given, devices, machine)
    sized = replace(message, schedule=_resized(message.schedule, devices))
    assert sized.schedule is not None
    seconds = time_s(sized.schedule, sized.whole, message.itemsize, machine)
    return message.count * seconds


@functools.cache
def _resized(schedule: Schedule, devices: int) -> Schedule:
    """Built once: a ring of 1,024 devices takes a second."""
    return schedule.resized(devices)


def _in_ms(
    devices: int, compute_s: float, communication_s: float, exposed_s: float
) -> Priced:
    return Priced(devices, 1e3 * compute_s, 1e3 * communication_s, 1e3 * exposed_s)
