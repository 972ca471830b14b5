"""Figures of losses over pushes and over time, of staleness, and of delays."""

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.harness import plots
from experiments.harness.result import Rows
from experiments.parts import staleness_delays as delays
from experiments.parts import staleness_tables as tables
from experiments.parts.staleness_curves import curve
from experiments.parts.staleness_panels import finish, panels
from experiments.parts.staleness_runs import (
    EQUAL,
    NO_BOUND,
    POLICIES,
    SPEEDS,
    STRAGGLER,
    SYNCHRONOUS,
    Key,
    Runs,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 3
START = 0.1  # share of the pushes in which losses may be too high to be shown
# The longer the bound, the darker and thinner, since lines lie on top of each other.
POLICY_STYLES: Mapping[str, dict[str, Any]] = {
    SYNCHRONOUS: {"color": plots.INK, "linestyle": (0, (4, 2)), "zorder": 3},
    "τ = 0": {"color": "#b3cde3", "linewidth": 4},
    "τ = 1": {"color": "#8fb8de", "linewidth": 3.4},
    "τ = 2": {"color": "#5a9bd4", "linewidth": 2.8},
    "τ = 4": {"color": "#2f74b5", "linewidth": 2.2},
    "τ = 8": {"color": "#123f73", "linewidth": 1.6},
    NO_BOUND: {"color": "#D55E00", "linewidth": 1.2},
}
# Okabe and Ito's colours, told apart with every common colour vision.
OPTIMIZER_STYLES: Mapping[str, dict[str, Any]] = {
    "SGD": {"color": "#0072B2", "marker": "o"},
    "momentum": {"color": "#D55E00", "marker": "s", "linestyle": "--"},
    "Adam": {"color": "#009E73", "marker": "^", "linestyle": "-."},
    delays.LARGER_BATCH: {"color": plots.INK, "marker": "x", "linestyle": ":"},
}
SPEED_STYLES: Mapping[str, dict[str, Any]] = {
    EQUAL: {"color": "#0072B2", "marker": "o"},
    STRAGGLER: {"color": "#D55E00", "marker": "s", "linestyle": "--"},
}


def losses(runs: Runs, speeds: str, over_time: bool) -> "Figure":
    """A panel for each task and optimizer, a line for each policy."""
    title = f"Loss over {'virtual time' if over_time else 'pushes'}, {speeds}"
    note = "without its steep start; where lines coincide, longer bounds are thinner"
    if over_time:
        note += "; dotted: the run without a bound has made all its pushes"
    groups = [group for group in tables.groups(runs) if group[2] == speeds]
    names = [f"{task}, {optimizer}" for task, optimizer, _ in groups]
    figure, every = panels(title, note, names, COLUMNS)
    for axes, group in zip(every, groups, strict=True):
        highest = []
        for policy, style in POLICY_STYLES.items():
            of = curve(runs[Key(*group, policy)])
            x = of.times_ms if over_time else of.pushes
            axes.plot(x, of.losses, label=policy, **style)
            highest.append(of.highest_after(START))
        axes.set_ylim(top=1.05 * max(highest))
        axes.set_xlim(left=0)
        if over_time:
            end_ms = tables.equal_ms(runs, group)
            axes.axvline(end_ms, color=plots.MUTED, linewidth=0.8, linestyle=":")
            axes.set_xlim(right=2 * end_ms)
    return finish(figure, "virtual time (ms)" if over_time else "pushes", "loss")


def at_equal_time(rows: Rows) -> "Figure":
    """A panel for each task and optimizer, a line for workers of each kind."""
    note = "where each run is when the one without a bound has made all its pushes"
    groups = list(dict.fromkeys((row["data"], row["optimizer"]) for row in rows))
    names = [f"{task}, {optimizer}" for task, optimizer in groups]
    figure, every = panels("Loss at equal virtual time", note, names, COLUMNS)
    ticks = ["sync", *(policy.removeprefix("τ = ") for policy in [*POLICIES][1:])]
    for axes, group in zip(every, groups, strict=True):
        for row in rows:
            if (row["data"], row["optimizer"]) == group:
                numbers = tables.numbers(row, POLICIES)
                axes.plot(numbers, label=row["workers"], **SPEED_STYLES[row["workers"]])
        axes.set_xticks(range(len(ticks)), ticks)
    return finish(figure, "synchronous, or the bound τ", "loss")


def staleness(runs: Runs, task: str, optimizer: str) -> "Figure":
    """A panel for each bound and for workers of each kind: how old pushes were."""
    note = "updates made between the pull and the push of a gradient; dotted: mean"
    policies = [policy for policy in POLICIES if policy != SYNCHRONOUS]
    groups = [*itertools.product(SPEEDS, policies)]
    names = [f"{policy}, {speeds}" for speeds, policy in groups]
    size = (1.75, 1.7)
    figure, every = panels("Staleness", note, names, len(policies), size)
    for axes, (speeds, policy) in zip(every, groups, strict=True):
        ages = runs[Key(task, optimizer, speeds, policy)].staleness
        shares = 100 * np.array([*ages.values()]) / sum(ages.values())
        axes.bar([*ages], shares, 0.9, color=POLICY_STYLES[policy]["color"])
        mean = np.average([*ages], weights=shares)
        axes.axvline(mean, color=plots.INK, linewidth=1, linestyle=":")
        where = {"transform": axes.transAxes, "ha": "right", "va": "top"}
        text = f"mean {mean:.1f}\nhighest {max(ages)}"
        axes.text(0.98, 0.95, text, fontsize=7, color=plots.INK, **where)
    _share_axes(every)
    return finish(figure, "staleness (updates)", "% of pushes", legend=False)


def exact_delays(curves: delays.Curves) -> "Figure":
    """A panel for each task, a line for each optimizer."""
    note = "average over the run; runs that diverge are drawn at the initial loss"
    tasks = list(dict.fromkeys(task for task, _ in curves))
    title = "Mean loss over equally many pushes, all of them equally old"
    figure, every = panels(title, note, tasks, len(tasks), (4.2, 2.8))
    for axes, task in zip(every, tasks, strict=True):
        for (of, optimizer), by_delay in curves.items():
            if of == task:
                means = [min(c.mean, c.losses[0]) for c in by_delay.values()]
                axes.plot(means, label=optimizer, **OPTIMIZER_STYLES[optimizer])
        axes.set_xticks(range(len(delays.DELAYS)), [*map(str, delays.DELAYS)])
    return finish(figure, "delay of every push (rounds of W updates)", "mean loss")


def _share_axes(every) -> None:
    """The same limits everywhere, so that panels can be compared."""
    for axis in "xy":
        limits = [getattr(axes, f"get_{axis}lim")() for axes in every]
        low, high = min(limits)[0], max(high for _, high in limits)
        for axes in every:
            getattr(axes, f"set_{axis}lim")(low, high)
