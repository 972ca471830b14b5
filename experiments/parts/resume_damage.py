"""Damages to every file of a checkpoint, and what restore did."""

import pathlib
import re
import shutil
import tempfile
import warnings
from typing import Any

from experiments.harness.result import Rows
from jaxdp.checkpoint import Checkpoints

DAMAGES = ("one bit flipped", "cut in half", "missing")


def table(folder: pathlib.Path, training: tuple[Any, Any]) -> Rows:
    """One row for each file and damage.

    Args:
        folder: Of two checkpoints; the newer one is damaged, in a copy.
        training: That can restore them, and a fresh state.
    """
    older, newer = Checkpoints(folder).steps()[-2:]
    step = folder / f"{newer:08d}"
    rows = []
    for path in sorted(path for path in step.rglob("*") if path.is_file()):
        name = path.relative_to(step)
        for how in DAMAGES:
            with tempfile.TemporaryDirectory() as copied:
                copy = pathlib.Path(copied, "run")
                shutil.copytree(folder, copy)
                damage(copy / step.name / name, how)
                did, why = restore(copy, training, older, newer)
            why = why.removeprefix(str(name)).strip()
            shown = re.sub(r"[0-9a-f]{28,}", "…", str(name))
            rows.append({"file": shown, "damage": how, "restore": did, "says": why})
    return rows


def damage(path: pathlib.Path, how: str) -> None:
    """Does it."""
    content = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
        return
    if how == "cut in half":
        content = content[: len(content) // 2]
    else:
        content[len(content) // 2] ^= 1
    path.write_bytes(content)


def restore(
    folder: pathlib.Path, training: tuple[Any, Any], older: int, newer: int
) -> tuple[str, str]:
    """What restore did, and what it said."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            found = Checkpoints(folder).restore(*training)
        except ValueError as error:
            return "refused", str(error)
    assert found is not None
    step = int(found.state.step)
    did = {older: f"used step {older} instead", newer: f"used step {newer}"}[step]
    reasons = [str(each.message) for each in told]
    reason = " ".join(reasons).partition(f"{newer:08d}: ")[2]
    return did, reason.partition(". It goes on")[0]
