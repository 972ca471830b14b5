"""A step in several micro-batches, one after another: less memory, one update.

Two ways to need less memory on the root. Parts of the batch, each on all devices as a
step of its own would be, need smaller slices. The same slices one by one on the root
need no gradients from other devices beside the root's. The gradients of all
micro-batches are summed in one set of buffers, and one starts when the one before has
ended, so that the arrays of one alone are there at a time.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from jaxdp.buckets import is_key
from jaxdp.replicated import transfers
from jaxdp.replicated.devices import name
from jaxdp.replicated.inputs import Inputs, check, check_arrays, chunk_sizes, is_array
from jaxdp.replicated.micro import Micro
from jaxdp.replicated.model import DataParallel
from jaxdp.replicated.programs import Constant
from jaxdp.replicated.step import State, TrainStep

PyTree = Any
SMALLER_BATCH = "smaller batch"
ONE_DEVICE = "one device"
FALLBACKS = (SMALLER_BATCH, ONE_DEVICE)


class Setting(NamedTuple):
    """How a batch runs.

    Attributes:
        parts: Into how many parts it is split, at most, one after another.
        alone: Whether every part's slices run one after another on the root.
    """

    parts: int = 1
    alone: bool = False

    def sizes(self, rows: int, devices: int) -> list[int]:
        """The rows of each micro-batch."""
        parts = chunk_sizes(rows, self.parts)
        if not self.alone:
            return parts
        return [size for part in parts for size in chunk_sizes(part, devices)]

    def lower(self, rows: int, devices: int, fallback: str) -> "Setting | None":
        """The next setting that needs less on the root; None if there is none.

        Parts are halved while the root's slice of a part has more than one row.
        """
        part = chunk_sizes(rows, self.parts)[0]
        if self.alone:
            return None
        if fallback == SMALLER_BATCH and part > devices:
            return Setting(2 * self.parts)
        return Setting(self.parts, True) if min(part, devices) > 1 else None

    def words(self, rows: int, model: DataParallel) -> str:
        """Such as "2 micro-batches of at most 33 rows on 4 devices"."""
        sizes = self.sizes(rows, len(model.devices))
        if len(sizes) == 1:
            return f"all {rows} rows at once"
        where = f"{len(model.devices)} devices"
        where = f"{name(model.root)} alone" if self.alone else where
        most = f"{max(sizes)} row{'s' if max(sizes) > 1 else ''}"
        return f"{len(sizes)} micro-batches of at most {most} on {where}"


class Batch(NamedTuple):
    """What a step is given beside the state.

    Attributes:
        inputs: Positional inputs of `apply_fn`.
        keywords: Keyword inputs.
        targets: What the loss compares with.
        rows: Along `dim`, of all arrays.
        shape: Equal for batches that the same programs run; hashable. Parts have none.
    """

    inputs: tuple[Any, ...]
    keywords: dict[str, Any]
    targets: PyTree
    rows: int
    shape: Any = None

    def split(self, count: int, dim: int) -> Iterator["Batch"]:
        """Parts as `torch.chunk` makes them, each cut when it is asked for.

        Arrays are cut; leaves without rows are part of every part, and every part has
        keys of its own.
        """
        start = 0
        sizes = chunk_sizes(self.rows, count)
        for i, size in enumerate(sizes):
            if len(sizes) == 1:
                yield self
                return
            cut = functools.partial(_cut, dim=dim, start=start, size=size, part=i)
            inputs, keywords, targets = jax.tree.map(
                cut, (self.inputs, self.keywords, self.targets)
            )
            yield Batch(inputs, keywords, targets, size)
            start += size


def batch_of(
    inputs: Any, targets: PyTree, keywords: dict[str, Any], dim: int, caller: str
) -> Batch:
    """A checked batch.

    Raises:
        TypeError: Leaves that look like data and are none.
        ValueError: Inputs that cannot be split, or targets that cannot be cut with
            them.
    """
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    rows = check(Inputs(inputs, keywords), dim, caller)
    check_arrays(targets, caller, "targets")
    bad = [
        f"targets{jax.tree_util.keystr(path)} of shape {leaf.shape}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(targets)
        if is_array(leaf) and leaf.ndim and not _has_rows(leaf, dim, rows)
    ]
    if bad:
        raise ValueError(
            f"{caller} got {', '.join(bad)}. Targets are cut along dim={dim} with the "
            f"outputs they belong to, and need the {rows} rows of the inputs there. "
            "Give every array of the targets one entry per row; pass what all rows "
            "share as a scalar, or bind it to loss_fn."
        )
    return Batch(inputs, keywords, targets, rows, _shape((inputs, keywords, targets)))


def on_root(step: TrainStep) -> TrainStep:
    """The same step on the root alone."""
    model = step.model
    alone = DataParallel(
        model.apply_fn,
        model.params,
        model_state=model.model_state,
        device_ids=[model.root],
        output_device=model.root,
        dim=model.dim,
    )
    return TrainStep(alone, step.loss_fn, step.optimizer)


def run(
    step: TrainStep, alone: TrainStep, state: State, batch: Batch, setting: Setting
) -> Micro:
    """Stages 1 to 8 of a batch, without the optimizer.

    Args:
        step: On all devices.
        alone: On the root.
        state: Not donated.
        batch: Checked.
        setting: How it runs.
    """
    if setting == Setting():
        return step.run(state, batch.inputs, batch.targets, batch.keywords)
    total = None
    for part in batch.split(setting.parts, step.model.dim):
        if setting.alone:
            total = _slice_by_slice(alone, state, part, total, len(step.model.devices))
        else:
            total = _one(step, state, part, total)
        state = state._replace(model_state=total.model_state)
    assert total is not None  # a batch has at least one row
    return total


def _slice_by_slice(
    alone: TrainStep, state: State, part: Batch, total: Micro | None, devices: int
) -> Micro:
    """What all replicas do with a part; as there, the first one's buffers survive."""
    own = state.model_state
    survives = None
    for replica, piece in enumerate(part.split(devices, alone.model.dim)):
        total = _one(alone, state._replace(model_state=own), piece, total)
        survives = total.model_state if replica == 0 else survives
        own = _of_replica(state.model_state, replica + 1)
    assert total is not None  # a part has at least one row
    return total._replace(model_state=survives)


