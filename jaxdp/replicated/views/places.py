"""Where an equation of a program comes from: the layer, and the line.

JAX keeps with every equation the scopes and the call stack in which it was traced.
"""

import os
import urllib.parse
from collections.abc import Callable
from typing import Any

import flax
import jax
import jaxlib
import optax

import jaxdp
from jaxdp.replicated.views.hooks import hooked, inlined

MARK = "layer:"  # what tells the names of layers from those of other scopes
JAX, OTHERS = (
    tuple(os.path.dirname(str(library.__file__)) + os.sep for library in libraries)
    for libraries in ((jax, jaxlib), (flax, optax, jaxdp))
)
LIBRARIES = JAX + OTHERS


def trace(function: Callable[..., Any], arrays: Any) -> Any:
    """The program of `function(arrays)`, in which every equation knows its layer."""

    def hook(module, path, run):
        del module
        with jax.named_scope(MARK + urllib.parse.quote(path, safe="")):
            return run()

    # A new function every time: JAX would remember a program without its layers.
    with hooked(hook):
        return inlined(lambda: jax.make_jaxpr(lambda given: function(given))(arrays))


def layer_of(scopes: list[str]) -> str:
    """The innermost layer among the scopes of an equation and its callers."""
    for scope in reversed(scopes):
        _, mark, rest = scope.rpartition(MARK)
        if mark:
            return urllib.parse.unquote(rest.partition("/")[0].partition(")")[0])
    return ""


def source_of(eqns: tuple[Any, ...]) -> str:
    """The innermost line that is no library's, of an equation or else its callers."""
    tracebacks = [eqn.source_info.traceback for eqn in eqns]
    frames = [frame for each in tracebacks if each for frame in each.frames]
    for libraries in (LIBRARIES, JAX):
        for frame in frames:
            if not frame.file_name.startswith(libraries):
                return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    return ""
