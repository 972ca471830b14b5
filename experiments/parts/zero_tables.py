"""Tables of stages: what a device holds and sends, beside the formulas of the paper."""

from collections.abc import Sequence
from typing import Any

from experiments.harness.result import Rows
from experiments.parts import zero_formulas as formulas
from experiments.parts import zero_steps as steps
from experiments.parts.zero_steps import Step

MIB = 2**20
WITHIN = 5.0  # percent of the formula
HELD = (
    "float32, Adam: p = g = 4 and k = 8 bytes; counted when a device holds most, which "
    "may be before all gradients exist; error: of parameters, gradients and optimizer "
    "state together"
)
SENT = (
    "per device and step; spared: parameters that the backward pass does not gather "
    "again; beside: loss and statistics of BatchNorm, with their padding"
)


def held(found: Sequence[Step], where: str) -> Rows:
    """What a device holds in each step, beside the formula."""
    return [_held(step, where) for step in found]


def _held(step: Step, where: str) -> dict[str, Any]:
    expected = formulas.held(step.stage, sum(step.leaves), step.devices)
    counted = sum(step.held[kind] for kind in formulas.KINDS)
    total = sum(expected.values())
    row: dict[str, Any] = {"model": step.model, "stage": step.stage, "N": step.devices}
    row |= {"formula_mb": total / MIB, "counted_mb": counted / MIB}
    row |= {"error (%)": 100 * (counted / total - 1)}
    for kind in formulas.KINDS:
        row |= {
            f"{kind}, formula_mb": expected[kind] / MIB,
            f"{kind}_mb": step.held[kind] / MIB,
        }
    others = [kind for kind in steps.KINDS if kind not in formulas.KINDS]
    row |= {f"{kind}_mb": step.held[kind] / MIB for kind in others}
    whole = sum(step.held.values())
    return row | {"all_mb": whole / MIB, "label": f"{where}; {HELD}"}


def sent(found: Sequence[Step], where: str) -> Rows:
    """What a device sends in each step, beside the formula; stage 0 has none here."""
    return [_sent(step, where) for step in found if step.stage]


def _sent(step: Step, where: str) -> dict[str, Any]:
    given = step.leaves, step.not_again, step.devices, step.beside
    expected = formulas.sent(step.stage, *given)
    parts = {f"{name}_bytes": int(size) for name, size in expected._asdict().items()}
    return (
        {"model": step.model, "stage": step.stage, "N": step.devices}
        | parts
        | {
            "expected_bytes": int(expected.total),
            "counted_bytes": max(step.sent),
            "exact": set(step.sent) == {expected.total},
            "label": f"{where}; {SENT}",
        }
    )
