"""Digits, trained at every stage in lockstep, and how long further steps take."""

import numpy as np
import optax

import jaxdp
from experiments.harness.result import Rows
from experiments.parts import digits, lockstep
from experiments.parts import zero_steps as steps

BATCH_SIZE = 128  # rows over all devices
CAP_MB = 0.05  # of a bucket: three of them
NAMES = {0: "DDP", 1: "stage 1", 2: "stage 2", 3: "stage 3"}
DDP = NAMES[0]


def problem() -> digits.Problem:
    """The digits, with Adam."""
    given = digits.problem(seed=0, learning_rate=0.0, momentum=0.0)
    return given._replace(optimizer=optax.adam(steps.LEARNING_RATE))


def data(given: digits.Problem, epochs: int) -> list[digits.Batch]:
    """Batches of some epochs."""
    return [*digits.batches(given.train, BATCH_SIZE, epochs, seed=0)]


def trainers(
    given: digits.Problem, batch: digits.Batch, devices: int
) -> dict[str, lockstep.Trainer]:
    """One for each stage; and a single device, to which they are compared."""
    mesh = jaxdp.data_mesh(devices)
    start = given.loss_fn, given.optimizer, given.params, batch
    designs = [
        jaxdp.RingAllReduce(CAP_MB),
        *(jaxdp.Zero(stage, bucket_cap_mb=CAP_MB) for stage in (1, 2, 3)),
    ]
    made = {lockstep.ALONE: lockstep.single(*start)}
    for name, design in zip(NAMES.values(), designs, strict=True):
        made[name] = lockstep.parallel(*start, mesh, design)
    return made


def curves(history: lockstep.History) -> Rows:
    """How far each run's losses are from those of DDP, and from one device."""
    reference = np.array(history.losses[DDP])
    rows = []
    for name in NAMES.values():
        losses = np.array(history.losses[name])
        rows.append(
            {
                "run": name,
                "steps": len(losses),
                "first loss": float(losses[0]),
                "last loss": float(losses[-1]),
                "largest difference to DDP": float(np.abs(losses - reference).max()),
                "parameters to one device": max(history.differences[name]),
            }
        )
    return rows
