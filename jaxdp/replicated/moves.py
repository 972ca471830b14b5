"""Scatter, replicate and gather as moves: there, and back for the gradient.

A move is plain data: which devices, which sizes. `there` starts it; `back` is its
transpose, which takes cotangents of what came out to cotangents of what went in. As in
PyTorch's `torch.nn.parallel`, what was scattered is gathered, what was replicated is
summed where it came from, and what was gathered is scattered.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Protocol

import jax
from jax.core import Tracer

from jaxdp.buckets import is_summable
from jaxdp.mesh import without_mesh
from jaxdp.replicated import observe, transfers
from jaxdp.replicated.devices import Device
from jaxdp.replicated.transfers import Arrays, Sizes

Devices = tuple[Device, ...]


class Move(Protocol):
    """A linear function on arrays, and its transpose; hashable."""

    def there(self, arrays: Any) -> Any:
        """Starts the move."""
        ...

    def back(self, cotangents: Any) -> Any:
        """Starts the transpose."""
        ...


@dataclasses.dataclass(frozen=True)
class Scatter:
    """Arrays to slices, one for each device.

    Attributes:
        devices: As many as there are slices.
        dim: The dimension to split.
        sizes: Of the slices along `dim`.
        sources: Where each array lies; None is the host.
    """

    devices: Devices
    dim: int
    sizes: Sizes
    sources: tuple[Device | None, ...]

    def there(self, arrays: Arrays) -> list[Arrays]:
        """For each device its slices of the arrays."""
        parts: list[Arrays] = [[None] * len(arrays) for _ in self.sizes]
        for source in dict.fromkeys(self.sources):
            indices = [i for i, other in enumerate(self.sources) if other == source]
            chosen = [arrays[i] for i in indices]
            began = observe.now()
            pieces = transfers.cut(chosen, source, self.dim, self.sizes)
            if source is not None:
                made = {"batch": pieces}
                about = ("3 scatter", "slices", None, source, source)
                observe.tell(*about, chosen, made, began)
            for replica, (piece, device) in enumerate(
                zip(pieces, self.devices, strict=True)
            ):
                about = ("3 scatter", "batch", replica)
                sent = transfers.send(piece, source, device, *about)
                for i, array in zip(indices, sent, strict=True):
                    parts[replica][i] = array
        return parts

    def back(self, cotangents: list[Arrays]) -> Arrays:
        """The whole arrays, where they came from."""
        whole = []
        for column, source in zip(
            zip(*cotangents, strict=True), self.sources, strict=True
        ):
            home = source or self.devices[0]
            about = ("7 backward", "gradients of the batch")
            parts = [
                transfers.send([array], device, home, *about, replica)
                for replica, (array, device) in enumerate(
                    zip(column, self.devices, strict=True)
                )
            ]
            whole += transfers.joined(parts, self.dim)
        return whole


@dataclasses.dataclass(frozen=True)
class Replicate:
    """Arrays to copies, one on each device; they come from the first.

    Attributes:
        devices: Of the replicas; the first is the root.
        what: What the arrays are.
    """

    devices: Devices
    what: str = "parameters"

    def there(self, arrays: Arrays) -> list[Arrays]:
        """For each device its copies."""
        root = self.devices[0]
        arrays = self.at_root(arrays)
        return [
            transfers.send(arrays, root, device, "2 replicate", self.what, replica)
            for replica, device in enumerate(self.devices)
        ]

    def at_root(self, arrays: Arrays) -> Arrays:
        """The arrays, those from elsewhere sent to the root."""
        root = self.devices[0]
        strangers = [i for i, a in enumerate(arrays) if not transfers.is_on(a, root)]
        moved = list(arrays)
        for source in dict.fromkeys(transfers.where(arrays[i]) for i in strangers):
            indices = [i for i in strangers if transfers.where(arrays[i]) == source]
            chosen = [arrays[i] for i in indices]
            sent = transfers.send(chosen, source, root, "2 replicate", self.what)
            for i, array in zip(indices, sent, strict=True):
                moved[i] = array
        return moved

    def back(self, cotangents: list[Arrays]) -> Arrays:
        """The sum over replicas, on the first device."""
        return self.add(self.collect(cotangents))

    def collect(self, gradients: list[Arrays]) -> list[Arrays]:
        """The replicas' gradients, on the first device."""
        root = self.devices[0]
        about = ("8 reduce", "received gradients")
        own, *others = gradients
        received = [
            transfers.send(arrays, device, root, *about, replica)
            for replica, (arrays, device) in enumerate(
                zip(others, self.devices[1:], strict=True), start=1
            )
        ]
        return [own, *received]

    def add(self, received: list[Arrays]) -> Arrays:
        """Their sum."""
        root = self.devices[0]
        began = observe.now()
        total = transfers.added(received)
        about = ("8 reduce", "gradient", None, root, root, received)
        lower = functools.partial(transfers.added.lower, received)
        observe.tell(*about, {"gradient": total}, began, lower)
        return total


