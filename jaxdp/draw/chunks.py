"""The chunk-by-chunk figure of a schedule.

Columns are devices and rows are chunks, so every arrow stays in its row: a transfer
never changes the number of a chunk. Neighbours are joined by a straight arrow, others
by an arc; an arrow that leaves at one side and comes in at the other closes the ring.
"""

import collections
import dataclasses
import os
from typing import TYPE_CHECKING

from jaxdp.draw.panels import Arrow, Cell, Line, Panel, broken, lines, reach
from jaxdp.draw.plotting import INK, MUTED, Page
from jaxdp.schedule import Schedule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A red and blues that are told apart with every common colour vision.
COMPLETE, NOTHING = (0.70, 0.09, 0.17), (1.0, 1.0, 1.0)  # RGB
FEWEST, MOST = (0.93, 0.96, 0.99), (0.33, 0.62, 0.83)  # partial sums, from few to many

CELL, GAP = 0.38, 0.17  # inches: a cell, and the space between two for an arrow
ROW_GAP, ARC = 0.07, 0.06  # inches: between rows, and height of an arc per device
MARGIN, TITLE, HEADING, HEADER = 0.28, 0.45, 0.36, 0.37  # inches
LABEL, SPACE, LEGEND = 0.62, 0.24, 0.42  # inches
LANDING = 0.36  # inches of a cell's upper edge on which arcs land
NARROWEST, WIDEST = 6.0, 20.0  # inches: room for the legend; lines break here
MOST_WRITTEN = 4  # more contributions than this are counted instead of written


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


def colour(share: float) -> tuple[float, float, float]:
    """Red for all contributions, white for none, a deeper blue for a larger share."""
    if share in (0, 1):
        return COMPLETE if share else NOTHING
    red, green, blue = (
        low + share * (high - low) for low, high in zip(FEWEST, MOST, strict=True)
    )
    return red, green, blue


