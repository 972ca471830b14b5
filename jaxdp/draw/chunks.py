"""The chunk-by-chunk figure of a schedule.

Columns are devices and rows are chunks, so every arrow stays in its row: a transfer
never changes the number of a chunk. Neighbours are joined by a straight arrow, others
by an arc; an arrow that leaves at one side and comes in at the other closes the ring.
"""

import os
from typing import TYPE_CHECKING

from jaxdp.draw.cells import CELL, GAP, LABEL, Panels, panel_width, row_tops
from jaxdp.draw.panels import Cell, broken, lines
from jaxdp.draw.plotting import MUTED, Page
from jaxdp.schedule import Schedule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARGIN, TITLE = 0.28, 0.45  # inches
SPACE, LEGEND = 0.24, 0.42  # inches
ARC = 0.06  # inches: height of an arc per device
NARROWEST, WIDEST = 6.0, 20.0  # inches: room for the legend; lines break here
MOST_WRITTEN = 4  # more contributions than this are counted: cells are small


def draw_schedule(
    schedule: Schedule,
    path: str | os.PathLike | None = None,
    title: str | None = None,
) -> "Figure":
    """Draws what every device holds before each round, and what it sends.

    Args:
        schedule: The schedule; the figure stays readable up to about 8 devices.
        path: Where to save the figure; the suffix chooses the format.
        title: Title of the figure; None takes the schedule's name.

    Returns:
        The matplotlib figure. Every cell is a patch with a `gid` such as
        `"Round 0, device 1, chunk 2"`.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: The schedule is malformed; see `jaxdp.schedule.holdings`.
    """
    drawing = _Drawing(schedule)
    drawing.draw(title or schedule.name)
    return drawing.page.save(path)


class _Drawing:
    """Where things lie on the page."""

    def __init__(self, schedule: Schedule):
        self.devices, self.chunks = schedule.devices, schedule.chunks
        self.pitch = panel_width(self.devices) + SPACE
        self.lines = broken(lines(schedule), int(WIDEST / self.pitch))
        self.panels = [panel for line in self.lines for panel in line.panels]
        self.rows = [row_tops(line.panels, self.chunks, ARC) for line in self.lines]
        columns = max(len(line.panels) for line in self.lines)
        width = LABEL + columns * self.pitch - SPACE
        line_heights = sum(rows[-1] + SPACE for rows in self.rows)
        self.height = 2 * MARGIN + TITLE + line_heights + LEGEND
        self.page = Page(
            2 * MARGIN + max(width, NARROWEST), self.height, "draw_schedule"
        )
        self.strokes = Panels(self.page, self.devices, MOST_WRITTEN, ARC)

    def draw(self, title: str) -> None:
        """Draws everything."""
        style = {"ha": "left", "va": "top"}
        self.page.text(MARGIN, MARGIN, title, 13, weight="bold", **style)
        top = MARGIN + TITLE
        for line, rows in zip(self.lines, self.rows, strict=True):
            self.page.text(MARGIN, top, line.title, 10, color=MUTED, **style)
            self.strokes.draw_labels(MARGIN, top, rows)
            for j, panel in enumerate(line.panels):
                left = MARGIN + LABEL + j * self.pitch
                self.strokes.draw_panel(left, top, panel, rows)
            top += rows[-1] + SPACE
        self.draw_legend(MARGIN, self.height - MARGIN - CELL / 2)

    def draw_legend(self, x: float, y: float) -> None:
        """Says what colours, digits and arrows mean, on cells of this figure."""
        cells = [cell for panel in self.panels for cell in panel.cells]
        partial = [cell for cell in cells if 0 < cell.share < 1]
        shown = [max(partial, key=lambda cell: cell.share)] if partial else []
        shown += [cell for cell in cells if cell.share == 1][-1:]
        for cell in shown:
            self.strokes.draw_cell(x, y - CELL / 2, cell, "legend")
            x = self.draw_entry(x + CELL, y, _meaning(cell, self.devices))
        if any(panel.arrows for panel in self.panels):
            self.page.arrow((x, y), (x + 1.4 * GAP, y))
            self.draw_entry(x + 1.4 * GAP, y, "sent in this round")

    def draw_entry(self, x: float, y: float, text: str) -> float:
        """Writes a legend entry; returns where the next may start."""
        self.page.text(x + 0.1, y, text, 8.5, ha="left", color=MUTED)
        return x + 0.1 + 0.066 * len(text) + 0.3


def _meaning(cell: Cell, devices: int) -> str:
    """What the legend says of a cell."""
    if cell.share == 1:
        return "complete"
    if len(cell.held) == 1:
        return "own part"
    if devices > MOST_WRITTEN:
        return f"sum of {len(cell.held)} devices' contributions"
    *others, last = map(str, sorted(cell.held))
    return f"sum over devices {', '.join(others)} and {last}"
