"""Weight and image layouts: the only place where JAX and torch differ in shape.

| array       | JAX                       | torch                     |
|-------------|---------------------------|---------------------------|
| convolution | `kernel`, HWIO            | `weight`, OIHW            |
| linear      | `kernel`, `(in, out)`     | `weight`, `(out, in)`     |
| images      | NHWC                      | NCHW                      |

Biases are the same. Leading axes before those named here are not allowed.
"""

import numpy as np


def name_to_torch(name: str) -> str:
    """Return `"conv.weight"` for `"conv/kernel"`."""
    return name.replace("/", ".").replace("kernel", "weight")


def name_to_jax(name: str) -> str:
    """Return `"conv/kernel"` for `"conv.weight"`."""
    return name.replace(".", "/").replace("weight", "kernel")


def weight_to_torch(array: np.ndarray) -> np.ndarray:
    """Turn an HWIO or `(in, out)` kernel into a torch weight; keep a bias."""
    if array.ndim == 4:
        return np.ascontiguousarray(array.transpose(3, 2, 0, 1))
    return np.ascontiguousarray(array.T)


def weight_to_jax(array: np.ndarray) -> np.ndarray:
    """Turn an OIHW or `(out, in)` weight into a JAX kernel; keep a bias."""
    if array.ndim == 4:
        return np.ascontiguousarray(array.transpose(2, 3, 1, 0))
    return np.ascontiguousarray(array.T)


def inputs_to_torch(array: np.ndarray) -> np.ndarray:
    """Turn NHWC images into NCHW; keep vectors `[batch, features]`."""
    if array.ndim == 4:
        return np.ascontiguousarray(array.transpose(0, 3, 1, 2))
    return array


def nest(flat: dict[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """Return `{"conv": {"kernel": ...}}` for `{"conv/kernel": ...}`."""
    tree: dict[str, dict[str, np.ndarray]] = {}
    for name, array in flat.items():
        layer, leaf = name.split("/")
        tree.setdefault(layer, {})[leaf] = array
    return tree
