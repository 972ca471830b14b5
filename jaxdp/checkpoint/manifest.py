"""The manifest of a checkpoint: what it holds, and how to tell that it still does.

Three nets, from cheap to dear: every file must have its size, the manifest and small
files their checksum, and every array its own once it has been read. Checksums are
CRC-32, which finds every single flipped bit, and 2.2 GB/s of a core.
"""

import importlib.metadata
import json
import pathlib
import zlib
from typing import Any

import jax
import numpy as np

from jaxdp.checkpoint import folders
from jaxdp.checkpoint.names import listed

MANIFEST = "manifest.json"
FORMAT = 1
SMALL = 1 << 20  # bytes of a file that is read twice
Manifest = dict[str, Any]


class DamagedError(ValueError):
    """A checkpoint that is not what was saved."""


def made_of(arrays: dict[str, np.ndarray], checksums: dict[str, int]) -> Manifest:
    """What a manifest says of arrays, by name."""
    return {
        name: {
            "dtype": array.dtype.name,
            "shape": list(array.shape),
            "crc32": checksums[name],
        }
        for name, array in arrays.items()
    }


def write(folder: pathlib.Path, facts: Manifest) -> None:
    """Writes the manifest of a step whose arrays are written."""
    files = {
        name: {"bytes": size}
        | ({"crc32": _crc32(folder / name)} if size < SMALL else {})
        for name, size in folders.sizes(folder).items()
    }
    versions = {"jaxdp": _version("jax-data-parallel"), "jax": jax.__version__}
    versions["orbax"] = _version("orbax-checkpoint")
    facts = {"format": FORMAT, "versions": versions} | facts | {"files": files}
    facts["crc32"] = zlib.crc32(_text(facts).encode())
    (folder / MANIFEST).write_text(_text(facts, indent=1))


def read(folder: pathlib.Path) -> Manifest:
    """The manifest of a step whose files are as they were written.

    Raises:
        DamagedError: They are not; names the file.
    """
    try:
        facts = json.loads((folder / MANIFEST).read_text())
        checksum = facts.pop("crc32")
        if zlib.crc32(_text(facts).encode()) != checksum:
            raise ValueError("its checksum is another")
    except FileNotFoundError:
        raise DamagedError(f"{MANIFEST} is missing") from None
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise DamagedError(f"{MANIFEST} is not as it was written: {error}") from None
    if facts["format"] != FORMAT:
        raise DamagedError(
            f"{MANIFEST} has format {facts['format']}, and this version of jaxdp reads "
            f"format {FORMAT}"
        )
    if wrong := _wrong_files(folder, facts["files"]):
        raise DamagedError(listed(wrong))
    return facts


def _wrong_files(folder: pathlib.Path, files: dict[str, Any]) -> list[str]:
    """What is wrong with each file."""
    there, wrong = folders.sizes(folder), []
    for name, said in files.items():
        if name not in there:
            wrong.append(f"{name} is missing")
        elif there[name] != said["bytes"]:
            wrong.append(
                f"{name} has {there[name]:,} bytes instead of {said['bytes']:,}"
            )
        elif "crc32" in said and said["crc32"] != _crc32(folder / name):
            wrong.append(f"{name} has another checksum")
    return wrong


def _crc32(path: pathlib.Path) -> int:
    """Of a small file."""
    return zlib.crc32(path.read_bytes())


def _text(facts: Manifest, indent: int | None = None) -> str:
    """As JSON, the same for the same facts."""
    return json.dumps(facts, indent=indent, sort_keys=True)


def _version(package: str) -> str:
    """The installed version."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
