"""Frames as pictures for slides: one file each, or an animation."""

import os
import pathlib
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxdp.draw.cells import COMPLETE, LABEL, Panels, colour, panel_width, row_tops
from jaxdp.draw.frames import Frame
from jaxdp.draw.panels import Cell, Panel
from jaxdp.draw.places import Places, Point, along, shortened
from jaxdp.draw.plotting import INK, MUTED, Page
from jaxdp.draw.units import bytes_text, seconds_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image

WIDTH, HEIGHT = 10.0, 5.625  # inches: a slide
MARGIN, TOP = 0.45, 1.0  # inches
SIDE, ROOM = 3.3, 5.3  # inches: of the picture of the links, and what cells may have
LARGEST = 1.6  # times the size of cells in `draw_schedule`
ARC = 0.025  # inches: height of an arc per device, before cells are enlarged
MOST_WRITTEN = 9  # more contributions than this are counted
RADIUS = 0.07  # of a device, in parts of SIDE
CROWDED = 24  # with more links in use, chunks have no numbers
WAY, CLOCK = "#d3d9df", "#1f5f99"
GIF_DPI = 100
FRAME_MS, LAST_MS = 1600, 4000


def draw_frame(
    frames: Sequence[Frame],
    index: int,
    placed: Places,
    *,
    title: str,
    note: str = "",
    path: str | os.PathLike | None = None,
) -> "Figure":
    """Draws one frame as a slide: devices and links, cells, and what is true now.

    Args:
        frames: All frames of a schedule.
        index: Which one.
        placed: Where devices stand.
        title: Title of the slide.
        note: Small print: what the clock counts with.
        path: Where to save the figure; the suffix chooses the format.

    Returns:
        The matplotlib figure. Every cell is a patch with a `gid` such as
        `"Round 0, device 1, chunk 2"`.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    page, frame = Page(WIDTH, HEIGHT, "draw_frame"), frames[index]
    left, right = {"ha": "left", "va": "top"}, {"ha": "right", "va": "top"}
    page.text(MARGIN, 0.4, title, 17, weight="bold", **left)
    count = f"{index} of {len(frames) - 1} rounds done"
    page.text(WIDTH - MARGIN, 0.45, count, 10, color=MUTED, **right)
    _draw_links(page, frame, placed)
    _draw_cells(page, frames, frame)
    said = textwrap.fill(f"{frame.next} {frame.detail}".strip(), 125)
    page.text(MARGIN, 4.42, frame.now, 11, weight="bold", **left)
    page.text(MARGIN, 4.68, said, 9, color=MUTED, linespacing=1.4, **left)
    _draw_clock(page, frame, frames[-1], note)
    return page.save(path)


def save_gif(figures: Sequence["Figure"], path: str | os.PathLike) -> None:
    """Writes an animation that repeats: a picture for every figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    images = []
    for figure in figures:
        figure.set_dpi(GIF_DPI)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        images.append(np.asarray(canvas.buffer_rgba())[..., :3])
    first, *others = _in_few_colours(np.stack(images))
    first.save(
        pathlib.Path(path),
        format="GIF",
        save_all=True,
        append_images=others,
        duration=[FRAME_MS] * len(others) + [LAST_MS],
        loop=0,
    )


def _in_few_colours(images: np.ndarray) -> list["Image"]:
    """The pictures in the 256 colours that most pixels have: cells keep theirs."""
    from PIL import Image

    codes = images.astype(np.int32) @ np.array([2**16, 2**8, 1], np.int32)
    found, places, counts = np.unique(codes, return_inverse=True, return_counts=True)
    rgb = np.stack([found >> 16, found >> 8 & 255, found & 255], axis=-1)
    few = rgb[np.argsort(-counts, stable=True)[:256]]
    apart = ((rgb[:, None] - few) ** 2).sum(axis=-1)
    nearest = apart.argmin(axis=1).astype(np.uint8)[places.reshape(codes.shape)]
    result = [Image.fromarray(pixels) for pixels in nearest]
    for image in result:
        image.putpalette(few.astype(np.uint8).tobytes())
    return result


