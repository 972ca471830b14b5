"""Results that are current, older, missing or damaged, and what their notes say."""

import pathlib
import re
import subprocess

import pytest

from experiments.harness import reading, registry, result
from tests import results


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository of two commits; the second changes only what results do not need."""
    root = tmp_path / "checkout"
    for folder in ("jaxdp", "experiments", "docs"):
        (root / folder).mkdir(parents=True)
        (root / folder / "file.txt").write_text("1\n")

    def git(*arguments):
        name = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        command = ["git", *name, "-C", str(root), *arguments]
        ran = subprocess.run(command, check=True, capture_output=True, text=True)
        return ran.stdout.strip()

    def commit():
        git("add", "-A")
        git("commit", "-m", "a change")
        return git("rev-parse", "HEAD")

    git("init", "-q")
    first = commit()
    (root / "docs" / "file.txt").write_text("2\n")
    second = commit()
    monkeypatch.setattr(reading, "ROOT", root)
    monkeypatch.setattr(result, "commit", lambda: second)
    return root, first


def test_current_results_have_no_note(tmp_path, checkout):
    root, first = checkout
    results.write(
        tmp_path, "ring", results.claim("CB1"), commit=first
    )  # only docs/ changed since
    found = reading.find(tmp_path, "ring")
    assert (found.state, found.tiny, found.note) == ("current", False, "")
    assert found.folder == tmp_path / "ring"
    assert found.document and found.document["claims"][0]["id"] == "CB1"
    changed = root / "experiments" / "file.txt"
    changed.write_text("2\n")  # also if it is not committed yet
    assert reading.find(tmp_path, "ring").state == "older"


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (None, "It is of commit {}, and the code has changed since. Make it anew"),
        ("0" * 40, "It is of commit 0000000, which is not in this checkout. Make it"),
        ("--output=x", "It says that it is of commit '--output=x', which is none."),
    ],
    ids=["changed", "not there", "an option"],
)
def test_older_results_name_their_commit(tmp_path, checkout, made, words):
    root, first = checkout
    (root / "jaxdp" / "file.txt").write_text("2\n")
    results.write(tmp_path, "ring", commit=made or first)
    found = reading.find(tmp_path, "ring")
    assert found.state == "older" and found.document
    assert found.note.startswith(words.format(first[:7]))
    assert f'make experiment EXP=ring ARGS="--output {tmp_path}"' in found.note


@pytest.mark.parametrize(("made", "now"), [(None, "1" * 40), ("1" * 40, None)])
def test_without_a_commit_nothing_is_older(tmp_path, monkeypatch, made, now):
    results.write(tmp_path, "ring", commit=made)
    monkeypatch.setattr(result, "commit", lambda: now)
    assert reading.find(tmp_path, "ring").state == "current"


def test_tiny_results_are_told_apart(tmp_path):
    results.write(tmp_path, "ring", tiny=True)
    found = reading.find(tmp_path, "ring")
    assert (found.state, found.tiny) == ("current", True)
    assert found.note.startswith("It is of a tiny run")


def test_missing_results_name_the_command(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # `results` is where the command writes by itself
    found = reading.find(pathlib.Path("results"), "ring")
    assert (found.state, found.document) == ("missing", None)
    there, command = "results/ring/result.json", "`make experiment EXP=ring`"
    assert found.note == f"{there} is not there. Make it with {command}."
    assert list(reading.find_all(tmp_path)) == registry.names()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"text": '{"experiment": '}, r"it is not JSON \(Expecting value"),
        ({"text": "[1]"}, r"it is \[1\], and no object with keys"),
        ({"question": 3}, "question is 3"),
        ({"claims": ["CB1"]}, "claim is 'CB1', and no object with keys"),
        ({"tables": {"t": None}}, "table 't' is no list of rows"),
        ({"experiment": "star"}, "it is of the experiment 'star'"),
        ({"artifacts": ["report.html", "a.png"]}, "it lists are missing: a.png"),
        ({"artifacts": ["report.html", None, 5]}, r"have no name: \[None, 5\]"),
        ({"artifacts": ["../ring/report.html"]}, r"have no name: \['\.\./ring"),
        ({"text": "[" * 10**5}, r"it is not JSON \(maximum recursion"),
    ],
    ids=[
        *("cut", "list", "type", "claim", "table", "other", "file", "no name"),
        *("elsewhere", "deep"),
    ],
)
def test_damaged_results_say_how(tmp_path, changes, words):
    folder = results.write(tmp_path, "ring", **changes)
    if text := changes.get("text"):
        (folder / "result.json").write_text(text)
    found = reading.find(tmp_path, "ring")
    assert (found.state, found.document) == ("damaged", None)
    assert re.search(words, found.note)
    assert "Make it again with `make experiment EXP=ring" in found.note
