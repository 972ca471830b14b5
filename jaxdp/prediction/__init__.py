"""Predicted steps: what a design costs with devices that nobody has to own."""

from jaxdp.prediction.model import Model
from jaxdp.prediction.scaling import Predicted, Prediction, predict, price
from jaxdp.prediction.step import CompiledStep, compiled_step

__all__ = (
    "CompiledStep",
    "Model",
    "Predicted",
    "Prediction",
    "compiled_step",
    "predict",
    "price",
)
