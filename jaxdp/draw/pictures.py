"""Frames as pictures for slides: one file each, or an animation."""

import os
import pathlib
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxdp.draw.cells import LABEL, Panels, colour, panel_width, row_tops
from jaxdp.draw.frames import Frame
from jaxdp.draw.panels import Arrow, Panel
from jaxdp.draw.places import Places, along
from jaxdp.draw.plotting import INK, MUTED, Page, Point
from jaxdp.schedule import Schedule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 10.0, 5.625  # inches: a slide
MARGIN, SIDE, TOP = 0.45, 3.3, 1.0  # inches: SIDE is that of the picture of the links
WAY = "#d3d9df"  # links that the round does not use
MOST_WRITTEN = 9
CROWDED = 24  # with more links in use, chunks have no numbers
WRAPPED = 105  # characters of a line below the pictures
GIF_DPI = 100
FRAME_MS, LAST_MS = 1600, 4000


def draw_frame(
    schedule: Schedule,
    frames: Sequence[Frame],
    index: int,
    placed: Places,
    title: str,
    note: str = "",
    path: str | os.PathLike | None = None,
) -> "Figure":
    """Draws one frame: devices and links, cells, and what is true, as a slide.

    Args:
        schedule: Whose frames these are.
        frames: All of them, of `jaxdp.draw.frames.frames`.
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
    style = {"ha": "left", "va": "top"}
    page.text(MARGIN, MARGIN, title, 17, weight="bold", **style)
    count = f"{index} of {len(frames) - 1} rounds done"
    style_right = {"ha": "right", "va": "top", "color": MUTED}
    page.text(WIDTH - MARGIN, MARGIN, count, 11, **style_right)
    _draw_links(page.part(MARGIN, TOP, SIDE), schedule, frame, placed)
    _draw_cells(page, schedule, frames, frame)
    y = TOP + SIDE + 0.15
    page.text(MARGIN, y, _wrapped(frame.now, 90), 12, weight="bold", **style)
    said = f"{frame.next} {frame.detail}".strip()
    page.text(MARGIN, y + 0.27, _wrapped(said, 120), 9.5, color=MUTED, **style)
    page.text(WIDTH - MARGIN, HEIGHT - 0.2, note, 8, **style_right | {"va": "bottom"})
    page.text(MARGIN, HEIGHT - 0.2, _costs(frame, frames[-1]), 8, **style)
    page.save(path)
    return page.figure


def save_gif(figures: Sequence["Figure"], path: str | os.PathLike) -> None:
    """Writes an animation that repeats: a picture for every figure."""
    from PIL import Image

    images = []
    for figure in figures:
        figure.set_dpi(GIF_DPI)
        canvas: Any = figure.canvas
        canvas.draw()
        images.append(Image.fromarray(canvas.buffer_rgba()).convert("RGB"))
    palette = _palette(images)
    images = [image.quantize(palette=palette, dither=0) for image in images]
    images[0].save(
        pathlib.Path(path),
        format="GIF",
        save_all=True,
        append_images=images[1:],
        duration=[FRAME_MS] * (len(images) - 1) + [LAST_MS],
        loop=0,
        optimize=False,
    )
