"""What do steps of `Zero` cost against `RingAllReduce` with the same optimizer?

Run by `python -m benchmarks.zero`; two minutes on two cores. Writes
results/bench/zero.json. Expected on forced CPU devices, whose memory and cores are
shared, so that it says nothing about bandwidth: stages 1 and 2 within 1.05 of the ring,
stage 3, which gathers parameters twice, within 1.5.
"""

import argparse
import dataclasses
import json
import pathlib

import jax
import optax
from rich.console import Console
from rich.table import Table

import jaxdp
from benchmarks.__main__ import network, outputs, squared_error, stateful_pair
from benchmarks.pairs import Pair
from experiments.harness import devices as harness

LIMITS = {1: 1.05, 2: 1.05, 3: 1.5}  # by stage
PATH = pathlib.Path("results/bench/zero.json")


def stage_pair(stage: int, devices: int, limit: float, seconds: float) -> Pair:
    """A step of a stage against one of `RingAllReduce`; both run Adam."""
    params, x, y = network(32 * devices)
    mesh = jaxdp.data_mesh(devices)
    batch = jaxdp.shard_batch({"x": x, "y": y}, mesh)

    def loss_fn(params, batch):
        return squared_error(outputs(params, batch["x"]), batch["y"])

    steps, starts = [], []
    for design in (jaxdp.Zero(stage), jaxdp.RingAllReduce()):
        train = jaxdp.data_parallel(loss_fn, optax.adam(1e-3), mesh, design)

        def run(state, train=train):
            state, metrics = train.step(state, batch)
            return state, (state.params, metrics["loss"])

        steps.append(run)
        starts.append(train.init(params))
    name = f"stage {stage} / ring step, N = {devices}"
    return stateful_pair(name, tuple(steps), tuple(starts), limit, seconds)


def main() -> None:
    """Runs all comparisons, prints them and writes the result file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zero")
    parser.add_argument("--seconds", type=float, default=20, help="per comparison")
    seconds = parser.parse_args().seconds
    harness.start(8, "auto")
    print(harness.describe(8))
    pairs = [
        stage_pair(stage, devices, limit, seconds)
        for devices in (4, 8)
        for stage, limit in LIMITS.items()
    ]
    table = Table("program", "Zero ms", "ring ms", "ratio", "quartiles", "limit")
    for pair in pairs:
        times = f"{pair.ours_ms:.2f}", f"{pair.theirs_ms:.2f}", f"{pair.ratio:.3f}"
        low, high = pair.quartiles
        table.add_row(pair.name, *times, f"{low:.2f}-{high:.2f}", f"{pair.limit:.2f}")
    Console().print(table)
    rows = [dataclasses.asdict(pair) | {"holds": pair.holds} for pair in pairs]
    record = {"jax": jax.__version__, "platform": jax.default_backend(), "rows": rows}
    PATH.parent.mkdir(parents=True, exist_ok=True)
    PATH.write_text(json.dumps(record, indent=2) + "\n")
    print(f"wrote {PATH}")


if __name__ == "__main__":
    main()
