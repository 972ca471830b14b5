"""The step-through page: every schedule, to be stepped through, played or worked out.

One HTML file with no need of a network. Schedules go in as data, with the words of each
round; the page computes holdings, bytes and seconds from them by the rules of
`jaxdp.schedule.holdings` and `jaxdp.cost`, so that buffer and hardware can be changed
in it. `page/` has the parts it is put together from.
"""

import functools
import html
import json
import os
import pathlib
import re
from typing import Any

from jaxdp.draw import catalogue
from jaxdp.draw.cells import colour
from jaxdp.draw.machines import OWN, machines
from jaxdp.draw.panels import lines, moments
from jaxdp.draw.places import places
from jaxdp.draw.sentences import doing, true_now
from jaxdp.draw.units import buffer_bytes
from jaxdp.schedule import Schedule, bundles
from jaxdp.targets.hardware import Hardware

PARTS = pathlib.Path(__file__).with_name("page")
SCRIPTS = "model links flights cells costs hand page controls"  # in this order
DEVICES = (*range(1, 9), 16)  # that the reader can choose
TITLE = "Step through a collective"
SHARED = ("starts", "ways", "phases", "points", "links", "groups")


def write_page(
    path: str | os.PathLike,
    schedule: str | Schedule = "ring",
    devices: int = 4,
    *,
    size_mb: float = 64.0,
    hardware: str | Hardware = "h100",
    title: str = TITLE,
    home: str = "",
) -> None:
    """Writes the step-through page: one HTML file that needs nothing else.

    It has all algorithms for 1 to 8 and for 16 devices. An address may name one and how
    many rounds are done: `ring.html#ring-4-3`.

    Args:
        path: Where to write it.
        schedule: What it shows first: a name of `jaxdp.draw.names()`, or a schedule of
            your own, verified, which is added.
        devices: How many, for a name.
        size_mb: MiB of the buffer, at first.
        hardware: Whose links the clock counts with, at first: a name such as "h100", or
            any hardware, which is added.
        title: Its heading.
        home: Address of a page that it leads back to, such as "index.html".

    Raises:
        ValueError: An unknown name or target, a size that no buffer has, or a number of
            devices for which the algorithm does not exist.
        OSError: The file cannot be written.
    """
    about = {"title": title, "home": home}
    text = page(schedule, devices, size_mb=size_mb, hardware=hardware, **about)
    pathlib.Path(path).write_text(text, encoding="utf-8")


def page(
    schedule: str | Schedule,
    devices: int,
    *,
    size_mb: float,
    hardware: str | Hardware,
    title: str,
    home: str,
) -> str:
    """The text of the page; arguments and errors as of `write_page`."""
    own = isinstance(schedule, Schedule)
    if not own:
        catalogue.build(schedule, devices)  # refuses what cannot be shown
    offered = machines(hardware)
    algorithms = _algorithms(schedule, devices)
    shared = _share(algorithms)
    data = {
        "start": [OWN if own else schedule, schedule.devices if own else devices],
        "size_bytes": buffer_bytes(size_mb),
        "machine": hardware if isinstance(hardware, str) else OWN,
        "machines": offered,
        "algorithms": algorithms,
        "shared": shared,
        "colours": _colours(max(DEVICES[-1], devices, schedule.devices if own else 1)),
    }
    parts = {
        "title": html.escape(title),
        "home": f'<a class="home" href="{html.escape(home)}">Back</a>' if home else "",
        "style": (PARTS / "page.css").read_text(encoding="utf-8"),
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        "script": "\n".join(
            (PARTS / f"{name}.js").read_text(encoding="utf-8")
            for name in SCRIPTS.split()
        ),
    }
    template = (PARTS / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda part: parts[part[1]], template)


def _algorithms(schedule: str | Schedule, devices: int) -> list[dict[str, Any]]:
    """All that the reader can choose, in the order of the list."""
    found = []
    if isinstance(schedule, Schedule):
        own = {str(schedule.devices): _described(schedule)}
        names = {"id": OWN, "label": schedule.name, "collective": "Yours"}
        found.append(names | {"about": [], "schedules": own})
    for name, choice in catalogue.choices().items():
        extra = {devices} if name == schedule else set()
        found.append(
            {
                "id": name,
                "label": choice.label,
                "collective": choice.collective.replace("_", "-").capitalize(),
                "about": choice.about,
                "schedules": {
                    str(n): _known(name, n)
                    for n in sorted({*DEVICES} | extra)
                    if choice.fits(n)
                },
            }
        )
    return found


@functools.cache
def _known(name: str, devices: int) -> dict[str, Any]:
    """A schedule of the catalogue."""
    return _described(catalogue.build(name, devices), catalogue.choice(name).hosts)


def _described(schedule: Schedule, hosts: int = 1) -> dict[str, Any]:
    """A schedule as the page reads it, with its words and places."""
    placed, panels = places(schedule, hosts), moments(schedule)
    rounds = bundles(schedule)
    ways = [*dict.fromkeys(each.pairs for round_ in rounds for each in round_)]
    return {
        "name": schedule.name,
        "devices": schedule.devices,
        "chunks": schedule.chunks,
        "starts": schedule.starts,
        "ways": ways,  # pairs, which rounds name by their place in this list
        "rounds": [
            [
                [each.op, ways.index(each.pairs), [t.chunks for t in each.transfers]]
                for each in round_
            ]
            for round_ in rounds
        ],
        "phases": [[line.title, len(line.panels) - 1] for line in lines(schedule)],
        "now": [
            true_now(before, now)
            for before, now in zip((None, *panels), panels, strict=False)
        ],
        "next": [doing(panel) for panel in panels[:-1]],
        "points": [_rounded(point) for point in placed.points],
        "links": [[at.source, at.target, *_rounded(at.over)] for at in placed.links],
        "groups": placed.groups,
    }


def _share(algorithms: list[dict[str, Any]]) -> list[Any]:
    """Takes out what several schedules have: sentences and places.

    Returns:
        The parts taken out. The schedules now have their places in this list.
    """
    found: dict[str, int] = {}

    def taken(part: Any) -> int:
        return found.setdefault(json.dumps(part, separators=(",", ":")), len(found))

    for algorithm in algorithms:
        for devices, schedule in algorithm["schedules"].items():
            changed: dict[str, Any] = {n: taken(schedule[n]) for n in SHARED}
            changed["now"] = [*map(taken, schedule["now"])]
            changed["next"] = [[*map(taken, each)] for each in schedule["next"]]
            algorithm["schedules"][devices] = schedule | changed
    return [json.loads(part) for part in found]


def _rounded(point: tuple[float, float]) -> list[float]:
    return [round(at, 4) for at in point]


def _colours(most: int) -> list[list[str]]:
    """Entry `[n][k]` is the colour of a cell with `k` of `n` contributions."""
    return [
        [hexadecimal(colour(k / max(n, 1))) for k in range(n + 1)]
        for n in range(most + 1)
    ]


def hexadecimal(rgb: tuple[float, ...]) -> str:
    """A colour as "#rrggbb"."""
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)
