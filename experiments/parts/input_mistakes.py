"""Mistakes in what a model is called with: no arrays, and arrays that do not fit."""

import importlib
from typing import Any

import jax
import numpy as np

from experiments.parts import pytorch
from experiments.parts.mistakes import Mistake, Setting


def about_inputs(on: Setting) -> list[Mistake]:
    """Inputs that are no arrays, or have no values."""
    model, x, rows = on.model(), on.x, len(on.x)
    tensor = pytorch.tensor(x)
    stands_in = isinstance(tensor, pytorch.Tensor)
    return [
        Mistake(
            "a batch left as a Python list",
            lambda: model({"x": x.tolist()}),
            TypeError,
            (f"inputs[0]['x'] ({rows} entries)", "Only arrays are split"),
            "Pass numpy.asarray(...)",
        ),
        Mistake(
            "an image of PIL, not converted",
            lambda: model(x, _image()),
            TypeError,
            ("inputs[1] is a PIL.Image.Image",),
            "Pass numpy.asarray(image)[None]",
        ),
        Mistake(
            "a stand-in for a tensor of PyTorch" if stands_in else "a PyTorch tensor",
            lambda: model({"x": x, "mask": tensor}),
            TypeError,
            ("inputs[0]['mask'] is a ", "Tensor", "jax.Array or numpy.ndarray"),
            "Pass numpy.asarray(" if stands_in else "Pass tensor.numpy(force=True)",
        ),
        Mistake(
            "labels that are text",
            lambda: model(x, labels=np.array(["cat", "dog"] * (rows // 2))),
            TypeError,
            ("keywords['labels'] is an array of dtype <U3",),
            "Convert it to numbers",
        ),
        Mistake(
            "no array at all",
            lambda: model("train", 3),
            ValueError,
            ("no array among the 2 leaves",),
            "Pass the batch as a jax.Array",
        ),
        Mistake(
            "a call inside jax.jit",
            lambda: jax.jit(model)(x),
            ValueError,
            ("inputs[0] without a value, from a surrounding jax.jit",),
            "Take it out of jax.jit",
        ),
    ]


def about_shapes(on: Setting) -> list[Mistake]:
    """Arrays that cannot be split, or not together."""
    model, x, rows = on.model(), on.x, len(on.x)
    return [
        Mistake(
            "a label missing",
            lambda: model(x, np.arange(rows - 1)),
            ValueError,
            (f"inputs[0] ({rows}, 3), inputs[1] ({rows - 1},)", "dim=0"),
            "Give every array one entry per row",
        ),
        Mistake(
            "a recurrent state, split along its 2 layers",
            lambda: model(x, np.ones((2, rows, 5))),
            ValueError,
            (f"inputs[0] ({rows}, 3), inputs[1] (2, {rows}, 5)", "dim=0"),
            "Give every array one entry per row",
        ),
        Mistake(
            "a constant as an array without axes",
            lambda: model(x, temperature=np.float32(0.7)),
            ValueError,
            ("dim=0: keywords['temperature'] of shape ()",),
            "pass a constant as a Python number",
        ),
        Mistake(
            "dim=2 for a batch with two axes",
            lambda: on.model(dim=2)(x),
            ValueError,
            (f"dim=2: inputs[0] of shape ({rows}, 3) (allows -2 to 1)",),
            "Choose another dim",
        ),
        Mistake(
            "a batch without rows",
            lambda: model(x[:0]),
            ValueError,
            ("0 rows along dim=0: inputs[0] (0, 3)", "At least 1"),
            "Skip this batch",
        ),
    ]


def _image() -> Any:
    """A small image; Pillow comes with matplotlib."""
    return importlib.import_module("PIL.Image").new("RGB", (8, 8))
