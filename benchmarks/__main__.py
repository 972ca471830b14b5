"""What does jaxdp cost against the same programs written by hand?

Run by `make bench`; about 8 minutes on two cores. Writes results/bench/result.json.
Expected on forced CPU devices, which share memory and cores: executor and RingAllReduce
within 1.05 of hand-written rounds, NativeAllReduce within 1.02 of a hand-written `psum`
step, DataParallel within 1.05 of four programs and their transfers written by hand;
Zero in stages 1 and 2 within 1.05 of RingAllReduce, in stage 3, which gathers
parameters twice, within 1.5.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import jaxdp
from benchmarks import analysis, distributing, handwritten
from benchmarks.pairs import Pair, compare
from experiments.harness import devices as harness

RIVALS = (  # names, designs, and the ratio that must not be passed
    ("1 server / root", (jaxdp.ParameterServer(), jaxdp.GatherToRoot()), 1.05),
    ("Zero(1) / ring", (jaxdp.Zero(1), jaxdp.RingAllReduce()), 1.05),
    ("Zero(2) / ring", (jaxdp.Zero(2), jaxdp.RingAllReduce()), 1.05),
    ("Zero(3) / ring", (jaxdp.Zero(3), jaxdp.RingAllReduce()), 1.5),
)


def executor_pair(devices: int, megabytes: int, seconds: float) -> Pair:
    """Our ring against a hand-written one: one array, one `shard_map`, nothing else."""
    mesh = jaxdp.data_mesh(devices)
    length = devices * megabytes * 2**20 // 4
    x = np.arange(length, dtype=np.float32) % 1021
    x = jax.device_put(x, NamedSharding(mesh, P("data")))

    def program(body):
        mapped = jax.shard_map(
            lambda x: body(x, "data"),
            mesh=mesh,
            in_specs=P("data"),
            out_specs=P("data"),
            check_vma=False,  # a hand-made ring is not provably replicated
        )
        return jax.jit(mapped)

    ours, theirs = program(jaxdp.all_reduce), program(handwritten.ring)
    np.testing.assert_array_equal(ours(x), theirs(x))
    return compare(
        f"ring, N = {devices}, {megabytes} MB",
        lambda: ours(x),
        lambda: theirs(x),
        limit=1.05,
        seconds=seconds,
    )


def step_pair(
    exchange: str, design: jaxdp.Design, devices: int, limit: float, seconds: float
) -> Pair:
    """A training step of a design against the same step written by hand."""
    params, x, y = network(32 * devices)
    optimizer = optax.adam(1e-3)
    mesh = jaxdp.data_mesh(devices)
    batch = jaxdp.shard_batch({"x": x, "y": y}, mesh)

    def loss_fn(params, batch):
        return squared_error(outputs(params, batch["x"]), batch["y"])

    train = jaxdp.data_parallel(loss_fn, optimizer, mesh, design=design)
    by_hand = handwritten.step(loss_fn, optimizer, mesh, exchange)
    replicated = NamedSharding(mesh, P())

    def ours(state):
        state, metrics = train.step(state, batch)
        return state, (state.params, metrics["loss"])

    def theirs(state):
        params, opt_state, loss = by_hand(*state, batch)
        return (params, opt_state), (params, loss)

    start = jax.device_put((params, optimizer.init(params)), replicated)
    name = f"{exchange} step, N = {devices}"
    return stateful_pair(
        name, (ours, theirs), (train.init(params), start), limit, seconds
    )


def designs_pair(
    name: str,
    designs: tuple[jaxdp.Design, jaxdp.Design],
    devices: int,
    limit: float,
    seconds: float,
) -> Pair:
    """A step of one design against one of another, both with Adam."""
    params, x, y = network(32 * devices)
    mesh = jaxdp.data_mesh(devices)
    batch = jaxdp.shard_batch({"x": x, "y": y}, mesh)

    def loss_fn(params, batch):
        return squared_error(outputs(params, batch["x"]), batch["y"])

    steps, starts = [], []
    for design in designs:
        train = jaxdp.data_parallel(loss_fn, optax.adam(1e-3), mesh, design)

        def run(state, train=train):
            state, metrics = train.step(state, batch)
            return state, (state.params, metrics["loss"])

        steps.append(run)
        starts.append(train.init(params))
    name = f"{name} step, N = {devices}"
    return stateful_pair(name, tuple(steps), tuple(starts), limit, seconds)


def port_pair(devices: int, limit: float, seconds: float) -> Pair:
    """A step of `jaxdp.DataParallel` against one written by hand."""
    params, x, y = network(64 * devices)
    optimizer = optax.adam(1e-3)
    used = jax.devices()[:devices]
    model = jaxdp.DataParallel(outputs, params, device_ids=used)
    step = model.train_step(squared_error, optimizer)
    by_hand = handwritten.port_step(squared_error, optimizer, used)

    def ours(state):
        state, metrics = step(state, x, y)
        return state, (state.params, metrics["loss"])

    def theirs(state):
        params, opt_state, loss = by_hand(*state, x, y)
        return (params, opt_state), (params, loss)

    start = jax.device_put((params, optimizer.init(params)), used[0])
    name = f"DataParallel step, N = {devices}"
    return stateful_pair(name, (ours, theirs), (step.init(), start), limit, seconds)


def stateful_pair(
    name: str, steps: tuple, starts: tuple, limit: float, seconds: float
) -> Pair:
    """Compares two steps that donate their states.

    Args:
        name: What is compared.
        steps: Ours and the one by hand, `state -> (state, arrays)`.
        starts: Their first states.
        limit: The ratio that must not be passed.
        seconds: How long to go on.
    """
    states: list[Any] = [None, None]
    order = [0, 1]

    def renew():
        # A state is updated in place, step after step, and where it happens to lie in
        # memory changes a step by up to 7 %, for either program.
        states[:] = [None, None]
        for which in order:
            states[which] = jax.tree.map(jnp.copy, starts[which])
        order.reverse()

    def run(which):
        states[which], arrays = steps[which](states[which])
        return arrays

    return compare(
        name, lambda: run(0), lambda: run(1), limit=limit, seconds=seconds, renew=renew
    )


def network(rows: int) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Parameters of a network of three layers, inputs and targets."""
    widths = (64, 1024, 1024, 10)
    rng = np.random.default_rng(0)
    params = [
        rng.normal(size=shape, scale=shape[0] ** -0.5).astype(np.float32)
        for shape in itertools.pairwise(widths)
    ]
    x = rng.normal(size=(rows, widths[0])).astype(np.float32)
    return params, x, np.sin(x[:, : widths[-1]])