def _one(step: TrainStep, state: State, part: Batch, total: Micro | None) -> Micro:
    """One micro-batch, added to those before; waits until its arrays are gone."""
    done = step.run(state, part.inputs, part.targets, part.keywords, part.rows)
    done = done.summed() if total is None else total.plus(done)
    return jax.block_until_ready(done)


def _of_replica(buffers: PyTree, replica: int) -> PyTree:
    """The root's buffers with the keys that a replica gets."""
    return jax.tree.map(
        lambda leaf: transfers.folded(leaf, replica) if is_key(leaf) else leaf, buffers
    )


def _shape(whole: PyTree) -> Any:
    """Structure, shapes and dtypes, and the values of leaves that are no arrays."""
    leaves, structure = jax.tree.flatten(whole)
    kinds = (
        (leaf.shape, leaf.dtype) if is_array(leaf) else Constant(leaf)
        for leaf in leaves
    )
    return structure, tuple(kinds)


def _has_rows(leaf: Any, dim: int, rows: int) -> bool:
    """Whether an array has one entry per row."""
    return -leaf.ndim <= dim < leaf.ndim and leaf.shape[dim] == rows


def _cut(leaf: Any, dim: int, start: int, size: int, part: int) -> Any:
    """A leaf's share of a part."""
    if is_key(leaf) and not leaf.ndim:
        return transfers.folded(leaf, part)
    if not is_array(leaf) or not leaf.ndim:
        return leaf
    if isinstance(leaf, np.ndarray):
        before = (slice(None),) * (dim % leaf.ndim)
        return leaf[(*before, slice(start, start + size))]
    return _sliced(leaf, start, size, dim)


# The start is an argument of the program, so that parts of one size share it.
_sliced = jax.jit(lax.dynamic_slice_in_dim, static_argnums=(2, 3))
