"""Whether a checkpoint is one of this training, before any of it is used."""

import warnings
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxdp.checkpoint.content import COPIES, Content
from jaxdp.checkpoint.folders import CheckpointWarning
from jaxdp.checkpoint.manifest import Manifest
from jaxdp.checkpoint.names import listed, named

CARRIED = "carried/"
DELAYED = "in_flight"
# Others start anew from it, or count pushes of workers that there are no more.
UNIMPORTANT = (COPIES, "refused_pushes", "states")


def check_same(
    where: str, expected: Content, keys: dict[str, str], saved: Manifest, cast: bool
) -> None:
    """Refuses a checkpoint of another model, optimizer or precision.

    Args:
        where: The checkpoint, as errors call it.
        expected: Shapes and dtypes of what this training would save.
        keys: Kinds of its keys, by name.
        saved: The manifest.
        cast: Whether another floating dtype is meant.

    Raises:
        ValueError: Names everything that differs.
    """
    leaves = expected._replace(carried={}).names()
    there = saved["arrays"]
    wrong = [f"{name} is not in the checkpoint" for name in leaves if name not in there]
    wrong += [
        f"{name} is only in the checkpoint"
        for name in there
        if name not in leaves and not name.startswith(CARRIED)
    ]
    only_cast = not wrong
    for name in (name for name in leaves if name in there):
        has = np.dtype(leaves[name].dtype).name, list(leaves[name].shape)
        said = there[name]["dtype"], there[name]["shape"]
        if said[1] == has[1] and is_cast(said[0], has[0]):
            wrong += [] if cast else [_differs(name, said, has)]
        elif said != has:
            wrong.append(_differs(name, said, has))
            only_cast = False
    for name in {**keys, **saved["keys"]}:
        kinds = [str(each.get(name, "no key")) for each in (saved["keys"], keys)]
        if kinds[0] != kinds[1] and name in leaves and name in there:
            wrong.append(f"{name} is a key of kind {kinds[0]}, here {kinds[1]}")
            only_cast = False
    if not wrong:
        return
    remedy = (
        "Pass cast=True to change dtypes of floating numbers."
        if only_cast
        else "Restore it with the model, optimizer, precision and train.init arguments "
        "that it was saved with; jaxdp.checkpoint.load reads its arrays as they are."
    )
    raise ValueError(
        f"restore got a checkpoint, {where}, that differs from this training in "
        f"{len(wrong)} of {len(leaves)} leaves: {listed(wrong)}. Both must have the "
        f"same leaves, shapes and dtypes. {remedy}"
    )


def usable(
    where: str, expected: Content, saved: Manifest, design: Any
) -> dict[str, Iterable[str]]:
    """What this design takes over of what the other one carried.

    Args:
        where: The checkpoint, as errors call it.
        expected: As for `check_same`.
        saved: The manifest.
        design: This training's.

    Returns:
        By what is carried, the names of its leaves.

    Raises:
        ValueError: Gradients in flight, which only the same design can apply.
    """
    there = saved["arrays"]
    roots = {n.split("/")[1].partition("[")[0] for n in there if n.startswith(CARRIED)}
    found = {}
    for root in sorted(roots):
        at = f"{CARRIED}{root}"
        names = {n for n in there if n == at or n.startswith((f"{at}/", f"{at}["))}
        like = named(expected.carried.get(root), at)
        exact = root == DELAYED
        if names == {*like} and all(_fits(there[n], like[n], exact) for n in names):
            found[root] = like
        elif exact:
            raise ValueError(
                f"restore got a checkpoint, {where}, of {saved['design']} on "
                f"{saved['devices']} devices with gradients in flight, and this "
                f"training is {design}. Only the same design on as many devices can "
                "apply them. Save after state = train.flush(state), which does."
            )
        elif root not in UNIMPORTANT:
            warnings.warn(
                f"restore does not use {root!r} of {where}, which {saved['design']} "
                f"carried from step to step: {design} has nothing of that kind.",
                CheckpointWarning,
                stacklevel=4,
            )
    return found


def is_cast(saved: str, here: str) -> bool:
    """Whether two dtypes differ, and are floating both."""
    dtypes = jnp.dtype(saved), jnp.dtype(here)
    floating = all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes)
    return floating and saved != here


def _fits(said: Any, like: Any, exact: bool) -> bool:
    """Whether a carried leaf is this design's, if on another number of devices."""
    shapes = tuple(said["shape"]), tuple(like.shape)
    if said["dtype"] != np.dtype(like.dtype).name:
        return False
    if exact or not all(shapes):
        return shapes[0] == shapes[1]
    return shapes[0][1:] == shapes[1][1:]


def _differs(name: str, said: Any, has: Any) -> str:
    """One leaf, as it was saved and as it is here."""
    return f"{name} is {said[0]}{said[1]}, here {has[0]}{has[1]}"
