"""Trains a task with gradients that travel as they are, and with every compression."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

import jaxdp
from experiments.parts.compression_tasks import Task
from jaxdp.compression import Bf16, Compression, Fp16, Int8, PowerSGD, TopK
from jaxdp.program import analyze

UNCOMPRESSED = "none"
COMPRESSIONS: Mapping[str, Compression | None] = {
    UNCOMPRESSED: None,
    "Bf16": Bf16(),
    "Fp16": Fp16(),
    "Int8": Int8(),
    "Int8 stochastic": Int8(stochastic=True, error_feedback=False),
    "TopK 5 %": TopK(0.05),
    "TopK 1 %": TopK(0.01),
    "PowerSGD 4": PowerSGD(4),
    "PowerSGD 2": PowerSGD(2),
    "PowerSGD 4, Bf16": PowerSGD(4, inner=Bf16()),
}

FEW = (UNCOMPRESSED, "Bf16", "Int8", "TopK 1 %", "PowerSGD 4")  # where steps are many


class Run(NamedTuple):
    """What became of one run.

    Attributes:
        losses: Of the batch, in every step.
        test_loss: After the last step.
        accuracy: Share of right answers in the test.
        sent_bytes: What one device sends in a step, from the compiled program.
        program: The compiled step.
    """

    losses: list[float]
    test_loss: float
    accuracy: float
    sent_bytes: int
    program: jax.stages.Compiled

    @property
    def last_loss(self) -> float:
        """Mean of the last tenth of the steps."""
        last = self.losses[-max(len(self.losses) // 10, 1) :]
        return sum(last) / len(last)


Runs = Mapping[tuple[str, str], Run]  # by task and compression


def train(
    task: Task, mesh: Mesh, compression: Compression | None, advance: Callable[[], Any]
) -> Run:
    """Trains on all batches of the task; advances after every step."""
    design = jaxdp.RingAllReduce(compression=compression)
    training = jaxdp.data_parallel(task.loss_fn, task.optimizer, mesh, design=design)
    state = training.init(task.params)
    program = training.lower(state, task.batches[0]).compile()
    losses = []
    for batch in task.batches:
        state, metrics = program(state, jaxdp.shard_batch(batch, mesh))
        losses.append(float(metrics["loss"]))  # waits: many at once starve devices
        advance()
    loss, accuracy = task.test(training.params(state))
    sent = max(analyze(program).sent_bytes)
    return Run(losses, loss, accuracy, sent, program)
