"""Which device computes each layer: hooks that report every Flax submodule.

A compiled program has no modules any more. So the replicas run once operation by
operation, and each module's arrays are asked where they are.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax.core import Tracer

from jaxdp.replicated import functional, replicas
from jaxdp.replicated.captured import check_captured
from jaxdp.replicated.devices import Device
from jaxdp.replicated.programs import Arrays, Call
from jaxdp.replicated.views.hooks import hooked, inlined

if TYPE_CHECKING:
    from jaxdp.replicated.model import DataParallel

PyTree = Any


class Layer(NamedTuple):
    """One call of a Flax module by one replica.

    Attributes:
        replica: Which replica.
        path: Where the module stands, such as "blocks.0.conv1" or "Block_0.Dense_1";
            the outermost goes by the name of its class.
        kind: The name of its class.
        device: Where its output is, asked of the arrays; None if it returned none, or
            ran inside `jax.checkpoint`, `jax.vmap` or `jax.grad`, where it has no array
            of its own.
        shape: Of its output; of several arrays a tuple of shapes.
        dtype: Of its output, such as "float32"; of several arrays a tuple.
        nbytes: Of its output, all arrays together.
    """

    replica: int
    path: str
    kind: str
    device: Device | None
    shape: tuple[Any, ...]
    dtype: str | tuple[str, ...]
    nbytes: int


def layers(model: "DataParallel", *inputs: Any, **keywords: Any) -> list[Layer]:
    """Runs the model operation by operation, and reports every call of a Flax module.

    Slow: nothing is compiled as a whole, and a `scan` is a Python loop. The model and
    its modules stay as they are.

    Args:
        model: Made by `from_nnx`, by `from_linen`, or with any `apply_fn` that calls
            Flax modules.
        *inputs: As of a call of the model.
        **keywords: As of a call of the model.

    Returns:
        For each replica its layers, in the order in which they finish: a module comes
        after those inside it, and twice if it was called twice. Empty if `apply_fn`
        calls no Flax module.

    Raises:
        Exception: What a call of the model raises.

    Example:
        >>> import jax.numpy as jnp, jaxdp
        >>> from flax import nnx
        >>> rngs = nnx.Rngs(0)
        >>> net = nnx.Sequential(nnx.Linear(3, 4, rngs=rngs), nnx.relu)
        >>> model = jaxdp.replicated.from_nnx(net, device_ids=[3, 1])
        >>> for each in layers(model, jnp.ones((5, 3))):
        ...     print(each.path, each.kind, each.device.id, each.shape)
        layers.0 Linear 3 (3, 4)
        Sequential Sequential 3 (3, 4)
        layers.0 Linear 1 (2, 4)
        Sequential Sequential 1 (2, 4)
    """
    slices = model.split((model.params, model.model_state), inputs, keywords)
    copies = functional.copies(model.params, model.model_state, slices.devices)
    found: list[Layer] = []
    with replicas.started(slices.devices, slices.sizes) as running:
        for replica, device in enumerate(slices.devices):
            arrays = [*copies[replica], *slices.inputs[replica]]
            made = _layers_of(slices.calls[replica], arrays, device, replica)
            running.append(())
            found += made
    return found


def _layers_of(call: Call, arrays: Arrays, device: Device, replica: int) -> list[Layer]:
    """The layers of one replica."""
    # Refuses what the model refuses: modules of a closure that the call would change,
    # and captured arrays.
    check_captured(jax.make_jaxpr(call)(arrays), call.apply_fn, call.devices)
    found: list[Layer] = []

    def hook(module, path, run):
        output = run()
        found.append(_layer(replica, path, type(module).__name__, output))
        return output

    def run():
        found.clear()
        call(arrays)

    # What a layer makes from nothing, such as zeros, belongs on the replica's device.
    with jax.default_device(device), hooked(hook):
        inlined(run)
    # Some transformations trace a module before they run it.
    ran = {layer.path for layer in found if layer.device is not None}
    return [layer for layer in found if layer.device or layer.path not in ran]


def _layer(replica: int, path: str, kind: str, output: PyTree) -> Layer:
    """The record of one call."""
    arrays = [leaf for leaf in jax.tree.leaves(output) if isinstance(leaf, jax.Array)]
    shapes = tuple(tuple(array.shape) for array in arrays)
    dtypes = tuple(str(array.dtype) for array in arrays)
    shape, dtype = (shapes[0], dtypes[0]) if len(arrays) == 1 else (shapes, dtypes)
    real = [array for array in arrays if not isinstance(array, Tracer)]
    devices = [device for array in real for device in array.devices()]
    device = devices[0] if devices else None
    nbytes = sum(array.size * array.dtype.itemsize for array in arrays)
    return Layer(replica, path, kind, device, shape, dtype, nbytes)
