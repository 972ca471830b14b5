"""What the articles claim about bytes and speed, beside compiled programs."""

from collections.abc import Sequence

from experiments.harness.result import Claim
from experiments.ledger import catalogue
from experiments.parts.gpu_steps import RING, ROOT, Step, phi_bytes

FASTER = (15, 30)  # percent by which DDP is faster, as the article says


def claims(steps: Sequence[Step]) -> list[Claim]:
    """CB1 and CA5, over all models."""
    rings = [step for step in steps if step.design_name == RING]
    roots = [step for step in steps if step.design_name == ROOT]
    return [ring_bytes(rings), distributed_is_faster(roots, rings)]


def ring_bytes(rings: Sequence[Step]) -> Claim:
    """CB1."""
    shares = [max(step.report.sent_bytes) / phi_bytes(step) for step in rings]
    n = rings[0].devices
    expected = 2 * (n - 1) / n
    # Loss, metrics and BatchNorm's statistics travel in the same buckets.
    holds = all(0 <= share / expected - 1 < 0.01 for share in shares)
    counted = "; ".join(
        f"{step.model.name} {max(step.report.sent_bytes):,} bytes = {share:.4f} Φ"
        for step, share in zip(rings, shares, strict=True)
    )
    return Claim(
        id="CB1",
        claim=catalogue.text("CB1"),
        expected=round(expected, 4),
        measured=round(max(shares), 4),
        unit=f"Φ sent by each of {n} devices",
        verdict="holds" if holds else "partly",
        why=f"Counted in the programs that XLA made for {n} GPUs: {counted}. What is "
        "above the formula are BatchNorm's statistics, the loss, and padding to a "
        "multiple of N: they travel in the same buckets.",
    )


def distributed_is_faster(roots: Sequence[Step], rings: Sequence[Step]) -> Claim:
    """CA5."""
    gains = [
        100 * (1 - ring.timeline.step_s / root.timeline.step_s)
        for root, ring in zip(roots, rings, strict=True)
    ]
    compared = "; ".join(
        f"{ring.model.name}: {1e3 * root.timeline.step_s:.1f} ms by way of the root, "
        f"{1e3 * ring.timeline.step_s:.1f} by the ring ({gain:.0f} % less)"
        for root, ring, gain in zip(roots, rings, gains, strict=True)
    )
    inside = [FASTER[0] <= gain <= FASTER[1] for gain in gains]
    verdict = "holds" if all(inside) else "partly" if min(gains) > 0 else "refuted"
    return Claim(
        id="CA5",
        claim=catalogue.text("CA5"),
        expected="15 to 30",
        measured=" and ".join(f"{gain:.0f}" for gain in gains),
        unit="% less time for a step, predicted",
        verdict=verdict,
        why=f"Predicted from compiled programs, not run: {compared}. The gain is what "
        "communication costs beside computation, so it depends on the model, the batch "
        "and the links. nn.DataParallel costs more besides: one process, its threads, "
        "and replicas that are made anew in every step.",
    )
