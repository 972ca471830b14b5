"""Cells and arrows of one panel, as strokes: what figures and frames share."""

import collections
import dataclasses
from collections.abc import Sequence

from jaxdp.draw.panels import Arrow, Cell, Panel, reach
from jaxdp.draw.plotting import INK, MUTED, Page

# A red and blues that are told apart with every common colour vision.
COMPLETE, NOTHING = (0.702, 0.09, 0.17), (1.0, 1.0, 1.0)  # RGB
FEWEST, MOST = (0.93, 0.96, 0.99), (0.33, 0.62, 0.83)  # partial sums, from few to many

CELL, GAP = 0.38, 0.17  # inches: a cell, and the space between two for an arrow
ROW_GAP = 0.07  # inches: between rows
HEADING, HEADER = 0.36, 0.37  # inches: to the middle of the title, and to the cells
LANDING = 0.36  # inches of a cell's upper edge on which arcs land
LABEL = 0.62  # inches: names of rows, left of a panel


def colour(share: float) -> tuple[float, float, float]:
    """Red for all contributions, white for none, a deeper blue for a larger share."""
    if share in (0, 1):
        return COMPLETE if share else NOTHING
    red, green, blue = (
        low + share * (high - low) for low, high in zip(FEWEST, MOST, strict=True)
    )
    return red, green, blue


def panel_width(devices: int) -> float:
    """Inches."""
    return devices * (CELL + GAP) + GAP


class Panels:
    """Draws panels of a schedule onto a page.

    Attributes:
        page: Where to.
        devices: How many columns a panel has.
        most_written: More contributions than this are counted instead of written.
        arc: Inches, how much higher an arc is for each device that it passes.
        width: Inches, of a panel.
    """

    def __init__(self, page: Page, devices: int, most_written: int, arc: float):
        """Prepares for panels of so many devices."""
        self.page, self.devices = page, devices
        self.most_written, self.arc = most_written, arc
        self.width = panel_width(devices)

    def draw_labels(self, left: float, top: float, rows: list[float]) -> None:
        """Names the rows; `rows` are their distances from `top`, and the last end."""
        for chunk, row in enumerate(rows[:-1]):
            y = top + row + CELL / 2
            self.page.text(left, y, f"chunk {chunk}", 8, ha="left", color=MUTED)

    def cell_left(self, left: float, device: int) -> float:
        """Left edge of a device's cells in the panel at `left`."""
        return left + GAP + device * (CELL + GAP)

    def draw_panel(
        self, left: float, top: float, panel: Panel, rows: list[float]
    ) -> None:
        """One moment, with its title and the numbers of the devices."""
        y, middle = top + HEADING, left + self.width / 2
        self.page.text(middle, y, panel.title, 9.5, weight="bold")
        for device in range(self.devices):
            x = self.cell_left(left, device) + CELL / 2
            self.page.text(x, y + 0.23, f"dev {device}", 7.5, color=MUTED)
        for cell in panel.cells:
            x, y = self.cell_left(left, cell.device), top + rows[cell.chunk]
            gid = f"{panel.title}, device {cell.device}, chunk {cell.chunk}"
            self.draw_cell(x, y, cell, gid)
        landing = landings(panel.arrows)
        for arrow in panel.arrows:
            back = dataclasses.replace(arrow, source=arrow.target, target=arrow.source)
            aside = 0.07 if back in panel.arrows else 0.0
            y = top + rows[arrow.chunk]
            self.draw_arrow(left, y, arrow, aside, landing.get(arrow, 0.0))

    def draw_cell(self, x: float, y: float, cell: Cell, gid: str) -> None:
        """A cell's colour says how much it holds, its digits whose."""
        self.page.box(x, y, CELL, colour(cell.share), gid)
        style = {"color": "white" if cell.share == 1 else INK}
        if self.devices > self.most_written:
            count = str(len(cell.held)) if cell.held else ""
            self.page.text(x + CELL / 2, y + CELL / 2, count, 10, **style)
            return
        columns = 2 if self.devices <= 4 else 3
        rows = -(-self.devices // columns)
        for device in cell.held:  # each digit in a place of its own
            across = 0.5 + 0.8 / columns * (device % columns - (columns - 1) / 2)
            down = 0.5 + 0.86 / columns * (device // columns - (rows - 1) / 2)
            self.page.text(
                *(x + CELL * across, y + CELL * down, f"{device}", 17 / columns),
                **style,
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
            height = self.arc * (length + 1)
            self.page.arrow((source, y), (target + landing, y), height)


def row_tops(panels: Sequence[Panel], chunks: int, arc: float) -> list[float]:
    """How far below a panel's top each row of cells begins, and the last one ends."""
    longest = collections.Counter()
    for arrow in (arrow for panel in panels for arrow in panel.arrows):
        longest[arrow.chunk] = max(longest[arrow.chunk], reach(arrow))
    rows = [HEADING + HEADER]
    for chunk in range(chunks):  # arcs need room above their row
        rows[-1] += arc * (longest[chunk] + 1) if longest[chunk] > 1 else 0.0
        rows.append(rows[-1] + CELL + ROW_GAP)
    return rows


def landings(arrows: tuple[Arrow, ...]) -> dict[Arrow, float]:
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
