"""All replicas side by side: each device's program is started, none is waited for."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from jaxdp.buckets import is_movable, is_summable
from jaxdp.mesh import without_mesh
from jaxdp.replicated import observe, programs
from jaxdp.replicated.devices import Device, name
from jaxdp.replicated.inputs import rows_of
from jaxdp.replicated.programs import Arrays, Call, Made, Saved

Devices = tuple[Device, ...]
PyTree = Any


def predict(
    calls: Sequence[Call], arrays: Sequence[Arrays], devices: Devices, sizes: Any = None
) -> list[tuple[PyTree, PyTree]]:
    """Output and next model state of every replica; `grad` can pass.

    Args:
        calls: What each replica runs.
        arrays: Its arrays, on its device.
        devices: The devices.
        sizes: Of their slices, named in errors.
    """
    traced = any(isinstance(array, Tracer) for each in arrays for array in each)
    run = _differentiable if traced else run_predict
    with started(devices, sizes) as running:
        for replica, (call, given) in enumerate(zip(calls, arrays, strict=True)):
            running.append(run(call, devices[replica], replica, given))
    return running


def forward(
    slices: Any, arrays: Sequence[Arrays], trained: int
) -> tuple[list[tuple[PyTree, PyTree]], list[Saved]]:
    """Starts every replica's forward program that can go back.

    Args:
        slices: Calls, devices and sizes.
        arrays: For each replica its arrays.
        trained: The gradient of how many of them is wanted: the first ones.

    Returns:
        For each replica `(output, model_state)`, and what its backward program needs.
    """
    active = tuple(i < trained for i in range(len(arrays[0])))
    with started(slices.devices, slices.sizes) as running:
        for i, (call, given) in enumerate(zip(slices.calls, arrays, strict=True)):
            running.append(run_forward(call, slices.devices[i], i, active, given))
    return [made for made, _ in running], [saved for _, saved in running]


def backward(
    saved: list[Saved],
    devices: Devices,
    arrays: list[Arrays],
    cotangents: Sequence[Arrays],
    sizes: Sequence[int],
) -> list[Arrays]:
    """Starts every replica's backward program; a list of gradients for each.

    Lets go of what a replica saved once its program has started.
    """
    with started(devices, sizes) as gradients:
        for i, (device, given) in enumerate(zip(devices, cotangents, strict=True)):
            kept, own = saved.pop(0), arrays.pop(0)
            gradients.append(run_backward(kept, device, i, kept.needed(own), given))
    return gradients


@contextlib.contextmanager
def started(devices: Devices, sizes: Sequence[int] | None) -> Iterator[list[Any]]:
    """Collects what replicas make; if one raises, waits for those that run already.

    Raises:
        Exception: What the replica raised, of the same type where that can be made
            from a message, with replica, device and rows named.
    """
    running: list[Any] = []
    try:
        yield running
    except Exception as error:
        replica = len(running)
        jax.block_until_ready(running)
        rows = f", {rows_of(sizes, replica)}" if sizes else ""
        message = _raised(error, replica, devices[replica], rows)
        raise _again(error, message) from error


def run_predict(
    call: Call, device: Device, replica: int, arrays: Arrays
) -> tuple[PyTree, PyTree]:
    """Starts the forward program of one replica."""
    began = observe.now()
    made = programs.predict(call, arrays)
    lower = functools.partial(programs.predict.lower, call, arrays)
    about = ("4 forward", "outputs", replica, device, device, arrays)
    results = {"outputs": made.output, "model state": made.state}
    observe.tell(*about, results, began, lower)
    return _finished(made)


def run_forward(
    call: Call,
    device: Device,
    replica: int,
    active: tuple[bool, ...],
    arrays: Arrays,
) -> tuple[tuple[PyTree, PyTree], Saved]:
    """Starts the forward program that can go back."""
    began = observe.now()
    made, saved = programs.forward(call, active, arrays)
    lower = functools.partial(programs.forward.lower, call, active, arrays)
    about = ("4 forward", "outputs", replica, device, device, arrays)
    results = {"outputs": made.output, "model state": made.state}
    observe.tell(*about, results | {"activations": saved.kept}, began, lower)
    return _finished(made), saved


def run_backward(
    saved: Saved,
    device: Device,
    replica: int,
    needed: Arrays,
    cotangents: Arrays,
) -> Arrays:
    """Starts the backward program: gradients of the active arrays."""
    began = observe.now()
    gradients = programs.backward(saved, needed, cotangents)
    lower = functools.partial(programs.backward.lower, saved, needed, cotangents)
    given = (saved.kept, needed, cotangents)
    about = ("7 backward", "gradients", replica, device, device, given)
    observe.tell(*about, {"gradients": gradients}, began, lower)
    return gradients


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _differentiable(
    call: Call, device: Device, replica: int, arrays: Arrays
) -> tuple[PyTree, PyTree]:
    """One replica, with a gradient through its output; none through its state."""
    return run_predict(call, device, replica, arrays)


def _there(call, device, replica, primals: list[CustomVJPPrimal]):
    """Runs forward for the arrays whose gradient is asked for."""
    arrays = [primal.value for primal in primals]
    active = tuple(primal.perturbed and is_summable(primal.value) for primal in primals)
    made, saved = run_forward(call, device, replica, active, arrays)
    places = [i for i, is_active in enumerate(active) if is_active]
    return made, (saved, saved.needed(arrays), _Static((len(arrays), *places)))


@without_mesh
def _back(call, device, replica, residuals, cotangents):
    """Runs backward; arrays that were not asked for get no gradient."""
    del call
    saved, needed, static = residuals
    count, *places = static.value
    output, _ = cotangents

    def is_zero(leaf: Any) -> bool:
        return isinstance(leaf, SymbolicZero)

    smooth = [
        jax.device_put(np.zeros(leaf.shape, leaf.dtype), device)
        if is_zero(leaf)
        else leaf
        for leaf in jax.tree.leaves(output, is_leaf=is_zero)
        if is_movable(leaf)
    ]
    try:
        gradients = run_backward(saved, device, replica, needed, smooth)
    except Exception as error:
        raise _again(error, _raised(error, replica, device)) from error
    found = iter(gradients)
    return ([next(found) if i in places else None for i in range(count)],)


_differentiable.defvjp(_there, _back, symbolic_zeros=True)


@jax.tree_util.register_static
class _Static:
    """A value beside the arrays that a forward pass hands to its backward pass."""

    def __init__(self, value: tuple[int, ...]):
        self.value = value

    def __hash__(self) -> int:
        return hash(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self.value == other.value


def _finished(made: Made) -> tuple[PyTree, PyTree]:
    """Waits for a program that calls back, so that what it raises names its replica."""
    if made.calls_back:
        jax.block_until_ready((made.output, made.state))
    return made.output, made.state


def _raised(error: Exception, replica: int, device: Device, rows: str = "") -> str:
    """What a replica raised, in words."""
    where = f"Replica {replica} on {name(device)}{rows}"
    return f"{where} raised {type(error).__name__}: {error}"


def _again(error: Exception, message: str) -> Exception:
    """An error of the same type with another message, or a RuntimeError."""
    try:
        again = type(error)(message)
    except Exception:
        return RuntimeError(message)
    return again if str(again) == message else RuntimeError(message)
