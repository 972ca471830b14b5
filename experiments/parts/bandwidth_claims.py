"""What becomes of CB2 and CB4 on links of limited rate."""

from experiments.harness.result import Claim, Rows, Verdict
from experiments.ledger import catalogue
from experiments.parts import bandwidth_training as training
from experiments.parts import bandwidth_ways as ways

ABOUT = 0.1  # how far from N "about N times longer" may be
FEWEST_HOSTS, FEWEST_REPEATS = 4, 5  # for a verdict by times
SYNCHRONOUS = (training.RING, training.NATIVE, training.STAGED)


def servers(
    times: Rows, traffic: Rows, devices: int, size_mb: float, repeats: int
) -> Claim:
    """CB2.

    Args:
        times: Of all N; those of other sizes are left out.
        traffic: At `devices` and `size_mb`.
        devices: N, where bytes were counted.
        size_mb: Φ in MiB.
        repeats: How many blocks of each way were timed, at least.
    """
    ratios = _star_over_ring([row for row in times if row["size_mb"] == size_mb])
    judged = {n: ratio for n, ratio in ratios.items() if n >= FEWEST_HOSTS}
    decided = bool(judged) and repeats >= FEWEST_REPEATS
    sent = {way: _sent(traffic, way) for way in (ways.STAR, ways.RING)}
    totals = {way: sum(links) for way, links in sent.items()}
    same = abs(totals[ways.STAR] / totals[ways.RING] - 1) < ABOUT
    about = all(abs(ratio / n - 1) < ABOUT for n, ratio in judged.items())
    verdict: Verdict = "refuted"
    if same:
        verdict = "holds" if about and decided else "partly"
    server, each = sent[ways.STAR][0], max(sent[ways.RING])
    found = ", ".join(f"{ratio:.2f} at N = {n}" for n, ratio in sorted(ratios.items()))
    phi = size_mb * 2**20
    return Claim(
        id="CB2",
        claim=catalogue.text("CB2"),
        expected=devices,
        measured=ratios[devices],
        unit="times longer than a ring, measured on limited links",
        verdict=verdict,
        why=f"The kernel counted {totals[ways.STAR] / phi:.2f} Φ on all {devices} "
        f"links with one server and {totals[ways.RING] / phi:.2f} Φ with a ring, "
        f"headers included. The server's link carries {server / phi:.2f} Φ each way, a "
        f"link of the ring {each / phi:.2f} Φ. Star over ring took {found} times. "
        f"{_worth(decided)}",
    )


def asynchrony(steps: Rows, repeats: int) -> Claim:
    """CB4.

    Args:
        steps: Of the training designs, `training.DELAYED` and a synchronous one or
            more among them.
        repeats: How many blocks of each were timed.
    """
    shares = {row["design"]: row["compute / step"] for row in steps}
    late = shares[training.DELAYED]
    best = max(shares[name] for name in SYNCHRONOUS if name in shares)
    refuted = repeats >= FEWEST_REPEATS and late <= best
    listed = ", ".join(f"{name} {share:.2f}" for name, share in shares.items())
    return Claim(
        id="CB4",
        claim=catalogue.text("CB4"),
        expected=f"above {best:.2f}",
        measured=late,
        unit="of a step is computation, with a delay of 1",
        verdict="refuted" if refuted else "partly",
        why=f"Computation alone takes this share of a step: {listed}. Gradients that "
        "are one step late travel beside the next step's computation, so a step takes "
        "the longer of both instead of their sum: the ratio rises. That workers never "
        "wait is not so: where communication is longer, they wait for the rest of it. "
        "The batch was chosen so that both are about as long.",
    )


def _star_over_ring(times: Rows) -> dict[int, float]:
    """How many times longer a star takes, by N."""
    ms = {(row["algorithm"], row["devices"]): row["time_ms"] for row in times}
    return {
        n: time / ms[ways.RING, n]
        for (way, n), time in sorted(ms.items())
        if way == ways.STAR
    }


def _worth(decided: bool) -> str:
    """What the verdict rests on."""
    if decided:
        return (
            f"Judged at N >= {FEWEST_HOSTS}, where it must be within {ABOUT:.0%} of N: "
            "with 2 hosts both directions of a link take turns in gloo, which doubles "
            "the time of a ring."
        )
    return (
        f"The times do not decide: that takes N >= {FEWEST_HOSTS} and "
        f"{FEWEST_REPEATS} repeats."
    )


def _sent(traffic: Rows, way: str) -> list[int]:
    """Bytes that every link sends."""
    return [row["sent_bytes"] for row in traffic if row["algorithm"] == way]
