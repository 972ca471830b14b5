"""What every experiment writes, wherever in the tests it runs in tiny form."""

import importlib
import json
import pathlib
import re
from typing import NamedTuple

import jax
import pytest

from experiments.harness import command, devices, registry
from experiments.harness.result import Document, Result
from experiments.site import measures

# They run in their own tests, `experiments_NAME_test.py`, which look at more.
_OWN = (
    *("algorithms", "claims", "compression", "gpu", "memory", "overlap", "pipeline"),
    *("resume", "staleness", "uneven", "zero"),
)
ELSEWHERE = {name: f"experiments_{name}_test" for name in _OWN}
# Its programs are among those of gpu: they are compiled once for both.
ELSEWHERE["scaling"] = ELSEWHERE["gpu"]


class Ran(NamedTuple):
    """An experiment that ran as a command: what it found, and what it wrote."""

    found: Result
    folder: pathlib.Path
    document: Document


def run(name: str, output: pathlib.Path, *options: str) -> Ran:
    """Runs an experiment in tiny form, as from the command line."""
    module = importlib.import_module(f"experiments.{name}")
    original, found = module.run, []

    def keep(config):
        found.append(original(config))
        return found[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "run", keep)
        given = ["--tiny", "--platform", "cpu", "--output", str(output), *options]
        with jax.numpy_rank_promotion("allow"):  # as when run by hand
            assert command.run(module, given) == 0
    folder = output / name
    return Ran(found[0], folder, json.loads((folder / "result.json").read_text()))


def check(ran: Ran, claims: dict[str, str]) -> None:
    """Checks all that was written, and the verdicts of claims."""
    check_format(ran.folder, ran.document)
    check_claims(ran.document, claims)
    check_artifacts(ran.folder, ran.document)
    check_report(ran.folder, ran.document)


def check_format(folder: pathlib.Path, document: Document) -> None:
    """Checks the names in `result.json`, and what each of them promises."""
    name = folder.name
    assert list(document) == [
        "experiment",
        "question",
        "config",
        "environment",
        "claims",
        "tables",
        "artifacts",
    ]
    assert document["experiment"] == name
    assert document["question"] == registry.question(name)
    assert document["config"]["tiny"] is True
    environment = document["environment"]
    assert environment["jax"] == jax.__version__
    assert environment["devices"] == document["config"]["devices"]
    assert re.fullmatch(r"[0-9a-f]{40}", environment["commit"] or "0" * 40)
    assert environment["date"].endswith("+00:00")
    for claim in document["claims"]:
        assert set(claim) == {
            "id",
            "claim",
            "expected",
            "measured",
            "unit",
            "verdict",
            "why",
        }
        assert claim["why"] and claim["claim"]
    assert all(
        rows and isinstance(rows[0], dict) for rows in document["tables"].values()
    )
    for source in measures.read_from(name):  # by the report's overview
        rows = document["tables"][source.table]
        assert any(source.value in row for row in rows), source


def check_claims(document: Document, claims: dict[str, str]) -> None:
    """Checks which claims there are, with which verdicts."""
    assert {c["id"]: c["verdict"] for c in document["claims"]} == claims


def check_artifacts(folder: pathlib.Path, document: Document) -> None:
    """Checks that the folder holds what the document lists, and nothing else."""
    files = {path.name for path in folder.iterdir()}
    assert files == {"result.json", *document["artifacts"]}
    kinds = {path.rpartition(".")[2] for path in files}
    assert {"json", "html", "png"} <= kinds <= {"json", "html", "png", "txt", "gz"}
    for path in folder.glob("*.hlo.txt"):
        assert path.read_text().startswith("HloModule")


def check_report(folder: pathlib.Path, document: Document) -> None:
    """Checks that the page shows everything, and needs no file but long programs.

    The page of `claims` links to its evidence, too.
    """
    page = (folder / "report.html").read_text()
    long = {path.name for path in folder.glob("*.hlo.txt.gz")}
    links = re.findall(r"(?:src|href)=\"(?!data:)([^\"]*)", page)
    evidence = [row["link"] for row in document["tables"].get("ledger", [])]
    assert sorted(links) == sorted([*long, *evidence])
    assert "prefers-color-scheme: dark" in page
    assert '<meta name="viewport"' in page
    for claim in document["claims"]:
        assert f'<span class="badge {claim["verdict"]}">' in page
    assert page.count("<img ") == len(list(folder.glob("*.png")))
    assert page.count("<details") == len(list(folder.glob("*.hlo.txt")))


def check_labels(document: Document) -> None:
    """Checks that timings say that devices were forced."""
    tables = document["tables"].values()
    timed = [row for rows in tables for row in rows if "median_ms" in row]
    assert timed
    assert all(devices.FORCED in row["label"] for row in timed)
