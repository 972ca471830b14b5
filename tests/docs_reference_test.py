"""The documentation names every public name, and what its pages point at is there."""

import dataclasses
import importlib
import inspect
import json
import pkgutil
import re

import pytest

import jaxdp
from experiments.harness import registry
from tests.docs_code_test import DOCS

PAGES = [page for page in DOCS.rglob("*.md") if "_build" not in page.parts]
DIRECTIVE = re.compile(r"^\.\. auto(?:class|function|exception):: (\S+)$", re.M)
LINK = re.compile(r"\]\(([^)\s]+)\)")
DOCUMENTED = [
    name
    for page in sorted((DOCS / "reference").glob("*.md"))
    for name in DIRECTIVE.findall(page.read_text())
]


def found(name):
    """What a dotted name stands for: some functions have the name of their module."""
    value, path = jaxdp, "jaxdp"
    for part in name.split(".")[1:]:
        path = f"{path}.{part}"
        if not hasattr(value, part):
            importlib.import_module(path)
        value = getattr(value, part)
    return value


def public(module):
    """What a package offers of its own, by name; constants and types aside."""
    names = getattr(module, "__all__", dir(module))
    for name in names:
        value = getattr(module, name)
        own = str(getattr(value, "__module__", "")).startswith("jaxdp.")
        if own and callable(value) and not name.startswith("_"):
            yield f"{module.__name__}.{name}", value


def given(value):
    """What a function or a class of data takes, by name."""
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value) if field.init]
    if inspect.isclass(value):
        return getattr(value, "_fields", ())
    return inspect.signature(value).parameters


def packages():
    """The packages that a user imports, and the modules that are public as they are."""
    yield jaxdp
    names = [each.name for each in pkgutil.iter_modules(jaxdp.__path__) if each.ispkg]
    for name in (*names, "aggregation", "choice", "cost"):
        yield importlib.import_module(f"jaxdp.{name}")


def test_every_public_name_is_in_the_reference():
    documented = [found(name) for name in DOCUMENTED]
    missing = []
    for module in packages():
        for name, value in public(module):
            imported = not hasattr(module, "__path__")
            if imported and value.__module__ != module.__name__:
                continue  # a module's own imports; those of a package are its names
            if not any(value is each for each in documented):
                missing.append(name)
    assert not missing


def test_no_name_is_in_the_reference_twice():
    assert sorted({*DOCUMENTED}) == sorted(DOCUMENTED)
    values = [found(name) for name in DOCUMENTED]
    assert len({id(value) for value in values}) == len(values)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_what_is_public_says_what_it_is(name):
    value = found(name)
    assert value.__doc__ and not value.__doc__.startswith(f"{value.__name__}(")
    if "Args:" in value.__doc__ or "Attributes:" in value.__doc__:
        listed = re.findall(r"^ +\**(\w+(?:, \w+)*):", value.__doc__, re.M)
        assert {*given(value)} <= {name for line in listed for name in line.split(", ")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_links_of_a_page_lead_somewhere(page):
    text = re.sub(r"^```(?!\{).*?^```", "", page.read_text(), flags=re.M | re.S)
    for target in LINK.findall(text):
        if "://" not in target:
            path, _, _ = target.partition("#")
            assert (page.parent / path if path else page).resolve().exists(), target


def test_every_claim_has_a_verdict_and_evidence_that_can_be_run():
    rows = json.loads((DOCS / "claims.json").read_text())["tables"]["ledger"]
    ids = [*(f"CA{i}" for i in range(1, 17)), *(f"CB{i}" for i in range(1, 10))]
    assert [row["id"] for row in rows] == ids
    assert {row["evidence"] for row in rows} <= {*registry.names()}
    page = (DOCS / "documents.md").read_text()
    listed = re.findall(r"^```\{ledger\} (\w+)$", page, re.M)
    assert {row["verdict"] for row in rows} <= {*listed} - {"counts"}
    for row in rows:
        assert row["claim"] and row["why"] and str(row["measured"])
