"""What becomes of CB1, CB2 and CB6: equality decides, not a tolerance."""

from collections.abc import Mapping
from fractions import Fraction

from experiments.harness.result import Claim, Rows
from experiments.parts import traffic_designs as designs
from experiments.parts import traffic_times as times

ABOUT = 0.1  # how far from N "about N times longer" may be
By = Mapping[str, Mapping[int, Mapping]]


def by_design(rows: Rows) -> By:
    """Rows of one gradient by design and N."""
    found: dict[str, dict[int, Mapping]] = {}
    for row in rows:
        found.setdefault(row["design"], {})[row["N"]] = row
    return found


def moved(row: Mapping, measure: str = "busiest") -> Fraction:
    """Gradients that were counted, in Φ: what else was expected is taken off.

    Args:
        row: Of one step.
        measure: "busiest" sends; or "all links" together carry.
    """
    beside = row[f"{measure}, expected_bytes"] - row[f"{measure}, gradients_bytes"]
    return (row[f"{measure}, counted_bytes"] - beside) / Fraction(row["Φ_bytes"])
