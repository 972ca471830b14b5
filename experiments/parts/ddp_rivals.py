"""The same step as DataParallel and as three designs: its time, and its bytes."""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

import jaxdp
from experiments.harness import devices as harness
from experiments.harness import show, timing
from experiments.harness.result import Claim, Rows
from experiments.ledger import catalogue
from experiments.parts import digits, problem
from jaxdp.program import analyze
from jaxdp.replicated import Trace

PORT = "DataParallel"
DDP = "RingAllReduce"
OF_PORT = "of DataParallel's time"
DESIGNS = {
    "GatherToRoot": jaxdp.GatherToRoot(),
    DDP: jaxdp.RingAllReduce(),
    "NativeAllReduce": jaxdp.NativeAllReduce(),
}
CLAIMED = (0.15, 0.30)  # by how much DDP is faster


class Rival(NamedTuple):
    """One way to take the step."""

    call: Callable[[], Any]
    programs: str
    sent_bytes: int  # by the busiest device
    received_bytes: int


def compare(mesh: jax.sharding.Mesh, batch_size: int, repeats: int) -> Rows:
    """Times all in turns.

    Args:
        mesh: The devices.
        batch_size: Rows over all devices.
        repeats: Timed steps of each.
    """
    given = digits.problem(seed=0, learning_rate=0.05, momentum=0.9)
    images, labels = given.train
    batch = images[:batch_size], labels[:batch_size]
    rivals = {PORT: _port(given, batch, mesh)}
    for name, design in DESIGNS.items():
        rivals[name] = _design(given, batch, mesh, design)
    calls = {name: rival.call for name, rival in rivals.items()}
    with show.progress("timing steps", repeats) as advance:
        times = timing.interleaved(calls, repeats, advance)
    return [
        {
            "step": name,
            "programs": rival.programs,
            "busiest sends_bytes": rival.sent_bytes,
            "busiest receives_bytes": rival.received_bytes,
            OF_PORT: times[name].median_ms / times[PORT].median_ms,
            **times[name]._asdict(),
        }
        for name, rival in rivals.items()
    ]


def shares(devices: int) -> Rows:
    """How much faster DDP is on real links, by the part that communication takes of DP.

    DataParallel moves (N - 1) Φ out of and into one link, a ring (N - 1) Φ / N twice
    through every link: 1 / N of the time, at the same bandwidth and without overlap.
    """
    return [
        {
            "communication of a DP step": share,
            "DDP is faster by": faster,
            "as claimed": CLAIMED[0] <= round(faster, 9) <= CLAIMED[1],
        }
        for share in (0.1, 0.2, 0.3, 0.4, 0.6, 0.8)
        for faster in (share * (1 - 1 / devices),)
    ]


def claim(rows: Rows, devices: int) -> Claim:
    """CA5."""
    found = {row["step"]: row for row in rows}
    port, ddp = found[PORT], found[DDP]
    fewer = port["busiest sends_bytes"] / ddp["busiest sends_bytes"]
    faster = 1 - ddp[OF_PORT]
    low, high = (100 * faster / (1 - 1 / devices) for faster in CLAIMED)
    return Claim(
        id="CA5",
        claim=catalogue.text("CA5"),
        expected="15 to 30 % faster",
        measured=f"{100 * faster:.0f} % faster, {harness.label()}",
        unit="",
        verdict="partly" if fewer > 1 else "refuted",
        why=f"The direction holds: at {devices} devices the busiest one sends "
        f"{fewer:.1f} times the bytes under DataParallel. The number is no constant. "
        "Bytes decide on real links: there DDP saves (1 - 1/N) of what DataParallel "
        f"communicates, so 15-30 % means that this was {low:.0f} to {high:.0f} % of "
        "its step; overlap saves more. Times measured here are of forced host devices, "
        "that share cores and have no links: they show what it costs to start one "
        "program per device and stage.",
    )


def _port(given: digits.Problem, batch: digits.Batch, mesh: jax.sharding.Mesh) -> Rival:
    """nn.DataParallel's way, its transfers read from a trace."""
    devices = [*mesh.devices.flat]
    model = jaxdp.DataParallel(given.apply, given.params, device_ids=devices)
    step = model.train_step(problem.mean_entropy, given.optimizer)
    state = step.init()

    def call():
        nonlocal state  # donated
        state, metrics = step(state, *batch)
        return metrics

    jax.block_until_ready(call())
    with model.trace() as trace:
        jax.block_until_ready(call())
    return Rival(call, "one per device and stage", *_busiest(trace))


def _busiest(trace: Trace) -> tuple[int, int]:
    """Bytes that one device sends and receives at most; the host is no device."""
    sent, received = Counter(), Counter()
    for record in trace.records:
        if record.source != "host":
            sent[record.source] += record.nbytes
            received[record.target] += record.nbytes
    return max(sent.values()), max(received.values())


def _design(
    given: digits.Problem,
    batch: digits.Batch,
    mesh: jax.sharding.Mesh,
    design: jaxdp.Design,
) -> Rival:
    """One program over all devices."""
    train = jaxdp.data_parallel(given.loss_fn, given.optimizer, mesh, design)
    placed = jaxdp.shard_batch(batch, mesh)
    state = train.init(given.params)
    report = analyze(train.lower(state, placed).compile())

    def call():
        nonlocal state  # donated
        state, metrics = train.step(state, placed)
        return metrics

    sent, received = max(report.sent_bytes), max(report.received_bytes)
    return Rival(call, "one over all devices", sent, received)
