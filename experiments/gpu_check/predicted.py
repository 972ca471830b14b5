"""Step times predicted from compiled programs, beside those measured."""

import dataclasses
from typing import Any

import jax

import jaxdp
from jaxdp import targets
from jaxdp.targets import Hardware

DATA_SHEET, MEASURED = "data sheet", "rates measured here"


def hardwares(flops_per_s: dict[str, float], bytes_per_s: float) -> dict[str, Hardware]:
    """This device as its data sheet has it, if it is a known one, and as measured."""
    kind = jax.devices()[0].device_kind
    known = {targets.chip(name).kind: name for name in targets.NAMES}.get(kind)
    sheet = {DATA_SHEET: targets.hardware(known)} if known else {}
    # One device: its links and the size of its memory change no time.
    base = targets.hardware(known or "h100")
    measured = dataclasses.replace(
        base,
        name=kind,
        flops_per_s=tuple(flops_per_s.items()),
        memory_bytes_per_s=bytes_per_s,
    )
    return sheet | {MEASURED: measured}


def rows(
    timed: dict[str, Any], program: jax.stages.Compiled, every: dict[str, Hardware]
) -> list[dict[str, Any]]:
    """A row for each description of the hardware.

    Args:
        timed: The row with the time of the step.
        program: The step.
        every: The hardware, by where its figures come from.
    """
    report = jaxdp.analyze(program)
    found = []
    for name, hardware in every.items():
        predicted_ms = 1e3 * report.timeline(hardware).step_s
        found.append(
            {
                "model": timed["model"],
                "step": timed["step"],
                "figures": name,
                "predicted_ms": predicted_ms,
                "measured_ms": timed["median_ms"],
                "measured_of_predicted": timed["median_ms"] / predicted_ms,
            }
        )
    return found
