"""The folder of a run: which steps lie there, and how another one gets there.

    00000040/            a checkpoint: manifest.json and arrays/
    00000040-2/          the same step, saved again
    tmp-00000050/        being written, or left by a save that was interrupted

A step is written under another name, flushed to the disk, and then renamed: it is there
as a whole or not at all. What it replaces goes after that.
"""

import contextlib
import os
import pathlib
import re
import shutil
from collections.abc import Iterator
from typing import NamedTuple

ARRAYS = "arrays"
UNFINISHED = "tmp-"
_NAME = re.compile(r"(\d{8,})(?:-(\d+))?")


class CheckpointWarning(UserWarning):
    """A checkpoint was not used, or not all of it."""


class Place(NamedTuple):
    """Where a step lies.

    Attributes:
        step: Its number.
        attempt: How many times it had been saved with this one.
        path: The folder.
    """

    step: int
    attempt: int
    path: pathlib.Path


def places(folder: pathlib.Path) -> list[Place]:
    """All steps of a folder, the newest first; complete or not."""
    if not folder.is_dir():
        return []
    found = []
    for path in folder.iterdir():
        if match := _NAME.fullmatch(path.name):
            found.append(Place(int(match[1]), int(match[2] or 1), path))
    return sorted(found, reverse=True)


def unfinished(folder: pathlib.Path) -> list[pathlib.Path]:
    """What saves have left that did not come to their end."""
    return sorted(folder.glob(f"{UNFINISHED}*")) if folder.is_dir() else []


@contextlib.contextmanager
def placed(folder: pathlib.Path, step: int) -> Iterator[pathlib.Path]:
    """A folder to write a step into; it is renamed when the block ends well.

    Raises:
        OSError: Something could not be written; nothing is left of it.
    """
    beside = folder / f"{UNFINISHED}{step:08d}"
    try:
        for left in unfinished(folder):
            shutil.rmtree(left)
        beside.mkdir(parents=True)
        yield beside
        _flush(beside)
        attempts = [place.attempt for place in places(folder) if place.step == step]
        name = f"{step:08d}-{attempts[0] + 1}" if attempts else f"{step:08d}"
        beside.rename(folder / name)
        _flush_one(folder)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def remove(place: Place) -> None:
    """Removes a step; one that is half removed does not look like a step."""
    with contextlib.suppress(FileNotFoundError):
        aside = place.path.with_name(f"{UNFINISHED}removed-{place.path.name}")
        place.path.rename(aside)
        shutil.rmtree(aside)


def sizes(folder: pathlib.Path) -> dict[str, int]:
    """Bytes of all files below a folder, by path from there."""
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def free_bytes(folder: pathlib.Path) -> int:
    """Free on the disk of a folder, which need not be there yet."""
    for parent in (folder, *folder.parents):
        if parent.is_dir():
            return shutil.disk_usage(parent).free
    return 0


def failure(folder: pathlib.Path, step: int, size: int, error: BaseException) -> str:
    """The message for a step that could not be saved."""
    return (
        f"Checkpoints could not save step {step} to {folder}: {error}. It takes "
        f"{size:,} bytes there, and {free_bytes(folder):,} are free. Steps that were "
        "saved before are as they were. Make the folder writable, free some space or "
        "use a smaller keep=, and save again."
    )


def _flush(folder: pathlib.Path) -> None:
    """Brings all files below a folder, and their names, to the disk."""
    for path in sorted(folder.rglob("*"), reverse=True):
        _flush_one(path)
    _flush_one(folder)


def _flush_one(path: pathlib.Path) -> None:
    """Brings a file, or the names in a folder, to the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
