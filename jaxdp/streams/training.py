"""Training steps whose communication runs beside their computation.

A process owns two devices per replica (`two_streams`). Each design here is one of
`jaxdp.data_parallel`, dispatched as several programs instead of one.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import optax

from jaxdp.collectives import Algorithm
from jaxdp.designs import AllReduce, NativeAllReduce, RingAllReduce
from jaxdp.designs.bucketed import Bucketed
from jaxdp.state import TrainState
from jaxdp.streams.meshes import Streams, check_streams
from jaxdp.streams.trainer import StreamTrainer

PyTree = Any


class StreamParallel(NamedTuple):
    """A training program on two streams, made by `jaxdp.streams.data_parallel`.

    Attributes:
        init: `init(params, *, rng=None) -> TrainState`. Copies, so the caller's arrays
            survive.
        step: `step(state, batch) -> (TrainState, metrics)`. The state given is donated.
            Metrics are those of this step; reading them waits for it.
        params: `params(state)`: a copy of the parameters.
        flush: `flush(state) -> TrainState`. With a delay, applies the gradient still in
            flight, and donates the state; without, returns it.
        lower: `lower(state, batch)`: every program of a step by name, "segment_1",
            "exchange_1" and so on to "update", as a `jax.stages.Lowered`.
    """

    init: Callable[..., TrainState]
    step: Callable[[TrainState, PyTree], tuple[TrainState, dict[str, Any]]]
    params: Callable[[TrainState], PyTree]
    flush: Callable[[TrainState], TrainState]
    lower: Callable[[TrainState, PyTree], dict[str, jax.stages.Lowered]]


def data_parallel(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    streams: Streams,
    *,
    delay: Literal[0, 1] = 0,
    bucket_cap_mb: float | None = 25.0,
    first_bucket_mb: float | None = 1.0,
    algorithm: Algorithm = "ring",
) -> StreamParallel:
    """Makes a training program that communicates on devices of its own.

    `delay=0`: the backward pass runs in segments, one program per bucket, and a bucket
    travels while later segments compute (Li et al., VLDB 2020, section 3.2). Operations
    and their order are those of `jaxdp.data_parallel` with a design of the same
    buckets; so are the bits, unless XLA compiles two operations differently together
    and apart: it may round a product and a sum once, or lay out a transpose otherwise.

    `delay=1`: the gradient of a step travels while the next step computes, and is
    applied before the one after that: step t computes with weights that contain the
    gradients up to t - 2 (Li et al., OSDI 2014, bounded delay). The numbers are those
    of `jaxdp.ParameterServer(max_staleness=1)`.

    Devices: before and after a step, each compute device holds parameters and optimizer
    state, the same bits everywhere; communication devices hold buckets in transit.

    Cost: bytes and rounds of the algorithm; two copies of each bucket inside the
    process. Values that cross from one segment to a later one live in memory between
    them; with a delay, one set of averaged gradients more.

    Args:
        loss_fn: As for `jaxdp.data_parallel`, without `model_state`. It must not
            communicate.
        optimizer: Any optax transformation that does not communicate.
        streams: From `two_streams`.
        delay: Steps between a gradient and its use: 0 or 1.
        bucket_cap_mb: The cap of a bucket in MiB; None for one bucket per dtype.
        first_bucket_mb: The cap of the first bucket, which travels first.
        algorithm: As for `jaxdp.AllReduce`.

    Returns:
        The program, with `init`, `step`, `params`, `flush` and `lower`.

    Raises:
        ValueError: An unknown `delay` or algorithm, a cap that is not positive, or
            streams that do not fit. From `init`: a `model_state`. From `step`: a loss
            or optimizer that communicates, and what `jaxdp.data_parallel` raises.
        TypeError: `streams` are none; parameters or a loss that are not floating.
        RuntimeError: A state that was given to a step before.

    Example:
        >>> import jax.numpy as jnp, jaxdp.streams, optax
        >>> def loss_fn(params, batch):
        ...     return jnp.mean((batch["x"] * params - batch["y"]) ** 2)
        >>> streams = jaxdp.streams.two_streams()
        >>> train = jaxdp.streams.data_parallel(loss_fn, optax.sgd(0.01), streams)
        >>> state = train.init(jnp.array(0.0))
        >>> x = jnp.arange(8.0)
        >>> state, metrics = train.step(state, {"x": x, "y": 3 * x})
        >>> print(metrics["loss"], train.params(state))
        157.5 1.05
    """
    check_streams(streams)
    if isinstance(delay, bool) or delay not in (0, 1):
        raise ValueError(
            f"streams.data_parallel got delay={delay!r}. It must be 0 (a gradient is "
            "applied in its own step) or 1 (in the next). For longer delays use "
            "jaxdp.ParameterServer(max_staleness=...)."
        )
    design = _design(algorithm, bucket_cap_mb, first_bucket_mb)
    design.check(streams.compute.size)
    program = StreamTrainer(loss_fn, optimizer, design, streams, delay)
    return StreamParallel(
        *(program.init, program.step, program.params, program.flush), program.lower
    )


def _design(
    algorithm: Any, bucket_cap_mb: float | None, first_bucket_mb: float | None
) -> Bucketed:
    """The design whose buckets and exchange these are."""
    if isinstance(algorithm, str) and algorithm == "native":
        return NativeAllReduce(bucket_cap_mb, first_bucket_mb)
    if isinstance(algorithm, str) and algorithm == "ring":
        return RingAllReduce(bucket_cap_mb, first_bucket_mb)
    return AllReduce(algorithm, bucket_cap_mb, first_bucket_mb)
