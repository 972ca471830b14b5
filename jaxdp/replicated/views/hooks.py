"""Hooks on the calls of Flax modules, of NNX and of Linen.

Linen has interceptors of its own. NNX has none: while hooks are open, `__call__` of
every class of modules is replaced, in the class that defines it, by one that asks the
hook first. Whatever happens, closing puts back what was there.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

# Called with a module, its path and what runs it; returns what that returned.
Hook = Callable[[Any, str, Callable[[], Any]], Any]

# Classes belong to all threads: their methods are replaced by one thread at a time.
_replacing = threading.RLock()


class Frame(NamedTuple):
    """A module that is being called.

    Attributes:
        module: The module.
        path: Its path; empty for the outermost.
        inner: The modules inside by `id`, with their paths; kept, so that no other
            module can have that `id`.
    """

    module: Any
    path: str
    inner: dict[int, tuple[Any, str]]


@contextlib.contextmanager
def hooked(hook: Hook) -> Iterator[None]:
    """Calls `hook` around every call of a Flax module by this thread.

    The path of a module is that inside the outermost one that is being called, such as
    "blocks.0.conv1", and the outermost itself goes by the name of its class. A module
    made during a call has the path of its maker, and its class.

    Args:
        hook: `hook(module, path, run)`, which must return what `run()` returns.
    """
    with _nnx(hook), _linen(hook):
        yield


def inlined(function: Callable[[], Any]) -> Any:
    """Calls a function; inside, `jax.jit` and `scan` are Python, if that is possible.

    A cached program calls no modules, and a `scan` calls them once for all its trips.
    """
    try:
        with jax.disable_jit():
            return function()
    except Exception:  # JAX cannot do it for all: a scan of length 0 raises
        return function()


@contextlib.contextmanager
def _linen(hook: Hook) -> Iterator[None]:
    """Hooks on modules of Linen."""
    import flax.linen as nn

    running: list[Any] = []

    def intercept(call, arguments, keywords, context):
        module = context.module
        # A class that calls `super().__call__` is one module, called once.
        if context.method_name != "__call__" or running[-1:] == [id(module)]:
            return call(*arguments, **keywords)
        path = ".".join(module.path) or type(module).__name__
        running.append(id(module))
        try:
            return hook(module, path, lambda: call(*arguments, **keywords))
        finally:
            running.pop()

    with nn.intercept_methods(intercept):
        yield


@contextlib.contextmanager
def _nnx(hook: Hook) -> Iterator[None]:
    """Hooks on modules of NNX."""
    from flax import nnx

    running: list[Frame] = []
    thread = threading.get_ident()

    def intercept(module, call):
        same = bool(running) and running[-1].module is module
        if same or threading.get_ident() != thread:
            return call()
        frame = _frame(module, running)
        running.append(frame)
        try:
            return hook(module, frame.path or type(module).__name__, call)
        finally:
            running.pop()

    with _replacing, contextlib.ExitStack() as put_back:
        for kind in set(_subclasses(nnx.Module)):
            original = vars(kind).get("__call__")
            if callable(original):
                put_back.callback(setattr, kind, "__call__", original)
                setattr(kind, "__call__", _replacement(original, intercept))  # noqa: B010
        yield


def _replacement(original: Any, intercept: Callable[..., Any]) -> Callable[..., Any]:
    """A method that asks first; the original can be any object that binds as one."""

    @functools.wraps(original, updated=())
    def call(module, *arguments, **keywords):
        bound = original.__get__(module, type(module))
        return intercept(module, lambda: bound(*arguments, **keywords))

    return call


def _frame(module: Any, running: list[Frame]) -> Frame:
    """A module's path, and those of the modules inside."""
    from flax import nnx

    path = ""
    if running:
        above = running[-1]
        if id(module) in above.inner:
            return Frame(module, above.inner[id(module)][1], above.inner)
        path = _join(above.path, type(module).__name__)
    inner = {
        id(each): (each, _join(path, *steps))
        for steps, each in nnx.iter_modules(module)
    }
    return Frame(module, path, inner)


def _join(*steps: Any) -> str:
    """Steps of a path, with dots between."""
    return ".".join(str(step) for step in steps if step != "")


def _subclasses(kind: type) -> Iterator[type]:
    """All classes below a class; some come twice."""
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)
