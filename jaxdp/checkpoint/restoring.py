"""From a folder to a state: the newest step that is whole, on this training's devices.

All processes read, and agree on every step before it is used: one that a single process
finds damaged is passed over by all of them.
"""

import pathlib
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.buckets import is_key
from jaxdp.checkpoint import arrays, folders, manifest
from jaxdp.checkpoint.comparing import check_same, usable
from jaxdp.checkpoint.content import Content, expected_of, kinds_of_keys, state_of
from jaxdp.checkpoint.folders import CheckpointWarning, Place
from jaxdp.checkpoint.manifest import DamagedError, Manifest
from jaxdp.checkpoint.names import filled
from jaxdp.mesh import without_mesh
from jaxdp.processes import agreement
from jaxdp.state import TrainState
from jaxdp.trainer import Trainer

PyTree = Any


class Source(NamedTuple):
    """Where a state comes from, and where it goes.

    Attributes:
        folder: Of the run.
        trainer: The training.
        state: A fresh state.
        cast: Whether floating dtypes may differ.
    """

    folder: pathlib.Path
    trainer: Trainer
    state: TrainState
    cast: bool


def restored(source: Source, step: int | None) -> tuple[TrainState, Any, Any] | None:
    """State, data and metadata of a step, or of the newest one; None if there is none.

    Raises:
        ValueError: Damaged, or of another training.
        FileNotFoundError: The step is not there.
    """
    found = _agreed(
        source, "which checkpoints there are", _listing(source.folder, step)
    )
    if not found:
        if step is None:
            return None
        raise FileNotFoundError(
            f"restore got step={step}, and {source.folder} has the steps "
            f"{sorted({p.step for p in folders.places(source.folder)})}. Ask for one "
            "of those, or leave step= out for the newest."
        )
    reasons = []
    for number, attempt, name in found:
        place = Place(number, attempt, source.folder / name)
        reason, values = _loaded(source, place)
        if reason is None and values is not None:
            return values
        reasons.append(f"{name}: {reason}")
        if step is None and len(reasons) < len(found):
            warnings.warn(
                f"restore passes over a damaged checkpoint, {place.path}: {reason}. It "
                "goes on with the one before.",
                CheckpointWarning,
                stacklevel=3,
            )
    raise ValueError(
        f"restore found no checkpoint that is whole in {source.folder}: "
        f"{'; '.join(reasons)}. Every file must be as it was written. Bring the files "
        "back from a copy, or start from another step."
    )


def _listing(folder: pathlib.Path, step: int | None) -> list[list[Any]]:
    """Candidates, the best first; says what was left unfinished."""
    for left in folders.unfinished(folder):
        warnings.warn(
            f"restore does not look at {left}: a save that was interrupted, or that "
            "goes on in another process.",
            CheckpointWarning,
            stacklevel=4,
        )
    return [
        [place.step, place.attempt, place.path.name]
        for place in folders.places(folder)
        if step in (None, place.step)
    ]


def _agreed(source: Source, what: str, value: Any) -> Any:
    """What the first process says."""
    ranks = source.trainer.ranks
    return agreement.agree(what, value, agreement.STEP_TIMEOUT_S, ranks=ranks)[0]


def _loaded(source: Source, place: Place) -> tuple[str | None, Any]:
    """State, data and metadata of a step; or why not, as some process says."""
    reason = content = None
    facts: Manifest = {}
    try:
        facts = manifest.read(place.path)
        content = _content(source, place, facts)
    except DamagedError as error:
        reason = str(error)
    ranks = source.trainer.ranks
    everyone = agreement.agree(
        "a checkpoint, read", reason, agreement.STEP_TIMEOUT_S, ranks=ranks
    )
    bad = [f"rank {rank}: {r}" for rank, r in zip(ranks, everyone, strict=True) if r]
    if bad:
        return reason if len(ranks) == 1 else "; ".join(bad), None
    assert content is not None
    state = without_mesh(state_of)(content, source.state, source.trainer)
    return None, (_on_devices(state, source.state), facts["data"], facts["metadata"])


def _content(source: Source, place: Place, facts: Manifest) -> Content:
    """Compares a step with this training, reads it, and proves it unchanged."""
    expected = expected_of(source.state, source.trainer)
    where, design = str(place.path), source.trainer.replica.design
    check_same(where, expected, kinds_of_keys(source.state), facts, source.cast)
    carried = usable(where, expected, facts, design)
    names = expected._replace(carried={}).names()
    wanted = [*names, *(name for part in carried.values() for name in part)]
    said = {name: facts["arrays"][name] for name in wanted}
    values = arrays.read(place.path / folders.ARRAYS, said)
    for name, leaf in names.items():
        values[name] = values[name].astype(leaf.dtype, copy=False)
    return Content(
        {name: filled(tree, name, values) for name, tree in expected.common.items()},
        {
            name: filled(expected.carried[name], f"carried/{name}", values)
            for name in carried
        },
    )


def _on_devices(state: TrainState, like: TrainState) -> TrainState:
    """Arrays of the host where those of another state are."""

    def place(values, leaf):
        if is_key(leaf):
            plain = jax.random.key_data(leaf)
            data = place(values, plain)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        if isinstance(values, jax.Array):  # of a fresh state, which stays as it is
            return jnp.copy(values)
        values = np.asarray(values)
        if leaf.is_fully_addressable and leaf.is_fully_replicated:
            return jax.device_put(values, leaf.sharding)
        return jax.make_array_from_callback(
            leaf.shape, leaf.sharding, values.__getitem__
        )

    return without_mesh(jax.tree.map)(place, state, like)
