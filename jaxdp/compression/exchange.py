"""One bucket's exchange: error feedback around a compression."""

import jax
import jax.numpy as jnp

from jaxdp.compression.base import Compression, PyTree, Travelled, Wire
from jaxdp.executor import accumulation_dtype


def exchange(
    compression: Compression,
    leaves: list[jax.Array],
    residuals: list[jax.Array] | None,
    states: list[PyTree],
    wire: Wire,
) -> tuple[list[jax.Array], list[jax.Array] | None, list[PyTree]]:
    """Averages one bucket over the replicas, and keeps what is lost for the next step.

    Devices: runs inside `shard_map`. Before, leaves and residuals differ between
    replicas and states are the same; after, means and states are the same.

    A NaN or infinity in anybody's leaves or residuals makes means non-finite on all
    replicas. Residuals and states are then of no use: a caller who skips such a step
    keeps the old ones.

    Args:
        compression: What the leaves travel as.
        leaves: This replica's gradients, of one dtype.
        residuals: What this replica has not sent yet of each leaf, in any float dtype;
            None without error feedback.
        states: Of each leaf.
        wire: Of this bucket.

    Returns:
        Means with the dtype of the leaves, residuals with theirs, and states.

    Raises:
        ValueError: The compression returns other leaves than it was given.
    """
    given = leaves
    if residuals is not None:
        given = [
            _wide(leaf) + _wide(residual)
            for leaf, residual in zip(leaves, residuals, strict=True)
        ]
    travelled = compression.mean(given, states, wire)
    _check(compression, travelled, leaves)
    means = travelled.means
    if not compression.carries_nonfinite:
        means = _spoiled(means, given, wire)
    if residuals is not None:
        residuals = [
            (whole - sent).astype(residual.dtype)
            for whole, sent, residual in zip(
                given, travelled.sent, residuals, strict=True
            )
        ]
    means = [x.astype(leaf.dtype) for x, leaf in zip(means, leaves, strict=True)]
    return means, residuals, travelled.states


def _wide(array: jax.Array) -> jax.Array:
    """In the dtype of sums."""
    return array.astype(accumulation_dtype(array.dtype))


def _spoiled(
    means: list[jax.Array], given: list[jax.Array], wire: Wire
) -> list[jax.Array]:
    """The means, but NaN if a replica was given something that is not finite."""
    finite = jnp.stack([jnp.isfinite(leaf).all() for leaf in given]).all()
    (spoiled,) = wire.mean([1.0 - finite.astype(jnp.float32)])
    return [jnp.where(spoiled > 0, jnp.nan, mean) for mean in means]


def _check(
    compression: Compression, travelled: Travelled, leaves: list[jax.Array]
) -> None:
    """Checks what a compression made: mostly for those of users."""
    wanted = [leaf.shape for leaf in leaves]
    for name in ("means", "sent"):
        made = [x.shape for x in getattr(travelled, name)]
        if made != wanted:
            raise ValueError(
                f"{compression} returned {name} of shapes {made}. It was given leaves "
                f"of shapes {wanted}, and each must come back in its own. Reshape "
                f"{name} in `mean`."
            )
    if len(travelled.states) != len(leaves):
        raise ValueError(
            f"{compression} returned {len(travelled.states)} states for {len(leaves)} "
            "leaves. There is one for each; () if nothing is kept. Return the given "
            "states if `mean` does not change them."
        )
