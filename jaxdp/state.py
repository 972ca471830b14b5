"""The train state, and the checks that refuse what is not one."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding

from jaxdp.buckets import is_key, is_summable, same_types
from jaxdp.designs.base import Design

PyTree = Any


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "params", "opt_state", "rng", "model_state", "loss_scale"],
    meta_fields=["design"],
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything a run carries from step to step.

    Attributes:
        step: `[]`, int32, updates done; steps that were skipped do not count.
        params: What the design keeps of the parameters; `train.params` gives the tree.
        opt_state: What the design keeps of the optimizer state.
        rng: Key of the run, or None.
        model_state: Tree given to `init`, as the last step left it, or None;
            `train.model_state` gives the tree, whatever the policy keeps of it.
        loss_scale: `jaxdp.loss_scale.LossScale`, or None.
        design: The design that made the state.
    """

    step: Any
    params: PyTree
    opt_state: PyTree
    rng: Any
    model_state: PyTree
    loss_scale: Any
    design: Design


def check_state(
    state: TrainState, design: Design, sharding: NamedSharding, caller: str
) -> None:
    """Refuses a state that another program made.

    Args:
        state: What the caller passed as a state.
        design: The design of the program it was passed to.
        sharding: Any sharding over that program's mesh.
        caller: Which function, as errors call it, such as "train.step".

    Raises:
        TypeError: No `TrainState`.
        ValueError: Made by another design, or on other devices.
        RuntimeError: Given to a step before.
    """
    if not isinstance(state, TrainState):
        raise TypeError(
            f"{caller} got a state of type {type(state).__name__}. It must be "
            "the TrainState that train.init or the last train.step returned."
        )
    if state.design != design:
        raise ValueError(
            f"{caller} got a state made by {state.design}, and this program uses "
            f"{design}. Take the program that made it, or make a state with this "
            "program's init, from the train.params(state) of the other."
        )
    given = getattr(state.step, "sharding", None) or sharding
    if given != sharding and _ids(given) != _ids(sharding):
        raise ValueError(
            f"{caller} got a state on devices {_ids(given)}, and this program "
            f"runs on {_ids(sharding)}, in this order. Make the state with this "
            "program's init, from the train.params(state) of the other."
        )
    # jax 0.10 crashes the process when a program is given a deleted array.
    if is_deleted(state.step):  # as is the rest: a state is donated as a whole
        raise RuntimeError(
            f"{caller} got a state whose arrays have been deleted. train.step "
            "donates the state that it is given, so that each state serves one step. "
            "Go on with the state that it returned, and keep copies of parameters "
            "with train.params(state)."
        )


def check_opt_state(given: PyTree, expected: PyTree) -> None:
    """Refuses an optimizer state that does not belong to the parameters.

    Raises:
        ValueError: Structure, shapes or dtypes differ.
    """
    if not same_types(given, expected):
        raise ValueError(
            f"train.step got an optimizer state with {_sizes(given)}, and this "
            f"optimizer keeps {_sizes(expected)} for these parameters. State and "
            "parameters must come from one train.init of this program. Call it with "
            "these parameters."
        )


def check_params(params: PyTree, caller: str) -> None:
    """Refuses leaves that have no gradient.

    Args:
        params: The parameters.
        caller: Whom errors speak for.

    Raises:
        TypeError: Names them all.
    """
    no_numbers = "OSU"  # kinds of NumPy dtypes: objects, bytes, strings
    bad = [
        f"params{jax.tree_util.keystr(path)} "
        f"({getattr(leaf, 'dtype', type(leaf).__name__)})"
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if getattr(getattr(leaf, "dtype", None), "kind", "O") in no_numbers
        or not is_summable(leaf)
    ]
    if bad:
        raise TypeError(
            f"{caller} got parameters that have no gradient: {', '.join(bad)}. Every "
            "leaf must be a floating or complex array. Keep counters and keys out of "
            "them: train.init takes them as model_state=."
        )


def _ids(sharding: jax.sharding.Sharding) -> list[int]:
    """Device ids of a sharding, in the order of its mesh if it has one."""
    devices = sharding.mesh.devices if isinstance(sharding, NamedSharding) else None
    if devices is None:
        return sorted(device.id for device in sharding.device_set)
    return [device.id for device in devices.flat]


def own_copy(tree: PyTree) -> PyTree:
    """Copies, so that no two leaves share a buffer, and strips weak types."""
    return jax.tree.map(
        lambda leaf: jnp.copy(
            leaf if is_key(leaf) else lax.convert_element_type(leaf, leaf.dtype)
        ),
        tree,
    )


def is_deleted(leaf: Any) -> bool:
    """Whether a leaf is an array that has been donated."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
        return False
    return leaf.is_deleted()


def _sizes(tree: PyTree) -> str:
    """How many leaves and elements a tree has."""
    leaves = jax.tree.leaves(tree)
    return f"{len(leaves)} leaves of {sum(leaf.size for leaf in leaves)} elements"
