"""What pipelines did, as rows: ticks, numbers, memory, work."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.harness.result import Rows
from experiments.parts.pipeline_program import Params, Stack
from experiments.parts.pipeline_runs import Run
from jaxdp.program.memory import memory_of

MIB = 2**20
COUNTED = (
    "worked: ticks in which a micro-batch, or a gradient of one, was seen at a stage "
    "as the program ran; all: P stages in 2(M+P-1) ticks"
)
HELD = (
    "per device, without arguments and results; stage inputs: of all ticks, what "
    "re-materialization keeps"
)
WORK = (
    "by XLA's own count; expected: what computes hidden layers and inner blocks again"
)


def formula(stages: int, microbatches: int) -> float:
    """The bubble: the share of all ticks in which a stage has nothing to do."""
    return (stages - 1) / (microbatches + stages - 1)


def work_formula(blocks: int) -> float:
    """How often both passes compute the products of the plain ones, re-materialized.

    A product forward is two backward. A stage's forward pass comes once more, without
    its very last product: its gradient needs only what goes in.
    """
    products = 2 * blocks
    return (3 * products + products - 1) / (3 * products)


def bubbles(runs: Sequence[Run]) -> Rows:
    """How many ticks stages worked in."""
    rows = []
    for run in runs:
        worked = int((run.found.forward > 0).sum() + run.found.backward.sum())
        ticks = run.found.forward.size + run.found.backward.size
        rows.append(
            {
                "stages": run.stages,
                "micro-batches": run.microbatches,
                "worked": worked,
                "all": ticks,
                "bubble": (ticks - worked) / ticks,
                "(P-1)/(M+P-1)": formula(run.stages, run.microbatches),
                "label": COUNTED,
            }
        )
    return rows


def agreement(runs: Sequence[Run], loss: np.ndarray, gradients: Params) -> Rows:
    """Loss and gradients beside those of one device."""
    return [
        {
            "run": run.name,
            "loss": float(run.found.loss),
            "loss alone": float(loss),
            "gradients apart": apart(run.found.gradients, gradients),
            "label": "gradients: largest difference, in those of the largest gradient",
        }
        for run in runs
    ]


def apart(found: Params, expected: Params) -> float:
    """The largest difference of any matrix, relative to its largest number."""
    return max(
        float(np.abs(a - b).max() / np.abs(b).max())
        for a, b in zip(found, expected, strict=True)
    )


def memory(runs: Sequence[Run], width: int) -> Rows:
    """Temporaries of a device, with and without re-materialization."""
    return [
        {
            "micro-batches": whole.microbatches,
            "kept_mb": temporary_mb(whole),
            "re-materialized_mb": temporary_mb(again),
            "saved (%)": 100 * (1 - temporary_mb(again) / temporary_mb(whole)),
            "stage inputs_mb": inputs_mb(whole, width),
            "label": HELD,
        }
        for whole, again in pairs(runs)
    ]


def work(runs: Sequence[Run], stack: Stack) -> Rows:
    """Floating-point operations of a tick in both passes, where XLA says them."""
    rows = []
    for whole, again in pairs(runs):
        counts = [_flops(run) for run in (whole, again)]
        if all(counts):
            rows.append(
                {
                    "micro-batches": whole.microbatches,
                    "kept (MFLOP)": counts[0] / 1e6,
                    "re-materialized (MFLOP)": counts[1] / 1e6,
                    "ratio": counts[1] / counts[0],
                    "expected": work_formula(stack.blocks),
                    "label": WORK,
                }
            )
    return rows


def pairs(runs: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Runs of equally many micro-batches, without and with re-materialization."""
    found: dict[int, dict[bool, Any]] = {}
    for run in runs:
        found.setdefault(run.microbatches, {})[run.remat] = run
    return [(each[False], each[True]) for each in found.values()]


def temporary_mb(run: Run) -> float:
    """MiB of what a device's program makes and drops."""
    planned = memory_of(run.program)
    assert planned is not None  # CPUs and GPUs say it
    return planned.temporary_bytes / MIB


def inputs_mb(run: Run, width: int) -> float:
    """MiB of the inputs of a stage in all ticks of float32."""
    ticks = run.found.forward.shape[1]
    return ticks * (run.rows // run.microbatches) * width * 4 / MIB


def _flops(run: Run) -> float:
    """Of the bodies of the loops over ticks; both loops run equally often."""
    return (run.program.cost_analysis() or {}).get("flops", 0.0)
