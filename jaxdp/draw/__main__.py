"""Draws a schedule: python -m jaxdp.draw ring --devices 4 --out ring.html.

The suffix chooses what is written: a page to step through (.html), all rounds on one
sheet (.png, .svg, .pdf) or, with --frames, a picture of each moment (ring-00.png and so
on), an animation of these (.gif), or the frames as data (.json).
"""

import argparse
import json
import os
import pathlib
import sys
from collections.abc import Sequence

from jaxdp.draw import catalogue, stepping
from jaxdp.draw.chunks import draw_schedule
from jaxdp.draw.frames import Frame, frames, record
from jaxdp.draw.pictures import draw_frame, save_gif
from jaxdp.draw.places import places
from jaxdp.draw.units import buffer_bytes, bytes_text
from jaxdp.schedule import Schedule
from jaxdp.targets.hardware import hardware

SHEETS = (".png", ".svg", ".pdf")
SUFFIXES = (".html", *SHEETS, ".gif", ".json")


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes what the command line asks for.

    Args:
        arguments: Of the command line; None takes those of the process.

    Returns:
        0; or 2 if that cannot be drawn or written, with the reason on stderr.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.list:
        print(_listed())
        return 0
    try:
        for path in _write(given):
            print(f"wrote {path} ({bytes_text(path.stat().st_size)})")
    except (OSError, ValueError, ModuleNotFoundError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxdp.draw",
        description="Draws a collective algorithm, round by round: as a page to step "
        "through, as pictures or as data.",
        epilog=f"FILE may end in {', '.join(SUFFIXES)}.",
    )
    parser.add_argument(
        "algorithm", nargs="?", default="ring", help="a name of --list; default: ring"
    )
    parser.add_argument("--devices", type=int, default=4, help="default: 4")
    parser.add_argument(
        "--out", type=pathlib.Path, metavar="FILE", help="default: ALGORITHM.html"
    )
    parser.add_argument(
        "--frames", action="store_true", help="a picture of each moment, not one sheet"
    )
    parser.add_argument(
        "--size-mb", type=float, default=64.0, help="MiB of the buffer; default: 64"
    )
    parser.add_argument(
        "--hardware", default="h100", help="whose links the clock counts; default: h100"
    )
    parser.add_argument("--title", help="heading of the page or picture")
    parser.add_argument("--list", action="store_true", help="list the algorithms")
    return parser


def _write(given: argparse.Namespace) -> list[pathlib.Path]:
    """Writes the files; returns which."""
    out = given.out or pathlib.Path(f"{given.algorithm}.html")
    _check(out, given)
    schedule = catalogue.build(given.algorithm, given.devices)
    machine, size_bytes = hardware(given.hardware), buffer_bytes(given.size_mb)
    if out.suffix == ".html":
        title = given.title or stepping.TITLE
        options = {"size_mb": given.size_mb, "hardware": given.hardware, "title": title}
        stepping.write_page(out, given.algorithm, given.devices, **options)
        return [out]
    title = given.title or catalogue.choice(given.algorithm).title(given.devices)
    if out.suffix in SHEETS and not given.frames:
        draw_schedule(schedule, out, title)
        return [out]
    moments = frames(schedule, size_bytes, machine)
    if out.suffix == ".json":
        out.write_text(_json(schedule, moments, given), encoding="utf-8")
        return [out]
    placed = places(schedule, catalogue.choice(given.algorithm).hosts)
    note = f"{bytes_text(size_bytes)} on {machine.name}, {machine.link.name}"
    paths = _numbered(out, len(moments))
    animated = out.suffix == ".gif"
    figures = [
        draw_frame(
            *(moments, index, placed),
            title=title,
            note=note,
            path=None if animated else path,
        )
        for index, path in enumerate(paths)
    ]
    if animated:
        save_gif(figures, out)
    return [out] if animated else paths


def _check(out: pathlib.Path, given: argparse.Namespace) -> None:
    """Refuses what could not be written, before anything is computed."""
    if out.suffix not in SUFFIXES:
        raise ValueError(
            f"--out got {out.name!r}, whose suffix is {out.suffix!r}. It says what to "
            f"write and must be one of {', '.join(SUFFIXES)}: name the file "
            f"{out.stem}.html for the page."
        )
    if not out.parent.is_dir():
        raise ValueError(
            f"--out got {os.fspath(out)!r}, but there is no folder "
            f"{os.fspath(out.parent)!r}. Make it first: mkdir -p {out.parent}."
        )
    if given.frames and out.suffix not in SHEETS:
        raise ValueError(
            f"--frames got {out.name!r}. A picture of each moment is one of "
            f"{', '.join(SHEETS)}; {out.suffix} has all moments anyway. Leave out "
            "--frames, or name a picture."
        )


def _numbered(out: pathlib.Path, count: int) -> list[pathlib.Path]:
    """A file for each frame: ring-00.png and so on."""
    digits = max(2, len(str(count - 1)))
    return [out.with_stem(f"{out.stem}-{i:0{digits}}") for i in range(count)]


def _json(
    schedule: Schedule, moments: Sequence[Frame], given: argparse.Namespace
) -> str:
    about = {
        "schedule": schedule.name,
        "devices": schedule.devices,
        "chunks": schedule.chunks,
        "size_bytes": buffer_bytes(given.size_mb),
        "hardware": given.hardware,
    }
    return json.dumps(about | {"frames": [*map(record, moments)]}, indent=1)


def _listed() -> str:
    """A line for each algorithm, under its collective."""
    lines: list[str] = []
    for name, choice in catalogue.choices().items():
        heading = choice.collective.replace("_", "-")
        if heading not in lines:
            lines.append(heading)
        needs = f" (devices: {choice.needs})" if choice.needs else ""
        about = choice.about[0] if choice.about else ""
        lines.append(f"  {name:<34} {about}{needs}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
