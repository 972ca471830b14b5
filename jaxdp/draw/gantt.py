"""A Gantt chart: what each device does over time, and what arrives there meanwhile."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxdp.draw.plotting import EDGE, INK, MUTED, empty_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart with every common colour vision.
PALETTE = (
    *("#56B4E9", "#0072B2", "#009E73", "#F0E442", "#E69F00", "#D55E00", "#1f2933"),
    *("#CC79A7", "#b5bfc9", "#7b8794"),
)
LANE, WIDTH = 0.62, 9.0  # inches
COLUMNS = 5  # of the legend
PROGRAM, TRANSFER = (0.04, 0.44), (-0.4, 0.3)  # below the lane's middle, height


def draw_gantt(
    records: Sequence[Any],
    path: str | os.PathLike | None = None,
    *,
    title: str = "Stages by device",
    note: str = "",
) -> "Figure":
    """Draws a lane per device: its programs, and above them what arrives.

    Args:
        records: Of a `jaxdp.replicated.Trace`.
        path: Where to save the figure; the suffix chooses the format.
        title: Title of the figure.
        note: Small print below it.

    Returns:
        The matplotlib figure.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    lanes = sorted({r.target for r in records}, key=lambda name: (len(name), name))
    stages = sorted(dict.fromkeys(r.stage for r in records), key=lambda s: s[0])
    colours = {stage: PALETTE[i % len(PALETTE)] for i, stage in enumerate(stages)}
    figure = empty_figure(WIDTH, LANE * max(len(lanes), 1) + 1.9, "draw_gantt")
    from matplotlib.patches import Patch  # after the check that there is matplotlib

    figure.set_layout_engine("constrained", h_pad=0.1, w_pad=0.1)
    axes = figure.subplots()
    for record in records:
        below, height = TRANSFER if record.is_transfer else PROGRAM
        axes.barh(
            lanes.index(record.target) + below,
            record.duration_ms,
            height,
            record.start_ms,
            align="edge",
            color=colours[record.stage],
            edgecolor=EDGE,
            linewidth=0.4,
        ).patches[0].set_gid(f"{record.stage}, {record.target}")
    patches = [
        Patch(facecolor=colour, edgecolor=EDGE, linewidth=0.4, label=stage)
        for stage, colour in colours.items()
    ]
    axes.set_xlabel("time (ms)", color=MUTED)
    note = note or "thin bars: what arrives at the device"
    describe(axes, lanes, patches, title, note)
    if path is not None:
        figure.savefig(os.fspath(path))
    return figure


def describe(
    axes: Any, lanes: Sequence[str], handles: Sequence[Any], title: str, note: str
) -> None:
    """Title, note, lanes from top to bottom; a legend, if any, below the time axis."""
    from matplotlib.transforms import ScaledTranslation

    axes.set_title(title, loc="left", fontweight="bold", color=INK, fontsize=12, pad=22)
    above = ScaledTranslation(0, 0.06, axes.figure.dpi_scale_trans)
    small = {"fontsize": 8, "color": MUTED, "transform": axes.transAxes + above}
    axes.text(0, 1, note, **small)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(len(lanes) - 0.4, -0.5)
    axes.tick_params(colors=MUTED, length=0)
    axes.grid(axis="x", color="#e4e8ec", linewidth=0.7)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color("#d9dee3")
    if not handles:
        return
    rows = -(-len(handles) // COLUMNS)
    columns = -(-len(handles) // rows)
    below = ScaledTranslation(0, -0.5, axes.figure.dpi_scale_trans)
    axes.legend(  # matplotlib fills column by column; this reads row by row
        handles=[handle for i in range(columns) for handle in handles[i::columns]],
        frameon=False,
        fontsize=8,
        ncols=columns,
        loc="upper center",
        bbox_to_anchor=(0.5, 0),
        bbox_transform=axes.transAxes + below,
    )
