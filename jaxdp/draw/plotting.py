"""A page measured in inches, and the strokes that figures are made of.

Matplotlib is imported only when a page is made. Its global state (`matplotlib.pyplot`)
stays untouched, so no display is needed.
"""

import os
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
    """A figure with inches as units and y downwards."""

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

    def save(self, path: str | os.PathLike | None) -> "Figure":
        """Writes the page, if there is a path, and returns the figure."""
        if path is not None:
            self.figure.savefig(os.fspath(path))
        return self.figure

    def text(self, x: float, y: float, text: str, size: float, **style: Any) -> None:
        """Writes text of `size` points, centred on (x, y) unless `style` says else."""
        style = {"ha": "center", "va": "center", "color": INK} | style
        self.axes.text(x, y, text, fontsize=size, **style)

    def box(self, x: float, y: float, size: float, face: Any, gid: str) -> None:
        """Draws a square; (x, y) is its upper left corner."""
        from matplotlib.patches import FancyBboxPatch

        style = f"round,pad=0,rounding_size={size / 8}"
        patch = FancyBboxPatch(
            (x, y), size, size, style, facecolor=face, edgecolor=EDGE, linewidth=0.7
        )
        patch.set_gid(gid)
        self.axes.add_patch(patch)

    def arrow(self, start: Point, end: Point, height: float = 0.0) -> None:
        """Draws an arrow; `height` bends it upwards into an arc."""
        from matplotlib.patches import FancyArrowPatch
        from matplotlib.path import Path

        middle = [((start[0] + end[0]) / 2, start[1] - 2 * height)] if height else []
        curve = [Path.CURVE3] * 2 if height else [Path.LINETO]
        path = Path([start, *middle, end], [Path.MOVETO, *curve])
        patch = FancyArrowPatch(
            path=path,
            arrowstyle="-|>,head_length=2.6,head_width=1.7",
            mutation_scale=1.3,
            color=INK,
            linewidth=1.0,
        )
        self.axes.add_patch(patch)
