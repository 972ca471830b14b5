"""How the templates of pages are read, and the look that they share.

`look.css` has the colours, light and dark, and what is on every page of results;
`parts.html.j2` has claims, tables and lists as macros.
"""

import pathlib
import re

import jinja2

from experiments.harness import show, wording

REPORT = re.compile(r"(?:\.\./)+(?:\w+/)+report\.html(?:#\w+)?")  # beside a report
HERE = pathlib.Path(__file__).parent


def environment(folder: pathlib.Path) -> jinja2.Environment:
    """Reads templates of a folder: escapes values, refuses names that nobody gave."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, HERE]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"heading": wording.heading, "value": wording.value}
    made.filters["slug"] = wording.slug
    made.tests |= {"numeric": wording.is_number, "report_link": REPORT.fullmatch}
    made.globals["split_label"] = show.split_label
    return made