def _draw_links(page: Page, frame: Frame, placed: Places) -> None:
    """Devices as rings with a part for every chunk, and what travels between them."""

    def at(point: Point) -> Point:
        return MARGIN + SIDE * point[0], TOP + SIDE * point[1]

    held: dict[int, list[Cell]] = {}
    for cell in frame.cells:
        held.setdefault(cell.device, []).append(cell)
    sent: dict[tuple[int, int], list[int]] = {}
    for arrow in frame.arrows:
        sent.setdefault((arrow.source, arrow.target), []).append(arrow.chunk)
    radius = RADIUS if len(held) <= MOST_WRITTEN else RADIUS / 1.5
    for link in placed.links:
        chunks = sent.get((link.source, link.target))
        ends = placed.points[link.source], placed.points[link.target]
        curve = shortened(ends[0], link.over, ends[1], radius + 0.01)
        page.curve([at(point) for point in curve], INK if chunks else WAY, bool(chunks))
        if chunks:
            x, y = at(along(*curve, 0.5))
            crowded = len(sent) > CROWDED or radius < RADIUS
            face = colour(held[link.source][chunks[0]].share)
            _draw_packet(page, x, y, "" if crowded else _label(chunks), face)
    for device, cells in held.items():
        x, y = at(placed.points[device])
        radii = SIDE * radius, SIDE * radius * 0.68
        page.ring((x, y), radii, [colour(cell.share) for cell in cells])
        page.text(x, y, f"{device}", 10 if radius == RADIUS else 7, weight="bold")


def _draw_packet(
    page: Page, x: float, y: float, label: str, face: tuple[float, float, float]
) -> None:
    """Chunks on their way: their numbers, or a dot where there is no room."""
    style = "round,pad=0.28" if label else "circle,pad=0.2"
    box = {"boxstyle": style, "facecolor": face, "edgecolor": INK, "linewidth": 0.7}
    color = "white" if face == COMPLETE else INK
    size = 7.5 if label else 4
    page.text(x, y, label or " ", size, weight="bold", color=color, bbox=box)


def _label(chunks: Sequence[int]) -> str:
    """The numbers of chunks on one link, in brief."""
    first, *_, last = *sorted(chunks), max(chunks)
    if len(chunks) < 3:
        return ", ".join(map(str, sorted(chunks)))
    row = last - first + 1 == len(chunks)
    return f"{first} to {last}" if row else f"{len(chunks)} chunks"


def _draw_cells(page: Page, frames: Sequence[Frame], frame: Frame) -> None:
    """The panel of `draw_schedule`, as large as fits, and no arrows cut off."""
    devices, chunks = (1 + getattr(frame.cells[-1], n) for n in ("device", "chunk"))
    panels = [Panel(each.title, each.cells, each.arrows) for each in frames]
    rows = row_tops(panels, chunks, ARC)
    width = LABEL + panel_width(devices)
    scale = min(ROOM / width, (SIDE + 0.3) / rows[-1], LARGEST)
    left = WIDTH - MARGIN - ROOM + (ROOM - scale * width) / 2
    part = page.part(left, TOP - 0.3 + (SIDE + 0.3 - scale * rows[-1]) / 2, scale)
    strokes = Panels(part, devices, MOST_WRITTEN, ARC)
    strokes.draw_labels(0, 0, rows)
    strokes.draw_panel(LABEL, 0, panels[frames.index(frame)], rows)


def _draw_clock(page: Page, frame: Frame, last: Frame, note: str) -> None:
    """How far the clock has come, and who has sent most."""
    y, small = HEIGHT - 0.3, {"ha": "left", "color": MUTED}
    share = frame.clock_s / last.clock_s if last.clock_s else 1.0
    end = WIDTH - MARGIN
    page.curve([(MARGIN, y - 0.22), (end, y - 0.22)], WAY, head=False)
    if share:
        here = MARGIN + share * (end - MARGIN)
        page.curve([(MARGIN, y - 0.22), (here, y - 0.22)], CLOCK, head=False)
    most = max(last.sent_bytes)
    busiest = last.sent_bytes.index(most)
    who = "each device" if {*last.sent_bytes} == {most} else f"device {busiest}"
    clock = f"clock {seconds_text(frame.clock_s)} of {seconds_text(last.clock_s)}"
    sent = (
        f"{bytes_text(frame.sent_bytes[busiest])} of {bytes_text(most)} sent by {who}"
    )
    page.text(MARGIN, y, f"{clock};  {sent}", 8, **small)
    page.text(end, y, note, 8, **small | {"ha": "right"})
