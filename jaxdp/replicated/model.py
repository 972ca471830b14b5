"""`DataParallel`: the whole of `nn.DataParallel`, one program per device.

`N` devices, the first of them the root. Between steps the root alone holds parameters,
buffers and optimizer state; during a step every device holds a copy and its slice of
the batch, and the output device all outputs. One Python program starts everything:
asynchronous dispatch takes the place of PyTorch's threads.

PyTorch: `torch.nn.DataParallel`, and Li et al., VLDB 2020, section 2.2, on why its
successor keeps a copy on every device instead.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
import optax

from jaxdp.mesh import without_mesh
from jaxdp.replicated import functional, replicas
from jaxdp.replicated.devices import Device, resolve, resolve_one
from jaxdp.replicated.inputs import Inputs, check, check_dim, numbers
from jaxdp.replicated.programs import Arrays, Call, flatten
from jaxdp.replicated.views.memory import Memory, watching
from jaxdp.replicated.views.trace import Trace, tracing

if TYPE_CHECKING:
    from jaxdp.replicated.step import State, TrainStep
    from jaxdp.replicated.views.anomaly import Anomaly
    from jaxdp.replicated.views.diagnosis import Diagnosis
    from jaxdp.replicated.views.layers import Layer

PyTree = Any


class Slices(NamedTuple):
    """The inputs of one call, split: for each device what it runs, and its arrays.

    Attributes:
        calls: What each replica runs.
        inputs: Its slices of the inputs, on its device.
        devices: Those that have a slice.
        sizes: Rows of each.
    """

    calls: list[Call]
    inputs: list[Arrays]
    devices: tuple[Device, ...]
    sizes: list[int]


class _State(NamedTuple):
    """Parameters and buffers, by the names that errors give them."""

    params: PyTree
    model_state: PyTree


def _own(leaf: Any) -> Any:
    """A copy of an array of NumPy: on CPU, JAX can share its memory otherwise."""
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


class DataParallel:
    """Runs one function on slices of a batch, a replica on each device.

    Called on inputs it scatters them, replicates the parameters, applies every replica
    and gathers the outputs. `jax.grad` works through a call, in reverse mode, and
    leaves the gradient of parameters on the root: the sum over replicas, which is the
    gradient of the loss on the gathered output.

    Devices: `device_ids[0]`, the root, holds the parameters; the output is on
        `output_device`; other devices hold nothing after a call.

    Cost: N - 1 copies of the parameters leave the root, every row and every output is
        sent once; backward, N - 1 gradients come to the root.

    Attributes:
        apply_fn: What a replica computes.
        params: On the root.
        model_state: Buffers, on the root; None if there are none.
        devices: Where replicas run; the order is that of the slices.
        output_device: Where outputs are gathered.
        dim: The dimension that is split and joined.
    """

    def __init__(
        self,
        apply_fn: Callable[..., Any],
        params: PyTree,
        *,
        model_state: PyTree = None,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
    ):
        """Places the parameters on the root.

        Args:
            apply_fn: `apply_fn(params, *inputs, **keywords)` gives the output of some
                rows. With a model state it receives `model_state=` too, and returns
                `(output, model_state)`.
            params: Any nesting of arrays; moved to the root, unless they are there.
            model_state: Buffers, such as BatchNorm statistics. Every replica sees those
                of the root and its own slice; only the root's updates survive.
            device_ids: Ids or devices, whose order is that of the slices; None takes
                all devices of this process.
            output_device: Id or device, any of this process; None takes the root.
            dim: The dimension along which arrays are split and outputs joined.

        Raises:
            TypeError: `apply_fn` is no function, `dim` no integer, an id none.
            ValueError: Devices that do not exist, or one twice.
        """
        if not callable(apply_fn) or _is_flax_module(apply_fn):
            raise TypeError(
                f"DataParallel got apply_fn of type {type(apply_fn).__name__}. It must "
                "be a function apply_fn(params, *inputs). For a Flax module use "
                "jaxdp.replicated.from_nnx(module) or from_linen(module, variables)."
            )
        check_dim(dim, "DataParallel")
        self.apply_fn = apply_fn
        self.devices = resolve(device_ids, "DataParallel")
        self.output_device = (
            self.root
            if output_device is None
            else resolve_one(output_device, "output_device", "DataParallel")
        )
        self.dim = dim
        state = _State(params, model_state)
        owned = jax.tree.map(_own, numbers(state, "DataParallel", ""))
        self.params, self.model_state = jax.device_put(owned, self.root)

    @property
    def root(self) -> Device:
        """The first device."""
        return self.devices[0]

    def __call__(self, *inputs: Any, **keywords: Any) -> PyTree:
        """The output for all rows, on the output device.

        Runs no backward program, unless `jax.grad` asks for one. The next model state
        is dropped: `apply` and a train step return it.

        Args:
            *inputs: Any nesting; arrays are split along `dim`, other leaves go to every
                replica as they are, and a new value of one compiles a new program.
                Memory of NumPy must not change before the output is there: devices
                may still be reading it.
            **keywords: The same.

        Returns:
            What `apply_fn` returned: arrays joined along `dim`, scalars stacked to
            `[N]`.

        Raises:
            TypeError: Leaves that look like data and are none.
            ValueError: No array, arrays of different length, `dim` out of range, no
                rows; outputs of different structure; `apply_fn` brought arrays from
                another device; a call inside `jax.jit`.
            Exception: What `apply_fn` raised, with replica, device and rows named.

        Example:
            >>> import jax.numpy as jnp, jaxdp
            >>> model = jaxdp.DataParallel(lambda w, x: w * x, jnp.array(3.0))
            >>> model(jnp.arange(10.0)).tolist()[-3:]
            [21.0, 24.0, 27.0]
        """
        output, _ = self._run(self.params, self.model_state, inputs, keywords)
        return output

    def apply(
        self, params: PyTree, *inputs: Any, model_state: PyTree = None, **keywords: Any
    ) -> Any:
        """Calls with other parameters; as `__call__` otherwise.

        Args:
            params: Like the model's, on any device.
            *inputs: As of a call.
            model_state: Buffers, if `apply_fn` takes any.
            **keywords: As of a call.

        Returns:
            The output; with a model state `(output, model_state)`, the root's.

        Example:
            >>> import jax, jax.numpy as jnp, jaxdp
            >>> model = jaxdp.DataParallel(lambda w, x: w * x, jnp.array(3.0))
            >>> def loss(w):
            ...     return jnp.mean(model.apply(w, jnp.arange(10.0)))
            >>> print(jax.grad(loss)(model.params))
            4.5
        """
        state = self.model_state if model_state is None else model_state
        output, new = self._run(params, state, inputs, keywords)
        return output if model_state is None else (output, new)

    def train_step(
        self, loss_fn: Callable[..., Any], optimizer: optax.GradientTransformation
    ) -> "TrainStep":
        """Makes the training step: all eight stages, the optimizer on the root.

        Args:
            loss_fn: `loss_fn(output, targets)` on the gathered output: a scalar or a
                `jaxdp.Mean`, alone or as `(loss, jaxdp.Aux(metrics=...))`.
            optimizer: Any optax transformation.

        Returns:
            A `jaxdp.replicated.TrainStep`: `state = step.init()`, then
            `state, metrics = step(state, inputs, targets)`.
        """
        from jaxdp.replicated.step import TrainStep

        return TrainStep(self, loss_fn, optimizer)

    def trace(self) -> AbstractContextManager[Trace]:
        """Records every stage and device inside a `with` block.

        Example:
            >>> import jax.numpy as jnp, jaxdp
            >>> model = jaxdp.DataParallel(lambda w, x: w * x, jnp.array(3.0))
            >>> with model.trace() as trace:
            ...     output = model(jnp.arange(10.0))
            >>> trace.records[-1].stage
            '5 gather'
        """
        return tracing()

    def memory(self) -> AbstractContextManager[Memory]:
        """Counts what every device holds, stage by stage, inside a `with` block."""
        return watching()

    def layers(self, *inputs: Any, **keywords: Any) -> "list[Layer]":
        """Runs every replica operation by operation, and reports its Flax modules.

        See `jaxdp.replicated.layers`.
        """
        from jaxdp.replicated.views.layers import layers

        return layers(self, *inputs, **keywords)

    def find_nan(
        self,
        inputs: Any,
        targets: PyTree = None,
        loss_fn: Callable[..., Any] | None = None,
        state: "State | None" = None,
        **options: Any,
    ) -> "Anomaly | None":
        """Runs one step until a NaN appears; names stage, device, layer and line.

        See `jaxdp.replicated.find_nan`.
        """
        from jaxdp.replicated.views.anomaly import find_nan

        return find_nan(self, inputs, targets, loss_fn, state, **options)

    def diagnose(
        self,
        loss_fn: Callable[..., Any],
        optimizer: optax.GradientTransformation,
        batches: Any,
        **options: Any,
    ) -> "Diagnosis":
        """Measures where the time of a training step goes, and says what to do.

        Args:
            loss_fn: As of `train_step`.
            optimizer: As of `train_step`.
            batches: An iterable of `(inputs, targets)`, or one such tuple.
            **options: As of `jaxdp.replicated.diagnose`.
        """
        from jaxdp.replicated.views.diagnosis import diagnose

        step = self.train_step(loss_fn, optimizer)
        return diagnose(step, step.init(), batches, **options)

    def split(self, params_like: PyTree, inputs: tuple, keywords: dict) -> Slices:
        """Stages 1 and 3: checks inputs and sends every device its slice.

        Args:
            params_like: `(params, model_state)`: structure and number of arrays.
            inputs: Positional inputs.
            keywords: Keyword inputs.
        """
        rows = check(Inputs(inputs, keywords), self.dim, "DataParallel")
        call, arrays = flatten(
            self.apply_fn, (*params_like, inputs, keywords), self.devices
        )
        first = len(jax.tree.leaves(params_like))
        slices, sizes = functional.split(arrays[first:], self.devices, self.dim, rows)
        used = self.devices[: len(sizes)]
        return Slices([call] * len(sizes), slices, used, sizes)

    @without_mesh
    def _run(self, params, state, inputs, keywords) -> tuple[PyTree, PyTree]:
        """Stages 1 to 5."""
        params, state = numbers(_State(params, state), "DataParallel", "")
        slices = self.split((params, state), inputs, keywords)
        copies = functional.copies(params, state, slices.devices)
        ran = replicas.predict(
            slices.calls,
            [[*own, *part] for own, part in zip(copies, slices.inputs, strict=True)],
            slices.devices,
            slices.sizes,
        )
        outputs = [output for output, _ in ran]
        output = functional.collect(
            outputs, slices.devices, self.output_device, self.dim
        )
        return output, ran[0][1]


def _is_flax_module(value: Any) -> bool:
    """Whether a value is a module of NNX or Linen, asked without importing Flax."""
    return any(
        kind.__name__ == "Module" and kind.__module__.startswith("flax.")
        for kind in type(value).__mro__
    )
