"""Pictures of schedules, and the page that steps through them, made while building.

    ```{schedule} sharded_servers 4
    :options: {"servers": 2}
    What the picture shows, for readers who do not see it.
    ```

draws what the function of that name in `jaxdp.algorithms` makes for so many devices.

    ```{stepthrough} ring 4
    ```

shows the page of `jaxdp.draw.write_page`, opened at that schedule.
"""

import json
import os
import pathlib

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from jaxdp import algorithms, draw

PAGE = "_static/step.html"


class SchedulePicture(SphinxDirective):
    """The chunk-by-chunk figure of one schedule, as SVG."""

    required_arguments = 2
    has_content = True
    option_spec = {  # noqa: RUF012 (docutils reads it from the class)
        "title": directives.unchanged_required,
        "options": directives.unchanged_required,
    }

    def run(self) -> list[nodes.Node]:
        """Draws it and refers to it."""
        name, devices = self.arguments
        options = json.loads(self.options.get("options", "{}"))
        schedule = getattr(algorithms, name)(int(devices), **options)
        variant = "".join(f"-{key}-{value}" for key, value in options.items())
        path = pathlib.Path(self.env.doctreedir, f"{name}-{devices}{variant}.svg")
        draw.draw_schedule(schedule, path, self.options.get("title"))
        uri = f"/{os.path.relpath(path, self.env.srcdir)}"
        image = nodes.image(uri=uri, alt=" ".join(self.content))
        return [nodes.figure("", image, classes=["schedule"])]


class StepThrough(SphinxDirective):
    """The step-through page inside of this one, and a link to it alone."""

    required_arguments = 2

    def run(self) -> list[nodes.Node]:
        """Refers to the page, which `_write_page` puts there."""
        name, devices = self.arguments
        url = f"{'../' * self.env.docname.count('/')}{PAGE}#{name}-{devices}-0"
        page = (
            f'<iframe class="step" src="{url}" title="Step through a schedule" '
            f'loading="lazy"></iframe><p class="step-link"><a href="{url}">'
            "Open it on a page of its own</a></p>"
        )
        return [nodes.raw("", page, format="html")]


def _write_page(app: Sphinx, exception: Exception | None) -> None:
    if exception is None and app.builder.format == "html":
        draw.write_page(pathlib.Path(app.outdir, PAGE))


def setup(app: Sphinx) -> dict:
    """Adds the directives."""
    app.add_directive("schedule", SchedulePicture)
    app.add_directive("stepthrough", StepThrough)
    app.connect("build-finished", _write_page)
    return {"parallel_read_safe": True}
