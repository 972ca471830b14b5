"""Models whose training steps are measured in 32 and 16 bits, as shapes alone.

Flax computes in the dtype that parameters and inputs have, if a layer has no `dtype` of
its own. Two layers have one without being asked: `nnx.Embed` keeps that of its initial
table, and `nnx.BatchNorm` widens to its running statistics. What comes after them is
float32 again, so that "mixed precision" computes almost nothing in 16 bits.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.extend.core import Jaxpr

import jaxdp
from experiments import models
from experiments.models.resnet import STAGES
from experiments.models.transformer import GPT2_SMALL
from jaxdp import prediction
from jaxdp.precision import DTYPES, Precision

PyTree = Any
WIDENING = nnx.Embed, nnx.BatchNorm


class Model(NamedTuple):
    """A model to be trained, and the sizes of a step.

    Attributes:
        name: How tables call it.
        loss_fn: As `jaxdp.data_parallel` takes it.
        params: Shapes of the parameters.
        model_state: Shapes of BatchNorm statistics; None without any.
        row: Shapes of one row of a batch.
        optimizer: What is trained with.
    """

    name: str
    loss_fn: Callable[..., Any]
    params: PyTree
    model_state: PyTree
    row: tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]
    optimizer: optax.GradientTransformation

    def batch(self, rows: int) -> PyTree:
        """Shapes of a batch."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((rows, *x.shape), x.dtype), self.row
        )

    def described(self, rows: int, precision: Precision) -> prediction.Model:
        """As steps are compiled from, with the rows of one device."""
        return prediction.Model(
            self.loss_fn,
            self.optimizer,
            *(self.params, self.batch(rows), self.model_state),
            precision,
            self.name,
        )

    def forward(self, precision: Precision, rows: int) -> Jaxpr:
        """The forward pass, traced; its results are kept for the backward pass."""

        def forward(params, model_state, batch):
            def loss(params):
                return self.compute(precision, params, model_state, batch)

            return jax.vjp(loss, params)[1]

        given = self.params, self.model_state, self.batch(rows)
        return jax.make_jaxpr(forward)(*given).jaxpr

    def compute(self, precision: Precision, params, model_state, batch) -> jax.Array:
        """The loss as a training step of that precision computes it."""
        given = precision.to_compute((params, batch))
        state = {} if model_state is None else {"model_state": model_state}
        return self.loss_fn(*given, **state)[0]


def resnet(tiny: bool, precision: Precision, follow: bool, image_size: int) -> Model:
    """ResNet-50 on images, SGD with momentum."""
    stages = ((4, 1),) if tiny else STAGES
    split = _split(
        lambda: models.ResNet50(nnx.Rngs(0), stages=stages), precision, follow
    )
    image = jax.ShapeDtypeStruct((image_size, image_size, 3), jnp.float32)
    row = image, jax.ShapeDtypeStruct((), jnp.int32)
    optimizer = optax.sgd(0.1, momentum=0.9)
    return Model("ResNet-50, SGD", *split, row, optimizer)


def transformer(
    tiny: bool, precision: Precision, follow: bool, blocks: int = 12
) -> Model:
    """A transformer of the size of GPT-2, but for its vocabulary; Adam."""
    width, blocks, context = (16, 1, 8) if tiny else (768, blocks, 256)
    sizes = {"width": width, "blocks": blocks, "context": context}
    return _transformer("transformer, Adam", sizes, precision, follow)


def gpt2_small(tiny: bool, precision: Precision) -> Model:
    """GPT-2 small in every size, on tokens; Adam."""
    sizes = GPT2_SMALL
    if tiny:
        sizes = {"vocabulary": 50, "context": 8, "width": 16, "blocks": 1, "tied": True}
    return _transformer("GPT-2 small, Adam", sizes, precision, True)


def _transformer(name: str, sizes: Any, precision: Precision, follow: bool) -> Model:
    """A transformer of some sizes."""
    split = _split(
        lambda: models.CharTransformer(nnx.Rngs(0), **sizes), precision, follow
    )
    tokens = jax.ShapeDtypeStruct((sizes["context"],), jnp.int32)
    return Model(name, *split, (tokens, tokens), optax.adam(0.1))


def follow_inputs(module: nnx.Module, precision: Precision) -> None:
    """Gives the layers that would widen the dtype that computes."""
    for _, layer in nnx.iter_modules(module):
        if isinstance(layer, WIDENING):
            layer.dtype = DTYPES[str(precision.compute)]


def _split(make: Callable[[], nnx.Module], precision: Precision, follow: bool):
    """The loss function, parameters and statistics of a module."""
    module = nnx.eval_shape(make)
    if follow:
        follow_inputs(module, precision)
    graphdef, params, statistics = nnx.split(module, nnx.Param, nnx.BatchStat)

    def loss_fn(params, batch, model_state=None):
        x, labels = batch
        states = [nnx.State(params), nnx.State(model_state or {})]
        merged = nnx.merge(graphdef, *states, copy=True)
        logits = merged(x).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        new = nnx.to_pure_dict(nnx.state(merged, nnx.BatchStat)) or None
        return losses.mean(), jaxdp.Aux(model_state=new)

    plain = nnx.to_pure_dict(params), nnx.to_pure_dict(statistics) or None
    return loss_fn, *plain


def size_bytes(tree: PyTree, itemsize: int | None = None) -> int:
    """Bytes of all arrays, or of those whose elements have so many."""
    return sum(
        int(np.prod(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if itemsize in (None, leaf.dtype.itemsize)
    )
