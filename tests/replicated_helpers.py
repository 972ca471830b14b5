"""What the tests of replicas share: where arrays lie, and what was compiled."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
import pytest

PyTree = Any
COMPILATION = "/jax/core/compile/backend_compile_duration"


@contextmanager
def compilations() -> Iterator[list[str]]:
    """The names of all functions compiled inside the block, once for each program."""
    names: list[str] = []

    def note(event: str, duration_secs: float, **about: Any) -> None:
        del duration_secs
        if event == COMPILATION:
            names.append(str(about["fun_name"]).removeprefix("jit(").removesuffix(")"))

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def ids_of(tree: PyTree) -> PyTree:
    """For each leaf the id of its device; a set of them if it has several."""

    def leaf(array: Any) -> Any:
        ids = {device.id for device in array.devices()}
        return ids.pop() if len(ids) == 1 else ids

    return jax.tree.map(leaf, tree)


def put(value: Any, device: int, dtype: Any = None) -> jax.Array:
    """An array on the device of this id, committed to it."""
    return jax.device_put(np.asarray(value, dtype), jax.devices()[device])


def numbered(*shape: int, start: int = 1) -> np.ndarray:
    """Distinct whole numbers, in order."""
    return np.arange(start, start + np.prod(shape), dtype="f").reshape(shape)


def foreign(name: str, mark: str) -> Any:
    """An array of another library, such as `PIL.Image.Image`."""
    module, _, kind = name.rpartition(".")
    return type(kind, (), {"__module__": module, mark: property(lambda self: {})})()


def refuses(kind: type[Exception], *parts: str) -> Any:
    """Expects an error whose message has these parts, in this order."""
    pattern = "(?s)" + ".*".join(re.escape(part) for part in parts)
    return pytest.raises(kind, match=pattern)
