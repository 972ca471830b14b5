"""Rows of labelled boxes: who does what when, or who holds what.

    ```{bars} time →
    device 0: compute forward 2 | compute backward 4 | send ring 3 | update 1
    device 1: compute forward 2 | wait 7 | update 1
    ```

A box is a kind, what is written in it (the kind, if nothing else), and how wide it is.
The kind chooses the colour: those of `KINDS`.
"""

import html
import re

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

KINDS = ("compute", "send", "update", "wait", "hold", "part", "free")
BOX = re.compile(r"(?P<kind>\w+)(?P<text>.*?) (?P<width>[\d.]+)")


class Bars(Directive):
    """Rows of boxes as HTML, which a narrow page may shrink."""

    optional_arguments = 1
    final_argument_whitespace = True
    has_content = True

    def run(self) -> list[nodes.Node]:
        """Writes the rows, and the legend below them."""
        rows = "".join(map(_row, self.content))
        legend = html.escape("".join(self.arguments))
        label = html.escape("; ".join(self.content), quote=True)
        page = (
            f'<div class="bars" role="img" aria-label="{label}">{rows}'
            f'<div class="bars-legend">{legend}</div></div>'
        )
        return [nodes.raw("", page, format="html")]


def _row(line: str) -> str:
    label, _, boxes = line.partition(":")
    inside = "".join(_box(text.strip()) for text in boxes.split("|"))
    label = html.escape(label)
    return (
        f'<div class="bars-row"><span class="bars-label">{label}</span>'
        f'<span class="bars-boxes">{inside}</span></div>'
    )


def _box(text: str) -> str:
    found = BOX.fullmatch(text)
    if not found or found["kind"] not in KINDS:
        raise ValueError(
            f"bars got the box {text!r}. It must be a kind ({', '.join(KINDS)}), a "
            "text and a width, such as 'compute forward 2'."
        )
    kind, width = found["kind"], found["width"]
    words = found["text"].strip() or ("" if kind in ("wait", "free") else kind)
    words = html.escape(words)
    return f'<span class="box-{kind}" style="flex-grow:{width}">{words}</span>'


def setup(app: Sphinx) -> dict:
    """Adds the directive."""
    app.add_directive("bars", Bars)
    return {"parallel_read_safe": True}
