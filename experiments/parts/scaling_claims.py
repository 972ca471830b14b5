"""What becomes of CA5 and CA6."""

from collections.abc import Sequence

from experiments.harness.result import Claim
from experiments.ledger import catalogue
from experiments.parts.scaling_hardware import HOSTS
from experiments.parts.scaling_tables import (
    CLAIMED,
    DDP,
    DP,
    IN_A_HOST,
    NATIVE,
    Curve,
    gain,
)

LARGE = 100_000_000  # parameters


def faster(curves: Sequence[Curve]) -> Claim:
    """CA5."""
    there = [curve for curve in curves if curve.hardware in HOSTS]
    gains = {(c.hardware, c.model, n): gain(c, n) for c in there for n in IN_A_HOST}
    low, high = CLAIMED
    inside = [low <= value <= high for value in gains.values()]
    positive = all(value > 0 for value in gains.values())
    spread = f"{min(gains.values()):.1f} to {max(gains.values()):.1f} %"
    native = [100 * (1 - c.at(DDP, 8) / c.at(NATIVE, 8)) for c in there]
    return Claim(
        id="CA5",
        claim=catalogue.text("CA5"),
        expected="15 to 30 %",
        measured=f"{spread}, predicted",
        unit="",
        verdict="holds" if all(inside) else "partly" if positive else "refuted",
        why="By how much DDP's step is shorter, in a host: "
        + "; ".join(
            f"{c.hardware}, {c.model}: "
            + ", ".join(f"{gain(c, n):.1f} % at N = {n}" for n in IN_A_HOST)
            for c in there
        )
        + f". Of {len(inside)} numbers {sum(inside)} are between {low} and {high}. The "
        "ring sends 1/N of what DataParallel's main device sends, in 2(N-1) rounds for "
        "each bucket, and part of it during the backward pass, so the gain is what "
        "share of a step communication is: no constant. XLA's own all-reduce is "
        f"{min(native):.1f} to {max(native):.1f} % faster than the ring at N = 8. "
        "Host overheads, such as one Python thread for each replica of DataParallel, "
        "are not in these times.",
    )


def saturates(curves: Sequence[Curve], parameters: dict[str, int]) -> Claim:
    """CA6."""
    there = [curve for curve in curves if curve.hardware in HOSTS]
    beyond = [c.at(DP, 8) < c.at(DP, 4) for c in there]
    large = [c for c in there if parameters[c.model] > LARGE]
    falls = [c.at(DP, 2) < 1 for c in large]
    every = all([*beyond, *falls])
    bounded = any(c.times(DP)[-1] < max(c.times(DP)) for c in curves)
    within, alone = (sum(c.best <= n for c in curves) for n in (max(IN_A_HOST), 1))
    least, most = (choose(c.best for c in there) for choose in (min, max))
    held = ", ".join(
        f"{c.hardware}, {c.model}: {c.at(DP, 4):.2f} and {c.at(DP, 8):.2f} of at most "
        f"{c.bound:.2f}"
        for c in there
    )
    return Claim(
        id="CA6",
        claim=catalogue.text("CA6"),
        expected=4,
        measured=most if least == most else f"{least} to {most}",
        unit=f"devices, of {max(IN_A_HOST)} in a host, are fastest, predicted",
        verdict="holds" if every else "partly" if bounded else "refuted",
        why="With N devices a step takes C + 2(N-1)t, t for the gradients over a link "
        "of the main device: throughput rises towards C / 2t times one device, and "
        "falls only if that is below 1, then from N = 2 on; it has no peak inside a "
        "host. Neither 4 devices nor 100 M parameters is a limit. Throughput of one "
        f"device's at N = 4 and 8: {held}. It falls where the link gets slower: if "
        "DataParallel could leave a host, it would be fastest with "
        f"{max(IN_A_HOST)} devices or fewer in {within} of {len(curves)} cases, and "
        f"with one alone in {alone}.",
    )
