"""The same step on H100 that are not here: nn.DataParallel and DDP, device by device.

Of nn.DataParallel the program of one replica is compiled, loss and gradient of its
rows; what the main device holds beside it is known from shapes: the gradients that it
receives, the optimizer state, the gathered outputs. DDP is one program on all devices.
"""

from typing import Any

import jax

import jaxdp
from experiments.harness.result import Rows
from experiments.parts import resnet
from experiments.parts.footprint import (
    GATHER,
    GRADIENTS,
    MIB,
    OPTIMIZER,
    PARAMETERS,
    RECEIVED,
)
from experiments.parts.resnet import Problem
from jaxdp import targets
from jaxdp.program.memory import Memory, memory_of

TARGET = "h100"
NEEDED = "activations and temporaries"
LABEL = (
    "compiled for the H100, not run; float32, its products in TF32; gradients of the "
    "others arrive while the main device is in its backward pass: the most it can hold"
)


def rows(given: Problem) -> Rows:
    """What a main device, another one, and one of DDP hold; none without a compiler."""
    if targets.missing(TARGET):
        return []
    main, other = data_parallel(given)
    held = {
        "DP, main device": main,
        "DP, other devices": other,
        "DDP, every device": distributed(given),
    }
    return [
        {"device": name, "all_mb": sum(parts.values()) / MIB}
        | {"more than DP's others (%)": _percent(parts, other)}
        | {f"{part}_mb": size / MIB for part, size in parts.items()}
        | {"label": LABEL}
        for name, parts in held.items()
    ]


def data_parallel(given: Problem) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes by part of the main device in its backward pass, and of another."""
    model, devices = given.model, len(given.devices)
    batch = _shapes(given, len(given.images) // devices)
    params, statistics = _abstract((model.params, model.model_state))

    def step(params, statistics, images, labels):
        def loss(params):
            logits, new = model.apply_fn(params, images, model_state=statistics)
            return resnet.loss_fn(logits, labels), (logits, new)

        return jax.grad(loss, has_aux=True)(params)

    planned = _planned(step, params, statistics, *batch)
    size, kept = resnet.size_bytes(params), resnet.size_bytes(statistics)
    logits = 4 * len(given.images) * resnet.CLASSES
    other = {
        PARAMETERS: size,
        GRADIENTS: size,
        RECEIVED: 0,
        OPTIMIZER: 0,
        GATHER: 0,
        "batch, outputs, buffers": resnet.size_bytes(batch)
        + logits // devices
        + 2 * kept,
        NEEDED: planned.temporary_bytes,
    }
    opt_state = jax.eval_shape(given.optimizer.init, params)
    main = other | {
        RECEIVED: (devices - 1) * size,
        OPTIMIZER: resnet.size_bytes(opt_state),
        GATHER: 2 * logits,  # what was received, and joined
    }
    return main, other


def distributed(given: Problem) -> dict[str, int]:
    """Bytes by part of every device in DDP's step."""
    devices = len(given.devices)
    mesh = targets.mesh(TARGET, devices)
    train = resnet.training(given, mesh, jaxdp.RingAllReduce())
    state = resnet.first_state(given, train)
    batch = _shapes(given, len(given.images))
    where = {"target": TARGET, "devices": devices}
    program = jaxdp.compile_for(train.step, state, batch, **where)
    planned = _memory(program)
    parts = {
        PARAMETERS: resnet.size_bytes(state.params),
        GRADIENTS: 0,  # part of the temporaries: one program makes and uses them
        RECEIVED: 0,
        OPTIMIZER: resnet.size_bytes(state.opt_state),
        GATHER: 0,
        "batch, outputs, buffers": 0,
        NEEDED: planned.temporary_bytes,
    }
    parts["batch, outputs, buffers"] = planned.peak_bytes - sum(parts.values())
    return parts


def _planned(step: Any, *arguments: Any) -> Memory:
    """What XLA plans for a program of one H100."""
    program = jaxdp.compile_for(step, *arguments, target=TARGET, devices=1)
    return _memory(program)


def _memory(program: jax.stages.Compiled) -> Memory:
    memory = memory_of(program)
    assert memory is not None  # GPUs say it
    return memory


def _shapes(given: Problem, count: int) -> tuple[Any, Any]:
    """Shapes of so many images and labels."""
    images, labels = given.images, given.labels
    return (
        jax.ShapeDtypeStruct((count, *images.shape[1:]), images.dtype),
        jax.ShapeDtypeStruct((count,), labels.dtype),
    )


def _abstract(tree: Any) -> Any:
    """The tree as shapes."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _percent(parts: dict[str, int], base: dict[str, int]) -> float:
    return 100 * (sum(parts.values()) / sum(base.values()) - 1)
