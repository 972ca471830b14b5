"""Stacked layers whose parameters are gathered one by one, inside a scan.

A network of equal layers keeps their parameters stacked, `[L, ...]`, and scans over
them. If the whole stack were gathered before the scan, all its layers would be whole at
once. `scan_layers` gathers each layer inside the scan, computes it, and frees it; the
backward scan gathers it again, and reduce-scatters its gradient before the next one.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Literal

from jaxdp.buckets import by_dtype, is_movable, is_summable
from jaxdp.zero.flat import flattened
from jaxdp.zero.shards import Shard, is_shard
from jaxdp.zero.wire import Wire

PyTree = Any
SCANNED = "jaxdp scanned layers"
# What may stand between the parts that a loss is given and `scan_layers`.
PASSING = frozenset({"convert_element_type", "copy", "pvary"})


@jax.tree_util.register_pytree_node_class
class LayerShards:
    """Stacked layers in parts: what a loss finds in place of a stack.

    It is for `scan_layers` alone. Its leaves, which gradients have too, are this
    device's parts: gradients of these are sums over the devices of the sharded axis.

    Attributes:
        shards: A tree of `Shard`s with as many `layers` as the stack has.
        wire: How they are gathered.
    """

    def __init__(self, shards: PyTree, wire: Wire):
        """Of a tree of shards."""
        self.shards, self.wire = shards, wire

    @classmethod
    def of(cls, shards: PyTree, wire: Wire) -> "LayerShards":
        """Of a tree of shards."""
        return cls(shards, wire)

    def tree_flatten(self):
        """Its children are the numbers of this device."""
        shards, structure = jax.tree.flatten(self.shards, is_leaf=is_shard)
        empty = tuple(shard.like(None) for shard in shards)
        return [shard.data for shard in shards], (structure, empty, self.wire)

    @classmethod
    def tree_unflatten(cls, aux, children):
        """Undoes it."""
        structure, empty, wire = aux
        shards = [s.like(data) for s, data in zip(empty, children, strict=True)]
        return cls(structure.unflatten(shards), wire)

    def _refuse(self, *_: Any) -> NoReturn:
        """What it is not for."""
        names = jax.tree_util.tree_leaves_with_path(self.shards, is_leaf=is_shard)
        listed = ", ".join(f"{jax.tree_util.keystr(p)} {s.shape}" for p, s in names)
        raise TypeError(
            f"loss_fn used stacked layers ({listed}) by itself, and Zero has cut them "
            "into parts: on this device they are not whole. Layers named in "
            "Zero(layers=...) are gathered one by one. Pass the entry of the "
            "parameters as it is to jaxdp.scan_layers(layer, stacked, carry), or "
            "leave its name out of layers."
        )

    __getitem__ = __iter__ = __len__ = __jax_array__ = __array__ = _refuse
    __add__ = __radd__ = __mul__ = __rmul__ = __matmul__ = __rmatmul__ = _refuse
    __sub__ = __rsub__ = __truediv__ = __pow__ = __neg__ = _refuse


def scan_layers(
    layer: Callable[[PyTree, PyTree], PyTree],
    stacked: PyTree,
    carry: PyTree,
    *,
    policy: Callable[..., bool] | None = None,
    unroll: int = 1,
) -> PyTree:
    """Applies layers one after the other: `carry = layer(params, carry)` for each.

    As `lax.scan` over a `jax.checkpoint` of the layer. With `Zero(stage=3, layers=...)`
    the stack is in parts, and a layer is whole only while it is computed.

    Cost: with layers in parts, per device 2 (N - 1) K / N bytes sent to gather them, in
    the forward and in the backward pass, and (N - 1) K / N to reduce gradients. With
    K / L bytes of whole parameters at a time, and as many of gradients.

    Args:
        layer: From the parameters of one layer and the carry to the next carry, of the
            same shapes.
        stacked: Parameters, leaves `[L, ...]`, or what Zero gives in their place.
        carry: What the first layer gets: activations, a mask, a key.
        policy: What the forward pass keeps for the backward pass besides the carries,
            as `jax.checkpoint` has it; None for nothing. A policy that keeps
            everything keeps whole parameters; `dots_saveable` does not.
        unroll: How many layers stand in one trip of the loop; so many are whole at a
            time.

    Returns:
        The last carry.

    Raises:
        ValueError: Leaves of `stacked` that are not equally long, or none.

    Example:
        >>> import jax.numpy as jnp
        >>> scales = jnp.array([2.0, 3.0, 5.0])
        >>> print(scan_layers(lambda scale, x: scale * x, scales, jnp.ones(2)))
        [30. 30.]
    """
    rows, whole = _rows(stacked)

    def one(carry, row):
        return layer(whole(row), carry), None

    # Forward and backward pass are loops of their own, between which nothing merges.
    one = jax.checkpoint(one, policy=policy, prevent_cse=False)
    return lax.scan(one, carry, rows, unroll=unroll)[0]


def check_scanned(
    program: ClosedJaxpr, numbers: Sequence[int], names: Sequence[str]
) -> None:
    """Proves that layers in parts go to `scan_layers` and nowhere else.

    A loss that maps over all leaves of the parameters, to decay weights say, would take
    this device's part for the whole.

    Args:
        program: Of the gradient.
        numbers: The arguments that are leaves of `LayerShards`.
        names: What errors call them.

    Raises:
        ValueError: Names what is used in another way, and by what.
    """
    jaxpr = flattened(program).jaxpr
    named = {jaxpr.invars[i]: name for i, name in zip(numbers, names, strict=True)}
    for eqn in jaxpr.eqns:
        if eqn.params.get("name") == SCANNED:
            continue
        found = [
            named[v] for v in eqn.invars if not isinstance(v, Literal) and v in named
        ]
        if found and eqn.primitive.name not in PASSING:
            raise ValueError(
                f"loss_fn computes {eqn.primitive.name} of {found[0]}, which Zero has "
                "cut into parts: on this device it is not whole. Layers named in "
                "Zero(layers=...) may only be passed to jaxdp.scan_layers. Leave them "
                "out where you map over all parameters: jaxdp.Zero shards what the "
                "optimizer does, so let optax decay the weights, for example."
            )
        named |= dict.fromkeys(eqn.outvars, found[0]) if found else {}


def _rows(stacked: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """What a scan goes over, and how a layer is made of one entry."""
    if not isinstance(stacked, LayerShards):
        _check_stack([x.shape for x in jax.tree.leaves(stacked)])
        return stacked, lambda row: row
    shards, structure = jax.tree.flatten(stacked.shards, is_leaf=is_shard)
    _check_stack([shard.shape for shard in shards])
    wire = stacked.wire
    rows = [
        checkpoint_name(s.data, SCANNED).reshape(s.layers, s.data.size // s.layers)
        for s in shards
    ]

    def whole(rows):
        layers: list[Any] = [
            Shard(row, s.shape[1:], s.devices)
            for row, s in zip(rows, shards, strict=True)
        ]
        for group in by_dtype(rows, is_movable):
            gathered = _gathered(wire, [layers[i] for i in group])
            for i, array in zip(group, gathered, strict=True):
                layers[i] = array
        return structure.unflatten(layers)

    return rows, whole


def _check_stack(shapes: list[tuple[int, ...]]) -> None:
    """Checks that all leaves have the same number of layers."""
    counts = sorted({shape[0] if shape else 0 for shape in shapes})
    if len(counts) != 1 or not counts[0]:
        listed = ", ".join(map(str, shapes)) or "none"
        raise ValueError(
            f"scan_layers got leaves of shapes: {listed}. "
            "All must be [L, ...] with the same L of at least 1, the number of layers. "
            "Stack the parameters of equal layers along axis 0."
        )


def _gathered(wire: Wire, shards: list[Shard]) -> list[jax.Array]:
    """Whole arrays, with a derivative if they have one."""
    if not is_summable(shards[0].data):
        return wire.gather(shards)
    empty = tuple(shard.like(None) for shard in shards)
    return _differentiable(wire, empty, [shard.data for shard in shards])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(
    wire: Wire, empty: tuple[Shard, ...], data: list[jax.Array]
) -> list[jax.Array]:
    """Gathers; the gradient is the sum over the devices, in float32 or wider."""
    return wire.gather([s.like(x) for s, x in zip(empty, data, strict=True)])


def _forward(wire, empty, data):
    """Nothing is kept for the backward pass."""
    return _differentiable(wire, empty, data), None


def _backward(wire, empty, _, cotangents):
    """Sums of whole gradients, each device its part."""
    del empty
    return (wire.summed(cotangents),)


_differentiable.defvjp(_forward, _backward)
