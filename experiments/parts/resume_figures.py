"""Figures of resumed runs: losses over steps, and seconds beside the disk's own."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from experiments.harness import plots
from experiments.harness.result import Rows
from experiments.parts.resume_runs import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, and a dash for every second design.
COLOURS = ("#0072B2", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#E69F00")


def losses(
    title: str, note: str, never: Run, resumed: Sequence[Run], saved_at: int
) -> "Figure":
    """A thick line that never stops, and thin ones that go on from the checkpoint."""
    figure, axes = plots.plot(title, "step", "training loss", note, (7.6, 4.4))
    steps = range(1, len(never.losses) + 1)
    axes.plot(
        steps,
        never.losses,
        color="#c4ccd4",
        linewidth=7,
        label=f"{never.name} on {never.devices}, never stopped",
    )
    for place, run in enumerate(resumed):
        at = range(run.first, run.first + len(run.losses))
        style: dict[str, Any] = {
            "color": COLOURS[place % len(COLOURS)],
            "linestyle": ("-", "--", ":")[place // len(COLOURS) % 3],
            "linewidth": 1.2,
        }
        axes.plot(at, run.losses, label=f"{run.name} on {run.devices}", **style)
    axes.axvline(saved_at, color=plots.MUTED, linewidth=0.8)
    axes.annotate(
        "checkpoint",
        (saved_at, max(never.losses)),
        xytext=(4, -4),
        textcoords="offset points",
        color=plots.MUTED,
        fontsize=8,
        va="top",
    )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.tick_params(which="minor", labelsize=7)
    axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def times(title: str, speed: Rows) -> "Figure":
    """Two bars for each way: the disk alone, and a checkpoint."""
    size = speed[0]["disk GB/s"] * speed[0]["disk_s"]
    note = f"a state of {size:.2g} GB; flushed to the disk, and read from it"
    figure, axes = plots.plot(title, "seconds", "", note, (6.4, 2.8))
    labels = []
    for place, row in enumerate(speed[:2]):
        ours = {"write": "save", "read": "restore"}[row["what"]]
        for shift, field, name, colour in (
            (0, "disk_s", f"disk, {row['what']}", "#c4ccd4"),
            (1, "checkpoint_s", ours, COLOURS[0]),
        ):
            at = -(3 * place + shift)
            axes.barh(at, row[field], 0.8, color=colour)
            rate = row[field.replace("_s", " GB/s")]
            axes.text(row[field], at, f"  {rate:.2g} GB/s", va="center", fontsize=8)
            labels.append((at, name))
    axes.set_yticks([at for at, _ in labels], [name for _, name in labels])
    axes.set_xlim(0, 1.25 * max(max(r["disk_s"], r["checkpoint_s"]) for r in speed[:2]))
    return figure
