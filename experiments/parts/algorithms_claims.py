"""What becomes of CB1 and CB2 when all algorithms are counted."""

from experiments.harness.result import Claim, Rows
from experiments.ledger import catalogue
from experiments.parts.algorithms_hardware import ETHERNET
from experiments.parts.algorithms_prices import LARGEST, written

CLOSE = 0.05  # how near to N the times of root and ring must be


def ring(moved: Rows) -> Claim:
    """CB1."""
    rows = [row for row in moved if row["algorithm"] == "ring"]
    exact = all(
        row["busiest sends / K"] == row["busiest receives / K"] == _least(row["N"])
        for row in rows
    )
    none_below = all(
        row["busiest sends / K"] > _least(row["N"]) - 1e-9
        or row["busiest receives / K"] > _least(row["N"]) - 1e-9
        for row in moved
    )
    last = max(rows, key=lambda row: row["N"])
    equal = sorted(
        {
            row["algorithm"]
            for row in moved
            if row["N"] == last["N"]
            and abs(row["busiest sends / K"] - _least(row["N"])) < 1e-9
        }
    )
    numbers = ", ".join(map(str, sorted(row["N"] for row in rows)))
    return Claim(
        id="CB1",
        claim=catalogue.text("CB1"),
        expected=_least(last["N"]),
        measured=last["busiest sends / K"],
        unit=f"Φ per device at N = {last['N']}",
        verdict="holds" if exact and none_below else "refuted",
        why="Bytes of the busiest device, counted in the schedules of all algorithms "
        f"for N = {numbers}. None has a busiest "
        f"device below 2(N-1)Φ/N. At N = {last['N']} these reach it: "
        f"{', '.join(equal)}.",
    )


def root(moved: Rows, predicted: Rows) -> Claim:
    """CB2."""
    rows = {(row["algorithm"], row["N"]): row for row in moved}
    counts = sorted({row["N"] for row in moved} & {row["N"] for row in predicted})
    busiest = all(rows["star", n]["busiest sends / K"] == n - 1 for n in counts)
    together = all(
        rows["star", n]["all send / K"] == rows["ring", n]["all send / K"]
        for n in counts
    )
    column = f"{written(LARGEST)}_us"
    took = {
        (row["algorithm"], row["N"]): row[column]
        for row in predicted
        if row["hardware"] == ETHERNET
    }
    ratios = {n: took["star", n] / took["ring", n] for n in counts}
    close = all(abs(ratio / n - 1) <= CLOSE for n, ratio in ratios.items())
    most = max(counts)
    return Claim(
        id="CB2",
        claim=catalogue.text("CB2"),
        expected=most,
        measured=ratios[most],
        unit=f"times longer than the ring at N = {most}, predicted",
        verdict="holds" if busiest and together and close else "refuted",
        why="The star is a server that works. Its root sends and receives (N-1)Φ, all "
        "links together carry 2(N-1)Φ, as the ring's do. Predicted for "
        f"{written(LARGEST)} on Ethernet of 10 Gbit/s between any two; for small "
        "messages the ring has the longer time, since it has more rounds.",
    )


def _least(devices: int) -> float:
    """2 (N - 1) / N."""
    return 2 * (devices - 1) / devices
