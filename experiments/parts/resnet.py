"""ResNet-50 on several devices: a call, a training step, and it as one program."""

import math
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx

import jaxdp
from experiments import models
from experiments.harness.result import Rows
from experiments.models.resnet import STAGES
from experiments.parts.footprint import MIB, OPTIMIZER, PARAMETERS, Split, split
from jaxdp.program import ProgramReport
from jaxdp.replicated.views.memory import TEMPORARY, Memory
from jaxdp.training import DataParallel

PyTree = Any
CLASSES = 1000
TINY_STAGES = ((4, 1),)
ONE_PROGRAM = (
    "One program runs on all devices, so XLA plans the same buffers for each: all hold "
    "an optimizer state and room for the gradients that only the root receives. Inside "
    "a program an activation is freed after its last use; between programs it is an "
    "argument, and stays until the backward program ends."
)


class Problem(NamedTuple):
    """A model on its devices, the batch of a step, and the optimizer."""

    model: jaxdp.DataParallel
    images: np.ndarray  # [B, S, S, 3]
    labels: np.ndarray  # [B]
    optimizer: optax.GradientTransformation

    @property
    def devices(self) -> list[str]:
        """The devices as snapshots call them; the first is the main device."""
        return [f"{device.platform}:{device.id}" for device in self.model.devices]


def problem(devices: int, rows: int, image_size: int, tiny: bool) -> Problem:
    """The model on the first devices, and random images, so many rows for each."""
    stages = TINY_STAGES if tiny else STAGES
    # One program that makes all parameters, instead of one for each.
    make = nnx.jit(lambda: models.ResNet50(nnx.Rngs(0), CLASSES, stages))
    model = jaxdp.replicated.from_nnx(make(), device_ids=jax.devices()[:devices])
    random = np.random.default_rng(0)
    shape = (rows * devices, image_size, image_size, 3)
    images = random.standard_normal(shape, np.float32)
    labels = random.integers(0, CLASSES, len(images)).astype(np.int32)
    return Problem(model, images, labels, optax.sgd(0.1, momentum=0.9))


def loss_fn(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean loss."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean()


def infer(given: Problem) -> Memory:
    """Watches a call without gradients."""
    with given.model.memory() as memory:
        jax.block_until_ready(given.model(given.images))
    return memory


def train(given: Problem) -> Memory:
    """Watches one training step; parameters are on the root once, as in PyTorch."""
    model = given.model
    step = model.train_step(loss_fn, given.optimizer)
    state = step.init(keep_model=False)
    with model.memory() as memory:
        state, _ = step(state, given.images, given.labels)
        jax.block_until_ready(state)
    model.params, model.model_state = state.params, state.model_state
    return memory


def training(
    given: Problem, mesh: jax.sharding.Mesh, design: jaxdp.Design
) -> DataParallel:
    """The step of the same model as one program on all devices."""
    model = given.model

    def whole_loss(params, batch, model_state):
        images, labels = batch
        logits, state = model.apply_fn(params, images, model_state=model_state)
        return loss_fn(logits, labels), jaxdp.Aux(model_state=state)

    return jaxdp.data_parallel(
        whole_loss, given.optimizer, mesh, design=design, model_state="mean"
    )


def first_state(given: Problem, train: DataParallel) -> PyTree:
    """Shapes of the state before the first step."""

    def start(params, model_state):
        return train.init(params, model_state=model_state)

    return jax.eval_shape(start, given.model.params, given.model.model_state)


def as_one_program(given: Problem) -> tuple[ProgramReport, Split]:
    """Compiles the `GatherToRoot` step; its report, and what each device holds."""
    mesh = jaxdp.data_mesh(given.model.devices)
    program = training(given, mesh, jaxdp.GatherToRoot())
    state = first_state(given, program)
    batch = jax.eval_shape(lambda *batch: batch, given.images, given.labels)
    report = jaxdp.analyze(program.lower(state, batch).compile())
    assert report.memory is not None  # CPUs and GPUs say it
    kinds = {
        PARAMETERS: size_bytes(state.params),
        OPTIMIZER: size_bytes(state.opt_state) // mesh.size,  # stacked, one per device
        "buffers": size_bytes(state.model_state),
        "batch": size_bytes(batch) // mesh.size,
        TEMPORARY: report.memory.temporary_bytes,
    }
    # The step counter, and results that do not take an argument's place.
    kinds["outputs"] = report.memory.peak_bytes - sum(kinds.values())
    return report, split(kinds)


def by_device(given: Problem, report: ProgramReport, held: Split) -> Rows:
    """A row per device: what it holds in the one program, and what it moves."""
    parts = {f"{part}_mb": size / MIB for part, size in held.items() if size}
    return [
        {"device": device, "label": ONE_PROGRAM, "all_mb": sum(held.values()) / MIB}
        | parts
        | {"sends_mb": sent / MIB, "gets_mb": received / MIB}
        for device, sent, received in zip(
            given.devices, report.sent_bytes, report.received_bytes, strict=True
        )
    ]


def count() -> Rows:
    """Parameters and buffers of ResNet-50, from shapes alone."""
    model = nnx.eval_shape(lambda: models.ResNet50(nnx.Rngs(0)))
    rows = []
    for name, kind in (
        ("parameters", nnx.Param),
        ("BatchNorm statistics", nnx.BatchStat),
    ):
        leaves = jax.tree.leaves(nnx.state(model, kind))
        numbers = sum(math.prod(leaf.shape) for leaf in leaves)
        size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
        row = {"part": name, "arrays": len(leaves), "numbers": numbers}
        rows.append(row | {"size_bytes": size, "size_mb": size / MIB})
    return rows


def size_bytes(tree: PyTree) -> int:
    """Bytes of all arrays."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
