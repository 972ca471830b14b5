"""Arrays of a checkpoint: written and read by Orbax, and their checksums.

Orbax with OCDBT, zarr 3 and without compression: trained numbers shrink by 8 %, and
Zstandard takes longer than the disk. Only the process that writes takes part, so that
nothing waits for the others.
"""

import concurrent.futures
import contextlib
import math
import os
import pathlib
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.checkpoint.manifest import DamagedError
from jaxdp.checkpoint.names import listed

THREADS = min(8, os.cpu_count() or 1)


def write(folder: pathlib.Path, arrays: dict[str, np.ndarray]) -> dict[str, int]:
    """Writes arrays by name into a new folder.

    Returns:
        Their checksums, taken meanwhile.
    """
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        sums = pool.map(checksum, arrays.values())
        with _orbax() as (ocp, checkpointer):
            some = {name: array for name, array in arrays.items() if array.size}
            checkpointer.save(folder, args=ocp.args.PyTreeSave(some))
        return dict(zip(arrays, sums, strict=True))


def read(folder: pathlib.Path, said: dict[str, Any]) -> dict[str, np.ndarray]:
    """Reads arrays by name.

    Args:
        folder: Written by `write`.
        said: By name, what the manifest says of them.

    Raises:
        DamagedError: They cannot be read, or are not what was written.
    """
    empty = {
        name: np.zeros(about["shape"], jnp.dtype(about["dtype"]))
        for name, about in said.items()
        if not math.prod(about["shape"])
    }
    names = [name for name in said if name not in empty]
    with _orbax() as (ocp, checkpointer):
        kind = ocp.RestoreArgs(restore_type=np.ndarray)
        wanted = ocp.args.PyTreeRestore(
            item={name: 0 for name in names},
            restore_args={name: kind for name in names},
            partial_restore=True,
        )
        try:
            found = empty | checkpointer.restore(folder, args=wanted)
        except Exception as error:  # of Orbax or TensorStore, of many kinds
            reason = str(error).partition("\n")[0]
            raise DamagedError(
                f"{folder.name} cannot be read: {type(error).__name__}: {reason}"
            ) from error
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        sums = dict(zip(found, pool.map(checksum, found.values()), strict=True))
    if wrong := [name for name in said if sums[name] != said[name]["crc32"]]:
        raise DamagedError(
            f"{folder.name} has other bits than were saved, in {listed(wrong)}"
        )
    return {name: found[name] for name in said}


def checksum(array: np.ndarray) -> int:
    """CRC-32 of the elements in order; without the lock of Python."""
    if not array.size:
        return 0
    flat = np.ascontiguousarray(array).reshape(-1)
    return zlib.crc32(flat.view(np.uint8).data)


@contextlib.contextmanager
def _orbax() -> Iterator[tuple[Any, Any]]:
    """Orbax, and its reader and writer for this process alone."""
    import orbax.checkpoint as ocp  # here: half a second that few programs need

    rank = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=rank,
        active_processes={rank},
        barrier_sync_key_prefix=f"jaxdp-{rank}",
    )
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=True,
        use_zarr3=True,
        use_compression=False,
        multiprocessing_options=alone,
    )
    with contextlib.closing(
        ocp.Checkpointer(handler, multiprocessing_options=alone)
    ) as checkpointer:
        yield ocp, checkpointer
