"""A design's step of a model, compiled for devices that need not be here."""

from typing import NamedTuple

import jax

from jaxdp import targets
from jaxdp.designs import Design
from jaxdp.jaxprs import opened
from jaxdp.mesh import data_mesh
from jaxdp.prediction.model import Model
from jaxdp.program.messages import Message, messages
from jaxdp.program.report import ProgramReport, analyze
from jaxdp.training import DataParallel


class CompiledStep(NamedTuple):
    """A step, compiled for some number of devices.

    Attributes:
        train: The training, on the mesh that it is compiled for.
        program: The step.
        report: What it sends, keeps and waits for.
        messages: Its collectives, as schedules.
        devices: How many it is for.
        rows: Of the batch of one device.
    """

    train: DataParallel
    program: jax.stages.Compiled
    report: ProgramReport
    messages: tuple[Message, ...]
    devices: int
    rows: int


def compiled_step(
    design: Design,
    model: Model,
    devices: int,
    target: str | None = "h100",
    hosts: int = 1,
) -> CompiledStep:
    """Compiles a step.

    Args:
        design: How gradients travel.
        model: What is trained.
        devices: How many.
        target: What to compile for; None for the devices at hand.
        hosts: In how many hosts they are.

    Raises:
        ValueError: As `targets.compile_for` and `jaxdp.data_parallel`.
        ModuleNotFoundError: The compiler is not installed.
    """
    mesh = targets.mesh(target, devices, hosts) if target else data_mesh(devices)
    train = model.training(design, mesh)
    arguments = model.state(train), model.global_batch(devices)
    if target is None:
        program = train.lower(*arguments).compile()
    else:
        where = {"target": target, "devices": devices, "hosts": hosts}
        program = targets.compile_for(train.step, *arguments, **where)
    sent = messages(opened(train.trace(*arguments).jaxpr))
    report = analyze(program)
    return CompiledStep(train, program, report, sent, devices, model.rows)
