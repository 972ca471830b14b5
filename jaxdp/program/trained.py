"""The training behind a compiled step: its shapes, and a mesh of as many devices."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxdp.trainer import Trainer
from jaxdp.training import trainer_of

if TYPE_CHECKING:
    from jaxdp.program.report import ProgramReport

PyTree = Any


def trainer_behind(train: Any, caller: str) -> Trainer:
    """What is behind the training that a method of a report was given.

    Raises:
        TypeError: It is none.
    """
    purpose = (
        "It sets a program beside the training it was compiled from; for other "
        "functions there is jaxdp.program.verdict.compare."
    )
    return trainer_of(train, f"report.{caller}", purpose)


def check_step(report: "ProgramReport", trainer: Trainer, caller: str) -> None:
    """Refuses the program of another training.

    Raises:
        ValueError: The state it takes is of another design, or there is none.
    """
    given, _ = report.arguments
    design = trainer.replica.design
    made_by = getattr(given[0], "design", "no training") if given else "no training"
    if len(given) != 2 or made_by != design:
        raise ValueError(
            f"report.{caller} got a program whose state is of {made_by}, and a "
            f"training with {design}. They must belong together. Compile train.lower("
            "state, batch), or jaxdp.compile_for(train.step, params, batch), of this "
            "training."
        )


def step_shapes(
    report: "ProgramReport", trainer: Trainer, arguments: Sequence[Any]
) -> tuple[PyTree, PyTree]:
    """Shapes of state and batch of the compiled step.

    Raises:
        ValueError: The report is of another training, or of text and names no shapes.
    """
    if arguments or report.arguments is None:
        return _given_shapes(report, trainer, arguments)
    check_step(report, trainer, "verify")
    given, _ = report.arguments
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)


def _given_shapes(
    report: "ProgramReport", trainer: Trainer, arguments: Sequence[Any]
) -> tuple[PyTree, PyTree]:
    """Shapes from what the caller passed."""
    if len(arguments) != 2:
        raise ValueError(
            f"report.verify got {len(arguments)} arguments after train, for a report "
            "made of text, which has no shapes of its own. It needs 2: the parameters "
            "or a state, and the batch. Pass them, or analyze the jax.stages.Compiled."
        )
    if trainer.mesh.size != report.devices:
        raise ValueError(
            f"report.verify got the text of a program for {report.devices} devices, "
            f"and a training on {trainer.mesh.size}. The shapes of a state depend on "
            "the number. Make the training on a mesh of as many devices, or analyze "
            "the jax.stages.Compiled instead of its text."
        )
    return trainer.shapes(*arguments)


def step_mesh(trainer: Trainer, devices: int, like: Any = None) -> AbstractMesh:
    """The mesh of a training, with so many devices: nothing runs on it.

    Its devices are of the kind of `like`, or of those of the training: what
    `algorithm="auto"` stands for depends on it.

    Raises:
        ValueError: It has several axes and another number of devices.
    """
    names, sizes = trainer.mesh.axis_names, trainer.mesh.devices.shape
    if trainer.mesh.size != devices:
        if len(names) > 1:
            raise ValueError(
                f"report.verify got a program for {devices} devices, and a training on "
                f"a mesh of {dict(zip(names, sizes, strict=True))}, which is "
                f"{trainer.mesh.size}. With several axes it cannot tell the shape of "
                f"the other mesh. Make the training on a mesh of {devices} devices."
            )
        sizes = (devices,)
    one = trainer.mesh if like is None else Mesh(np.array([like]), names[:1])
    return AbstractMesh(
        sizes,
        names,
        axis_types=(AxisType.Auto,) * len(names),
        abstract_device=one.abstract_mesh.abstract_device,
    )
