"""Models that experiments train or measure, in Flax NNX."""

from experiments.models.digits import DigitsNet as DigitsNet
from experiments.models.functional import functional as functional
from experiments.models.resnet import ResNet50 as ResNet50
from experiments.models.tiny_net import TinyNet as TinyNet
from experiments.models.transformer import CharTransformer as CharTransformer
