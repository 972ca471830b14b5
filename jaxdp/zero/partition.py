"""An optimizer's own program, run on shards of its arrays.

The function is traced on the true shapes, so that whatever Python decides by shape (a
mask of matrices, a factored statistic) is decided as on one device. Its program is then
interpreted on parts: what treats elements one by one runs on each device's part; a
reduction of all elements is one scalar per device and their sum; everything else gets
its operands whole and runs on every device alike. No optimizer is known by name, and
none is wrong: one that no rule helps is merely as costly as without shards.

Cost, per operation on shards, with K bytes of operands and N devices: one by one,
nothing; a reduction of everything, such as a norm, one scalar (N of them if it is no
sum); others, (N - 1) K / N bytes sent per device, and K of memory while they run.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal

from jaxdp import jaxprs
from jaxdp.packing import axis_size
from jaxdp.trees import own_parameter
from jaxdp.zero.flat import flattened
from jaxdp.zero.partition_rules import RULES, bound
from jaxdp.zero.partition_values import Axis, Form, Value, common_form
from jaxdp.zero.shards import is_shard

PyTree = Any
SHOWING = frozenset({"debug_callback", "debug_print"})  # every device may, harmlessly


def on_shards(
    function: Callable[..., PyTree],
    given: tuple[PyTree, ...],
    sharded: PyTree,
    axis_name: str,
) -> PyTree:
    """Runs a function of whole trees on trees of which some leaves are `Shard`s.

    Devices: each holds its part of every `Shard`, before and after. Runs inside a
    `shard_map` over the axis, with `check_vma=False`. Cost: see the module.

    Args:
        function: Takes the trees of `given` with every `Shard` as its whole array, and
            returns one tree of arrays. `unpartitionable` must have no objection.
        given: Trees whose leaves are arrays, the same on all devices, or `Shard`s.
        sharded: The result's tree or a prefix of it: with a `Shard` where a leaf comes
            back cut as that is, or True for one that is cut as a single layer; with
            anything else where it comes back whole, the same on all devices.
        axis_name: The mesh axis.

    Returns:
        The function's result. Padding in its `Shard`s is zero.

    Raises:
        ValueError: The axis is not bound here.
    """
    axis = Axis(axis_name, axis_size("on_shards", axis_name))
    leaves, structure = jax.tree.flatten(given, is_leaf=is_shard)
    types = jax.tree.unflatten(structure, [_whole_type(leaf) for leaf in leaves])
    program, shapes = jax.make_jaxpr(function, return_shape=True)(*types)
    values = [_value(x if is_shard(x) else jnp.asarray(x), axis) for x in leaves]
    results = _run(flattened(program), values, axis)
    forms = jax.tree.map(_form, sharded, is_leaf=is_shard)
    forms = jax.tree.leaves(jax.tree.broadcast(forms, shapes))
    results = map(_given_back, results, forms)
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def unpartitionable(function: Callable[..., PyTree], *shapes: PyTree) -> str | None:
    """Why a function cannot run on shards at all; None if it can.

    Args:
        function: Of whole trees.
        *shapes: The trees: arrays or their shapes.

    Returns:
        The operation that would be wrong if every device ran it: one that acts outside
        the program, where results may differ too, or that uses a mesh. Printing is not.
    """
    try:
        program = jax.make_jaxpr(function)(*shapes)
    except (NameError, ValueError) as error:  # an axis, say, that is not bound here
        return f"tracing it raised {type(error).__name__} ({error})"
    for eqn in jaxprs.equations(program):
        name = eqn.primitive.name
        operands = ", ".join(v.aval.str_short() for v in eqn.invars) or "nothing"
        if name == "shard_map" or "collective" in eqn.params or jaxprs.mesh_axes(eqn):
            return f"its {name} of {operands} uses the devices of a mesh"
        if eqn.effects and name not in SHOWING and not jaxprs.inner(eqn):
            return f"its {name} of {operands} would act once on every device"
    return None


def sharded_leaves(opt_state: PyTree, params: PyTree) -> PyTree:
    """Which leaves of an optimizer's state are cut into shards: a tree of bools.

    Those that belong to one parameter (`own_parameter`) element by element: they have
    its shape. Where the parameters are one array, the path tells nothing; there a state
    of one element stays whole.

    Args:
        opt_state: Arrays or their shapes, as from `optimizer.init`.
        params: The parameters, likewise.
    """
    known = {
        path: np.shape(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }

    def belongs(path, leaf):
        own = own_parameter(path, known)
        if own is None or known[own] != np.shape(leaf):
            return False
        return own != () or known[own] != ()

    return jax.tree_util.tree_map_with_path(belongs, opt_state)


def _run(program: ClosedJaxpr, values: Sequence[Value], axis: Axis) -> list[Value]:
    """Interprets a program on values."""
    jaxpr = program.jaxpr
    consts = [_value(const, axis) for const in program.consts]
    known = dict(zip(jaxpr.constvars, consts, strict=True))
    known |= dict(zip(jaxpr.invars, values, strict=True))

    def value(atom):
        return _literal(atom, axis) if isinstance(atom, Literal) else known[atom]

    for eqn in jaxpr.eqns:
        results = _applied(eqn, [value(v) for v in eqn.invars], axis)
        known |= dict(zip(eqn.outvars, results, strict=True))
    return [value(v) for v in jaxpr.outvars]


def _applied(eqn: Any, values: list[Value], axis: Axis) -> list[Value]:
    """The results of one operation, in the cheapest way that is right."""
    name = eqn.primitive.name
    if not all(v.is_whole for v in values) or name == "broadcast_in_dim":
        if name == "cond":
            return _cond(eqn, values, axis)
        results = RULES[name](eqn, values) if name in RULES else None
        if results is not None:
            return results
    results = bound(eqn, [v.as_whole() for v in values])
    return [_value(result, axis) for result in results]


def _cond(eqn: Any, values: list[Value], axis: Axis) -> list[Value]:
    """Either branch, on shards; their results get the same form.

    Devices agree on the branch, since what decides is the same on all of them.
    """
    index, *operands = values
    programs = [flattened(branch) for branch in eqn.params["branches"]]
    traced = [
        jax.eval_shape(functools.partial(_run, program, axis=axis), operands)
        for program in programs
    ]
    forms = [common_form(results) for results in zip(*traced, strict=True)]

    def branch(program, given):
        results = _run(program, given, axis)
        return [r.only(form) for r, form in zip(results, forms, strict=True)]

    branches = [functools.partial(branch, program) for program in programs]
    return lax.switch(index.as_whole(), branches, operands)


def _value(leaf: Any, axis: Axis) -> Value:
    """An array, which is whole, or a `Shard`."""
    if is_shard(leaf):
        return Value(axis, leaf.shape, part=leaf)
    return Value(axis, np.shape(leaf), whole=leaf)


def _literal(literal: Any, axis: Axis) -> Value:
    """A constant in the text of a program."""
    return _value(np.asarray(literal.val, literal.aval.dtype), axis)


def _form(leaf: Any) -> Form:
    """The form of a result that is asked for by a `Shard`, True or anything else."""
    if is_shard(leaf):
        return leaf.layers
    return 1 if leaf is True else "whole"


def _given_back(value: Value, form: Form) -> Any:
    """A result, its padding set to zero."""
    if not isinstance(form, int):
        return value.as_whole()
    part = value.as_part(form)
    return part.like(value.axis.masked(part, 0))


def _whole_type(leaf: Any) -> Any:
    """The type of the array that a `Shard` is a part of; others as they are."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_shard(leaf) else leaf
