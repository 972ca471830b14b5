"""The page of all benchmarks: one file that needs no other, and no network."""

import dataclasses
import pathlib
from collections.abc import Sequence

from benchmarks import changes, lines, machine, wording
from benchmarks.changes import Change, State
from benchmarks.history import Run
from benchmarks.lines import Chart
from experiments.harness import templates
from experiments.harness.wording import slug

STATES = 40  # that a picture and a table show, the last ones
RECENT = 20  # runs in which a benchmark must have been measured to be shown
HERE = pathlib.Path(__file__).parent
GROUPS = {
    "by hand": "Against the same programs written by hand",
    "designs": "Design against design",
    "algorithms": "Algorithms against each other, and against XLA's own all-reduce",
    "schedules": "Verifying and simulating schedules",
    "programs": "Reading compiled programs",
    "importing": "Importing jaxdp",
    "pytorch": "Real processes, against PyTorch's DistributedDataParallel",
    "compiling": "Compiling for H100 that are not here",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Card:
    """One benchmark on the page.

    Attributes:
        change: Its last state beside the ones before.
        states: The last ones, in the order of commits.
        chart: The same as places in a picture.
    """

    change: Change
    states: Sequence[State]
    chart: Chart

    @property
    def anchor(self) -> str:
        """What links point to."""
        return slug(self.change.row.name)


def cards(runs: Sequence[Run], last: Run) -> list[Card]:
    """Every benchmark that was measured lately on the machine of the last run."""
    like = [run for run in runs if machine.alike(run) == machine.alike(last)]
    lately: dict[str, Run] = {}  # names in the order of the last run that has them
    for run in reversed(like[-RECENT:]):
        for row in run["rows"]:
            lately.setdefault(row["name"], run)
    found = []
    for name, run in lately.items():
        states = changes.states(like, name)
        here = changes.index_of(states, run)
        shown = states[max(0, min(here, len(states) - STATES)) :][:STATES]
        change = changes.judge(states, here)
        found.append(
            Card(change=change, states=shown, chart=lines.chart(shown, change))
        )
    return found


def grouped(found: Sequence[Card]) -> dict[str, list[Card]]:
    """Cards by title of their group, in the order of `GROUPS`."""
    present = dict.fromkeys([*GROUPS, *(card.change.row.group for card in found)])
    groups = {
        group: [card for card in found if card.change.row.group == group]
        for group in present
    }
    return {GROUPS.get(group, group): ours for group, ours in groups.items() if ours}


def render(runs: Sequence[Run], last: Run) -> str:
    """The page.

    Args:
        runs: The history.
        last: One of them: its machine is shown.
    """
    environment = templates.environment(HERE)
    found = cards(runs, last)
    like = [run for run in runs if machine.alike(run) == machine.alike(last)]
    return environment.get_template("page.html.j2").render(
        last=last,
        groups=grouped(found),
        cards=found,
        slower=[card for card in found if card.change.verdict == "slower"],
        faster=[card for card in found if card.change.verdict == "faster"],
        passed=[card for card in found if not card.change.row.holds],
        like=len(like),
        others=len(runs) - len(like),
        compared=changes.BEFORE,
        words=wording,
        size=lines,
    )
