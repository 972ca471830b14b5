"""ResNet-50 and a GPT-2 of the small size in bfloat16, as shapes alone."""

from experiments.parts import amp_models
from jaxdp.precision import Precision
from jaxdp.prediction import Model

BF16 = Precision("bf16")
TINY_ROWS = 2


def resnet50(tiny: bool = False, rows: int = 64, image_size: int = 224) -> Model:
    """ResNet-50 on images, SGD with momentum: 25,557,032 parameters."""
    made = amp_models.resnet(tiny, BF16, True, 32 if tiny else image_size)
    described = made.described(TINY_ROWS if tiny else rows, BF16)
    return described._replace(name="ResNet-50")


def transformer(tiny: bool = False, rows: int = 8) -> Model:
    """GPT-2 small on sequences of 1,024 tokens, Adam: 124,439,808 parameters."""
    made = amp_models.gpt2_small(tiny, BF16)
    described = made.described(TINY_ROWS if tiny else rows, BF16)
    return described._replace(name="GPT-2 small")
