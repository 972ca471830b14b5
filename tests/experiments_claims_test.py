"""The ledger: its claims, how evidence is gathered, and what is written."""

import ast
import json
import os
import pathlib

import pytest

from experiments import claims
from experiments.harness import command, registry, result
from experiments.ledger import catalogue, gathering, judging, running, sources
from tests import experiments_contract as contract
from tests import results

IDS = [*(f"CA{i}" for i in range(1, 17)), *(f"CB{i}" for i in range(1, 10))]


@pytest.fixture
def ran(monkeypatch):
    """Takes jobs instead of running them; each leaves what it is told to."""
    taken, leave, failing = [], {}, {}

    def run_all(jobs, at_once):
        taken.extend(jobs)
        for job in jobs:
            output = job.options[job.options.index("--output") + 1]
            told = leave.get(job.name, [])
            if told is not None:
                folder, tiny = pathlib.Path(output), "--tiny" in job.options
                results.write(folder, job.name, *told, tiny=tiny)
        return {job.name: running.Ended(1.5, failing.get(job.name, "")) for job in jobs}

    monkeypatch.setattr(running, "run_all", run_all)
    monkeypatch.setattr(result, "commit", lambda: "1" * 40)  # also outside of git
    return taken, leave, failing


def wish(folder, *ids, **changes):
    """What is asked for."""
    usual = {"platform": "cpu", "tiny": False, "fresh": False, "all_claims": False}
    entries = catalogue.chosen(ids)
    return gathering.Wish(**{"entries": entries, "results": folder} | usual | changes)


def test_the_catalogue_has_all_claims_in_order():
    assert list(catalogue.CLAIMS) == IDS
    assert list(catalogue.CLAIMS) == [entry.id for entry in catalogue.chosen([])]
    for entry in catalogue.CLAIMS.values():
        assert entry.text.endswith(".") and len(entry.title) <= 46
        assert bool(entry.weighs) == (len(entry.evidence) > 1)


def test_experiments_and_catalogue_name_each_other():
    """By source: which experiment can emit which claim, in its module or its parts."""
    emitted = {name: _emitted(registry.FOLDER / f"{name}.py") for name in _names()}
    told = {name: set() for name in _names()}
    for entry in catalogue.CLAIMS.values():
        for name in entry.evidence:
            told[name].add(entry.id)
    assert told == emitted
    assert {name for name, ids in told.items() if ids} == set(sources.SOURCES)


def _names():
    return [name for name in registry.names() if name != "claims"]


def _emitted(path):
    """Ids of claims in a module and in the parts that it imports by name."""
    tree, found = ast.parse(path.read_text()), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Claim":
            (given,) = [key.value for key in node.keywords if key.arg == "id"]
            found.add(ast.literal_eval(given))
        if isinstance(node, ast.ImportFrom) and node.module == "experiments.parts":
            parts = [name.name for name in node.names]
            for part in parts:
                found |= _emitted(registry.FOLDER / "parts" / f"{part}.py")
    return found & set(IDS)


@pytest.mark.parametrize(
    ("given", "words"),
    [("cb1", "Did you mean CB1"), ("CB10", "Did you mean CB1"), ("x", "Use --only")],
)
def test_unknown_claims_end_the_command(capsys, given, words):
    assert command.run(claims, ["--only", "CA3", given]) == 2
    message = capsys.readouterr().err
    assert f"--only got {given}" in message and words in message
    assert ", ".join(IDS) in message


def test_devices_belong_to_experiments(capsys):
    assert command.run(claims, ["--devices", "4"]) == 2
    assert 'EXP=ring ARGS="--devices 4"' in capsys.readouterr().err


def test_current_results_are_read_and_others_made(tmp_path, ran):
    taken, leave, _ = ran
    results.write(tmp_path, "ring", results.claim("CB3"))
    results.write(tmp_path, "errors", results.claim("CA2"), tiny=True)
    results.write(tmp_path, "compare", commit="0" * 40)  # older
    results.write(tmp_path, "dp", question=3)  # damaged
    leave |= {"zero": [results.claim("CB8", "partly")]}  # was missing
    found = gathering.gather(wish(tmp_path, "CB3", "CA2", "CB7", "CA1", "CB8"))
    assert list(found) == ["dp", "errors", "ring", "compare", "zero"]
    assert {name: each.how for name, each in found.items()} == {
        "dp": "ran",
        "errors": "ran",
        "ring": "read",
        "compare": "ran",
        "zero": "ran",
    }
    made = {job.name: job for job in taken}
    assert [*made] == ["zero", "compare", "dp", "errors"]  # the longest first
    where = ["--platform", "cpu", "--output", str(tmp_path)]
    assert made["zero"].options == [
        *("--least", "8", "--most", "8", "--models", "resnet"),
        *where,
    ]
    assert made["zero"].log == tmp_path / "logs" / "zero.txt"
    said = found["zero"].claim("CB8")
    assert said and said["verdict"] == "partly" and not found["zero"].claim("CB7")


def test_tiny_runs_leave_full_results_alone(tmp_path, ran):
    taken, leave, _ = ran
    results.write(tmp_path, "ring", results.claim("CB3"))  # full, and as good
    results.write(tmp_path, "compare", commit="0" * 40)  # older
    results.write(tmp_path / "tiny", "errors", results.claim("CA2"), tiny=True)
    results.write(tmp_path, "zero", commit="0" * 40, tiny=True)  # nothing to keep
    leave["compare"] = [results.claim("CB7")]
    asked = wish(tmp_path, "CB3", "CA2", "CB7", "CB8", tiny=True)
    found = gathering.gather(asked)
    outputs = {job.name: job.options[-1] for job in taken}
    assert outputs == {"compare": str(tmp_path / "tiny"), "zero": str(tmp_path)}
    assert all(job.options[0] == "--tiny" for job in taken)
    assert {name: (each.how, each.folder) for name, each in found.items()} == {
        "errors": ("read", tmp_path / "tiny" / "errors"),
        "ring": ("read", tmp_path / "ring"),
        "compare": ("ran", tmp_path / "tiny" / "compare"),
        "zero": ("ran", tmp_path / "zero"),
    }
    old = json.loads((tmp_path / "compare" / "result.json").read_text())
    assert old["environment"]["commit"] == "0" * 40


