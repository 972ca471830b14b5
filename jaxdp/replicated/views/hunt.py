"""The stages of one step, one after the other, each checked for a NaN."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.replicated import functional, replicas, step
from jaxdp.replicated.devices import Device
from jaxdp.replicated.inputs import Inputs, check_arrays, is_array, rows_of
from jaxdp.replicated.moves import Replicate
from jaxdp.replicated.programs import Call
from jaxdp.replicated.views import origin, rerun
from jaxdp.replicated.views.anomaly import Anomaly
from jaxdp.state import check_params
from jaxdp.trees import place

if TYPE_CHECKING:
    from jaxdp.replicated.model import DataParallel

PyTree = Any
Arrays = list[Any]
Founds = Iterator[Anomaly | None]
SHOWN = 5  # row numbers in a message


class Hunt:
    """One step of a model on one batch."""

    def __init__(
        self,
        model: "DataParallel",
        inputs: Any,
        targets: PyTree,
        loss_fn: Callable[..., Any] | None,
        state: step.State | None,
        keywords: dict[str, Any],
        kinds: tuple[str, ...],
    ):
        """Sends everything to its device: stages 1 to 3."""
        params, buffers = model.params, model.model_state
        if state is not None:
            step.check_alive(state)
            params, buffers = state.params, state.model_state
        if loss_fn is not None:
            check_params(params, "find_nan")
        check_arrays(targets, "find_nan", "targets")
        self.model, self.loss_fn, self.kinds = model, loss_fn, kinds
        self.params, self.buffers = params, buffers
        self.trained = len(jax.tree.leaves(params))
        self.inputs = Inputs(
            inputs if isinstance(inputs, tuple) else (inputs,), keywords
        )
        self.targets = jax.device_put(targets, model.output_device)
        self.slices = model.split((params, buffers), *self.inputs)
        self.copies = functional.copies(params, buffers, self.slices.devices)
        self.given = [
            [*own, *part]
            for own, part in zip(self.copies, self.slices.inputs, strict=True)
        ]

    def stages(self) -> Founds:
        """What is found at each place of a step, in order; None where all is well."""
        yield from self._data()
        slices = self.slices
        if self.loss_fn is not None:
            yield from self._training(self.loss_fn)
            return
        calls, devices, sizes = slices.calls, slices.devices, slices.sizes
        made = replicas.predict(calls, self.given, devices, sizes)
        yield from self._forward(made, lambda call: call)

    def _data(self) -> Founds:
        """Stages 1 to 3: targets, parameters and buffers, inputs."""
        where, leaves = _named(self.targets, "targets"), jax.tree.leaves(self.targets)
        yield self._leaf("1 place", self.model.output_device, None, where, leaves, 0)
        where = _named(self.params, "params") + _named(self.buffers, "model_state")
        yield self._leaf("2 replicate", self.model.root, None, where, self.copies[0])
        yield self._constant()
        where, start = _named(self.inputs), 0
        for i, part in enumerate(self.slices.inputs):
            device = self.slices.devices[i]
            yield self._leaf("3 scatter", device, i, where, part, start)
            start += self.slices.sizes[i]

    def _forward(
        self, made: Sequence[Any], program: Callable[[Call], Callable[..., Any]]
    ) -> Founds:
        """Stage 4: outputs and buffers of the replicas."""
        slices = self.slices
        for i, each in enumerate(made):
            leaves, rows = jax.tree.leaves(each), rows_of(slices.sizes, i)
            about = ("4 forward", slices.devices[i], i, [rows] * len(leaves), leaves)
            yield self._made(*about, program(slices.calls[i]), self.given[i])

    def _training(self, loss_fn: Callable[..., Any]) -> Founds:
        """Stages 4 to 8, with a loss function."""
        model, slices, trained = self.model, self.slices, self.trained
        devices, root, target = slices.devices, model.root, model.output_device
        made, saved = replicas.forward(slices, self.given, trained)  # 4
        yield from self._forward(made, lambda call: rerun.forward_of(call, trained))
        gather, parts, structure = functional.gathering(  # 5
            [output for output, _ in made], devices, target, model.dim
        )
        run = rerun.loss_of(loss_fn, structure, model.dim)  # 6
        given = (gather.collect(parts), self.targets)
        loss, metrics, weight, cotangents = run(given)
        leaves = jax.tree.leaves((loss, metrics, cotangents))
        where = ["loss", *_named(metrics, "metrics"), *_of_replicas(cotangents)]
        yield self._made("6 loss", target, None, where, leaves, run, given)
        cotangents = gather.spread(cotangents)  # 7
        given = list(self.given)
        gradients = replicas.backward(saved, devices, given, cotangents, slices.sizes)
        where = [f"gradient of {each}" for each in _named(self.params, "params")]
        for i, each in enumerate(gradients):
            names = [f"{rows_of(slices.sizes, i)}, {name}" for name in where]
            run = rerun.backward_of(slices.calls[i], trained)
            given = (self.given[i], cotangents[i])
            yield self._made("7 backward", devices[i], i, names, each, run, given)
        received = Replicate(devices).collect(gradients)  # 8
        given = (received, jax.device_put(weight, root))
        yield self._made(
            "8 reduce", root, None, where, rerun.mean(given), rerun.mean, given
        )

    def _leaf(
        self,
        stage: str,
        device: Device,
        replica: int | None,
        where: Sequence[str],
        leaves: Arrays,
        start: int | None = None,
    ) -> Anomaly | None:
        """The first bad leaf; with its rows, counted from `start`, if it has any."""
        kinds = origin.check(leaves, self.kinds)
        for path, leaf, kind in zip(where, leaves, kinds, strict=True):
            if kind is not None:
                dim = self.model.dim
                rows = "" if start is None else _rows(leaf, kind, dim, start)
                return Anomaly(kind, stage, device, replica, path + rows)
        return None

    def _constant(self) -> Anomaly | None:
        """The first bad number among the inputs, which all replicas get."""
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.inputs):
            if isinstance(leaf, float | complex) and not is_array(leaf):
                where = [place(path)]
                about = ("3 scatter", self.model.root, None, where)
                if found := self._leaf(*about, [jnp.asarray(leaf)]):
                    return found
        return None

    def _made(
        self,
        stage: str,
        device: Device,
        replica: int | None,
        where: Sequence[str],
        leaves: Arrays,
        run: Callable[..., Any],
        given: Any,
    ) -> Anomaly | None:
        """The first bad result of `run(given)`, and the operation that made it."""
        found = self._leaf(stage, device, replica, where, leaves)
        if found is None:
            return None
        made = origin.find(run, given, device, self.kinds)
        if made is None:
            return found._replace(where=f"{found.where}, made by no single operation")
        if stage == "7 backward" and not made.is_backward:
            stage = "4 forward"  # dropped there, and spoils the gradient
        return found._replace(
            kind=made.kind,
            stage=stage,
            layer=made.layer,
            operation=made.operation,
            source=made.source,
        )


def _of_replicas(cotangents: list[Arrays]) -> list[str]:
    """What the cotangents are called."""
    return [
        f"gradient of the output of replica {i}"
        for i, each in enumerate(cotangents)
        for _ in each
    ]


def _named(tree: PyTree, prefix: str = "") -> list[str]:
    """What the arrays of a tree are called, such as "params['w']"."""
    return [
        place(path, prefix)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if is_array(leaf)
    ]


def _rows(array: jax.Array, kind: str, dim: int, start: int) -> str:
    """Which rows are bad, in words; empty if the array has no rows."""
    if not -array.ndim <= dim < array.ndim:
        return ""
    bad = np.asarray({"nan": jnp.isnan, "inf": jnp.isinf}[kind](array))
    rows = np.moveaxis(bad, dim, 0).reshape(bad.shape[dim], -1).any(axis=1)
    numbers = [str(start + row) for row in np.flatnonzero(rows)]
    more = f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
    label = "row" if len(numbers) == 1 else "rows"
    return f", {label} {', '.join(numbers[:SHOWN])}{more}"
