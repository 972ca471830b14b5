"""The models of `experiments.models` in PyTorch, with the same names and parameters."""

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import distributing_problem as problem

PARTS = {"kernel": "weight", "scale": "weight", "embedding": "weight", "bias": "bias"}


class DigitsNet(nn.Module):
    """Two 3x3 convolutions, then two linear layers."""

    def __init__(self) -> None:
        """As `experiments.models.DigitsNet`."""
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2)
        self.hidden = nn.Linear(512, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images `[B, 8, 8, 1]` to logits."""
        x = F.relu(self.conv1(x.permute(0, 3, 1, 2)))
        # Flax pads a stride of 2 at the end alone, where the size is even.
        x = F.relu(self.conv2(F.pad(x, (0, 1, 0, 1))))
        x = x.permute(0, 2, 3, 1).flatten(1)
        return self.head(F.relu(self.hidden(x)))


class Attention(nn.Module):
    """Causal attention of four heads."""

    def __init__(self, width: int) -> None:
        """As `nnx.MultiHeadAttention`."""
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[B, T, width]` to the same."""
        heads = [
            layer(x).unflatten(-1, (4, -1)).transpose(1, 2)  # [B, 4, T, width / 4]
            for layer in (self.query, self.key, self.value)
        ]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, then two linear layers, each added to its input."""

    def __init__(self, width: int) -> None:
        """As the blocks of `experiments.models.CharTransformer`."""
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attention = Attention(width)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.hidden = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[B, T, width]` to the same."""
        x = x + self.attention(self.norm1(x))
        hidden = F.gelu(self.hidden(self.norm2(x)), approximate="tanh")
        return x + self.out(hidden)


class CharTransformer(nn.Module):
    """Two blocks over characters."""

    def __init__(self, width: int = 48) -> None:
        """As `experiments.models.CharTransformer`."""
        super().__init__()
        self.characters = nn.Embedding(problem.CHARACTERS, width)
        self.places = nn.Embedding(problem.CONTEXT, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, problem.CHARACTERS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Characters `[B, T]` to logits `[B, T, characters]`."""
        x = self.characters(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


MODELS = {"cnn": DigitsNet, "transformer": CharTransformer}


def load(model: nn.Module, path: str) -> None:
    """Takes over parameters that Flax has made."""
    with np.load(path) as given, torch.no_grad():
        for name, parameter in _named(model, list(given)):
            array, shape = given[name], tuple(parameter.shape)
            if name.endswith("kernel"):  # Flax: inputs before outputs, heads apart
                conv = array.ndim == 4
                array = (
                    array.transpose(3, 2, 0, 1)
                    if conv
                    else array.reshape(shape[::-1]).T
                )
            parameter.copy_(torch.from_numpy(array.reshape(shape).copy()))


def save(model: nn.Module, like: str, path: str) -> None:
    """Writes parameters in the shapes of the file that they were taken from."""
    saved = {}
    with np.load(like) as given:
        for name, parameter in _named(model, list(given)):
            array = parameter.detach().numpy()
            if name.endswith("kernel"):
                array = array.transpose(2, 3, 1, 0) if array.ndim == 4 else array.T
            saved[name] = array.reshape(given[name].shape)
    np.savez(path, **saved)


def _named(model: nn.Module, names: list[str]) -> Iterator[tuple[str, nn.Parameter]]:
    """Flax's name of each parameter, and the parameter."""
    parameters = dict(model.named_parameters())
    for name in names:
        place, _, part = name.rpartition(".")
        yield name, parameters.pop(f"{place}.{PARTS[part]}")
    if parameters:
        raise ValueError(
            f"load got no arrays for {sorted(parameters)}. The file must hold every "
            "parameter of the model. Write it from the model of the same name."
        )
