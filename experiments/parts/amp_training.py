"""A training step in several precisions: bytes on the wire, and time."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

import jaxdp
from experiments.harness import timing
from experiments.harness.result import Rows
from experiments.parts.amp_models import size_bytes
from jaxdp.compression import Bf16, Fp16
from jaxdp.precision import LossScaleWarning, Precision

PyTree = Any
EMULATED = "CPUs compute in float32 and round: 16 bits cost them conversions"


class Way(NamedTuple):
    """How a step computes, and how its gradients travel."""

    precision: Precision
    design: jaxdp.Design = jaxdp.RingAllReduce()


def unscaled_fp16() -> Precision:
    """float16 without a loss scale, which warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LossScaleWarning)
        return Precision("fp16")


FP16 = Precision("fp16", loss_scale="dynamic")
WAYS = {
    "f32": Way(Precision("f32")),
    "bf16": Way(Precision("bf16")),
    "fp16, scaled": Way(FP16),
    "bf16, sent as bf16": Way(
        Precision("bf16"), jaxdp.RingAllReduce(compression=Bf16())
    ),
    "fp16, scaled, sent as fp16": Way(FP16, jaxdp.RingAllReduce(compression=Fp16())),
    "bf16, parameters too": Way(Precision("bf16", params="bf16")),
}
TIMED = ("f32", "bf16", "fp16, scaled")


class Training(NamedTuple):
    """A program with its state; `step()` makes an update on the same batch."""

    program: jax.stages.Compiled
    state_bytes: int  # parameters and optimizer state
    step: Callable[[], Any]


def training(
    loss_fn: Callable,
    optimizer: Any,
    params: PyTree,
    batch: PyTree,
    mesh: Mesh,
    way: Way,
) -> Training:
    """A training program that computes in some way."""
    train = jaxdp.data_parallel(
        loss_fn, optimizer, mesh, way.design, precision=way.precision
    )
    state = train.init(params)
    batch = jaxdp.shard_batch(batch, mesh)

    program = train.lower(state, batch).compile()

    def step():
        nonlocal state
        state, metrics = program(state, batch)
        return metrics["loss"]

    size = size_bytes((state.params, state.opt_state))
    return Training(program, size, step)


def on_the_wire(made: dict[str, Training], phi_bytes: int) -> Rows:
    """What a device sends in a step, counted in the compiled program."""
    rows = []
    for name, each in made.items():
        report = jaxdp.analyze(each.program)
        (sent,) = set(report.sent_bytes)
        rows.append(
            {
                "way": name,
                "sent_bytes": sent,
                "sent/Φ": sent / phi_bytes,
                "parameters and optimizer state_bytes": each.state_bytes,
                "label": f"Φ = {phi_bytes:,} bytes of gradients in float32; the loss "
                "rides along in a bucket",
            }
        )
    return rows


def times(made: dict[str, Training], repeats: int, on_repeat: Any) -> Rows:
    """Times of steps, in turns."""
    calls = {name: functools.partial(made[name].step) for name in TIMED}
    found = timing.interleaved(calls, repeats, on_repeat)
    base = found[TIMED[0]].median_ms
    return [
        {"way": name, "of f32": time.median_ms / base}
        | time._asdict()
        | {"label": f"{time.label}; {EMULATED}"}
        for name, time in found.items()
    ]