@dataclasses.dataclass(frozen=True)
class Gather:
    """Slices to whole arrays, on one device.

    Attributes:
        devices: Where the slices lie.
        output_device: Where they go.
        dim: The dimension to join along.
        sizes: For each array the sizes of its slices; of scalars their number.
    """

    devices: Devices
    output_device: Device
    dim: int
    sizes: tuple[Sizes | int, ...]

    def there(self, parts: list[Arrays]) -> Arrays:
        """The joined arrays."""
        received = self.collect(parts)
        began = observe.now()
        whole = transfers.joined(received, self.dim)
        about = ("5 gather", "join", None, self.output_device, self.output_device)
        lower = functools.partial(transfers.joined.lower, received, self.dim)
        observe.tell(*about, received, {"gathered outputs": whole}, began, lower)
        return whole

    def collect(self, parts: list[Arrays]) -> list[Arrays]:
        """The slices, on the output device."""
        about = ("5 gather", "received outputs")
        return [
            transfers.send(arrays, device, self.output_device, *about, replica)
            for replica, (arrays, device) in enumerate(
                zip(parts, self.devices, strict=True)
            )
        ]

    def back(self, cotangents: Arrays) -> list[Arrays]:
        """The slices of the cotangents, each on its replica's device."""
        return self.spread(transfers.unjoined(cotangents, self.dim, self.sizes))

    def spread(self, cotangents: list[Arrays]) -> list[Arrays]:
        """Cotangents of slices, to the devices of the slices."""
        about = ("7 scatter back", "output gradients")
        return [
            transfers.send(arrays, self.output_device, device, *about, replica)
            for replica, (arrays, device) in enumerate(
                zip(cotangents, self.devices, strict=True)
            )
        ]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def linear(move: Move, arrays: Any) -> Any:
    """A move that `grad` can pass."""
    return move.there(arrays)


linear.defvjp(
    lambda move, arrays: (move.there(arrays), None),
    lambda move, _, cotangents: (without_mesh(move.back)(cotangents),),
)


def fan_out(arrays: Arrays, make: Any) -> list[Arrays]:
    """Moves one list of arrays to several devices.

    Args:
        arrays: Any; gradients flow through those that have one.
        make: Gives the move for some of the arrays, by their indices.
    """
    if not any(isinstance(array, Tracer) for array in arrays):
        return make(range(len(arrays))).there(arrays)
    parts: list[list[Any]] = []
    for indices, run in _by_kind([[array] for array in arrays]):
        moved = run(make(indices), [arrays[i] for i in indices])
        parts = parts or [[None] * len(arrays) for _ in moved]
        for part, some in zip(parts, moved, strict=True):
            for i, array in zip(indices, some, strict=True):
                part[i] = array
    return parts


def fan_in(parts: Sequence[Arrays], make: Any) -> Arrays:
    """Moves lists of arrays from several devices to one; as `fan_out`."""
    count = len(parts[0])
    if not any(isinstance(array, Tracer) for part in parts for array in part):
        return make(range(count)).there(parts)
    whole: Arrays = [None] * count
    for indices, run in _by_kind(list(zip(*parts, strict=True))):
        moved = run(make(indices), [[part[i] for i in indices] for part in parts])
        for i, array in zip(indices, moved, strict=True):
            whole[i] = array
    return whole


def _by_kind(leaves: Sequence[Sequence[Any]]) -> list[tuple[list[int], Any]]:
    """Indices of the leaves with a gradient and without, and how to run their moves.

    Leaves that `grad` does not follow stay out: what is frozen gets no gradient.
    """
    smooth = [
        i
        for i, pieces in enumerate(leaves)
        if is_summable(pieces[0]) and any(isinstance(x, Tracer) for x in pieces)
    ]
    rest = sorted(set(range(len(leaves))) - set(smooth))
    kinds = [(smooth, linear), (rest, lambda move, arrays: move.there(arrays))]
    return [(indices, run) for indices, run in kinds if indices]
