"""What becomes of CB8, by what was counted at the numbers of devices that are asked."""

from collections.abc import Sequence

import numpy as np

from experiments.harness.result import Claim, Rows
from experiments.ledger import catalogue
from experiments.parts import zero_tables as tables
from experiments.parts.zero_formulas import PARAMETERS, STATE

JUDGED = (8, 64)  # devices
ERROR = "error (%)"
KEPT = (PARAMETERS, STATE)


def redundancy(held: Rows, sent: Rows, where: str) -> Claim:
    """CB8.

    Args:
        held: What devices hold.
        sent: What they send.
        where: What steps were compiled for.
    """
    judged = [row for row in held if row["N"] in JUDGED] or [*held]
    n = max(row["N"] for row in judged)
    kept = np.sum([_by_stage(judged, n, f"{kind}_mb") for kind in KEPT], axis=0)
    within = all(row[ERROR] <= tables.WITHIN for row in judged)
    falls = bool((np.diff(kept) <= 0).all() and kept[-1] < kept[1] < kept[0])
    exact = all(row["exact"] for row in sent)
    worst = max(judged, key=lambda row: row[ERROR])
    return Claim(
        id="CB8",
        claim=catalogue.text("CB8"),
        expected=n,
        measured=round(kept[0] / kept[-1], 2),
        unit=f"times less is kept in stage 3 than 0, {judged[-1]['model']}, N = {n}",
        verdict="holds" if within and falls else "partly" if falls else "refuted",
        why="Parameters, gradients and optimizer state, counted in steps "
        f"{where}, when a device holds most: {_models(judged, n)} Largest error at N = "
        f"{_numbers(judged)}: {worst[ERROR]:+.1f} % ({worst['model']}, stage "
        f"{worst['stage']}, N = {worst['N']}), where {tables.WITHIN:.0f} % above the "
        "formula pass. Not in the formula, and listed beside it: activations, and what "
        "is on its way, such as buckets, gathered parameters and gradients that are "
        "not reduced yet. Less than the formula is held where that moment is not the "
        "one with all gradients. "
        f"Bytes sent are {'' if exact else 'not '}those of 2Φ, 2Φ and 3Φ times "
        "(N-1)/N in every step, to the byte, with padding named, less the parameters "
        "that the backward pass does not gather again.",
    )


def _by_stage(rows: Sequence, n: int, column: str) -> list[float]:
    """Of the last model, from stage 0 on."""
    model = rows[-1]["model"]
    found = [row for row in rows if row["N"] == n and row["model"] == model]
    return [row[column] for row in sorted(found, key=lambda row: row["stage"])]


def _models(rows: Sequence, n: int) -> str:
    """What every model's stages take, in words."""
    words = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        sizes = ", ".join(f"{size:,.1f}" for size in _by_stage(own, n, "counted_mb"))
        formula = ", ".join(f"{size:,.1f}" for size in _by_stage(own, n, "formula_mb"))
        whole = ", ".join(f"{size:,.1f}" for size in _by_stage(own, n, "all_mb"))
        words.append(
            f"{model} at N = {n}: {sizes} MiB in stages 0 to 3 (by formula {formula}), "
            f"of {whole} in all."
        )
    return " ".join(words)


def _numbers(rows: Sequence) -> str:
    """The numbers of devices, each once."""
    return " and ".join(map(str, dict.fromkeys(row["N"] for row in rows)))
