"""Writes what an experiment found: `result.json`, `report.html`, figures, programs."""

import base64
import dataclasses
import gzip
import io
import pathlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

import jax

from experiments.harness import result, templates, wording

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BROAD = 9.0  # inches
LONG = 1_000_000  # characters of a program; more would make a page of many megabytes


def save(
    module: ModuleType, config: Any, found: result.Result, folder: pathlib.Path
) -> result.Document:
    """Writes everything to `folder`; returns the document of `result.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    artifacts = ["report.html"]
    images = {title: _png(figure) for title, figure in found.figures.items()}
    for title, image in images.items():
        artifacts.append(f"{wording.slug(title)}.png")
        (folder / artifacts[-1]).write_bytes(image)
    texts = {name: _text(program) for name, program in found.programs.items()}
    files = {name: _write_program(folder, name, text) for name, text in texts.items()}
    artifacts += files.values()
    for name, content in found.files.items():
        artifacts.append(name)
        (folder / name).write_text(content, encoding="utf-8")
    about = module.__doc__ or ""
    document = {
        "experiment": folder.name,
        "question": about.partition("\n")[0],
        "config": {k: _plain(v) for k, v in dataclasses.asdict(config).items()},
        "environment": result.environment(config.devices),
        "claims": [dataclasses.asdict(claim) for claim in found.claims],
        "tables": {name: [*map(dict, rows)] for name, rows in found.tables.items()},
        "artifacts": artifacts,
    }
    result.write(folder / "result.json", document)
    shown = {title: _shown(found.figures[title], images[title]) for title in images}
    page = report(document, about, shown, _listed(texts, files), config.where())
    (folder / "report.html").write_text(page, encoding="utf-8")
    return document


def report(
    document: result.Document,
    about: str,
    images: dict[str, dict[str, str]],
    programs: list[dict[str, Any]],
    where: str,
) -> str:
    """The report as one HTML page; it needs no other file to be read."""
    page = templates.environment(templates.HERE).get_template("report.html.j2")
    return page.render(
        document=document,
        about=about.partition("\n")[2].strip(),
        where=where,
        images=images,
        programs=programs,
    )


def _png(figure: "Figure") -> bytes:
    """A figure as a picture."""
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()


def _shown(figure: "Figure", png: bytes) -> dict[str, str]:
    """A picture inside the page; a broad one is scrolled on a phone, not shrunk."""
    width = "broad" if figure.get_figwidth() > BROAD else "plot"
    return {"data": base64.b64encode(png).decode(), "width": width}


def _write_program(folder: pathlib.Path, name: str, text: str) -> str:
    """Writes the text of a program, a long one compressed; returns the file's name."""
    file = f"{wording.slug(name)}.hlo.txt"
    if len(text) <= LONG:
        (folder / file).write_text(text, encoding="utf-8")
        return file
    (folder / f"{file}.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    return f"{file}.gz"


def _listed(texts: dict[str, str], files: dict[str, str]) -> list[dict[str, Any]]:
    """Programs as the page lists them: a long text is in its file alone."""
    return [
        {
            "name": name,
            "lines": text.count("\n") + 1,
            "file": files[name],
            "text": text if len(text) <= LONG else "",
        }
        for name, text in texts.items()
    ]


def _text(program: jax.stages.Compiled) -> str:
    return program.as_text() or "This backend gives no text."


def _plain(option: Any) -> Any:
    """An option as JSON has it."""
    return str(option) if isinstance(option, pathlib.Path) else option
