"""Pipelines compiled for H100 GPUs that are not here: memory read, times predicted."""

from typing import Any

import jax
import jax.numpy as jnp

import jaxdp
from experiments.parts import pipeline_program as pipeline
from experiments.parts.pipeline_program import Batch, Stack
from experiments.parts.pipeline_tables import MIB, formula

TARGET = "h100"
ROWS = 16384  # of all micro-batches: 16 sequences of 1,024 tokens
# The linear layers of a transformer of width 4096: 2.1e9 parameters.
STACK = Stack(stages=8, blocks=2, width=4096, hidden=16384, dtype=jnp.bfloat16)
MICROBATCHES = (1, 8, 32)
PREDICTED = (
    "memory: read from the compiled program; times: predicted from its schedule; "
    "useful: what is computed in ticks with a micro-batch; exposed: communication"
)


def row(stack: Stack, microbatches: int, remat: bool, rows: int) -> dict[str, Any]:
    """One pipeline, compiled and replayed."""
    mesh = jaxdp.data_mesh(stack.stages, axis_name=pipeline.AXIS)
    shape = (microbatches, rows // microbatches)
    batch = Batch(
        jax.ShapeDtypeStruct((*shape, stack.width), stack.dtype),
        jax.ShapeDtypeStruct(shape, jnp.int32),
    )
    program = jaxdp.compile_for(
        jax.jit(pipeline.passes(mesh, remat)),
        *(stack.shapes(), batch),
        target=TARGET,
        devices=stack.stages,
    )
    report = jaxdp.analyze(program)
    assert report.memory is not None  # GPUs say it
    timeline = report.timeline(TARGET)
    bubble = formula(stack.stages, microbatches)
    return {
        "micro-batches": microbatches,
        "re-materialized": remat,
        "temporaries_mb": round(report.memory.temporary_bytes / MIB),
        "passes_ms": 1e3 * timeline.step_s,
        "bubble": bubble,
        "useful_ms": 1e3 * timeline.compute_s * (1 - bubble),
        "exposed_ms": 1e3 * timeline.exposed_s,
        "label": PREDICTED,
    }
