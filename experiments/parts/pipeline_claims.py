"""What becomes of CB9, by what was counted and compiled."""

from collections.abc import Mapping
from typing import Any

from experiments.harness.result import Claim, Rows, Verdict
from experiments.ledger import catalogue

ROUNDING = 1e-5  # of the largest gradient, in float32


def pipeline(bubbles: Rows, held: Rows, agreed: Rows, work: Rows, stages: int) -> Claim:
    """CB9.

    Args:
        bubbles: Ticks that were counted, for several P and M.
        held: Memory of devices, with and without re-materialization.
        agreed: Gradients beside those of one device.
        work: Floating-point operations; may be empty.
        stages: P of the pipeline that the claim's numbers are of.
    """
    here = [row for row in bubbles if row["stages"] == stages]
    first, last = here[0], here[-1]
    exact = all(row["bubble"] == row["(P-1)/(M+P-1)"] for row in bubbles)
    rises = first["bubble"] > last["bubble"]
    lower = all(row["re-materialized_mb"] < row["kept_mb"] for row in held)
    same = all(row["gradients apart"] < ROUNDING for row in agreed)
    return Claim(
        id="CB9",
        claim=catalogue.text("CB9"),
        expected=last["(P-1)/(M+P-1)"],
        measured=last["bubble"],
        unit=f"of all ticks are bubble, P = {stages}, M = {last['micro-batches']}",
        verdict=_verdict(exact and rises and lower and same, rises or lower),
        why=f"With {stages} stages the bubble falls from {_percent(first)} of all "
        f"ticks at M = {first['micro-batches']} to {_percent(last)} at M = "
        f"{last['micro-batches']}: ticks counted as the program ran, by numbers that "
        "travel with micro-batches and by gradients that come back; "
        f"{'' if exact else 'not '}(P-1)/(M+P-1) at every P and M. From M = 4P on the "
        "paper calls that negligible; there it is still up to a fifth. "
        f"{_memory(held)}{_work(work)} Loss and gradients are "
        f"{'' if same else 'not '}those of the same blocks on one device: at most "
        f"{max(row['gradients apart'] for row in agreed):.1e} apart.",
    )


def _verdict(all_of_it: bool, some: bool) -> Verdict:
    return "holds" if all_of_it else "partly" if some else "refuted"


def _percent(row: Mapping[str, Any]) -> str:
    return f"{100 * row['bubble']:.1f} %"


def _memory(held: Rows) -> str:
    """What re-materialization saves, in words."""
    few, many = held[0], held[-1]
    return (
        "A device's temporaries fall by re-materialization from "
        f"{few['kept_mb']:.1f} to {few['re-materialized_mb']:.1f} MiB at M = "
        f"{few['micro-batches']} and from {many['kept_mb']:.1f} to "
        f"{many['re-materialized_mb']:.1f} MiB at M = {many['micro-batches']}, by "
        "XLA's own analysis of the programs."
    )


def _work(work: Rows) -> str:
    """What re-materialization costs, in words."""
    if not work:
        return ""
    return f" It takes {work[0]['ratio']:.2f} times the floating-point operations."
