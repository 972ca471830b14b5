"""Arrays of a checkpoint: written and read by Orbax, and their checksums.

Orbax without compression: trained numbers shrink by 8 %, and Zstandard takes longer
than the disk. Small states, and names that no file can have, go into one OCDBT database
of zarr 3; the arrays of large ones get a file each, of their elements alone (zarr 2).
Such files are read straight into memory that a CPU device can compute on: a checksum
proves what is in them, and what fails it is left to Orbax.

Only the process that writes takes part, so that nothing waits for the others.
"""

import concurrent.futures
import contextlib
import logging
import math
import os
import pathlib
import re
import zlib
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.checkpoint.manifest import DamagedError
from jaxdp.checkpoint.names import listed

THREADS = min(8, os.cpu_count() or 1)
LARGE = 1 << 26  # bytes of a state whose arrays get files
DIRECT = 1 << 20  # bytes of an array that is read straight from its file
ALIGNED = 64  # bytes; what JAX demands of memory that it takes over
_FILE_NAME = re.compile(r"[\w.'\[\] -]{1,100}(?<!^\.)(?<!^\.\.)")


def write(folder: pathlib.Path, arrays: dict[str, np.ndarray]) -> dict[str, int]:
    """Writes arrays by name into a new folder.

    Returns:
        Their checksums, taken meanwhile.
    """
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        checksums = pool.map(checksum, arrays.values())
        some = {name: array for name, array in arrays.items() if array.size}
        with _orbax(not _as_files(some)) as (ocp, checkpointer):
            checkpointer.save(folder, args=ocp.args.PyTreeSave(some))
        return dict(zip(arrays, checksums, strict=True))


def read(folder: pathlib.Path, said: dict[str, Any]) -> dict[str, np.ndarray]:
    """Reads arrays by name.

    Args:
        folder: Written by `write`.
        said: By name, what the manifest says of them.

    Raises:
        DamagedError: They cannot be read, or are not what was written.
    """
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        tried = pool.map(lambda name: _direct(folder, name, said[name]), said)
        found = {n: x for n, x in zip(said, tried, strict=True) if x is not None}
    rest = {name: about for name, about in said.items() if name not in found}
    found |= _by_orbax(folder, rest)
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        computed = pool.map(checksum, [found[name] for name in rest])
        checksums = dict(zip(rest, computed, strict=True))
    if wrong := [name for name in rest if checksums[name] != said[name]["crc32"]]:
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


def _as_files(arrays: dict[str, np.ndarray]) -> bool:
    """Whether each array gets a file: a large state, whose names can be paths."""
    if sum(array.nbytes for array in arrays.values()) < LARGE:
        return False
    safe = all(
        _FILE_NAME.fullmatch(part) for name in arrays for part in name.split("/")
    )
    return safe and not any(
        str(parent) in arrays for name in arrays for parent in PurePath(name).parents
    )


def _direct(folder: pathlib.Path, name: str, about: Any) -> np.ndarray | None:
    """An array from its file; None if it has none, or if that has other elements."""
    dtype, shape = jnp.dtype(about["dtype"]), about["shape"]
    size = math.prod(shape) * dtype.itemsize
    path = folder.joinpath(*name.split("/"), ".".join("0" for _ in shape) or "0")
    if size < max(DIRECT, 1) or not path.is_file():
        return None
    memory = np.empty(size + ALIGNED, np.uint8)
    start = -memory.ctypes.data % ALIGNED
    memory = memory[start : start + size]
    with path.open("rb", buffering=0) as file:
        view, at = memory.data, 0
        while at < size and (count := file.readinto(view[at:])):
            at += count
    if at < size or zlib.crc32(memory.data) != about["crc32"]:
        return None
    return memory.view(dtype).reshape(shape)


def _by_orbax(folder: pathlib.Path, said: dict[str, Any]) -> dict[str, np.ndarray]:
    """Arrays as Orbax reads them; those without elements are nowhere.

    Raises:
        DamagedError: They cannot be read.
    """
    empty = {
        name: np.zeros(about["shape"], jnp.dtype(about["dtype"]))
        for name, about in said.items()
        if not math.prod(about["shape"])
    }
    names = [name for name in said if name not in empty]
    if not names:
        return empty
    with _orbax() as (ocp, checkpointer):
        kind = ocp.RestoreArgs(restore_type=np.ndarray)
        wanted = ocp.args.PyTreeRestore(
            item={name: 0 for name in names},
            restore_args={name: kind for name in names},
            partial_restore=True,
        )
        try:
            return empty | checkpointer.restore(folder, args=wanted)
        except Exception as error:  # of Orbax or TensorStore, of many kinds
            reason = str(error).partition("\n")[0]
            raise DamagedError(
                f"{folder.name} cannot be read: {type(error).__name__}: {reason}"
            ) from error


@contextlib.contextmanager
def _orbax(ocdbt: bool = True) -> Iterator[tuple[Any, Any]]:
    """Orbax, and its reader and writer for this process alone."""
    import orbax.checkpoint as ocp  # here: half a second that few programs need

    rank = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=rank,
        active_processes={rank},
        barrier_sync_key_prefix=f"jaxdp-{rank}",
    )
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=ocdbt,
        use_zarr3=ocdbt,
        use_compression=False,
        multiprocessing_options=alone,
    )
    log = logging.getLogger("absl")
    log.addFilter(_is_news)
    try:
        with contextlib.closing(
            ocp.Checkpointer(handler, multiprocessing_options=alone)
        ) as checkpointer:
            yield ocp, checkpointer
    finally:
        log.removeFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """Not that there is no database where none is wanted."""
    return "Skipping merge of OCDBT" not in record.getMessage()