def outputs(params: Any, x: Any) -> jax.Array:
    """The network."""
    for weight in params[:-1]:
        x = jax.nn.relu(x @ weight)
    return x @ params[-1]


def squared_error(output: jax.Array, y: Any) -> jax.Array:
    """The mean over all rows."""
    return jnp.mean((output - y) ** 2)


def main() -> None:
    """Runs all comparisons, prints them and writes the result file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("--seconds", type=float, default=20, help="per comparison")
    seconds = parser.parse_args().seconds
    print(harness.start(8, "auto"))
    pairs = []
    for devices in (2, 4, 8):
        pairs.append(executor_pair(devices, 1, seconds))
        pairs.append(executor_pair(devices, 16, seconds))
        pairs.append(step_pair("psum", jaxdp.NativeAllReduce(), devices, 1.02, seconds))
        pairs.append(step_pair("ring", jaxdp.RingAllReduce(), devices, 1.05, seconds))
    pairs.append(port_pair(4, 1.05, seconds))
    for devices in (4, 8):
        pairs += [
            designs_pair(name, designs, devices, limit, seconds)
            for name, designs, limit in RIVALS
        ]
    report(pairs)
    analysis.show()
    print(distributing.missing() or "What distributing costs, by real processes:")
    distributing.show(distributing.rows(seconds))


def report(pairs: list[Pair]) -> None:
    """Prints a table and writes results/bench/result.json."""
    table = Table(
        *("program", "ours ms", "by hand ms", "ratio", "quartiles", "pairs", "limit"),
        title="ours / by hand, medians of pairs",
    )
    for p in pairs:
        style = "green" if p.holds else "red"
        table.add_row(
            p.name,
            f"{p.ours_ms:.2f}",
            f"{p.theirs_ms:.2f}",
            f"[{style}]{p.ratio:.3f}[/]",
            f"{p.quartiles[0]:.2f}-{p.quartiles[1]:.2f}",
            f"{p.pairs}",
            f"{p.limit:.2f}",
        )
    Console().print(table)
    path = pathlib.Path("results/bench/result.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{**dataclasses.asdict(p), "holds": p.holds} for p in pairs]
    record = {"jax": jax.__version__, "platform": jax.default_backend(), "rows": rows}
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
