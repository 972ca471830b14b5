"""Compiles a function for devices that are not here."""

import functools
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxdp.targets import retarget, topology, training
from jaxdp.targets.chips import chip
from jaxdp.targets.quiet import quietly
from jaxdp.trainer import Trainer

MOST_KEPT = 32  # compiled programs
# XLA chooses between kernels of Triton and of cuBLAS by measuring. Without a GPU it
# takes Triton's for every matrix product, and fails where no tile fits a shape.
DEFAULT_OPTIONS = {"cuda": {"xla_gpu_enable_triton_gemm": False}, "tpu": {}}
# What JAX says if it lowers a callback for a device that it did not start.
_OF_CALLBACKS = ("different from the lowering platform", "Unknown backend")


@dataclass(frozen=True)
class _Program:
    """A lowered program, equal to another if both compile to the same."""

    key: str
    lowered: jax.stages.Lowered = field(compare=False)
    options: dict[str, Any] | None = field(compare=False)


def compile_for(
    fn: Any,
    *args: Any,
    target: str = "h100",
    devices: int = 8,
    hosts: int = 1,
    compiler_options: Mapping[str, Any] | None = None,
) -> jax.stages.Compiled:
    """Compiles a program for accelerators that need not exist here.

    The result cannot run here; it can be read, as `jaxdp.analyze` does. It shows what
    XLA decides when it compiles: layouts, fusions, collectives and their order, bytes,
    the memory that is planned. It does not show what is decided by measuring on a GPU:
    which algorithm of a library a convolution or a matrix product uses, and with it the
    workspace, and where a kernel of Triton is faster than cuBLAS. Here all products are
    cuBLAS's, unless `compiler_options` has `xla_gpu_enable_triton_gemm`. Nor does it
    show what libraries decide as they run, such as NCCL's algorithms.

    Devices: device i is on host `i // (devices / hosts)`. TPUs form one torus, the most
    square one. XLA's programs are the same for any number of hosts so far: hosts say
    where devices are, for links and for predicted times.

    Cost: one compilation, on the CPU. The same program for the same target is compiled
    once: the last 32 are kept. The arguments are only looked at.

    Args:
        fn: `train.step` of a `jaxdp.data_parallel`, or its `init`, `params` or `flush`,
            made on a mesh of any size; it is made anew on the target's devices. Or any
            other function, jitted or not, on a mesh of exactly `devices` devices: the
            program is moved. A function that asks for the mesh of a `jax.set_mesh` gets
            one with axis "data".
        *args: Shapes (`jax.ShapeDtypeStruct`) or arrays. Those of a training are
            parameters or a state, and for `step` the global batch.
        target: One of `jaxdp.targets.NAMES`.
        devices: How many, over all hosts; a multiple of `hosts`.
        hosts: How many hosts they are in, with equally many each.
        compiler_options: For XLA, besides those of the function's own `jax.jit`.

    Returns:
        What `jax.jit(fn).lower(...).compile()` gives.

    Raises:
        ValueError: An unknown target; devices that do not divide into hosts, of which
            no such torus exists, or for which the function was not made.
        TypeError: Something that is no function, or other arguments than a training's.
        ModuleNotFoundError: The compiler is not installed, or of another version than
            JAX: `pip install 'jax-data-parallel[compile]'`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxdp import targets
        >>> x = jax.ShapeDtypeStruct((8, 4), jnp.float32)
        >>> targets.compile_for(jnp.tanh, x, target="h100", devices=6, hosts=4)
        Traceback (most recent call last):
        ...
        ValueError: compile_for got devices=6 and hosts=4. All hosts have equally ...
    """
    mesh = topology.mesh_for("compile_for", target, devices, hosts)
    with quietly():
        jax.local_devices()  # JAX's own start, if this is what starts it, writes too
    owner = getattr(fn, "__self__", None)
    with _explained():
        if isinstance(owner, Trainer):
            lowered, own = training.lowered(owner, fn.__name__, args, mesh)
        else:
            lowered, own = retarget.moved(fn, args, mesh, chip(target).backend)
    defaults = DEFAULT_OPTIONS[chip(target).backend]
    options = {name: v for name, v in defaults.items() if name not in own}
    options |= compiler_options or {}
    about = (target, devices, hosts, sorted(own.items()), sorted(options.items()))
    program = _Program(_key(lowered, about), lowered, options or None)
    return _compiled(program)


@contextmanager
def _explained() -> Iterator[None]:
    """Adds to errors of JAX what they come of."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if any(words in str(error) for words in _OF_CALLBACKS):
            error.add_note(
                "compile_for: the function calls back into Python, which belongs to a "
                "device that is here. Leave out jax.debug.print, jax.pure_callback and "
                "the like."
            )
        raise


def _key(lowered: jax.stages.Lowered, about: tuple[Any, ...]) -> str:
    """What decides how a program is compiled, and how its arguments are called."""
    kept = (lowered.as_text(), lowered.in_tree, lowered.out_tree, about)
    return hashlib.sha256("\0".join(map(str, kept)).encode()).hexdigest()


@functools.lru_cache(maxsize=MOST_KEPT)
def _compiled(program: _Program) -> jax.stages.Compiled:
    """Compiles, once for equal programs."""
    with quietly():
        return program.lowered.compile(compiler_options=program.options)
