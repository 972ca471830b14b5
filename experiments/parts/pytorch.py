"""What PyTorch does without a GPU: it cuts batches, and copies modules.

Its `DataParallel` needs CUDA; these are pieces that it is made of. Everything here
works, and says so, where PyTorch is not installed.
"""

import importlib
from typing import Any

import numpy as np

ABSENT = "PyTorch is not installed"


def library() -> Any:
    """The module `torch`, or None."""
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError:
        return None


def chunks(rows: int, count: int) -> str:
    """Sizes of the slices that its scatter makes, by `torch.chunk`."""
    torch = library()
    if torch is None:
        return ABSENT
    return ", ".join(str(len(part)) for part in torch.arange(rows).chunk(count))


def sharing(count: int) -> int | None:
    """How many of `count` replicas hold the module's very own plain tensor.

    Replicas are made by the method that `torch.nn.parallel.replicate` calls. None
    without PyTorch.
    """
    torch = library()
    if torch is None:
        return None
    module = torch.nn.Linear(2, 2)
    module.scale = torch.ones(2)
    replicas = [module._replicate_for_data_parallel() for _ in range(count)]
    return sum(replica.scale is module.scale for replica in replicas)


class Tensor:
    """Looks like a tensor of a library that JAX does not know."""

    def __init__(self, values: np.ndarray):
        """Keeps the values."""
        self.values = values

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        """As NumPy asks for it."""
        return np.asarray(self.values, *args, **kwargs)


def tensor(values: np.ndarray) -> Any:
    """A tensor, or what looks like one."""
    torch = library()
    return Tensor(values) if torch is None else torch.tensor(values)
