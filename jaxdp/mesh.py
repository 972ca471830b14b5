"""Meshes for data parallelism: one axis, checked when it is made.

The only place that names axis types: `jax.make_mesh` gives Explicit axes by default,
which refuse plain arrays inside `shard_map`.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh


def data_mesh(
    devices: int | Sequence[Any] | None = None, axis_name: str = "data"
) -> Mesh:
    """A one-axis mesh over devices; rank r on the axis is the r-th of them.

    Args:
        devices: How many of `jax.devices()`, or which in which order; None takes all.
        axis_name: Name of the axis.

    Returns:
        A `jax.sharding.Mesh` with one axis of type Auto.

    Raises:
        ValueError: No devices, more than exist, or one twice.
        TypeError: Something that is neither a count nor devices.

    Example:
        >>> import jaxdp
        >>> dict(jaxdp.data_mesh(4).shape)
        {'data': 4}
    """
    if devices is None:
        devices = jax.devices()
    elif isinstance(devices, int | np.integer) and not isinstance(devices, bool):
        devices = _first(int(devices))
    devices = list(devices) if isinstance(devices, Iterable) else [devices]
    strangers = [d for d in devices if not isinstance(d, jax.Device)]
    if strangers:
        raise TypeError(
            f"data_mesh got {strangers[0]!r} among its devices. It takes a count or a "
            "sequence of jax.Device: choose from jax.devices()."
        )
    if not devices or len(set(devices)) < len(devices):
        raise ValueError(
            f"data_mesh got {len(devices)} devices, {len(set(devices))} of them "
            "distinct. It needs at least one, and each once. Choose from "
            "jax.devices()."
        )
    return Mesh(np.array(devices), (axis_name,), axis_types=(AxisType.Auto,))


def without_mesh(function: Callable[..., Any]) -> Callable[..., Any]:
    """Hides the mesh of a `jax.set_mesh` from a function.

    Under it JAX refuses programs on other devices, and plain arrays if its axes are
    Explicit. Inside `jax.grad` JAX hides axes only, and not devices.
    """

    @functools.wraps(function)
    def hidden(*args, **keywords):
        if jax.sharding.get_abstract_mesh().empty:
            return function(*args, **keywords)
        try:
            no_mesh = jax.set_mesh(None)
        except ValueError:  # inside a transformation
            no_mesh = jax.sharding.use_abstract_mesh(AbstractMesh((), ()))
        with no_mesh:
            return function(*args, **keywords)

    return hidden


def auto_mesh(
    mesh: Mesh,
    axis_name: str | tuple[str, ...] | None,
    caller: str,
    most_axes: int = 1,
) -> Mesh:
    """The same devices and axes, with axes of type Auto.

    Meshes from `jax.make_mesh` have Explicit axes, which would make `shard_map` refuse
    plain arrays.

    Args:
        mesh: A mesh with one axis, or with up to `most_axes`.
        axis_name: The axis it must have, or all of them; None takes any.
        caller: Whom errors speak for.
        most_axes: How many axes it may have.

    Raises:
        ValueError: The mesh has other axes, or too many.
        TypeError: `mesh` is no Mesh.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"{caller} got mesh={mesh!r}. It needs a jax.sharding.Mesh. Make one with "
            "jaxdp.data_mesh()."
        )
    wanted = (axis_name,) if isinstance(axis_name, str) else axis_name
    if wanted is None:
        wanted = mesh.axis_names[:most_axes]
    if mesh.axis_names != wanted or not wanted:
        count = "one axis" if most_axes == 1 else f"1 to {most_axes} axes"
        named = count if axis_name is None else f"the axis {axis_name!r} and no other"
        raise ValueError(
            f"{caller} got a mesh with axes {mesh.axis_names}. It needs exactly "
            f"{named}. Make the mesh with jaxdp.data_mesh(axis_name=...), or pass the "
            "axis_name that it has."
        )
    types = (AxisType.Auto,) * len(wanted)
    if mesh.axis_types == types:
        return mesh
    return Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def worker_mesh(mesh: Mesh, serving_ranks: int) -> Mesh:
    """The mesh without the first ranks of its first axis, which only serve."""
    if not serving_ranks:
        return mesh
    return Mesh(
        mesh.devices[serving_ranks:], mesh.axis_names, axis_types=mesh.axis_types
    )


def across_cpu_processes() -> bool:
    """Whether devices are CPUs of several processes, which gloo connects."""
    return jax.process_count() > 1 and jax.default_backend() == "cpu"


def _first(count: int) -> list[Any]:
    """The first `count` devices."""
    found = jax.devices()
    if not 1 <= count <= len(found):
        platform = found[0].platform
        raise ValueError(
            f"data_mesh got devices={count}, and JAX started with {len(found)} "
            f"{platform} device(s). The count must lie between 1 and {len(found)}. For "
            "more CPU devices, call jax.config.update('jax_num_cpu_devices', "
            f"{max(count, 1)}) before anything uses JAX, or set JAX_NUM_CPU_DEVICES="
            f"{max(count, 1)} (and JAX_PLATFORMS=cpu) in the environment: once JAX has "
            "started, its device count is fixed."
        )
    return found[:count]
