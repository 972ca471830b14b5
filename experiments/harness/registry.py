"""Which experiments there are: the modules of this package, each named for its file."""

import ast
import difflib
import pathlib

FOLDER = pathlib.Path(__file__).parents[1]


def names() -> list[str]:
    """All experiments, sorted."""
    return sorted(
        path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_")
    )


def docstring(name: str) -> str:
    """The docstring of an experiment, read without importing it."""
    tree = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    return ast.get_docstring(tree) or ""


def question(name: str) -> str:
    """The first line of an experiment's docstring."""
    return docstring(name).partition("\n")[0]


def listing() -> list[str]:
    """One line per experiment."""
    width = max(map(len, names()))
    return [f"{name:{width}}  {question(name)}" for name in names()]


def unknown(name: str) -> str:
    """The message for a name that is no experiment."""
    close = difflib.get_close_matches(name, names(), n=1)
    remedy = f"Did you mean {close[0]!r}?" if close else "Choose one of these:"
    return "\n".join(
        [
            f"There is no experiment {name!r}. The name must be one of "
            f"{', '.join(names())}. {remedy}",
            *(f"  {line}" for line in listing()),
        ]
    )
