"""Programs of any function, moved to devices that are not here.

A function carries its mesh with it, in a `shard_map` or in shardings, and those devices
are here. So it is lowered on them, but for the target's platform, with `jax.export`:
that keeps the program and its partitioning, and forgets the devices. The program is
then called on the target's, which adds nothing to it: XLA compiles what it would for
the same function written on the target's mesh.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import export
from jax.extend.core import Jaxpr
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdp.jaxprs import inner, opened
from jaxdp.targets.topology import shaped_as

# What JAX traces a function without a mesh with, if the function asks for one.
_NO_MESH = (ValueError, RuntimeError)


class Moved(NamedTuple):
    """A program for other devices, and what its own `jax.jit` asks of the compiler."""

    lowered: jax.stages.Lowered
    compiler_options: dict[str, Any]


def moved(fn: Any, args: tuple[Any, ...], mesh: Mesh, platform: str) -> Moved:
    """The program of a function, for other devices.

    Args:
        fn: Jitted or not, on any mesh of as many devices, or on none.
        args: Shapes or arrays, with shardings or without.
        mesh: The devices, on one axis.
        platform: Theirs: "cuda" or "tpu".

    Raises:
        TypeError: `fn` is not callable.
        ValueError: The function is for another number of devices.
    """
    if not callable(fn):
        raise TypeError(
            f"compile_for got fn={fn!r}. It must be a function, jitted or not, or the "
            "step of a training: what is compiled already keeps its devices. Pass the "
            "function that it was made of."
        )
    jitted = fn if isinstance(fn, jax.stages.Wrapped) else jax.jit(fn)
    try:
        traced = jitted.trace(*args)
    except _NO_MESH as error:
        return _traced_on(jitted, args, mesh, error)
    exported = export.export(jitted, platforms=[platform])(*args)
    _check_devices(exported, mesh)
    return _called_on(traced, exported, mesh)


def _traced_on(
    jitted: jax.stages.Wrapped, args: tuple[Any, ...], mesh: Mesh, error: Exception
) -> Moved:
    """The program of a function that asks for a mesh: it gets the target's."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    with jax.set_mesh(mesh):
        try:
            traced = jitted.trace(*shapes)
        except _NO_MESH:  # a mesh was not what it lacked
            raise error from None
        return Moved(traced.lower(), _own_options(traced))


def _called_on(
    traced: jax.stages.Traced, exported: export.Exported, mesh: Mesh
) -> Moved:
    """The exported program, called on a mesh as the function was to be called."""
    no_mesh: Any = None  # gives shardings over the mesh's axes, without devices
    inputs: Any = exported.in_shardings_jax(no_mesh)
    outputs: Any = exported.out_shardings_jax(no_mesh)
    meshes = [s.mesh for s in (*inputs, *outputs) if s and not s.mesh.empty]
    like = meshes[0] if meshes else _mesh_in(opened(traced.jaxpr))
    if like is not None:
        mesh = shaped_as(mesh, like)
    args, _ = jax.tree.unflatten(
        exported.in_tree,
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in exported.in_avals],
    )
    in_shardings, _ = jax.tree.unflatten(
        exported.in_tree, [_on(s, mesh) for s in inputs]
    )
    donated = [
        place
        for place, arg in enumerate(traced.args_info[0])
        if any(leaf.donated for leaf in jax.tree.leaves(arg))
    ]

    def program(*args):
        return exported.call(*_used(exported, args))

    program.__name__ = program.__qualname__ = exported.fun_name
    options = _own_options(traced)
    called = jax.jit(
        program,
        in_shardings=in_shardings,
        out_shardings=jax.tree.unflatten(
            exported.out_tree, [_on(s, mesh) for s in outputs]
        ),
        donate_argnums=donated,
        compiler_options=options or None,
    )
    with jax.set_mesh(mesh):
        return Moved(called.lower(*args), options)


def _mesh_in(jaxpr: Jaxpr) -> Mesh | AbstractMesh | None:
    """The first mesh that a program names, in a `shard_map` or in a constraint."""
    for eqn in jaxpr.eqns:
        for value in eqn.params.values():
            mesh = getattr(value, "mesh", value)
            if isinstance(mesh, Mesh | AbstractMesh) and not mesh.empty:
                return mesh
        for program in inner(eqn):
            if (mesh := _mesh_in(program)) is not None:
                return mesh
    return None


def _used(exported: export.Exported, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments with zeros for those that the program leaves unused.

    The call would use them, and `jax.jit` could not drop them any more.
    """
    leaves, structure = jax.tree.flatten(args)
    kept = [
        leaf
        if place in exported.module_kept_var_idx
        or jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
        else jnp.zeros(leaf.shape, leaf.dtype)
        for place, leaf in enumerate(leaves)
    ]
    return structure.unflatten(kept)


def _on(sharding: Any, mesh: Mesh) -> NamedSharding | None:
    """A sharding over a mesh without devices, on one that has them."""
    if sharding is None:  # left to the compiler
        return None
    if sharding.mesh.empty:  # one device
        return NamedSharding(mesh, P())
    # CPUs have no other memory beside their own; a GPU has the host's.
    kind = sharding.memory_kind
    kind = kind if kind == "pinned_host" else None
    return NamedSharding(
        shaped_as(mesh, sharding.mesh), sharding.spec, memory_kind=kind
    )


def _check_devices(exported: export.Exported, mesh: Mesh) -> None:
    if exported.nr_devices != mesh.size:
        raise ValueError(
            f"compile_for got devices={mesh.size} and {exported.fun_name}, a function "
            f"for {exported.nr_devices} device(s). They must be equally many. Pass "
            f"devices={exported.nr_devices}, or make the function on "
            f"jaxdp.targets.mesh(target, {mesh.size})."
        )


def _own_options(traced: jax.stages.Traced) -> dict[str, Any]:
    """What `jax.jit` was given for the compiler; JAX has no public way to ask."""
    return dict(traced._params["compiler_options_kvs"])
