"""ResNet-50 and a GPT-2 of the small size in 16 bits, as shapes alone."""

from typing import Literal

from experiments.parts import amp_models
from jaxdp.precision import Precision
from jaxdp.prediction import Model

Compute = Literal["bf16", "f16", "f32"]


def resnet50(
    tiny: bool = False, rows: int = 64, size: int = 224, compute: Compute = "bf16"
) -> Model:
    """ResNet-50 on images, SGD with momentum: 25,557,032 parameters."""
    precision = Precision(compute)
    made = amp_models.resnet(tiny, precision, True, 32 if tiny else size)
    return _model(made, "ResNet-50", 2 if tiny else rows, precision)


def transformer(tiny: bool = False, rows: int = 8, compute: Compute = "bf16") -> Model:
    """GPT-2 small on sequences of 1,024 tokens, Adam: 124,439,808 parameters."""
    precision = Precision(compute)
    made = amp_models.gpt2_small(tiny, precision)
    return _model(made, "GPT-2 small", 2 if tiny else rows, precision)


def _model(made: amp_models.Model, name: str, rows: int, precision: Precision) -> Model:
    """As predictions take it, with the rows of one device."""
    return Model(
        loss_fn=made.loss_fn,
        optimizer=made.optimizer,
        params=made.params,
        batch=made.batch(rows),
        model_state=made.model_state,
        precision=precision,
        name=name,
    )
