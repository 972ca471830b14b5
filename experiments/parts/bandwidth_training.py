"""Training steps over hosts with limited links: how much communication they hide.

A step is timed beside what it consists of: the same computation without communication,
by all hosts at once, and the same design without the network's computation. What a step
takes less than both together it has hidden; at most the shorter of the two.
"""

import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from experiments.harness.result import Rows
from experiments.network import Hosts
from experiments.parts.bandwidth_groups import Groups
from experiments.parts.bandwidth_mlp import Sizes

COMPUTE, TORCH = "compute", "torch DDP"
STAR, RING, NATIVE = "GatherToRoot", "RingAllReduce", "NativeAllReduce"
STAGED, DELAYED = "streams, staged", "streams, delay 1"
DESIGNS = (STAR, RING, NATIVE, STAGED, DELAYED)
PROBE_ROWS = 64  # of the batch that tells how long a row takes
AGREE = 1e-4  # relative, of first losses
STEPS = 3  # counted in a block


class Block(NamedTuple):
    """What takes turns."""

    torch: bool
    way: str
    idle: bool  # without the network's computation


class Training:
    """Processes of both libraries that train the same network."""

    def __init__(
        self,
        hosts: Hosts,
        count: int,
        sizes: Sizes,
        cap_mb: float,
        designs: Sequence[str] = DESIGNS,
    ):
        """Starts them, one of each library on each host.

        Args:
            hosts: Where; entered.
            count: On how many of them.
            sizes: Of the network; its rows are replaced by `balance`.
            cap_mb: Of a bucket, in MiB.
            designs: Ours that are timed; for `balance`, `NATIVE` among them.
        """
        modules = "bandwidth_steps_jax", "bandwidth_steps_torch"
        self.groups = Groups(hosts, count, *modules)
        self.sizes, self.cap_mb, self.designs = sizes, cap_mb, designs
        self._losses: list[float] = []  # of our computation alone, by host

    def balance(self) -> None:
        """Chooses rows so that a step computes about as long as `psum` communicates."""
        rows = PROBE_ROWS
        for _ in range(2):  # few rows are slow rows: the second time with as many
            self.sizes = self.sizes._replace(rows=rows)
            psum_s, compute_s = (
                self._settled_s(Block(False, *what))
                for what in ((NATIVE, True), (COMPUTE, False))
            )
            rows = max(8, 8 * round(rows * psum_s / compute_s / 8))
        self.sizes = self.sizes._replace(rows=rows)

    def blocks(self) -> list[Block]:
        """All that is timed; our computation alone is the first."""
        kinds = itertools.product(self.designs, (False, True))
        ours = [Block(False, way, idle) for way, idle in kinds]
        theirs = [Block(True, COMPUTE, False)]
        theirs += [Block(True, TORCH, idle) for idle in (False, True)]
        return [Block(False, COMPUTE, False), *ours, *(theirs * self.groups.torch)]

    def seconds(self, block: Block, steps: int = STEPS) -> float:
        """Seconds of a step, of the slowest process."""
        return max(seconds for seconds, _ in self._ask(block, steps))

    def check(self, block: Block) -> None:
        """Warms up, and checks that the first step has the loss of the whole batch.

        Raises:
            RuntimeError: Another loss than that of our computation alone.
        """
        losses = [loss for _, loss in self._ask(block, 1)]
        if block == Block(False, COMPUTE, False):
            self._losses = losses
        if block.idle:
            return
        expected = self._expected(block)
        pairs = zip(losses, expected, strict=True)
        if max(abs(found / wanted - 1) for found, wanted in pairs) > AGREE:
            raise RuntimeError(
                f"{block.way} starts from losses of {losses}, and they should be "
                f"{expected}, to {AGREE} of them: all must train the same network on "
                "the same rows. Compare experiments.parts.bandwidth_steps_jax and "
                "experiments.parts.bandwidth_steps_torch."
            )

    def _settled_s(self, block: Block) -> float:
        """Seconds of a step, after a warm-up."""
        self.seconds(block, 1)
        return statistics.median(self.seconds(block) for _ in range(STEPS))

    def _expected(self, block: Block) -> list[float]:
        """First losses by host; our designs return the mean over all rows."""
        if block.torch or block.way == COMPUTE:
            return self._losses
        return [statistics.fmean(self._losses)] * self.groups.count

    def _ask(self, block: Block, steps: int) -> list[Any]:
        return self.groups.ask(
            block.torch,
            do="seconds",
            way=block.way,
            sizes=self.sizes,
            cap_mb=self.cap_mb,
            idle=block.idle,
            steps=steps,
        )


def measure(
    training: Training, repeats: int, advance: Callable[[], Any] = lambda: None
) -> Rows:
    """Times all in turns.

    Args:
        training: What trains; `balance` has been called, or its sizes are right.
        repeats: Blocks of each, at least 2.
        advance: Called `repeats + 1` times for each of `training.blocks()`.
    """
    blocks = training.blocks()
    for block in blocks:
        training.check(block)
        advance()
    seconds = {block: [] for block in blocks}
    for _ in range(repeats):
        for block in blocks:
            seconds[block].append(training.seconds(block))
            advance()
        blocks.reverse()
    return rows(seconds, training.groups.count, training.sizes, training.cap_mb)


def rows(
    seconds: dict[Block, list[float]], count: int, sizes: Sizes, cap_mb: float
) -> Rows:
    """One row for each design.

    Args:
        seconds: Of a step, by block; blocks of the same place were neighbours.
        count: How many hosts trained.
        sizes: Of the network, and of the batch of a host.
        cap_mb: Of a bucket.
    """
    median = {block: 1e3 * statistics.median(seconds[block]) for block in seconds}
    label = (
        f"medians of {len(next(iter(seconds.values())))} blocks of {STEPS} steps, in "
        f"turns; {sizes.layers} layers of {sizes.width} x {sizes.width}, "
        f"{sizes.rows} rows a host, buckets of {cap_mb:g} MiB"
    )
    steps = [b for b in seconds if b.way != COMPUTE and not b.idle]
    return [
        _row(
            block.way,
            median[block],
            median[Block(block.torch, COMPUTE, False)],
            median[block._replace(idle=True)],
            label,
        )
        | {"hosts": count}
        for block in steps
    ]


def _row(
    design: str, step_ms: float, compute_ms: float, communication_ms: float, label: str
) -> dict[str, Any]:
    """What a step hides."""
    hidden = compute_ms + communication_ms - step_ms
    longer = max(compute_ms, communication_ms)
    return {
        "design": design,
        "step_ms": step_ms,
        "compute alone_ms": compute_ms,
        "communication alone_ms": communication_ms,
        "step / longer": step_ms / longer,
        "hidden_ms": hidden,
        "hidden / shorter": hidden / min(compute_ms, communication_ms),
        "compute / step": compute_ms / step_ms,
        "label": label,
    }
