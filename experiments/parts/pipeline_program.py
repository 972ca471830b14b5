"""A stack of blocks as a pipeline of stages, one on each device, in one program.

`P` stages, `M` micro-batches, `N` rows. Device `p` holds stage `p`: its blocks, and
then their gradients. In tick `t` of `M + P - 1` it works on micro-batch `t - p`, where
there is one, and hands the result to device `p + 1`. The backward pass is what
`jax.grad` makes of that: the ticks in reverse, and gradients from `p` to `p - 1`.
Without a micro-batch a stage computes all the same, and nobody reads the result:
others work meanwhile, so that it saves no time to leave that out.

With re-materialization a stage keeps its inputs alone, and computes what is between
them again in the backward pass: GPipe (Huang et al., NeurIPS 2019), section 2.3.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

AXIS = "stage"
CLASSES = 10  # the first numbers of the last block's output are logits
INITIAL = 0.5  # how much a block adds to its input, at first


class Params(NamedTuple):
    """Matrices of all blocks, by stage: arrays, or their shapes."""

    up: Any  # [P, blocks, width, hidden]
    down: Any  # [P, blocks, hidden, width]


class Batch(NamedTuple):
    """Rows and their classes, by micro-batch: arrays, or their shapes."""

    x: Any  # [M, N / M, width]
    labels: Any  # [M, N / M]


class Passes(NamedTuple):
    """What a forward and a backward pass give.

    Attributes:
        loss: The mean over all rows.
        gradients: Of the loss.
        forward: `[P, ticks]`, which micro-batch reached which stage in which tick of
            the forward pass, from 1; 0 for none. It travels with the micro-batch.
        backward: `[P, ticks]`, whether a gradient came back to what the stage gave in
            that tick.
    """

    loss: jax.Array
    gradients: Params
    forward: jax.Array
    backward: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stack:
    """Sizes of the model: residual blocks of two matrices, as in a transformer.

    Attributes:
        stages: P.
        blocks: Of each stage.
        width: Numbers of a row, between blocks and between stages.
        hidden: Numbers of a row inside a block.
        dtype: Of parameters and rows.
    """

    stages: int
    blocks: int = 4
    width: int = 64
    hidden: int = 256
    dtype: Any = jnp.float32

    def shapes(self) -> Params:
        """Parameters as shapes."""
        size = (self.stages, self.blocks)
        return Params(
            jax.ShapeDtypeStruct((*size, self.width, self.hidden), self.dtype),
            jax.ShapeDtypeStruct((*size, self.hidden, self.width), self.dtype),
        )

    def init(self, seed: int) -> Params:
        """Random parameters."""
        up, down = self.shapes()
        keys = jax.random.split(jax.random.key(seed))
        return Params(
            jax.random.normal(keys[0], up.shape, up.dtype) * self.width**-0.5,
            jax.random.normal(keys[1], down.shape, down.dtype)
            * (INITIAL * self.hidden**-0.5),
        )


def split(x: Any, labels: Any, microbatches: int) -> Batch:
    """`N` rows as `M` micro-batches of equally many."""
    shape = (microbatches, len(x) // microbatches)
    return Batch(x.reshape(*shape, -1), labels.reshape(shape))


def plain_loss(params: Params, batch: Batch) -> jax.Array:
    """The mean loss of all rows, through all blocks on one device."""
    x = batch.x.reshape(-1, batch.x.shape[-1])
    for stage in range(params.up.shape[0]):
        x = _stage(Params(params.up[stage], params.down[stage]), x)
    return _loss(x, batch.labels.reshape(-1))


def passes(mesh: Mesh, remat: bool) -> Callable[[Params, Batch], Passes]:
    """Loss and gradients through stages, and who worked when.

    Zeros are added to what stages give: they have a gradient where one comes back.

    Args:
        mesh: One axis, "stage", of P devices.
        remat: Whether stages keep their inputs alone for the backward pass.
    """
    loss_fn = jax.value_and_grad(_pipelined_loss(mesh, remat), (0, 2), has_aux=True)

    def run(params: Params, batch: Batch) -> Passes:
        ticks, width = len(batch.x) + mesh.size - 1, batch.x.shape[-1]
        probes = jnp.zeros((mesh.size, ticks, width), batch.x.dtype)
        (loss, forward), (found, back) = loss_fn(params, batch, probes)
        return Passes(loss, found, forward, (back != 0).any(axis=-1))

    return run


def _pipelined_loss(mesh: Mesh, remat: bool) -> Callable[..., Any]:
    """The loss, and `Passes.forward`, of parameters, a batch and zeros."""
    last = mesh.size - 1
    run_stage = jax.checkpoint(_stage) if remat else _stage
    onward = [(stage, stage + 1) for stage in range(last)]

    def run(
        params: Params, batch: Batch, probes: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        own = Params(params.up[0], params.down[0])
        rank = lax.axis_index(AXIS)

        def tick(arrived, given):
            index, probe = given
            x, number = arrived  # zeros where nobody sent: no micro-batch
            new = jnp.where(index < len(batch.x), index + 1, 0)
            number = jnp.where(rank == 0, new, number)
            place = jnp.maximum(number - 1, 0)
            x = jnp.where(rank == 0, batch.x[place], x)
            y = run_stage(own, x) + probe
            counts = (rank == last) & (number > 0)
            loss = jnp.where(counts, _loss(y, batch.labels[place]), 0.0)
            return lax.ppermute((y, number), AXIS, onward), (loss, number)

        nothing = (jnp.zeros_like(batch.x[0]), jnp.int32(0))
        start = lax.pcast(nothing, AXIS, to="varying")
        ticks = (jnp.arange(probes.shape[1]), probes[0][:, None])
        _, (losses, numbers) = lax.scan(tick, start, ticks)
        return lax.psum(losses.sum(), AXIS) / len(batch.x), numbers[None]

    specs = (P(AXIS), P(), P(AXIS))
    return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=(P(), P(AXIS)))


def _stage(params: Params, x: jax.Array) -> jax.Array:
    """All blocks of one stage: `[rows, width]` to the same."""
    for block in range(params.up.shape[0]):
        hidden = jax.nn.relu(jax.nn.standardize(x) @ params.up[block])
        x = x + hidden @ params.down[block]
    return x


def _loss(x: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean over rows of the last block's output."""
    logits = x[:, :CLASSES].astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
