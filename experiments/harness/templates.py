"""How the templates of pages are read."""

import pathlib

import jinja2


def environment(folder: pathlib.Path) -> jinja2.Environment:
    """Reads templates of a folder: escapes values, refuses names that nobody gave."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
