"""Arrays of a checkpoint for other tools, by name: NumPy and safetensors files.

A safetensors file is eight bytes that say how long its header is, the header in JSON
(dtype, shape and place of every array), and the arrays, row by row.
"""

import json
import os
import pathlib
import zipfile
from collections.abc import Mapping
from typing import BinaryIO

import numpy as np

from jaxdp.checkpoint import arrays, folders, manifest

SAFETENSORS = {  # the names of dtypes in such files
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}


def load(folder: str | pathlib.Path, step: int | None = None) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint by name, as they were saved.

    Args:
        folder: Of the run.
        step: Which one; None for the newest.

    Returns:
        Whole arrays: `params/...`, `opt_state/...`, `step`, and so on.

    Raises:
        FileNotFoundError: There is no such step.
        ValueError: It is damaged.
    """
    folder = pathlib.Path(folder).absolute()
    found = [p for p in folders.places(folder) if step in (None, p.step)]
    if not found:
        wanted = "no checkpoint" if step is None else f"no step {step}"
        there = sorted({place.step for place in folders.places(folder)})
        raise FileNotFoundError(
            f"load found {wanted} in {folder}, which has the steps {there}. Pass the "
            "folder of a run, and a step that it has."
        )
    path = found[0].path
    try:
        said = manifest.read(path)["arrays"]
        return arrays.read(path / folders.ARRAYS, said)
    except manifest.DamagedError as error:
        raise ValueError(
            f"load got a damaged checkpoint, {path}: {error}. Every file must be as it "
            "was written. Pass another step=, or bring the files back from a copy."
        ) from error


def export(
    folder: str | pathlib.Path,
    target: str | pathlib.Path,
    step: int | None = None,
    part: str | None = "params",
) -> None:
    """Writes arrays of a checkpoint as one file that other tools read.

    Args:
        folder: Of the run.
        target: `NAME.safetensors`, or `NAME.npz`; a file that is there is replaced.
        step: Which one; None for the newest.
        part: Of the state, left out of the names: `params/dense/w` becomes `dense/w`.
            None for everything, with whole names.

    Raises:
        FileNotFoundError: There is no such step.
        ValueError: It is damaged; nothing is called so; another ending.
        TypeError: The format has no name for a dtype.
    """
    target = pathlib.Path(target)
    if target.suffix not in (".npz", ".safetensors"):
        raise ValueError(
            f"export got the target {target.name}. Its ending says what it will be: "
            ".npz or .safetensors. Choose one of the two."
        )
    values = load(folder, step)
    if part is not None:
        values = {
            name.removeprefix(part).removeprefix("/") or part: array
            for name, array in values.items()
            if name == part or name.startswith((f"{part}/", f"{part}["))
        }
    if not values:
        raise ValueError(
            f"export got part={part!r}, and the checkpoint has nothing of that name. "
            "Pass 'params', 'opt_state', 'model_state', or None for everything."
        )
    _check_dtypes(target, values)
    beside = target.with_name(f"{folders.UNFINISHED}{target.name}")
    with beside.open("wb") as file:
        if target.suffix == ".npz":
            _write_npz(file, values)
        else:
            file.write(_header(values))
            for array in values.values():
                file.write(np.ascontiguousarray(array).tobytes())
        file.flush()
        os.fsync(file.fileno())
    beside.replace(target)


def _check_dtypes(target: pathlib.Path, values: Mapping[str, np.ndarray]) -> None:
    """Refuses dtypes that would not come back."""

    def known(array):
        if target.suffix == ".npz":
            return array.dtype.kind in "fciub"
        return array.dtype.name in SAFETENSORS

    unknown = [f"{n} ({a.dtype.name})" for n, a in values.items() if not known(a)]
    if unknown:
        other = ".safetensors" if target.suffix == ".npz" else ".npz"
        raise TypeError(
            f"export got {', '.join(unknown)} for {target.name}. {target.suffix} files "
            f"have no such dtype. Use {other}, or cast with jaxdp.checkpoint.load."
        )


def _write_npz(file: BinaryIO, values: Mapping[str, np.ndarray]) -> None:
    """As `numpy.savez` does, which cannot take an array called `file`."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in values.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.asarray(array))


def _header(values: Mapping[str, np.ndarray]) -> bytes:
    """Length and header of a safetensors file."""
    facts, start = {}, 0
    for name, array in values.items():
        end = start + array.nbytes
        facts[name] = {
            "dtype": SAFETENSORS[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(facts).encode()
    text += b" " * (-len(text) % 8)  # so that the arrays are aligned
    return len(text).to_bytes(8, "little") + text
