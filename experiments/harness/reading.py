"""Reads what experiments have written, and says what each result is worth today.

A result is made by one commit and read at another. It is `current` if neither `jaxdp/`
nor `experiments/` has changed in between, `older` if they have; outside a git checkout
nobody can tell, and nothing is older. Every note says what to run.
"""

import dataclasses
import json
import pathlib
import re
import subprocess
from typing import Any, Literal

from experiments.harness import registry, result

State = Literal["current", "older", "missing", "damaged"]
CODE = ("jaxdp", "experiments")  # what results depend on
ROOT = registry.FOLDER.parent
USUAL = pathlib.Path("results")


@dataclasses.dataclass(frozen=True)
class Found:
    """What is there of one experiment.

    Attributes:
        name: Of the experiment.
        folder: Where its files lie.
        document: Of `result.json`; None if it is missing or damaged.
        state: "current", "older", "missing" or "damaged".
        tiny: Whether it is from a run with `--tiny`.
        note: What a reader must know, with the command to run; "" for a current result
            of full size.
    """

    name: str
    folder: pathlib.Path
    document: result.Document | None
    state: State
    tiny: bool
    note: str


def find_all(results: pathlib.Path) -> dict[str, Found]:
    """What is there of every experiment, in the order of `registry.names()`."""
    return {name: find(results, name) for name in registry.names()}


def find(results: pathlib.Path, name: str) -> Found:
    """What is there of one experiment.

    Args:
        results: The folder of all results, such as `results`.
        name: Of the experiment; its files are in `results/NAME`.
    """
    folder = results / name
    path, run = folder / "result.json", command(results, name)
    if not path.exists():
        note = f"{path} is not there. Make it with `{run}`."
        return Found(name, folder, None, "missing", False, note)
    try:
        document = _read(path, name)
    except (OSError, ValueError) as error:
        note = f"{path} is damaged: {error} Make it again with `{run}`."
        return Found(name, folder, None, "damaged", False, note)
    tiny, age = document["config"].get("tiny") is True, _age(document)
    size = "It is of a tiny run: everything ran, but no number means much." * tiny
    words = " ".join(filter(None, [age, size]))
    note = f"{words} Make it anew, in full, with `{run}`." if words else ""
    return Found(name, folder, document, "older" if age else "current", tiny, note)


def command(results: pathlib.Path, name: str) -> str:
    """The command that makes a result of full size."""
    usual = results.resolve() == USUAL.resolve()
    return f"make experiment EXP={name}" + (
        "" if usual else f' ARGS="--output {results}"'
    )


def _read(path: pathlib.Path, name: str) -> result.Document:
    """A document that has the format, and whose files are all there.

    Raises:
        ValueError: The reason that it is damaged, as a sentence.
        OSError: It cannot be read.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or too deep
        raise ValueError(f"it is not JSON ({error}).") from None
    wrong = result.problems(document)
    if wrong:
        raise ValueError(f"it has not the format of today: {'; '.join(wrong)}.")
    if document["experiment"] != name:
        raise ValueError(f"it is of the experiment {document['experiment']!r}.")
    strange = [file for file in document["artifacts"] if not _is_file_name(file)]
    if strange:
        raise ValueError(f"it lists files that have no name: {strange}.")
    absent = [
        file for file in document["artifacts"] if not (path.parent / file).exists()
    ]
    if absent:
        raise ValueError(f"files that it lists are missing: {', '.join(absent)}.")
    return document


def _is_file_name(given: Any) -> bool:
    """Whether it names a file of the folder itself."""
    return isinstance(given, str) and pathlib.PurePath(given).name == given != ""


def _age(document: result.Document) -> str:
    """A sentence if the code has changed since; "" if not, or if nobody can tell."""
    made, now = document["environment"]["commit"], result.commit()
    if made is None or now is None or made == now:
        return ""
    if not re.fullmatch("[0-9a-f]{7,64}", made):  # git would take it for an option
        return f"It says that it is of commit {made!r}, which is none."
    compared = ["git", "-C", str(ROOT), "diff", "--quiet", made, "--", *CODE]
    status = subprocess.run(compared, capture_output=True, check=False).returncode
    if status == 0:
        return ""
    if status == 1:
        return f"It is of commit {made[:7]}, and the code has changed since."
    return f"It is of commit {made[:7]}, which is not in this checkout."
