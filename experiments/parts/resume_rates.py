"""How fast a large state is saved and restored, beside the disk's own rate."""

import os
import pathlib
import shutil
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import jaxdp
from experiments.harness.result import Rows
from jaxdp.checkpoint import Checkpoints

PIECE = 1 << 26  # bytes


class Times(NamedTuple):
    """Seconds of one repeat, and bytes of the state.

    Attributes:
        size: Bytes.
        disk_write: A plain file of as many bytes, flushed.
        disk_read: Read back from the disk.
        save: From the call until the checkpoint is there, without steps meanwhile.
        restore: From the disk, until the state is on the device.
        call: In which `save` returns.
        during: The step after that call, while the thread writes.
        step: One without.
    """

    size: int
    disk_write: float
    disk_read: float
    save: float
    restore: float
    call: float
    during: float
    step: float


def measure(
    folder: pathlib.Path, size_mb: float, repeats: int, advance: Callable[[], None]
) -> list[Times]:
    """Saves and restores a state, in turn with a plain file."""
    train, fresh = large(size_mb)
    state, _ = train.step(large(size_mb)[1], _batch())
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    found = []
    with Checkpoints(folder, keep=1) as checkpoints:
        for _ in range(repeats):
            shutil.rmtree(folder, ignore_errors=True)  # takes time of its own
            disk = plain_file(folder, size)
            _, save = timed(_saved, checkpoints, train, state)
            forget(folder)
            back, restore = timed(_restored, checkpoints, train, fresh)
            del back
            state, step = timed(_stepped, train, state)
            _, call = timed(checkpoints.save, train, state)
            state, during = timed(_stepped, train, state)
            checkpoints.wait()
            found.append(Times(size, *disk, save, restore, call, during, step))
            advance()
    shutil.rmtree(folder)
    return found


def large(size_mb: float) -> tuple[Any, Any]:
    """A training whose state has so many MB, of which Adam's moments are two thirds."""
    rows = max(1, round(size_mb * 1e6 / 12 / 4 / 1024))
    random = np.random.default_rng(0)
    params = [random.standard_normal((rows, 1024), np.float32) for _ in range(4)]

    def loss_fn(params, batch):
        return sum((batch.mean() * leaf).mean() for leaf in params)

    mesh = jaxdp.data_mesh(1)
    train = jaxdp.data_parallel(loss_fn, optax.adam(1e-3), mesh)
    return train, train.init(params)


def plain_file(folder: pathlib.Path, size: int) -> tuple[float, float]:
    """Seconds to write as many bytes into one file, to the disk; and to read them."""
    folder.mkdir(parents=True, exist_ok=True)
    path, piece = folder / "plain", np.random.default_rng(0).bytes(min(size, PIECE))

    def write():
        with path.open("wb", buffering=0) as file:
            for _ in range(size // len(piece)):
                file.write(piece)
            os.fsync(file.fileno())

    def read():
        with path.open("rb", buffering=0) as file:
            while file.readinto(into):
                pass

    _, wrote = timed(write)
    forget(folder)
    into = bytearray(piece)  # touched, so that no time goes into finding memory
    _, read_s = timed(read)
    path.unlink()
    share = size / (size // len(piece) * len(piece))
    return share * wrote, share * read_s


def forget(folder: pathlib.Path) -> None:
    """Drops files from the memory of the system, where it can be asked to."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(function: Callable[..., Any], *given: Any) -> tuple[Any, float]:
    """What a function returns, and after how many seconds."""
    start = time.perf_counter()
    return function(*given), time.perf_counter() - start


def speed(measured: list[Times]) -> Rows:
    """Medians: seconds and rates of the disk and of checkpoints."""
    rows = []
    pairs = {"write": ("disk_write", "save"), "read": ("disk_read", "restore")}
    for name, (disk, ours) in pairs.items():
        disk_s, ours_s = (_median(measured, field) for field in (disk, ours))
        rows.append(_speed(name, measured[0].size, disk_s, ours_s))
    both = [sum(row[of] for row in rows) for of in ("disk_s", "checkpoint_s")]
    return [*rows, _speed("both", 2 * measured[0].size, *both)]


def blocked(measured: list[Times]) -> Rows:
    """Medians: for how long a loop that trains on waits."""
    call, save, during, step = (
        _median(measured, field) for field in ("call", "save", "during", "step")
    )
    return [
        {
            "save_s": save,
            "the call returns after_s": call,
            "share of the save": call / save,
            "a step_s": step,
            "the next step_s": during,
        }
    ]


def _batch() -> np.ndarray:
    return np.ones(8, np.float32)


def _saved(checkpoints: Checkpoints, train: Any, state: Any) -> None:
    checkpoints.save(train, state)
    checkpoints.wait()


def _restored(checkpoints: Checkpoints, train: Any, fresh: Any) -> Any:
    found = checkpoints.restore(train, fresh)
    return found and jax.block_until_ready(found.state)


def _stepped(train: Any, state: Any) -> Any:
    return jax.block_until_ready(train.step(state, _batch())[0])


def _speed(name: str, size: int, disk_s: float, ours_s: float) -> dict[str, Any]:
    return {
        "what": name,
        "disk_s": disk_s,
        "checkpoint_s": ours_s,
        "disk GB/s": size / disk_s / 1e9,
        "checkpoint GB/s": size / ours_s / 1e9,
        "share of the disk": disk_s / ours_s,
    }


def _median(measured: list[Times], field: str) -> float:
    return statistics.median(getattr(times, field) for times in measured)
