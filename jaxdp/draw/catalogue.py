"""The schedules that can be drawn by name."""

import dataclasses
import difflib
import functools
from collections.abc import Callable

from jaxdp.algorithms import SCHEDULES, hierarchical, sharded_servers
from jaxdp.schedule import Schedule

MOST = 16  # devices; more are too many cells for a page or a picture
TWO = 2  # hosts and servers, where the algorithm has some


@dataclasses.dataclass(frozen=True)
class Choice:
    """A schedule that can be drawn.

    Attributes:
        name: That of its function in `jaxdp.algorithms`.
        collective: Such as "all_reduce".
        build: Makes it for N devices.
        about: What it does and costs, from the docstring of its function.
        needs: What N must be, in words, where not every N will do.
        fits: Whether an N will do.
        hosts: Into how many the devices are divided.
    """

    name: str
    collective: str
    build: Callable[[int], Schedule]
    about: tuple[str, ...]
    needs: str = ""
    fits: Callable[[int], bool] = bool
    hosts: int = 1

    @property
    def label(self) -> str:
        """For a list under the name of the collective."""
        words = self.name.removesuffix(f"_{self.collective}").replace("_", " ")
        hosts = f", {self.hosts} hosts" if self.hosts > 1 else ""
        return f"{words[:1].upper()}{words[1:]}{hosts}"

    def title(self, devices: int) -> str:
        """Such as "Ring all-reduce on 4 devices"."""
        what = self.collective.replace("_", "-")
        hosts = f" in {self.hosts} hosts" if self.hosts > 1 else ""
        name = self.label.split(",")[0]
        return f"{name} {what} on {devices} device{'s'[: devices - 1]}{hosts}"


def names() -> tuple[str, ...]:
    """Names of the schedules that can be drawn."""
    return tuple(choices())


@functools.cache
def choices() -> dict[str, Choice]:
    """Everything that can be drawn, by name."""
    found = [
        Choice(f.__name__, collective, f, _about(f))
        for collective, algorithms in SCHEDULES.items()
        for f in algorithms.values()
    ]
    two_hosts = Choice(
        "hierarchical",
        "all_reduce",
        functools.partial(hierarchical, hosts=TWO),
        _about(hierarchical),
        f"an even number, for {TWO} hosts with equally many",
        lambda devices: devices % TWO == 0,
        hosts=TWO,
    )
    two_servers = Choice(
        "sharded_servers",
        "all_reduce",
        functools.partial(sharded_servers, servers=TWO),
        _about(sharded_servers),
        f"at least {TWO}, one for each of {TWO} servers",
        lambda devices: devices >= TWO,
    )
    found += [two_hosts, two_servers]
    found.sort(key=lambda choice: [*SCHEDULES].index(choice.collective))
    return {choice.name: choice for choice in found}


def choice(name: str) -> Choice:
    """Looks a schedule up.

    Raises:
        ValueError: There is none of that name; lists those that there are.
    """
    known = choices()
    if name in known:
        return known[name]
    wanted = name.lower().replace("-", "_").replace(" ", "_")
    close = difflib.get_close_matches(wanted, known, n=1)
    remedy = f"Did you mean {close[0]!r}?" if close else "Choose one of them."
    raise ValueError(
        f"jaxdp.draw got algorithm {name!r}. It must be one of {', '.join(known)}. "
        f"{remedy}"
    )


def build(name: str, devices: int) -> Schedule:
    """Builds a schedule by name.

    Raises:
        ValueError: An unknown name, or a number of devices that cannot be drawn or for
            which the algorithm does not exist.
    """
    chosen = choice(name)
    if not 1 <= devices <= MOST:
        raise ValueError(
            f"jaxdp.draw got {devices} devices for {name}. It draws between 1 and "
            f"{MOST}. Choose such a number; the cost of more is in jaxdp.cost."
        )
    if not chosen.fits(devices):
        near = [n for n in (devices - 1, devices + 1) if n > 0 and chosen.fits(n)]
        raise ValueError(
            f"jaxdp.draw got {devices} devices for {name}. It needs {chosen.needs}. "
            f"Choose {' or '.join(map(str, near))}."
        )
    return chosen.build(devices)


def _about(function: Callable) -> tuple[str, ...]:
    """What a function's docstring says first, and of its cost."""
    paragraphs = (function.__doc__ or "").split("\n\n")
    said = [" ".join(paragraph.split()).replace("`", "") for paragraph in paragraphs]
    return tuple(
        text for i, text in enumerate(said) if text and (not i or text[:5] == "Cost:")
    )
