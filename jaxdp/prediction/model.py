"""What is trained, as shapes alone: enough to compile a step for devices elsewhere."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from jaxdp.designs import Design
from jaxdp.precision import Precision
from jaxdp.training import DataParallel, data_parallel

PyTree = Any


class Model(NamedTuple):
    """What is trained: shapes alone are enough.

    Attributes:
        loss_fn: As `jaxdp.data_parallel` takes it.
        optimizer: Likewise.
        params: Arrays, or shapes as `jax.ShapeDtypeStruct`.
        batch: The rows of one device, likewise; split along axis 0.
        model_state: Likewise; None without any.
        precision: As `jaxdp.data_parallel` takes it.
        name: For tables and figures.
    """

    loss_fn: Callable[..., Any]
    optimizer: optax.GradientTransformation
    params: PyTree
    batch: PyTree
    model_state: PyTree = None
    precision: Precision | None = None
    name: str = "model"

    @property
    def rows(self) -> int:
        """Rows of one device."""
        return jax.tree.leaves(self.batch)[0].shape[0]

    def global_batch(self, devices: int) -> PyTree:
        """Shapes of the batch of all devices."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                (devices * x.shape[0], *x.shape[1:]), x.dtype
            ),
            self.batch,
        )

    def training(self, design: Design, mesh: jax.sharding.Mesh) -> DataParallel:
        """The training program; model state is averaged."""
        return data_parallel(
            self.loss_fn,
            self.optimizer,
            mesh,
            design,
            model_state=None if self.model_state is None else "mean",
            precision=self.precision,
        )

    def state(self, train: DataParallel) -> PyTree:
        """Shapes of its first state."""

        def start(params, model_state):
            return train.init(params, model_state=model_state)

        return jax.eval_shape(start, self.params, self.model_state)
