"""A page measured in inches, and the strokes that figures are made of.

Matplotlib is imported only when a page is made. Its global state (`matplotlib.pyplot`)
stays untouched, so no display is needed.
"""

import copy
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, MUTED, EDGE = "#1f2933", "#52606d", "#7b8794"
DPI = 200
Point = tuple[float, float]


def empty_figure(width: float, height: float, caller: str) -> "Figure":
    """A white figure, measured in inches.

    Args:
        width: Inches.
        height: Inches.
        caller: The public function, named in the error.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{caller} found no matplotlib ({error}). Figures need it, and jaxdp "
            "does not install it by itself. Install the extra: "
            "pip install 'jax-data-parallel[experiments]'."
        ) from error
    return Figure((width, height), dpi=DPI, facecolor="white")


class Page:
    """A figure with inches as units and y downwards.

    Attributes:
        figure: The matplotlib figure.
        axes: The one pair of axes, which fill it.
    """

    def __init__(self, width: float, height: float, caller: str):
        """Makes an empty page.

        Args:
            width: Inches.
            height: Inches.
            caller: The public function, named in the error.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        self.figure = empty_figure(width, height, caller)
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, width), ylim=(height, 0))
        self.axes.set_axis_off()
        self._left, self._top, self._scale = 0.0, 0.0, 1.0

    def part(self, left: float, top: float, scale: float) -> "Page":
        """The same page, seen from (left, top) and enlarged, with all strokes."""
        part = copy.copy(self)
        part._left, part._top = self._at((left, top))
        part._scale = self._scale * scale
        return part

    def save(self, path: str | os.PathLike | None) -> "Figure":
        """Writes the page, if there is a path, and returns the figure."""
        if path is not None:
            self.figure.savefig(os.fspath(path))
        return self.figure

    def text(self, x: float, y: float, text: str, size: float, **style: Any) -> None:
        """Writes text of `size` points, centred on (x, y) unless `style` says else."""
        style = {"ha": "center", "va": "center", "color": INK} | style
        self.axes.text(*self._at((x, y)), text, fontsize=size * self._scale, **style)

    def box(self, x: float, y: float, size: float, face: Any, gid: str) -> None:
        """Draws a square; (x, y) is its upper left corner."""
        from matplotlib.patches import FancyBboxPatch

        size *= self._scale
        style = f"round,pad=0,rounding_size={size / 8}"
        line = {"edgecolor": EDGE, "linewidth": 0.7 * self._scale}
        patch = FancyBboxPatch(
            self._at((x, y)), size, size, style, facecolor=face, **line
        )
        patch.set_gid(gid)
        self.axes.add_patch(patch)

    def arrow(self, start: Point, end: Point, height: float = 0.0) -> None:
        """Draws an arrow; `height` bends it upwards into an arc."""
        over = ((start[0] + end[0]) / 2, start[1] - 2 * height)
        self.curve([start, over, end] if height else [start, end], INK)

    def curve(self, points: Sequence[Point], color: str, head: bool = True) -> None:
        """Draws a straight line, or a quadratic curve with a control point."""
        from matplotlib.patches import FancyArrowPatch
        from matplotlib.path import Path

        codes = [Path.CURVE3] * 2 if len(points) > 2 else [Path.LINETO]
        path = Path([self._at(point) for point in points], [Path.MOVETO, *codes])
        patch = FancyArrowPatch(
            path=path,
            arrowstyle="-|>,head_length=2.6,head_width=1.7" if head else "-",
            mutation_scale=1.3 * self._scale,
            color=color,
            linewidth=1.0 * self._scale,
        )
        self.axes.add_patch(patch)

    def ring(
        self, middle: Point, radii: tuple[float, float], faces: Sequence[Any]
    ) -> None:
        """Draws a ring with a part for each colour, clockwise from the top."""
        from matplotlib.patches import Wedge

        outer, inner = (radius * self._scale for radius in radii)
        turn = 360 / len(faces)
        for i, face in enumerate(faces):
            line = {"edgecolor": EDGE, "linewidth": 0.5 * self._scale}
            wedge = Wedge(
                self._at(middle),
                outer,
                turn * i - 90,
                turn * (i + 1) - 90,
                width=outer - inner,
                facecolor=face,
                **line,
            )
            self.axes.add_patch(wedge)

    def _at(self, point: Point) -> Point:
        """Where a point of this part lies on the whole page."""
        x, y = point
        return self._left + self._scale * x, self._top + self._scale * y
