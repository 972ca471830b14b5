"""What does distributing cost, ours against PyTorch's DistributedDataParallel?

Command:   make bench, or python -m benchmarks.distributing
Hardware:  two cores or more; with fewer cores than processes, both sides share them.
Runtime:   about five minutes on two cores.

The cost is (step on N processes) - (step of one process on its own share). Both sides
run as N real processes with one thread each, pinned to cores alike, exchange by gloo
over the loopback interface, and take their blocks of steps in turns, so that a machine
that drifts, drifts for both. They start from the same parameters and see the same rows;
that the first losses agree is checked. Beside the cost stands the plain ratio of steps,
which compares the code that XLA and PyTorch run on one CPU, too.

Why two baselines: with N processes on fewer than N cores, a distributed step also waits
for its turn. `alone` is what the cost above says; `beside` lets all N take steps of
their own share at the same time.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import itertools
import pathlib
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.harness.processes import Processes
from jaxdp.launch.environment import free_port

MODELS = ("cnn", "transformer")
WAYS = {
    "ring": "RingAllReduce()",
    "doubling": "AllReduce('recursive_doubling')",
    "native": "NativeAllReduce(25.0)",
}
STEPS = 10  # in a block
AGREE = 1e-4  # relative, of first losses
BASELINE = "cost: over the step of one process on its own share"
Quartiles = tuple[float, float, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """What distributing costs with one of our designs, and with theirs.

    Quartiles are first, median and third, over blocks of steps.

    Attributes:
        model: What is trained.
        processes: N.
        design: Ours.
        blocks: How many were counted.
        ours_ms: A step of all N processes.
        theirs_ms: The same of `DistributedDataParallel`.
        ours_alone_ms: A step of one process on its share, without any design.
        theirs_alone_ms: The same of PyTorch.
        ours_cost_ms: The difference.
        theirs_cost_ms: The difference.
        more_ms: Our cost minus theirs, block by block.
        more_beside_ms: The same over N processes that take steps side by side.
        ratio: Our step over theirs, block by block.
    """

    model: str
    processes: int
    design: str
    blocks: int
    ours_ms: Quartiles
    theirs_ms: Quartiles
    ours_alone_ms: Quartiles
    theirs_alone_ms: Quartiles
    ours_cost_ms: Quartiles
    theirs_cost_ms: Quartiles
    more_ms: Quartiles
    more_beside_ms: Quartiles
    ratio: Quartiles

    @property
    def holds(self) -> bool:
        """Whether ours is not larger, by the median."""
        return self.more_ms[1] <= 0


def missing() -> str:
    """Why nothing can be compared; empty if it can."""
    if importlib.util.find_spec("torch"):
        return ""
    return "PyTorch is not installed: pip install 'jax-data-parallel[torch]'"


def rows(seconds: float, counts: Sequence[int] = (2, 4)) -> list[Cost]:
    """Measures all models, process counts and designs.

    Args:
        seconds: How long to go on, for each model and count; at least 20 blocks.
        counts: Numbers of processes, powers of two.

    Returns:
        The costs; none without PyTorch, see `missing`.

    Raises:
        RuntimeError: A process fails, or both sides do not train the same.
    """
    if missing():
        return []
    return [cost for count in counts for cost in _with_processes(seconds, count)]


def _with_processes(seconds: float, count: int) -> Iterator[Cost]:
    """All costs with that many processes of each side."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        place = pathlib.Path(folder)

        def start(module, argument):
            return stack.enter_context(Processes(module, count, place, argument))

        ours = start("benchmarks.distributing_jax", str(free_port()))
        theirs = start("benchmarks.distributing_torch", folder)
        for model in MODELS:
            params = str(place / f"{model}.npz")
            sides = _Sides(ours, theirs, model, params)
            yield from _costs(sides.measured(seconds), model, count)


