"""Pictures of schedules, drawn while the site is built.

    ```{schedule} sharded_servers 4
    :options: {"servers": 2}
    What the picture shows, for readers who do not see it.
    ```

draws what the function of that name in `jaxdp.algorithms` makes for so many devices.
"""

import json
import os
import pathlib

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from jaxdp import algorithms, draw


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


def setup(app: Sphinx) -> dict:
    """Adds the directive."""
    app.add_directive("schedule", SchedulePicture)
    return {"parallel_read_safe": True}
