"""Claims judged by evidence that agrees, disagrees, has failed or says nothing."""

from typing import Any

from experiments.ledger import catalogue, gathering, judging
from tests import results


def evidence(folder, name, *found, how: Any = "read", note=""):
    """Evidence in memory, of claims."""
    document = {"claims": [*found], "config": {}, "environment": {}} if found else None
    return gathering.Evidence(name, document, folder / name, how, note)


def test_the_first_evidence_counts_and_says_why(tmp_path):
    entry = catalogue.CLAIMS["CA5"]
    gathered = {
        "scaling": evidence(tmp_path, "scaling", results.claim("CA5", "refuted")),
        "gpu": evidence(tmp_path, "gpu", results.claim("CA5", "partly", measured=9.0)),
        "ddp": evidence(tmp_path, "ddp", results.claim("CA5", "refuted")),
    }
    judged = judging.judge(entry, gathered)
    (row,) = judging.ledger([judged], tmp_path / "claims")
    assert (row["verdict"], row["measured"], row["evidence"]) == (
        "refuted",
        2.0,
        "scaling",
    )
    assert row["others"] == "gpu: partly; ddp: refuted"
    assert row["why"] == (
        "CA5 was seen. Elsewhere the verdict differs (gpu: partly); scaling counts: "
        + entry.weighs
    )
    gathered["gpu"] = evidence(tmp_path, "gpu", results.claim("CA5", "refuted"))
    (row,) = judging.ledger([judging.judge(entry, gathered)], tmp_path / "claims")
    assert row["why"] == "CA5 was seen."


def test_a_failure_leaves_the_word_to_others(tmp_path):
    gathered = {
        "ps": evidence(tmp_path, "ps", how="failed", note="ended badly"),
        "traffic": evidence(tmp_path, "traffic", results.claim("CB6", "partly")),
    }
    judged = judging.judge(catalogue.CLAIMS["CB6"], gathered)
    (found,) = judging.claims([judged])
    assert (found.verdict, found.claim) == ("partly", catalogue.CLAIMS["CB6"].text)
    assert found.why.endswith("This is not by ps, as it should be. ps failed.")
    assert judging.failures([judged]) == ["CB6: the experiment ps ended badly"]


def test_a_result_without_the_claim_is_a_failure(tmp_path):
    entry = catalogue.CLAIMS["CB5"]
    gathered = {"staleness": evidence(tmp_path, "staleness", results.claim("CB4"))}
    judged = judging.judge(entry, gathered)
    assert judging.failures([judged]) == [
        "CB5: no verdict. The result of staleness says nothing on it."
    ]
    gathered = {"staleness": evidence(tmp_path, "staleness", note="Not built yet.")}
    assert judging.failures([judging.judge(entry, gathered)]) == []
