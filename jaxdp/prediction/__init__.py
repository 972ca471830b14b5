"""Predicted steps: what a design costs with devices that nobody has to own."""

from jaxdp.prediction.model import GPU_OPTIONS, Model
from jaxdp.prediction.scaling import Predicted, Prediction, predict

__all__ = ("GPU_OPTIONS", "Model", "Predicted", "Prediction", "predict")
