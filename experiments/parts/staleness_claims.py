"""What the article says about asynchrony, beside what was measured."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments.harness.result import Claim, Rows, Verdict
from experiments.ledger import catalogue
from experiments.parts.staleness_delays import DELAYS, LARGER_BATCH, column
from experiments.parts.staleness_runs import (
    EQUAL,
    NO_BOUND,
    POLICIES,
    STRAGGLER,
    SYNCHRONOUS,
)
from experiments.parts.staleness_tables import numbers

Row = Mapping[str, Any]
WAITS = 1.0  # percent of the time; less is not called waiting
SLACK = 0.02  # relative; a loss that differs by less is not lower
TOLD = "digits", "SGD"  # whose numbers stand for all
SUMMARY: Mapping[Verdict, str] = {
    "holds": "Slower per step, and not faster in time.",
    "partly": "Slower per step, but faster in time.",
    "refuted": "Not slower with every longer delay.",
}


def never_wait(activity: Rows) -> Claim:
    """CB4, from what workers do under each policy."""
    ratios = {
        policy: [row["compute / rest"] for row in activity if row["policy"] == policy]
        for policy in (SYNCHRONOUS, NO_BOUND)
    }
    pairs = zip(ratios[SYNCHRONOUS], ratios[NO_BOUND], strict=True)
    raised = [synchronous < no_bound for synchronous, no_bound in pairs]
    waits = [row["waiting (%)"] for row in activity if row["policy"] != SYNCHRONOUS]
    return Claim(
        id="CB4",
        claim=catalogue.text("CB4"),
        expected=0,
        measured=f"{min(waits):.0f} to {max(waits):.0f}",
        unit="% of the time spent waiting, depending on τ",
        verdict=_verdict(all(raised), max(waits) <= WAITS),
        why=_ratios(activity),
    )


def slows_convergence(delayed: Rows, mean: Rows, timely: Rows, activity: Rows) -> Claim:
    """CB5.

    Args:
        delayed: Mean losses over equally many pushes, by exact delay.
        mean: Mean losses over equally many pushes, by policy.
        timely: Losses at equal virtual time, by policy.
        activity: What workers do under each policy.
    """
    delayed_pairs = [row for row in delayed if row["optimizer"] != LARGER_BATCH]
    slower = [rises(numbers(row, map(column, DELAYS))) for row in delayed_pairs]
    late = [row for row in timely if row["workers"] == STRAGGLER]
    faster = [is_lower(*numbers(row, (NO_BOUND, SYNCHRONOUS))) for row in late]
    verdict = _verdict(all(slower), not any(faster))
    return Claim(
        id="CB5",
        claim=catalogue.text("CB5"),
        expected=len(slower),
        measured=f"{sum(slower)} at equal steps, {len(faster) - sum(faster)} at equal "
        "time",
        unit=f"of {len(slower)} combinations of data and optimizer are slower",
        verdict=verdict,
        why=f"{SUMMARY[verdict]} {_by_step(delayed)} {_by_bound(mean, activity)} "
        f"{_by_time(late)}",
    )


def rises(losses: Sequence[float]) -> bool:
    """Whether the last loss is higher than the first, and none lower than before it."""
    falls = any(is_lower(later, loss) for loss, later in itertools.pairwise(losses))
    return is_lower(losses[0], losses[-1]) and not falls


def is_lower(one: float, other: float) -> bool:
    """Whether a loss is lower than another, by more than `SLACK`."""
    return one < (1 - SLACK) * other


def _verdict(true_in_part: bool, without_exception: bool) -> Verdict:
    if not true_in_part:
        return "refuted"
    return "holds" if without_exception else "partly"


def _ratios(activity: Rows) -> str:
    """What CB4 rests on."""
    rows = {
        (row["workers"], row["policy"]): row
        for row in activity
        if row["data"] == TOLD[0]
    }
    equal, beside = (
        {policy: f"{rows[speeds, policy]['compute / rest']:.2f}" for policy in POLICIES}
        for speeds in (EQUAL, STRAGGLER)
    )
    waiting = rows[STRAGGLER, "τ = 8"]["waiting (%)"]
    return (
        f"Time of computing over all other time, on {TOLD[0]}: {equal[SYNCHRONOUS]} "
        f"synchronous, {equal['τ = 0']} with τ = 0, {equal['τ = 1']} with τ = 1, "
        f"{equal[NO_BOUND]} without a bound, where nobody ever waits. Beside a "
        f"straggler: {beside[SYNCHRONOUS]} synchronous, {beside['τ = 1']} with τ = 1, "
        f"{beside['τ = 8']} with τ = 8, {beside[NO_BOUND]} without a bound. A bound "
        "puts off waiting for a straggler and does not end it: once the others are τ "
        "iterations ahead, they go at its pace, so that with τ = 8 they wait "
        f"{waiting:.0f} % of this run. Nor is less sent: a gradient costs a pull and a "
        "push under every policy."
    )


def _by_step(delayed: Rows) -> str:
    """What a delay costs, and what a larger batch."""
    rows = {(row["data"], row["optimizer"]): row for row in delayed}
    columns, delays = [*map(column, DELAYS)], ", ".join(map(str, DELAYS))
    return (
        f"At equal steps: with every push {delays} rounds old, the mean loss of a run "
        f"is {_cells(rows[TOLD], columns)} ({TOLD[1]} on {TOLD[0]}). Batches larger by "
        "as many rounds, without a delay and at the same rate per sample, give "
        f"{_cells(rows[TOLD[0], LARGER_BATCH], columns)}."
    )


def _by_bound(mean: Rows, activity: Rows) -> str:
    """Why τ is not the delay."""
    ages = {
        row["policy"]: f"{row['mean staleness']:.1f}"
        for row in activity
        if (row["data"], row["workers"]) == (TOLD[0], EQUAL)
    }
    bounds = ("τ = 0", "τ = 1", NO_BOUND)
    means = [
        f"{_cells(row, bounds)} ({row['optimizer']})"
        for row in mean
        if (row["data"], row["workers"]) == (TOLD[0], EQUAL)
    ]
    return (
        "But τ only bounds the delay. While a worker computes, the others push, so "
        f"that its push is about W - 1 updates old ({ages['τ = 1']} on average with "
        f"τ = 1, {ages[NO_BOUND]} without a bound), less than a round. Mean losses "
        f"with τ = 0, 1 and ∞ are {', '.join(means)}."
    )


def _by_time(late: Rows) -> str:
    """What asynchrony gains."""
    (row,) = (row for row in late if (row["data"], row["optimizer"]) == TOLD)
    return (
        "At equal time, when the run without a bound has made all its pushes beside a "
        f"straggler: its loss is {_cells(row, [NO_BOUND])}, that of the synchronous "
        f"run {_cells(row, [SYNCHRONOUS])}, that with τ = 8 {_cells(row, ['τ = 8'])}."
    )


def _cells(row: Row, columns: Iterable[str]) -> str:
    """Losses in words."""
    cells = (row[column] for column in columns)
    return ", ".join(c if isinstance(c, str) else f"{c:.2f}" for c in cells)
