"""A design's step of a model, compiled for devices that need not be here."""

from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jaxdp import targets
from jaxdp.designs import Design
from jaxdp.jaxprs import opened
from jaxdp.mesh import data_mesh
from jaxdp.prediction.model import Model
from jaxdp.program.report import ProgramReport, analyze
from jaxdp.program.sized import SizedCollective, sized_collectives
from jaxdp.training import DataParallel


class CompiledStep(NamedTuple):
    """A step, compiled for some number of devices.

    Attributes:
        train: The training, on the mesh that it is compiled for.
        program: The step.
        report: What it sends, keeps and waits for.
        collectives: As schedules, for any number of devices.
        devices: How many it is for.
        rows: Of the batch of one device.
    """

    train: DataParallel
    program: jax.stages.Compiled
    report: ProgramReport
    collectives: tuple[SizedCollective, ...]
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

    Returns:
        The step's program, its report, and what it sends for any number of devices.

    Raises:
        ValueError: As `targets.compile_for` and `jaxdp.data_parallel`.
        ModuleNotFoundError: The compiler is not installed.
    """
    mesh = targets.mesh(target, devices, hosts) if target else data_mesh(devices)
    train, arguments, program = compiled_on(mesh, design, model, target, hosts)
    sent = sized_collectives(opened(train.trace(*arguments).jaxpr))
    report = analyze(program)
    return CompiledStep(train, program, report, sent, devices, model.rows)


def compiled_on(
    mesh: Mesh, design: Design, model: Model, target: str | None, hosts: int = 1
) -> tuple[DataParallel, tuple[Any, Any], jax.stages.Compiled]:
    """Compiles a step on a mesh of the caller's, which may have two axes.

    Args:
        mesh: Of the target's devices; of those at hand without a target.
        design: As for `compiled_step`, like all that follow.
        model: What is trained.
        target: What to compile for.
        hosts: In how many hosts the devices are.

    Returns:
        The training; shapes of its state and of a batch; the compiled step.
    """
    train = model.training(design, mesh)
    arguments = model.state(train), model.global_batch(mesh.size)
    if target is None:
        return train, arguments, train.lower(*arguments).compile()
    where = {"target": target, "devices": mesh.size, "hosts": hosts}
    return train, arguments, targets.compile_for(train.step, *arguments, **where)