def test_fresh_makes_current_results_again(tmp_path, ran):
    results.write(tmp_path, "ring", results.claim("CB3"))
    found = gathering.gather(wish(tmp_path, "CB3", fresh=True))
    assert found["ring"].how == "ran" and found["ring"].seconds == 1.5


def test_witnesses_are_read_even_if_they_are_older(tmp_path, ran, monkeypatch):
    taken, leave, _ = ran
    leave["scaling"] = [results.claim("CA5")]
    results.write(tmp_path, "gpu", results.claim("CA5"), commit="0" * 40)
    found = gathering.gather(wish(tmp_path, "CA5"))
    assert [job.name for job in taken] == ["scaling"]
    assert found["gpu"].how == "read" and "of commit 0000000" in found["gpu"].note
    assert found["ddp"].how == "not there"
    assert "make experiment EXP=ddp" in found["ddp"].note
    quick = sources.Source(minutes=1, quick=True)
    monkeypatch.setitem(sources.SOURCES, "ddp", quick)
    gathering.gather(wish(tmp_path, "CA5", all_claims=True))
    assert [job.name for job in taken] == ["scaling", "ddp"]  # and gpu is not


def test_what_cannot_run_here_gives_way(tmp_path, ran, monkeypatch):
    taken, leave, _ = ran
    gone = sources.Source(minutes=1, absent=lambda: "There is no tc: install it.")
    monkeypatch.setitem(sources.SOURCES, "bandwidth", gone)
    leave["ps"] = [results.claim("CB2", "holds", measured=7.5)]
    found = gathering.gather(wish(tmp_path, "CB2"))
    assert [job.name for job in taken] == ["ps"]
    judged = judging.judge(catalogue.CLAIMS["CB2"], found)
    (row,) = judging.ledger([judged], tmp_path / "claims")
    assert (row["evidence"], row["measured"]) == ("ps", 7.5)
    assert "not by bandwidth, as it should be. There is no tc: install" in row["why"]
    monkeypatch.setattr(registry, "names", lambda: ["ring"])
    (row,) = judging.ledger(
        [
            judging.judge(
                catalogue.CLAIMS["CB9"], gathering.gather(wish(tmp_path, "CB9"))
            )
        ],
        tmp_path / "claims",
    )
    assert row["verdict"] == judging.NONE
    assert row["why"] == "The experiment pipeline is not built yet."


def test_what_a_result_lacks_is_said(tmp_path, ran, monkeypatch, capsys):
    monkeypatch.setattr(
        sources, "no_compiler", lambda: "No compiler: install [compile]."
    )
    ran[1]["scaling"] = [results.claim("CA6")]
    found = gathering.gather(wish(tmp_path, "CA6"))
    assert "No compiler: install [compile]." in capsys.readouterr().out
    judged = judging.judge(catalogue.CLAIMS["CA6"], found)
    (claim,) = judging.claims([judged])
    assert claim.why == "CA6 was seen. No compiler: install [compile]."


def test_failures_are_named_and_all_else_is_written(tmp_path, ran, capsys):
    _, leave, failing = ran
    leave |= {"ring": [results.claim("CB3")], "zero": None, "compare": None}
    failing["zero"] = "ended with status 3 after 1 s; the last lines:\n  oh dear"
    options = ["--only", "CB3", "CB7", "CB8", "--output", str(tmp_path)]
    assert command.run(claims, options) == 1
    message = capsys.readouterr().err
    assert "CB8: the experiment zero ended with status 3" in message
    assert "  oh dear" in message
    assert "CB7: the experiment compare" in message  # it wrote nothing
    document = json.loads((tmp_path / "claims" / "result.json").read_text())
    assert [claim["id"] for claim in document["claims"]] == ["CB3"]
    rows = {row["id"]: row for row in document["tables"]["ledger"]}
    assert [row["verdict"] for row in rows.values()] == [
        "holds",
        "no verdict",
        "no verdict",
    ]
    assert rows["CB8"]["why"] == "zero failed."
    counts = {row["claims of"]: row for row in document["tables"]["summary"]}
    assert (counts["together"]["holds"], counts["together"]["no verdict"]) == (1, 2)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Two claims, by an experiment that really runs."""
    folder = tmp_path_factory.mktemp("results")
    return contract.run("claims", folder, "--only", "CB3", "CB1")


def test_what_is_written(real):
    contract.check(real, {"CB1": "holds", "CB3": "holds"})


def test_links_lead_to_the_evidence(real):
    rows = real.document["tables"]["ledger"]
    assert [row["link"] for row in rows] == [
        "../ring/report.html#CB1",
        "../ring/report.html#CB3",
    ]
    for row in rows:
        page = os.path.normpath(real.folder / row["link"].partition("#")[0])
        assert os.path.exists(page)
        assert (row["expected"], row["measured"]) in [(1.75, 1.75), (1, 1)]
    assert (real.folder.parent / "logs" / "ring.txt").read_text()
    assert "<dd>CB3, CB1</dd>" in (real.folder / "report.html").read_text()
    (ring, *others) = real.document["tables"]["evidence"]
    assert (ring["experiment"], ring["how"], ring["tiny"]) == ("ring", "ran", True)
    assert {row["how"] for row in others} == {"not there"}
