"""One host's PyTorch process: steps of DistributedDataParallel, and their parts.

`python -m experiments.parts.bandwidth_steps_torch RANK COUNT FOLDER`, started by
`experiments.parts.bandwidth_training`; the processes find each other by a file in that
folder.
"""

import functools
import sys
import time
from collections.abc import Callable

import torch
from torch.nn.parallel import DistributedDataParallel

from experiments.harness import processes
from experiments.parts import bandwidth_mlp as mlp
from experiments.parts import bandwidth_torch

COMPUTE = "compute"
Step = Callable[[], torch.Tensor]


class Network(torch.nn.Module):
    """The network; if idle, a loss with gradients as large that takes no time."""

    def __init__(self, sizes: mlp.Sizes, idle: bool):
        """Makes its parameters."""
        super().__init__()
        self.idle = idle
        self.weights = torch.nn.ParameterList(map(torch.from_numpy, mlp.params(sizes)))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss."""
        if self.idle:
            squares = torch.stack([torch.sum(w * w) for w in self.weights])
            return (x[0] ** 2).mean() * squares.sum() / 2
        *hidden, last = self.weights
        for weights in hidden:
            x = torch.relu(x @ weights)
        return ((x @ last - y) ** 2).mean()


@functools.cache
def made(way: str, sizes: mlp.Sizes, cap_mb: float, idle: bool, rank: int) -> Step:
    """One more step, which returns its loss."""
    network = Network(sizes, idle)
    forward = network
    if way != COMPUTE:
        forward = DistributedDataParallel(network, bucket_cap_mb=cap_mb)
    optimizer = torch.optim.SGD(network.parameters(), lr=mlp.LEARNING_RATE)
    x, y = map(torch.from_numpy, mlp.batch(sizes, rank))

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = forward(x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def seconds(
    rank: int, way: str, sizes: list[int], cap_mb: float, idle: bool, steps: int
) -> tuple[float, float]:
    """Seconds of a step, and the loss of the first, which is not counted."""
    step = made(way, mlp.Sizes(*sizes), cap_mb, idle, rank)
    first, start = step().item(), time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - start) / steps, first


def main(rank: int, count: int, folder: str) -> None:
    """Serves the commands of `experiments.parts.bandwidth_training`."""
    torch.set_num_threads(1)
    commands = {
        "start": functools.partial(bandwidth_torch.join, rank, count, folder),
        "seconds": functools.partial(seconds, rank),
    }
    processes.serve(lambda do, **options: commands[do](**options))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
