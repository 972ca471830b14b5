"""What a training step keeps in memory, in 32 and 16 bits, and which products compute.

Two sources. In the traced program: everything that the forward pass makes and keeps for
the backward pass, exact, the same on every backend, before XLA recomputes what is cheap
to recompute. In the compiled program: what XLA plans to need beside arguments; on CPUs
in float32, since they compute in nothing narrower, and for an H100 as it would be.
"""

import math
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.core import Jaxpr, Literal, jaxprs_in_params

import jaxdp
from experiments.harness.result import Rows
from experiments.parts import amp_models as models
from experiments.parts.amp_models import Model, size_bytes
from jaxdp.precision import Precision
from jaxdp.prediction import compiled_step
from jaxdp.program import ProgramReport

MIB = 2**20
F32, BF16 = Precision("f32"), Precision("bf16")
AS_WRITTEN = "bf16, layers as Flax makes them"
WAYS = {"f32": (F32, True), "bf16": (BF16, True), AS_WRITTEN: (BF16, False)}
KEPT = (
    "kept: made by the forward pass for the backward pass, in the traced program, "
    "before XLA recomputes some; float32: parameters, gradients, optimizer state"
)


def kept(tiny: bool, image_size: int, rows: int) -> Rows:
    """A row for each model and way: what one device holds in a step."""
    found = []
    for make in (models.resnet, models.transformer):
        for way, (precision, follow) in WAYS.items():
            model = make(tiny, precision, follow, *_size(make, image_size))
            forward = model.forward(precision, rows)
            made = kept_by(forward)
            opt_state = jax.eval_shape(model.optimizer.init, model.params)
            parts = {
                "kept in 32 bits_mb": size_bytes(made, 4) / MIB,
                "kept in 16 bits_mb": size_bytes(made, 2) / MIB,
                "kept masks_mb": size_bytes(made, 1) / MIB,
                "parameters_mb": size_bytes(model.params) / MIB,
                "gradients_mb": size_bytes(model.params) / MIB,
                "optimizer state_mb": size_bytes(opt_state) / MIB,
            }
            share = products_in_16_bits(forward)
            found.append(
                {"step": f"{model.name}, {way}", "model": model.name, "way": way}
                | {"products in 16 bits (%)": share}
                | parts
                | {"all_mb": sum(parts.values()), "label": KEPT}
            )
    return [row | _saved(row, found) for row in found]


def _size(make: Any, image_size: int) -> tuple[int, ...]:
    return (image_size,) if make is models.resnet else ()


def _saved(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, float]:
    """What a row saves against float32, in percent."""
    (base,) = (r for r in rows if r["model"] == row["model"] and r["way"] == "f32")

    def percent(*names: str) -> float:
        now, before = (sum(r[name] for name in names) for r in (row, base))
        return 100 * (1 - now / before)

    kinds = [name for name in row if name.startswith("kept")]
    return {"saved, kept (%)": percent(*kinds), "saved, all (%)": percent("all_mb")}


def kept_by(forward: Jaxpr) -> list[Any]:
    """Shapes of what a forward pass returns and has made, each once."""
    there = {*forward.invars, *forward.constvars}
    found = dict.fromkeys(v for v in forward.outvars if not isinstance(v, Literal))
    return [variable.aval for variable in found if variable not in there]


def products_in_16_bits(forward: Jaxpr) -> float:
    """The share of the FLOPs of products whose operands are 16-bit, in percent."""
    flops = {2: 0, 4: 0}
    for itemsize, count in _products(forward):
        flops[itemsize] += count
    return 100 * flops[2] / sum(flops.values())


def _products(program: Jaxpr) -> Iterator[tuple[int, int]]:
    """Item size and FLOPs of every matrix product and convolution."""
    for equation in program.eqns:
        for inner in jaxprs_in_params(equation.params):
            yield from _products(inner)
        name = equation.primitive.name
        if name not in ("dot_general", "conv_general_dilated"):
            continue
        left, right, result = (_shape(v) for v in (*equation.invars, *equation.outvars))
        size = math.prod(result.shape)
        if name == "dot_general":
            (axes, _), _ = equation.params["dimension_numbers"]
            terms = math.prod(left.shape[axis] for axis in axes)
        else:
            features = equation.params["dimension_numbers"].rhs_spec[0]
            terms = math.prod(right.shape) // right.shape[features]
        yield max(left.dtype.itemsize, right.dtype.itemsize), 2 * size * terms


def _shape(variable: Any) -> jax.ShapeDtypeStruct:
    return variable.aval


def compiled(
    model: Model, precision: Precision, rows: int, target: str | None
) -> ProgramReport:
    """The training step of one device, compiled, for those at hand without a target."""
    described = model.described(rows, precision)
    return compiled_step(jaxdp.NativeAllReduce(), described, 1, target).report


def planned(rows: int) -> Rows:
    """What XLA plans for a small transformer here; for a CPU it widens 16 bits."""
    found = []
    for name, precision in (("f32", F32), ("bf16", BF16)):
        model = models.transformer(True, precision, True)
        row = {"step": f"CPU, small transformer, {name}", "target": "CPU"}
        row |= {"model": "small transformer", "way": name}
        row |= _memory(compiled(model, precision, rows, None))
        found.append(row | {"predicted_ms": None})
    return found


def for_h100(image_size: int, rows: int, on_program: Any) -> Rows:
    """What XLA plans for an H100, and how long its kernels take."""
    found = []
    for make, sizes in ((models.resnet, (image_size,)), (models.transformer, (2,))):
        for name, precision in (("f32", F32), ("bf16", BF16)):
            model = make(False, precision, True, *sizes)
            report = compiled(model, precision, rows, "h100")
            row = {"step": f"H100, {model.name}, {name}", "target": "H100"}
            row |= {"model": model.name, "way": name} | _memory(report)
            # JAX multiplies float32 in TF32 there: half of what bfloat16 reaches.
            took_s = report.timeline("h100").compute_s
            found.append(row | {"predicted_ms": 1e3 * took_s})
            on_program()
    return found


def _memory(report: ProgramReport) -> dict[str, float]:
    assert report.memory is not None  # CPUs and GPUs say it
    return {
        "temporaries_mb": report.memory.temporary_bytes / MIB,
        "all_mb": report.memory.peak_bytes / MIB,
    }
