"""The designs that `compare` trains, and what the step of each costs."""

from typing import Any

import jaxdp
from experiments.harness.result import Rows
from experiments.harness.timing import Timing
from experiments.parts import lockstep
from jaxdp.program import ProgramReport, analyze

SYNC_EVERY = 8  # steps from one average of the parameters to the next
ROOT, SERVER, RING, NATIVE = "gather to root", "1 server", "ring", "native"
DOUBLING, HALVING, LOCAL = "doubling", "halving-doubling", "local SGD"
STAGES = {stage: f"Zero({stage})" for stage in (1, 2, 3)}
# Few that differ most: their exchanges, what they keep, and when they agree.
TINY = (ROOT, RING, NATIVE, STAGES[3])
COUNTED = (
    "read from the program compiled for these devices; XLA's own collectives count as "
    f"the ring that NCCL makes; {LOCAL} exchanges in one step of {SYNC_EVERY}"
)
MIB = 2**20


def designs(devices: int, tiny: bool = False) -> dict[str, jaxdp.Design]:
    """Every design by name; a few in tiny form."""
    servers = {SERVER: 1} | ({f"{devices} servers": devices} if devices > 1 else {})
    every = {
        ROOT: jaxdp.GatherToRoot(),
        **{name: jaxdp.ParameterServer(servers=n) for name, n in servers.items()},
        RING: jaxdp.RingAllReduce(),
        DOUBLING: jaxdp.AllReduce("recursive_doubling"),
        HALVING: jaxdp.AllReduce("halving_doubling"),
        NATIVE: jaxdp.NativeAllReduce(),
        LOCAL: jaxdp.LocalSGD(sync_every=SYNC_EVERY),
        **{name: jaxdp.Zero(stage) for stage, name in STAGES.items()},
    }
    return {name: every[name] for name in (TINY if tiny else every)}


def costs(
    trainers: dict[str, lockstep.Trainer], times: dict[str, Timing], phi: int
) -> dict[str, Rows]:
    """What a step of each run sends, keeps and takes.

    Args:
        trainers: By name.
        times: Of their steps.
        phi: Bytes of the gradients.

    Returns:
        Two tables with a row for each run. "busiest" and "all": of the device that
        sends most, and of all together. "kept": by the fullest device between steps,
        of parameters and optimizer state. "peak": while the step runs.
    """
    reports = {name: analyze(trainer.program) for name, trainer in trainers.items()}
    about = f"memory: kept between steps, and while one runs; {COUNTED}"
    return {
        "designs": [
            _cost(name, reports[name], trainers[name].kept_bytes, phi)
            | {"step_ms": times[name].median_ms}
            | {"label": f"{about}; times: {times[name].label}"}
            for name in trainers
        ],
        "sent_in_a_step": [
            _sent(name, report, phi) | {"label": COUNTED}
            for name, report in reports.items()
        ],
    }


def _cost(name: str, report: ProgramReport, kept: int, phi: int) -> dict[str, Any]:
    assert report.memory is not None  # CPUs and GPUs say it
    return {
        "design": name,
        "busiest (Φ)": max(report.sent_bytes) / phi,
        "all (Φ)": sum(report.sent_bytes) / phi,
        "rounds": report.rounds,
        "kept_mb": kept / MIB,
        "peak_mb": report.memory.peak_bytes / MIB,
    }


def _sent(name: str, report: ProgramReport, phi: int) -> dict[str, Any]:
    return {
        "design": name,
        "busiest_bytes": max(report.sent_bytes),
        "least_bytes": min(report.sent_bytes),
        "all_bytes": sum(report.sent_bytes),
        "Φ_bytes": phi,
    }
