"""Designs side by side: numbers of several experiments, joined by design."""

import csv
import io
from collections.abc import Mapping
from typing import NamedTuple

from experiments.harness.reading import Found
from experiments.site.designs import DESIGNS, Design
from experiments.site.measures import MEASURES, Measure


class Number(NamedTuple):
    """A number of one design.

    Attributes:
        value: As it was found.
        source: The experiment that has it.
        percent: Of the largest number of the measure.
    """

    value: float
    source: str
    percent: float

    @property
    def text(self) -> str:
        """With three digits, and of most larger numbers all before the point."""
        whole = 1e3 <= abs(self.value) < 1e7
        return f"{round(self.value):,}" if whole else f"{self.value:.3g}"


class Panel(NamedTuple):
    """A measure of all designs that have it.

    Attributes:
        measure: What it is.
        numbers: By name of the design, in the order of `DESIGNS`.
        used: What is there of the experiments that the numbers are from.
        lacking: The same of those that have none.
    """

    measure: Measure
    numbers: Mapping[str, Number]
    used: list[Found]
    lacking: list[Found]


def panels(found: Mapping[str, Found]) -> list[Panel]:
    """All measures, filled with what is there."""
    return [_panel(measure, found) for measure in MEASURES]


def designs(shown: list[Panel]) -> list[Design]:
    """Those of which there is a number."""
    return [d for d in DESIGNS if any(d.name in panel.numbers for panel in shown)]


def as_csv(shown: list[Panel]) -> str:
    """All numbers, a line for each, with the experiment and the state of its result."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["design", "measure", "value", "experiment", "state", "tiny"])
    for panel in shown:
        used = {one.name: one for one in panel.used}
        for name, (value, source, _) in panel.numbers.items():
            state = [used[source].state, "yes" if used[source].tiny else "no"]
            lines.writerow([name, panel.measure.title, value, source, *state])
    return text.getvalue()


def _panel(measure: Measure, found: Mapping[str, Found]) -> Panel:
    values: dict[str, tuple[float, str]] = {}
    for source in measure.sources:
        document = found[source.experiment].document
        for design, value in (source.read(document) if document else {}).items():
            values.setdefault(design, (value, source.experiment))
    shown = [design.name for design in DESIGNS if design.name in values]
    most = max([values[name][0] for name in shown if values[name][0] > 0], default=1.0)
    numbers = {
        name: Number(*values[name], percent=100 * max(values[name][0], 0.0) / most)
        for name in shown
    }
    used = dict.fromkeys(number.source for number in numbers.values())
    lacking = dict.fromkeys(
        s.experiment for s in measure.sources if s.experiment not in used
    )
    return Panel(
        measure, numbers, [found[name] for name in used], [found[n] for n in lacking]
    )
