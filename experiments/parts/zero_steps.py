"""Training steps at every stage of ZeRO, compiled, and what a device holds in them.

Batches are so small that a device holds little but the model's states. What it holds
when memory is fullest is told apart by `ProgramReport.held`, and further by what it is:

    gradients             those that a stage keeps until the update: whole in stages 0
                          and 1, in parts from stage 2 on
    copies and buckets    what exists on the way: buckets, parameters that are gathered
                          or in another layout, from stage 2 on whole gradients
"""

import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jaxdp
from experiments.parts import amp_models
from experiments.parts.zero_formulas import FROM, GRADIENTS, PARAMETERS, STATE
from jaxdp.precision import Precision
from jaxdp.prediction import Model, compiled_step
from jaxdp.program.memory.held import Holdings

TARGET = "h100"
F32 = Precision("f32")
IMAGE_SIZE, TOKENS = 64, 64  # of the one row of a device
LEARNING_RATE = 1e-3
ACTIVATIONS, COPIES, REST = "activations", "copies and buckets", "everything else"
KINDS = (PARAMETERS, GRADIENTS, STATE, ACTIVATIONS, COPIES, REST)
# Added, or first to be multiplied: the gradient of what comes before needs none of it.
NOT_AGAIN = re.compile("bias$|^stem/|^places/")


class Step(NamedTuple):
    """A compiled step at some stage.

    Attributes:
        model: Its name.
        stage: From 0, `RingAllReduce`, to 3.
        devices: N.
        leaves: Elements of each parameter.
        not_again: Of those that the backward pass does not read.
        beside: Numbers that are averaged besides gradients.
        held: Bytes of a device when it holds most, by kind: all of `KINDS`.
        sent: Bytes of each device.
        program: The step.
    """

    model: str
    stage: int
    devices: int
    leaves: tuple[int, ...]
    not_again: tuple[int, ...]
    beside: int
    held: dict[str, int]
    sent: tuple[int, ...]
    program: jax.stages.Compiled


def resnet50(tiny: bool) -> Model:
    """ResNet-50 on one image, Adam, float32."""
    size = 32 if tiny else IMAGE_SIZE
    return _described(amp_models.resnet(tiny, F32, True, size), "ResNet-50")


def transformer(tiny: bool) -> Model:
    """GPT-2 small on one short sequence, Adam, float32."""
    made = amp_models.gpt2_small(tiny, F32)
    tokens = jax.ShapeDtypeStruct((min(TOKENS, *made.row[0].shape),), jnp.int32)
    return _described(made._replace(row=(tokens, tokens)), "GPT-2 small")


def _described(made: amp_models.Model, name: str) -> Model:
    described = made.described(1, F32)
    return described._replace(name=name, optimizer=optax.adam(LEARNING_RATE))


def design(stage: int) -> jaxdp.Design:
    """Of a stage; 0 is plain data parallelism."""
    return jaxdp.Zero(stage) if stage else jaxdp.RingAllReduce()


def step(model: Model, stage: int, devices: int, target: str | None) -> Step:
    """Compiles a step, for the devices at hand without a target."""
    hosts = max(1, devices // 8)
    made = compiled_step(design(stage), model, devices, target, hosts)
    return Step(
        *(model.name, stage, devices, sizes(model.params)),
        not_again=not_again(model.params),
        beside=1 + sum(sizes(model.model_state)),  # the loss
        held=by_kind(stage, made.report.held(made.train), model.params),
        sent=made.report.sent_bytes,
        program=made.program,
    )


def sizes(tree: Any) -> tuple[int, ...]:
    """Elements of each leaf."""
    return tuple(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def not_again(params: Any) -> tuple[int, ...]:
    """Elements of those parameters that the backward pass does not read."""
    named = jax.tree_util.tree_leaves_with_path(params)
    names = [jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in named]
    every = zip(names, sizes(params), strict=True)
    return tuple(size for name, size in every if NOT_AGAIN.search(name))


def by_kind(stage: int, held: Holdings, params: Any) -> dict[str, int]:
    """Bytes by kind, of `KINDS`."""
    found: dict[str, int] = dict.fromkeys(KINDS, 0)
    dims = {_dims(leaf.shape) for leaf in jax.tree.leaves(params)}
    for kind, part in held.parts.items():
        for name, nbytes in part.leaves:
            found[_kind(stage, kind, name, dims)] += nbytes
    return found


def _kind(stage: int, kind: str, name: str, params: set[tuple[int, ...]]) -> str:
    """What something is that `held` calls by this kind and name."""
    shape = tuple(map(int, re.findall(r"\d+", name.rpartition("[")[2])))
    on_the_way = COPIES if stage >= FROM[GRADIENTS] else GRADIENTS
    if kind == PARAMETERS:
        return PARAMETERS if name.startswith("params") else COPIES
    if kind == GRADIENTS:
        return on_the_way
    if kind not in ("activations", "buckets"):
        return kind if kind in KINDS else REST
    if name.startswith("bucket_") and shape[:1] == (1,):
        return GRADIENTS  # a chunk of a bucket: of their sum, or of a partial one
    if kind == "buckets" and _dims(shape) in params:
        return on_the_way
    return ACTIVATIONS if "jvp(" in name else COPIES


def _dims(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Dimensions in an order that transposing does not change, without ones."""
    return tuple(sorted(size for size in shape if size > 1))
