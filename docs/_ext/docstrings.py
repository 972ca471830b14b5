"""Google docstrings as this project writes them, made into what Sphinx reads.

Two habits need help. A section of one sentence stands on the line of its name, such as
`Cost: 2 rounds.`; it becomes a field beside the parameters. A table is indented after a
line that ends with a colon; it becomes a literal block.

What stands between backticks is code. It is a link if it names something public, as
`jaxdp.all_reduce` or `Schedule`, and never if it may be an argument, as `root`.
"""

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

FIELD = re.compile(r"(Devices|Cost|References?|Sources?|Errors raised by all): (\S.*)")
LINKED = re.compile(r"(jaxdp(\.\w+)+|[A-Z]\w+)(\(\))?")
PLURAL = re.compile(r"`(\w+)`(?=[a-z])")  # "`Round`s": a role must end at a space


def fields(lines: list[str]) -> list[str]:
    """Makes fields of sections that begin on the line of their name."""
    result, inside = [], False
    for line in lines:
        if found := FIELD.fullmatch(line):
            result += [] if not result or not result[-1] else [""]
            text = found[2][0].upper() + found[2][1:]
            line, inside = f":{found[1]}: {text}", True
        elif inside and line.strip():
            line = f"    {line.strip()}"
        else:
            inside = False
        result.append(line)
    return result


def literals(lines: list[str]) -> list[str]:
    """Makes literal blocks of what is indented after a colon and a blank line."""
    result = list(lines)
    for i in range(len(result) - 2):
        line, blank, block = result[i : i + 3]
        if line.endswith(":") and not line.endswith("::") and not blank.strip():
            indent = len(line) - len(line.lstrip())
            if block.startswith(" " * (indent + 4)):
                result[i] = f"{line}:"
    return result


def _process(app, what, name, obj, options, lines: list[str]) -> None:
    del app, what, name, obj, options
    lines[:] = [PLURAL.sub(r"`\1`\\ ", line) for line in literals(fields(lines))]


def _name(
    name: str, rawtext: str, text: str, lineno: int, inliner: Any, *rest: Any
) -> tuple[list[nodes.Node], list[nodes.system_message]]:
    """The role of backticks."""
    if not LINKED.fullmatch(text):
        return [nodes.literal(rawtext, text)], []
    link = inliner.document.settings.env.domains.python_domain.role("obj")
    return link("py:obj", rawtext, text, lineno, inliner, *rest)


def setup(app: Sphinx) -> dict:
    """Runs before napoleon, which has the default priority of 500."""
    app.setup_extension("sphinx.ext.autodoc")
    app.add_role("name", _name)
    app.connect("autodoc-process-docstring", _process, priority=400)
    return {"parallel_read_safe": True}
