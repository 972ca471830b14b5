"""What an `apply_fn` brings along: arrays of a closure, devices of its own, callbacks.

A replica must compute on its device with what it was given. An array that the function
captured from another device would be copied there silently at every compilation, and a
`jax.device_put` to a fixed device does nothing inside a program: both are the
hard-wired `cuda:0` of PyTorch programs, and both are refused when the program is
traced.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from jaxdp import jaxprs
from jaxdp.replicated.devices import Device, name

CALLBACKS = ("pure_callback", "io_callback", "debug_callback")


def check_captured(
    program: ClosedJaxpr, apply_fn: Callable[..., Any], devices: tuple[Device, ...]
) -> None:
    """Refuses captured arrays and transfers that tie a program to a device.

    Raises:
        ValueError: Names the arrays, or the line that transfers.
    """
    bad = [
        f"{_name_of(array, apply_fn)} of shape {array.shape} on "
        f"{', '.join(sorted(map(name, array.devices())))}"
        for array in constants(program)
        if isinstance(array, jax.Array)
        and getattr(array, "committed", False)
        and any(array.devices() != {device} for device in devices)
    ]
    if bad:
        raise ValueError(
            f"apply_fn has captured {'; '.join(bad)}. It runs on "
            f"{', '.join(map(name, devices))}, and every replica must find what it "
            "needs on its own device. Pass the array as a parameter or as an input, "
            "or leave it uncommitted: make it with jax.numpy, without jax.device_put."
        )
    moves = [
        f"to {', '.join(sorted(map(name, fixed)))}"
        for eqn in jaxprs.equations(program)
        if eqn.primitive.name == "device_put"
        and (fixed := _fixed_devices(eqn))
        and any(fixed != {device} for device in devices)
    ]
    if moves:
        raise ValueError(
            f"apply_fn moves an array with jax.device_put {', '.join(moves)}. It runs "
            f"on {', '.join(map(name, devices))}, one device for each replica, and "
            "must not name another. Remove the transfer."
        )


def has_callbacks(program: ClosedJaxpr) -> bool:
    """Whether a program calls functions on the host, which can raise when it runs."""
    return any(eqn.primitive.name in CALLBACKS for eqn in jaxprs.equations(program))


def constants(program: ClosedJaxpr) -> Iterator[Any]:
    """All captured arrays, those of inner programs included."""
    yield from program.consts
    for eqn in jaxprs.equations(program):
        for value in eqn.params.values():
            for part in value if isinstance(value, tuple | list) else [value]:
                if isinstance(part, ClosedJaxpr):
                    yield from part.consts


def _fixed_devices(eqn: Any) -> set[Device]:
    """The devices that a `device_put` names."""
    found = set()
    for target in eqn.params["devices"]:
        if isinstance(target, jax.Device):
            found.add(target)
        elif isinstance(target, jax.sharding.Sharding):
            found |= target.device_set
    return found


def _name_of(array: jax.Array, apply_fn: Callable[..., Any]) -> str:
    """The variable or attribute that holds a captured array, if it can be found."""
    for place, value in _captured(apply_fn):
        for path, leaf in jax.tree_util.tree_leaves_with_path(value):
            if leaf is array:
                return f"{place}{jax.tree_util.keystr(path)}"
    return "an array"


def _captured(apply_fn: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """What a function sees beside its arguments, by name; objects by attribute."""
    function = inspect.unwrap(getattr(apply_fn, "func", apply_fn))
    owner = getattr(function, "__self__", None)
    if not inspect.isroutine(function):  # an object with __call__
        function, owner = type(function).__call__, function
    try:
        variables = inspect.getclosurevars(function)
    except TypeError:  # no Python function
        return
    for scope in ({"self": owner}, variables.nonlocals, variables.globals):
        for variable, value in scope.items():
            yield variable, value
            if not inspect.ismodule(value):
                for attribute, held in getattr(value, "__dict__", {}).items():
                    yield f"{variable}.{attribute}", held
