"""Copies what an experiment has written into the site, and reads what pages show."""

import gzip
import pathlib
import shutil
import struct
import urllib.parse
import zlib
from typing import NamedTuple

from experiments.harness.reading import Found

REPORT = "report.html"
ACTIVE = (".htm", ".html", ".svg", ".xhtml", ".xml")  # browsers run scripts in them
FOLDED = 100_000  # characters of a program that stand in the page itself
BROAD = 1620  # pixels: 9 inches; broader figures are scrolled on a phone, not shrunk
USUAL = 1260, 736  # pixels of most figures, and of the page that they take
PNG = b"\x89PNG\r\n\x1a\n"


class Picture(NamedTuple):
    """A figure; sizes in pixels, 0 if they cannot be read."""

    title: str
    href: str
    width: int
    height: int

    @property
    def kind(self) -> str:
        """How much room it needs."""
        return "broad" if self.width > BROAD else "plot"

    @property
    def room(self) -> int:
        """How wide it is at most, so that narrow figures have no larger letters."""
        return round(self.width * USUAL[1] / USUAL[0])


class Program(NamedTuple):
    """A compiled program; `text` is its beginning, or all of it."""

    title: str
    href: str
    lines: int
    text: str
    whole: bool


class Other(NamedTuple):
    """Any other file."""

    name: str
    href: str
    size_bytes: int


class Files(NamedTuple):
    """What was copied, and the names of what could not be."""

    pictures: list[Picture]
    programs: list[Program]
    others: list[Other]
    absent: list[str]


def copy(found: Found, site: pathlib.Path) -> Files:
    """Copies the files of an experiment to `files/NAME` of the site.

    Only files of the experiment's own folder are copied, whatever a result names, and
    not its report, which says the same as its page and may link to other folders.
    """
    files = Files([], [], [], [])
    if not found.document:
        return files
    target = site / "files" / found.name
    target.mkdir(parents=True, exist_ok=True)
    named = dict.fromkeys(["result.json", *map(str, found.document["artifacts"])])
    named.pop(REPORT, None)
    for name in named:
        try:
            _copy(found.folder, name, target, files)
        except (OSError, EOFError, ValueError, zlib.error):
            files.absent.append(name)
    return files


def _copy(folder: pathlib.Path, name: str, target: pathlib.Path, files: Files) -> None:
    """Copies one file.

    Raises:
        ValueError: It is no file of the folder, or no text.
        OSError: It is missing or damaged.
    """
    path = folder / name
    if path.name != name or not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{name} is no file of {folder}")
    if name.endswith((".hlo.txt", ".hlo.txt.gz")):
        files.programs.append(_program(path, target))
        return
    written = f"{name}.txt" if path.suffix.lower() in ACTIVE else name
    shutil.copyfile(path, target / written)
    href = _href(target, written)
    if name.endswith(".png"):
        files.pictures.append(Picture(_title(name), href, *_size(path)))
    else:
        files.others.append(Other(name, href, path.stat().st_size))


def _program(path: pathlib.Path, target: pathlib.Path) -> Program:
    """Copies a program as it is, and reads its text, which may be compressed."""
    content = path.read_bytes()
    packed = path.name.endswith(".gz")
    text = (gzip.decompress(content) if packed else content).decode()
    (target / path.name).write_bytes(content)
    whole = len(text) <= FOLDED
    shown = text if whole else text[: text.rfind("\n", 0, FOLDED) + 1] or text[:FOLDED]
    title = _title(path.name.partition(".hlo.txt")[0])
    href = _href(target, path.name)
    return Program(title, href, text.count("\n") + 1, shown, whole)


def _href(target: pathlib.Path, name: str) -> str:
    """What links to a copy have, seen from a page of the site."""
    return urllib.parse.quote(f"files/{target.name}/{name}")


def _title(name: str) -> str:
    """A heading from a file's name."""
    words = name.removesuffix(".png").replace("-", " ")
    return words[:1].upper() + words[1:]


def _size(path: pathlib.Path) -> tuple[int, int]:
    """Width and height of a PNG, from its header."""
    with path.open("rb") as file:
        head = file.read(24)
    if head[:8] != PNG or len(head) < 24:
        return 0, 0
    return struct.unpack(">II", head[16:24])
