"""The programs of one replica: forward, forward that can go back, and backward.

Each is one `jax.jit`, traced once for all devices and compiled for each device that
runs it. The forward program of training returns what its backward program needs.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from jaxdp.buckets import is_summable
from jaxdp.replicated.captured import check_captured, has_callbacks
from jaxdp.replicated.devices import Device
from jaxdp.replicated.inputs import is_array
from jaxdp.replicated.residuals import Input, Kept, Origin, origins

PyTree = Any
Arrays = list[Any]


class Constant:
    """A leaf that is no array, as part of a cache's key: 1, 1.0 and True differ."""

    def __init__(self, value: Any):
        """Wraps any object; one without a hash is equal to itself only."""
        self.value = value
        try:
            # repr: 0.0 and -0.0 are equal, and numbers print all of their digits
            exact = repr(value) if isinstance(value, float | complex) else value
            self.key = (type(value), hash(value), exact)
        except TypeError:
            self.key = (type(value), id(value), None)

    def __hash__(self) -> int:
        """Of type and value."""
        return hash(self.key[:2])

    def __eq__(self, other: object) -> bool:
        """Same type and value."""
        return isinstance(other, Constant) and self.key == other.key


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of `apply_fn` without its arrays: what a program is compiled for.

    Attributes:
        apply_fn: `apply_fn(params, *inputs, **keywords)`, or with a model state
            `apply_fn(params, *inputs, model_state=..., **keywords)`, which then returns
            `(output, model_state)`.
        structure: Tree of `(params, model_state, inputs, keywords)`.
        constants: The leaves that are no arrays, by their place among the leaves.
        devices: Where replicas run.
    """

    apply_fn: Callable[..., Any]
    structure: Any  # a treedef
    constants: tuple[tuple[int, Constant], ...]
    devices: tuple[Device, ...]

    def __call__(self, arrays: Sequence[Any]) -> tuple[PyTree, PyTree]:
        """Output and next model state, for the arrays of one replica."""
        leaves = list(arrays)
        for place, constant in self.constants:
            leaves.insert(place, constant.value)
        params, state, inputs, keywords = jax.tree.unflatten(self.structure, leaves)
        if state is None:
            return self.apply_fn(params, *inputs, **keywords), None
        result = self.apply_fn(params, *inputs, model_state=state, **keywords)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(
                f"apply_fn returned {type(result).__name__} with a model_state. It "
                "must return (output, model_state) then, 2 values, as it receives "
                "model_state=. Return the state, changed or not."
            )
        return result


def flatten(
    apply_fn: Callable[..., Any], whole: PyTree, devices: tuple[Device, ...]
) -> tuple[Call, Arrays]:
    """A call of `(params, model_state, inputs, keywords)`, and its arrays."""
    leaves, structure = jax.tree.flatten(whole)
    arrays = [leaf for leaf in leaves if is_array(leaf)]
    constants = tuple(
        (i, Constant(leaf)) for i, leaf in enumerate(leaves) if not is_array(leaf)
    )
    return Call(apply_fn, structure, constants, devices), arrays


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["output", "state"],
    meta_fields=["calls_back"],
)
@dataclasses.dataclass(frozen=True)
class Made:
    """What a replica made; `calls_back` if its program calls functions on the host."""

    output: PyTree
    state: PyTree
    calls_back: bool


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["kept"],
    meta_fields=["structure", "origins"],
)
@dataclasses.dataclass(frozen=True)
class Saved:
    """What a backward program needs: the activations, and which inputs.

    Attributes:
        kept: Arrays that the forward program made.
        structure: Of the pullback.
        origins: Where each leaf of the pullback comes from.
    """

    kept: Arrays
    structure: Any  # a treedef
    origins: tuple[Origin, ...]

    def needed(self, arrays: Arrays) -> Arrays:
        """The inputs that the backward program takes again."""
        return [arrays[o.index] for o in self.origins if isinstance(o, Input)]

    def pullback(self, needed: Arrays) -> Callable[[PyTree], PyTree]:
        """The function from cotangents to gradients."""
        given = iter(needed)

        def leaf(origin):
            if isinstance(origin, Kept):
                return self.kept[origin.index]
            if isinstance(origin, Input):
                return next(given)
            return jnp.full(origin.shape, origin.value, origin.dtype)

        return jax.tree.unflatten(self.structure, map(leaf, self.origins))


@functools.partial(jax.jit, static_argnums=0)
def predict(call: Call, arrays: Arrays) -> Made:
    """Forward only: keeps nothing for a backward program."""
    run, calls_back = _checked(call, arrays)
    output, state = run(arrays)
    return Made(output, state, calls_back)


@functools.partial(jax.jit, static_argnums=(0, 1))
def forward(call: Call, active: tuple[bool, ...], arrays: Arrays) -> tuple[Made, Saved]:
    """Forward, and what backward needs for the gradient of the active arrays.

    Cotangents are those of the differentiable leaves of the output, in order.
    """
    run, calls_back = _checked(call, arrays)
    structure = None

    def of_active(arrays, chosen):
        given = iter(chosen)
        merged = [
            next(given) if a else array for a, array in zip(active, arrays, strict=True)
        ]
        made = run(merged)
        varying = [leaf for leaf in jax.tree.leaves(made[0]) if is_summable(leaf)]
        return varying, made

    def with_residuals(arrays):
        nonlocal structure
        chosen = [array for a, array in zip(active, arrays, strict=True) if a]
        differentiated = functools.partial(of_active, arrays)
        _, pullback, made = jax.vjp(differentiated, chosen, has_aux=True)
        leaves, structure = jax.tree.flatten(pullback)
        return made, leaves

    program, shapes = jax.make_jaxpr(with_residuals, return_shape=True)(arrays)
    results = jaxpr_as_fun(program)(*arrays)
    (output, state), leaves = jax.tree.unflatten(jax.tree.structure(shapes), results)
    first = len(results) - len(leaves)
    found, returned = origins(program.jaxpr, program.jaxpr.outvars[first:])
    kept = [leaves[i] for i in returned]
    return Made(output, state, calls_back), Saved(kept, structure, tuple(found))


@jax.jit
def backward(saved: Saved, needed: Arrays, cotangents: Arrays) -> Arrays:
    """Gradients of the active arrays."""
    (gradients,) = saved.pullback(needed)(cotangents)
    return gradients


def _checked(call: Call, arrays: Arrays) -> tuple[Callable[[Arrays], PyTree], bool]:
    """The call as a checked jaxpr, and whether it calls back; runs when traced."""
    program, shapes = jax.make_jaxpr(call, return_shape=True)(arrays)
    check_captured(program, call.apply_fn, call.devices)
    structure = jax.tree.structure(shapes)

    def run(arrays):
        results = jaxpr_as_fun(program)(*arrays)
        return jax.tree.unflatten(structure, results)

    return run, has_callbacks(program)
