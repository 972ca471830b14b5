"""The programs of a training, for devices that are not here."""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdp.mesh import without_mesh
from jaxdp.trainer import Trainer

PyTree = Any
FUNCTIONS = ("step", "init", "params", "flush")


def lowered(
    trainer: Trainer, function: str, args: tuple[Any, ...], mesh: Mesh
) -> tuple[jax.stages.Lowered, dict[str, Any]]:
    """A function of a training, lowered for other devices.

    Args:
        trainer: The training, on any mesh.
        function: One of `FUNCTIONS`.
        args: Parameters or a state; for a step the global batch too.
        mesh: The devices, on one axis.

    Returns:
        The program, and what the training's design asks of the compiler.

    Raises:
        TypeError: Not one of them, or other arguments.
        ValueError: The design needs another number of devices, or has no such program.
    """
    _check(trainer, function, args)
    trainer = trainer.on(_like(trainer.mesh, mesh))
    if function == "step":
        options = trainer.replica.design.compiler_options(mesh.devices[0].platform)
        return trainer.lower_abstract(*args), options
    initial = trainer.initial(args[0])
    if function == "init":
        placed = _placed(initial, trainer.replicated)
        return without_mesh(trainer.jitted_init.lower)(*placed), {}
    state = jax.eval_shape(trainer.jitted_init, *initial)
    if function == "flush":
        return without_mesh(trainer.jitted_flush.lower)(state), {}
    kept = _sharded(state.params, trainer.specs[0].params, trainer.mesh)
    return without_mesh(trainer.jitted_params.lower)(kept), {}


def _like(mesh: Mesh, target: Mesh) -> Mesh:
    """The target's devices with the axes of a training's mesh; the first one grows."""
    others = mesh.size // len(mesh.devices)
    if target.size % others:
        raise ValueError(
            f"compile_for got devices={target.size}, and a training on a mesh of shape "
            f"{dict(mesh.shape)}. All axes but the first keep their sizes, so that the "
            f"devices must be a multiple of {others}: {target.size} is none. Use "
            f"devices={others * max(1, target.size // others)}."
        )
    sizes = (target.size // others, *mesh.devices.shape[1:])
    return Mesh(
        target.devices.reshape(sizes), mesh.axis_names, axis_types=mesh.axis_types
    )


def _placed(tree: PyTree, sharding: NamedSharding) -> PyTree:
    """Shapes of arrays with one sharding."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
    )


def _sharded(tree: PyTree, specs: PyTree, mesh: Mesh) -> PyTree:
    """Shapes of arrays on a mesh, by a tree of specs or the beginning of one."""
    return jax.tree.map(
        lambda spec, part: _placed(part, NamedSharding(mesh, spec)),
        specs,
        tree,
        is_leaf=lambda part: isinstance(part, P),
    )


def _check(trainer: Trainer, function: str, args: tuple[Any, ...]) -> None:
    """Refuses what is no program, and arguments that are not its."""
    if function not in FUNCTIONS:
        raise TypeError(
            f"compile_for got train.{function}, which is no program of its own. It "
            f"takes {', '.join(f'train.{name}' for name in FUNCTIONS)}."
        )
    wanted = 2 if function == "step" else 1
    if len(args) != wanted:
        batch = ", and the global batch" if function == "step" else ""
        raise TypeError(
            f"compile_for got train.{function} and {len(args)} argument(s). It needs "
            f"{wanted}: parameters or a state{batch}, as arrays or as shapes."
        )
    if function == "flush" and not trainer.replica.design.max_staleness:
        raise ValueError(
            f"compile_for got train.flush of {type(trainer.replica.design).__name__}, "
            "which has max_staleness=0: no gradients are in flight, and nothing is "
            "compiled. Leave it out, or use a design with a delay."
        )