class _Drawing:
    """Where things lie on the page."""

    def __init__(self, schedule: Schedule):
        self.devices, self.chunks = schedule.devices, schedule.chunks
        self.panel_width = self.devices * (CELL + GAP) + GAP
        self.lines = broken(lines(schedule), int(WIDEST / (self.panel_width + SPACE)))
        self.panels = [panel for line in self.lines for panel in line.panels]
        self.rows = [_rows(line, self.chunks) for line in self.lines]
        columns = max(len(line.panels) for line in self.lines)
        width = LABEL + columns * (self.panel_width + SPACE) - SPACE
        line_heights = sum(rows[-1] + SPACE for rows in self.rows)
        self.height = 2 * MARGIN + TITLE + line_heights + LEGEND
        self.page = Page(
            2 * MARGIN + max(width, NARROWEST), self.height, "draw_schedule"
        )

    def draw(self, title: str) -> None:
        """Draws everything."""
        style = {"ha": "left", "va": "top"}
        self.page.text(MARGIN, MARGIN, title, 13, weight="bold", **style)
        top = MARGIN + TITLE
        for line, rows in zip(self.lines, self.rows, strict=True):
            self.page.text(MARGIN, top, line.title, 10, color=MUTED, **style)
            for chunk in range(self.chunks):
                y = top + rows[chunk] + CELL / 2
                self.page.text(MARGIN, y, f"chunk {chunk}", 8, ha="left", color=MUTED)
            for j, panel in enumerate(line.panels):
                left = MARGIN + LABEL + j * (self.panel_width + SPACE)
                self.draw_panel(left, top, panel, [top + row for row in rows])
            top += rows[-1] + SPACE
        self.draw_legend(MARGIN, self.height - MARGIN - CELL / 2)

    def cell_left(self, left: float, device: int) -> float:
        """Left edge of a device's cells in the panel at `left`."""
        return left + GAP + device * (CELL + GAP)

    def draw_panel(
        self, left: float, top: float, panel: Panel, rows: list[float]
    ) -> None:
        """One moment, with its title and the numbers of the devices."""
        y, middle = top + HEADING, left + self.panel_width / 2
        self.page.text(middle, y, panel.title, 9.5, weight="bold")
        for device in range(self.devices):
            x = self.cell_left(left, device) + CELL / 2
            self.page.text(x, y + 0.23, f"dev {device}", 7.5, color=MUTED)
        for cell in panel.cells:
            x, y = self.cell_left(left, cell.device), rows[cell.chunk]
            gid = f"{panel.title}, device {cell.device}, chunk {cell.chunk}"
            self.draw_cell(x, y, cell, gid)
        landing = _landing(panel.arrows)
        for arrow in panel.arrows:
            back = dataclasses.replace(arrow, source=arrow.target, target=arrow.source)
            aside = 0.07 if back in panel.arrows else 0.0
            y = rows[arrow.chunk]
            self.draw_arrow(left, y, arrow, aside, landing.get(arrow, 0.0))

    def draw_cell(self, x: float, y: float, cell: Cell, gid: str) -> None:
        """A cell's colour says how much it holds, its digits whose."""
        self.page.box(x, y, CELL, colour(cell.share), gid)
        style = {"color": "white" if cell.share == 1 else INK}
        if self.devices > MOST_WRITTEN:
            count = str(len(cell.held)) if cell.held else ""
            self.page.text(x + CELL / 2, y + CELL / 2, count, 10, **style)
            return
        rows = (self.devices + 1) // 2
        for device in cell.held:  # each digit in a place of its own, two by two
            across, down = 0.3 + 0.4 * (device % 2), 0.5 + 0.43 * (device // 2)
            down -= 0.215 * (rows - 1)
            self.page.text(
                x + CELL * across, y + CELL * down, f"{device}", 8.5, **style
            )

    def draw_arrow(
        self, left: float, y: float, arrow: Arrow, aside: float, landing: float
    ) -> None:
        """One arrow; `aside` and `landing` keep it apart from others."""
        way = 1 if (arrow.target > arrow.source) != arrow.wraps else -1
        source = self.cell_left(left, arrow.source) + CELL / 2
        target = self.cell_left(left, arrow.target) + CELL / 2
        length = reach(arrow)
        middle, out, to = y + CELL / 2 - aside * way, CELL / 2 * way, GAP * way
        if arrow.wraps:
            self.page.arrow((source + out, middle), (source + out + to, middle))
            self.page.arrow((target - out - to, middle), (target - out, middle))
        elif length == 1:
            self.page.arrow((source + out, middle), (target - out, middle))
        else:
            self.page.arrow((source, y), (target + landing, y), ARC * (length + 1))

    def draw_legend(self, x: float, y: float) -> None:
        """Says what colours, digits and arrows mean, on cells of this figure."""
        cells = [cell for panel in self.panels for cell in panel.cells]
        partial = [cell for cell in cells if 0 < cell.share < 1]
        shown = [max(partial, key=lambda cell: cell.share)] if partial else []
        shown += [cell for cell in cells if cell.share == 1][-1:]
        for cell in shown:
            self.draw_cell(x, y - CELL / 2, cell, "legend")
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


def _rows(line: Line, chunks: int) -> list[float]:
    """How far below the line's top each row of cells begins, and the last one ends."""
    longest = collections.Counter()
    for arrow in (arrow for panel in line.panels for arrow in panel.arrows):
        longest[arrow.chunk] = max(longest[arrow.chunk], reach(arrow))
    rows = [HEADING + HEADER]
    for chunk in range(chunks):  # arcs need room above their row
        rows[-1] += ARC * (longest[chunk] + 1) if longest[chunk] > 1 else 0.0
        rows.append(rows[-1] + CELL + ROW_GAP)
    return rows


def _landing(arrows: tuple[Arrow, ...]) -> dict[Arrow, float]:
    """How far from the middle of its target each arc lands.

    Arcs to one cell land side by side and do not cross: those from the left before
    those from the right, and of each the longest at the far edge.
    """
    cells = collections.defaultdict(list)
    for arrow in arrows:
        if reach(arrow) > 1:
            cells[arrow.target, arrow.chunk].append(arrow)
    found = {}
    for landing in cells.values():
        landing.sort(key=lambda a: (a.source > a.target, -a.source))
        apart = min(LANDING / len(landing), 0.09)
        for i, arrow in enumerate(landing):
            found[arrow] = apart * (i - (len(landing) - 1) / 2)
    return found
