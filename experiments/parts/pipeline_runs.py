"""Pipelines that run here: on digits, beside the same model on one device."""

import functools
from typing import NamedTuple

import jax
import numpy as np
from sklearn.datasets import load_digits

import jaxdp
from experiments.parts import pipeline_program as pipeline
from experiments.parts.pipeline_program import Batch, Params, Passes, Stack

SEED = 0


class Run(NamedTuple):
    """A pipeline that ran once.

    Attributes:
        stages: P.
        microbatches: M.
        remat: Whether stages keep their inputs alone.
        rows: N, of all micro-batches.
        given: Parameters and batch.
        program: For P devices.
        found: What it gave, on the host.
    """

    stages: int
    microbatches: int
    remat: bool
    rows: int
    given: tuple[Params, Batch]
    program: jax.stages.Compiled
    found: Passes

    @property
    def name(self) -> str:
        """How tables call it."""
        return f"M = {self.microbatches}{', re-materialized' if self.remat else ''}"


def run(stack: Stack, microbatches: int, remat: bool, rows: int) -> Run:
    """Compiles both passes of some digits, and runs them once."""
    mesh = jaxdp.data_mesh(stack.stages, axis_name=pipeline.AXIS)
    given = (stack.init(SEED), digits(microbatches, rows))
    program = jax.jit(pipeline.passes(mesh, remat)).lower(*given).compile()
    placed = jax.device_put(given, program.input_shardings[0])
    found = jax.device_get(program(*placed))
    return Run(stack.stages, microbatches, remat, rows, placed, program, found)


def alone(stack: Stack, rows: int) -> tuple[np.ndarray, Params]:
    """The loss and its gradients on one device, without stages."""
    given = (stack.init(SEED), digits(1, rows))
    return jax.device_get(jax.jit(jax.value_and_grad(pipeline.plain_loss))(*given))


def digits(microbatches: int, rows: int) -> Batch:
    """Images of scikit-learn's digits as rows of 64 numbers from 0 to 1."""
    pixels, labels = _digits()
    return pipeline.split(pixels[:rows], labels[:rows], microbatches)


@functools.cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
    pixels, labels = map(np.asarray, load_digits(return_X_y=True))
    return (pixels / 16).astype(np.float32), labels.astype(np.int32)