@dataclasses.dataclass
class _Sides:
    """Both groups of processes, training one model."""

    ours: Processes
    theirs: Processes
    model: str
    params: str  # where ours writes them, and theirs reads

    def measured(self, seconds: float) -> list[dict[str, float]]:
        """Milliseconds of a step by variant, block by block, in turns."""
        variants = [
            *(("ours", way, None) for way in WAYS),
            ("theirs", "ddp", None),
            *itertools.product(("ours", "theirs"), ("alone",), ([0], None)),
        ]
        self._check_same()
        for variant in variants:  # compiles, and warms up
            self._block(*variant)
        blocks = []
        begin = time.perf_counter()
        while len(blocks) < 20 or time.perf_counter() - begin < seconds:
            variants.reverse()  # nobody always follows the same
            blocks.append({_name(*v): self._block(*v)[0] for v in variants})
        return blocks

    def _block(self, side: str, way: str, ranks: Any, steps: int = STEPS) -> Any:
        """Steps of one variant: milliseconds and loss of the slowest process."""
        group = self.ours if side == "ours" else self.theirs
        return max(
            group.ask(ranks, model=self.model, way=way, steps=steps, params=self.params)
        )

    def _check_same(self) -> None:
        """Checks that a first step of both has the same loss."""
        losses = [self._block(side, "alone", [0], 1)[1] for side in ("ours", "theirs")]
        if abs(losses[0] - losses[1]) > AGREE * abs(losses[1]):
            raise RuntimeError(
                f"The {self.model} starts from a loss of {losses[0]} on our side and "
                f"{losses[1]} on PyTorch's. Both must train the same model on the same "
                f"rows, to {AGREE} of the loss. Compare experiments.models with "
                "benchmarks.distributing_torch."
            )


def _name(side: str, way: str, ranks: Any) -> str:
    """How a variant is called."""
    if way == "alone" and ranks is None:
        way = "beside"
    return f"{side} {way}"


def _costs(blocks: list[dict[str, float]], model: str, count: int) -> Iterator[Cost]:
    """What the blocks say about each design."""

    def over(baseline: str, side: str, way: str) -> list[float]:
        return [b[f"{side} {way}"] - b[f"{side} {baseline}"] for b in blocks]

    def quartiles(values: Any) -> Quartiles:
        first, median, third = statistics.quantiles(values, n=4)
        return first, median, third

    def more(baseline: str, way: str) -> Quartiles:
        pairs = zip(
            over(baseline, "ours", way), over(baseline, "theirs", "ddp"), strict=True
        )
        return quartiles([a - b for a, b in pairs])

    def times(name: str) -> Quartiles:
        return quartiles([b[name] for b in blocks])

    for way, design in WAYS.items():
        yield Cost(
            model=model,
            processes=count,
            design=design,
            blocks=len(blocks),
            ours_ms=times(f"ours {way}"),
            theirs_ms=times("theirs ddp"),
            ours_alone_ms=times("ours alone"),
            theirs_alone_ms=times("theirs alone"),
            ours_cost_ms=quartiles(over("alone", "ours", way)),
            theirs_cost_ms=quartiles(over("alone", "theirs", "ddp")),
            more_ms=more("alone", way),
            more_beside_ms=more("beside", way),
            ratio=quartiles([b[f"ours {way}"] / b["theirs ddp"] for b in blocks]),
        )


def show(costs: Sequence[Cost]) -> None:
    """Prints a table."""
    columns = (
        *("model", "N", "design", "step ms", "DDP ms", "cost ms", "DDP's cost ms"),
        *("ours - theirs", "beside", "plain ratio", "blocks"),
    )
    title = "What distributing costs, medians and quartiles"
    table = Table(*columns, title=title)
    for c in costs:
        style = "green" if c.holds else "red"
        table.add_row(
            *(c.model, f"{c.processes}", c.design),
            *(f"{t[1]:.2f}" for t in (c.ours_ms, c.theirs_ms)),
            *map(_spread, (c.ours_cost_ms, c.theirs_cost_ms)),
            f"[{style}]{_spread(c.more_ms)}[/]",
            *map(_spread, (c.more_beside_ms, c.ratio)),
            f"{c.blocks}",
        )
    Console().print(table)


def _spread(quartiles: Quartiles) -> str:
    first, median, third = quartiles
    return f"{median:.2f} ({first:.2f} to {third:.2f})"


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.distributing")
    parser.add_argument("--seconds", type=float, default=40, help="per model and N")
    seconds = parser.parse_args().seconds
    print(missing() or "real processes on this machine, one thread each")
    show(rows(seconds))


if __name__ == "__main__":
    main()
