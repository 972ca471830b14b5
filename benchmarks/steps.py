"""Training steps: against the same steps written by hand, and design against design."""

import functools
from collections.abc import Iterator

import jax
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdp
from benchmarks import handwritten, problem
from benchmarks.case import Case
from benchmarks.pairs import compare_steps
from benchmarks.rows import Row

ONE_RING = jaxdp.RingAllReduce(first_bucket_mb=None)  # as it is written by hand
BY_HAND = (  # what the hand-written step calls, our design, and the limit
    ("psum", jaxdp.NativeAllReduce(), 1.02),
    ("ring", ONE_RING, 1.05),
)
RIVALS = (  # names, designs, and the ratio that must not be passed, if there is one
    ("2 buckets / 1", (jaxdp.RingAllReduce(), ONE_RING), None),
    ("1 server / root", (jaxdp.ParameterServer(), jaxdp.GatherToRoot()), 1.05),
    ("Zero(1) / ring", (jaxdp.Zero(1), jaxdp.RingAllReduce()), 1.05),
    ("Zero(2) / ring", (jaxdp.Zero(2), jaxdp.RingAllReduce()), 1.05),
    ("Zero(3) / ring", (jaxdp.Zero(3), jaxdp.RingAllReduce()), 1.5),
)


def cases() -> Iterator[Case]:
    """Steps of 2, 4 and 8 devices."""
    for devices in (2, 4, 8):
        for exchange, design, limit in BY_HAND:
            yield Case(
                name=f"{exchange} step, N = {devices}",
                group="by hand",
                run=functools.partial(step_pair, exchange, design, devices, limit),
            )
    yield Case(
        name="DataParallel step, N = 4",
        group="by hand",
        run=functools.partial(port_pair, 4, 1.05),
    )
    for devices in (4, 8):
        for name, designs, limit in RIVALS:
            yield Case(
                name=f"{name} step, N = {devices}",
                group="designs",
                run=functools.partial(designs_pair, designs, devices, limit),
            )


def step_pair(
    exchange: str,
    design: jaxdp.Design,
    devices: int,
    limit: float,
    name: str,
    seconds: float,
) -> Iterator[Row]:
    """A training step of a design against the same step written by hand."""
    params, x, y = problem.network(32 * devices)
    optimizer = optax.adam(1e-3)
    mesh = jaxdp.data_mesh(devices)
    batch = jaxdp.shard_batch({"x": x, "y": y}, mesh)
    train = jaxdp.data_parallel(problem.loss_fn, optimizer, mesh, design=design)
    by_hand = handwritten.step(problem.loss_fn, optimizer, mesh, exchange)

    def ours(state):
        state, metrics = train.step(state, batch)
        return state, (state.params, metrics["loss"])

    def theirs(state):
        params, opt_state, loss = by_hand(*state, batch)
        return (params, opt_state), (params, loss)

    replicated = NamedSharding(mesh, P())
    start = jax.device_put((params, optimizer.init(params)), replicated)
    starts = train.init(params), start
    yield compare_steps(name, (ours, theirs), starts, seconds=seconds, limit=limit)


def designs_pair(
    designs: tuple[jaxdp.Design, jaxdp.Design],
    devices: int,
    limit: float | None,
    name: str,
    seconds: float,
) -> Iterator[Row]:
    """A step of one design against one of another, both with Adam."""
    params, x, y = problem.network(32 * devices)
    mesh = jaxdp.data_mesh(devices)
    batch = jaxdp.shard_batch({"x": x, "y": y}, mesh)

    def prepared(design):
        train = jaxdp.data_parallel(problem.loss_fn, optax.adam(1e-3), mesh, design)

        def run(state):
            state, metrics = train.step(state, batch)
            return state, (state.params, metrics["loss"])

        return run, train.init(params)

    (ours, our_start), (theirs, their_start) = map(prepared, designs)
    yield compare_steps(
        name, (ours, theirs), (our_start, their_start), seconds=seconds, limit=limit
    )


def port_pair(devices: int, limit: float, name: str, seconds: float) -> Iterator[Row]:
    """A step of `jaxdp.DataParallel` against one written by hand."""
    params, x, y = problem.network(64 * devices)
    optimizer = optax.adam(1e-3)
    used = jax.devices()[:devices]
    model = jaxdp.DataParallel(problem.outputs, params, device_ids=used)
    step = model.train_step(problem.squared_error, optimizer)
    by_hand = handwritten.port_step(problem.squared_error, optimizer, used)

    def ours(state):
        state, metrics = step(state, x, y)
        return state, (state.params, metrics["loss"])

    def theirs(state):
        params, opt_state, loss = by_hand(*state, x, y)
        return (params, opt_state), (params, loss)

    start = jax.device_put((params, optimizer.init(params)), used[0])
    starts = step.init(), start
    yield compare_steps(name, (ours, theirs), starts, seconds=seconds, limit=limit)
