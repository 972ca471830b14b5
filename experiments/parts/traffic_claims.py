"""What becomes of CB1, CB2 and CB6: equality decides, not a tolerance."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from experiments.harness.result import Claim, Rows
from experiments.ledger import catalogue
from experiments.parts import traffic_designs as designs
from experiments.parts import traffic_times as times

ROUNDS = "rounds, formula"
ABOUT = 0.1  # how far from N "about N times longer" may be


def ring(rows: Rows, where: str) -> Claim:
    """CB1."""
    found = [row for row in rows if row["design"] == designs.RING]
    last = found[-1]
    n, padding = last["N"], float(last["padding_bytes"])
    return Claim(
        id="CB1",
        claim=catalogue.text("CB1"),
        expected=2 * (n - 1) / n,
        measured=float(gradients(last)),
        unit=f"Φ per device at N = {n}",
        verdict="holds" if _exact(found) else "refuted",
        why=f"Counted in steps {where}, for N = {_counts(found)} and gradients that N "
        "divides and does not: every device sends and receives 2(N-1)/N of the "
        "gradients, a loss of 4 bytes and padding, to the byte, in 2(N-1) rounds, and "
        f"nothing else. Padding is at most 4(N-1) bytes: {padding:.0f} bytes "
        f"are sent for it at N = {n}. Independent of N is the bound 2Φ alone.",
    )


def server(rows: Rows, predicted: Rows, where: str) -> Claim:
    """CB2."""
    found = [row for row in rows if row["design"] == designs.ONE_SERVER]
    rings = [row for row in rows if row["design"] == designs.RING]
    largest = [row for row in predicted if row["gradients"] == "ResNet-50"]
    smallest = [row for row in predicted if row["gradients"] != "ResNet-50"][-1]
    about = all(abs(row[times.RATIO] / row["N"] - 1) < ABOUT for row in largest)
    n, last, ratio = found[-1]["N"], largest[-1], largest[-1][times.RATIO]
    everywhere = 2 * (n - 1)
    return Claim(
        id="CB2",
        claim=catalogue.text("CB2"),
        expected=last["N"],
        measured=ratio,
        unit=f"times longer than a ring, predicted for ResNet-50 on {last['N']} hosts",
        verdict="holds" if _exact([*found, *rings]) and about else "refuted",
        why=f"Counted in steps {where}: at N = {n} all links together carry "
        f"{everywhere}Φ of gradients in both; the server's sends and receives {n - 1}Φ "
        f"of it, a device of the ring {2 * (n - 1) / n:.4g}Φ: N/2 times as much each "
        "way, and one direction after the other. Times are predicted by the "
        "schedules' cost, at 10 Gbit/s and 50 µs. The claim is about bandwidth: "
        f"for {smallest['gradients']} one server takes {smallest[times.RATIO]:.2g} of "
        f"a ring's time on {smallest['N']} hosts, since a ring has 2(N-1) rounds and a "
        "server 2, of N-1 messages each.",
    )


def shares(rows: Rows, where: str) -> Claim:
    """CB6."""
    alone = {
        (row["N"], row["chunks"]): row
        for row in rows
        if row["design"] == designs.ONE_SERVER
    }
    apart = [row for row in rows if row["design"] == designs.APART]
    shared = [row for row in rows if row["design"] == designs.SHARED]
    parts = [
        gradients(row) / gradients(alone[row["N"], row["chunks"]]) for row in apart
    ]
    n = shared[-1]["N"]
    working = gradients(shared[-1]) / gradients(alone[n, shared[-1]["chunks"]])
    right = set(parts) == {Fraction(1, designs.DEDICATED)}
    exact = _exact([*apart, *shared, *alone.values()])
    return Claim(
        id="CB6",
        claim=catalogue.text("CB6"),
        expected=1 / designs.DEDICATED,
        measured=float(parts[-1]),
        unit=f"of one server's bytes, S = {designs.DEDICATED}, dedicated",
        verdict="holds" if exact and right else "refuted",
        why=f"Counted in steps {where}, for N = {_counts(apart)}: a dedicated server "
        "sends (N-1)Φ/S, to the byte. A server that works is a worker of the others "
        f"too, and pushes (S-1)Φ/S to them: with S = {designs.SERVERS} at N = {n} it "
        f"sends {float(working):.4g} of what one server does, and 1/S is its part as a "
        "server. Loss, weight and flags go to every server, and leaves are padded to "
        "whole parts.",
    )


def gradients(
    row: Mapping[str, Any], measure: str = "most", counted: str = "counted_bytes"
) -> Fraction:
    """Gradients in Φ: what was counted, less what rides along.

    Args:
        row: Of one step.
        measure: A field of `Share`.
        counted: The column that it was counted for.
    """
    expected = row["measures"][measure]
    riding = expected.beside + expected.padding
    return (row[counted] - riding) / Fraction(row["Φ_bytes"])


def _exact(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all were counted as expected, and all follow the library's schedule."""
    return all(
        row["exact"] and row["planned"] and row["rounds, counted"] == row[ROUNDS]
        for row in rows
    )


def _counts(rows: Sequence[Mapping[str, Any]]) -> str:
    """The numbers of devices, each once."""
    return ", ".join(map(str, dict.fromkeys(row["N"] for row in rows)))
