"""Tables of traffic: every design at one number of devices, and all that was counted.

`exact` is about every device and link: sent, received, the busiest and all together.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from experiments.harness.result import Rows
from experiments.parts import traffic_claims as claims
from experiments.parts import traffic_counts as counts

MAPPED = 8  # devices of the maps of links
PHI = ", ".join(
    f"{counts.phi(name):,} bytes ({name} chunks)" for name in counts.GRADIENTS
)
STEP = "design", "N", "chunks"
COUNTED = {
    "sent_by_the_busiest_device": (
        *STEP,
        *("gradients_bytes", "beside_bytes", "padding_bytes", "counted_bytes", "exact"),
    ),
    "carried_by_links": (
        *STEP,
        *("link, formula_bytes", "link, counted_bytes"),
        *("all links, formula_bytes", "all links, counted_bytes"),
    ),
    "sent_by_others_and_rounds": (
        *STEP,
        *("others, formula_bytes", "others, counted_bytes"),
        *("rounds, formula", "rounds, counted", "planned"),
    ),
}


def summary(rows: Rows, where: str) -> Rows:
    """Gradients at one number of devices, in Φ, and whether all was as expected."""
    last = max(row["N"] for row in rows if row["N"] <= MAPPED)
    every: dict[str, list[bool]] = {}
    for row in rows:
        every.setdefault(row["design"], []).append(row["exact"])
    label = f"gradients, N = {last}, {where}; DataParallel: in the trace of a step"
    return [
        {
            "design": row["design"],
            "busiest sends": row["formula"],
            "in Φ": float(claims.gradients(row)),
            "others": _in_phi(row, "least", "others"),
            "a link": _in_phi(row, "link", "link"),
            "all links": _in_phi(row, "total", "all links"),
            "rounds": row["rounds, counted"],
            "steps": len(every[row["design"]]),
            "all exact": all(every[row["design"]]),
            "label": label,
        }
        for row in rows
        if row["N"] == last and row["chunks"] == rows[0]["chunks"]
    ]


def _in_phi(row: Mapping[str, Any], measure: str, column: str) -> float:
    return float(claims.gradients(row, measure, f"{column}, counted_bytes"))


def columns(rows: Rows, names: Sequence[str], where: str) -> Rows:
    """Some columns, with fractions as JSON has them."""

    def plain(value: Any) -> Any:
        if not isinstance(value, Fraction):
            return value
        return int(value) if value.denominator == 1 else float(value)

    label = {"label": f"{where}; Φ = {PHI}"}
    return [{name: plain(row[name]) for name in names} | label for row in rows]
