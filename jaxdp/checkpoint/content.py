"""What a checkpoint keeps of a state: its content, as trees of whole arrays.

    step, params, opt_state, rng, model_state, loss_scale
                   the same tree for every design and number of devices
    carried        by name, what one design keeps besides, as it lies on its devices

Keys are the integers they are made of. Of a model state that every replica has for
itself, content is the one that `train.model_state` gives; the copies are carried.
"""

import math
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxdp.buckets import is_key
from jaxdp.checkpoint.names import named
from jaxdp.designs.portable import Portable
from jaxdp.designs.stacks import spread
from jaxdp.mesh import without_mesh
from jaxdp.state import TrainState
from jaxdp.trainer import Trainer

PyTree = Any
COPIES = "model_states"  # carried, of replicas that have one each
FIELDS = ("step", "rng", "model_state", "loss_scale")  # that are kept as they are


class Content(NamedTuple):
    """What a checkpoint keeps of a state.

    Attributes:
        common: By field, what does not depend on the design.
        carried: By name, what does.
    """

    common: dict[str, PyTree]
    carried: dict[str, PyTree]

    def names(self) -> dict[str, Any]:
        """All leaves by name."""
        found = {}
        for field, tree in self.common.items():
            found |= named(tree, field)
        for name, tree in self.carried.items():
            found |= named(tree, f"carried/{name}")
        return found


def content_of(state: TrainState, trainer: Trainer) -> Content:
    """The content of a state whose leaves are NumPy arrays, or shapes being traced."""
    portable = trainer.replica.design.portable(state.params, state.opt_state)
    carried = dict(portable.carried)
    model_state = state.model_state
    if trainer.specs[0].model_state != P():
        carried[COPIES] = model_state
        model_state = trainer.surviving(model_state)
    common = {name: getattr(state, name) for name in FIELDS}
    common |= {"params": portable.params, "opt_state": portable.opt_state}
    return Content(common | {"model_state": model_state}, carried)


def expected_of(state: TrainState, trainer: Trainer) -> Content:
    """Shapes and dtypes of what a checkpoint of such a state would keep."""

    def content(state):
        return content_of(without_keys(state), trainer)

    return without_mesh(jax.eval_shape)(content, state)


def state_of(content: Content, like: TrainState, trainer: Trainer) -> TrainState:
    """The state of a content, as global NumPy arrays; undoes `content_of`.

    Args:
        content: NumPy arrays, in the structure that `expected_of(like)` has.
        like: A fresh state of this training, on its devices.
        trainer: The training.
    """
    common = content.common
    carried = {k: v for k, v in content.carried.items() if k != COPIES}
    portable = Portable(common["params"], common["opt_state"], carried)
    plain = without_keys(like)
    params, opt_state = trainer.replica.design.kept(
        portable, plain.params, plain.opt_state
    )
    model_state = common["model_state"]
    if trainer.specs[0].model_state != P():
        own = content.carried.get(COPIES, model_state)
        model_state = jax.tree.map(_copies, own, model_state, plain.model_state)
    return TrainState(
        *(common["step"], params, opt_state, common["rng"]),
        *(model_state, common["loss_scale"], like.design),
    )


def without_keys(tree: PyTree) -> PyTree:
    """Keys as the integers they are made of."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)


def kinds_of_keys(state: TrainState) -> dict[str, str]:
    """By name, how the keys of a state make random numbers."""
    leaves = named(state.rng, "rng") | named(state.model_state, "model_state")
    return {
        name: str(jax.random.key_impl(leaf))
        for name, leaf in leaves.items()
        if is_key(leaf)
    }


def size_of(leaf: Any) -> int:
    """Bytes of an array, or of one that is only described."""
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize


def _copies(own: np.ndarray, first: np.ndarray, like: Any) -> np.ndarray:
    """One for each replica: its own, or on another number of devices the first one."""
    return own if own.shape == like.shape else spread(first, like)
