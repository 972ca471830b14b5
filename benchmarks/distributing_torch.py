"""Their side of what distributing costs: PyTorch's `DistributedDataParallel` over gloo.

`python -m benchmarks.distributing_torch RANK COUNT FOLDER`, started by
`benchmarks.distributing`.
"""

import datetime
import os
import pathlib
import sys
import time

# Also where the host's name resolves to another address.
os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks import distributing_models as models
from benchmarks import distributing_problem as problem
from experiments.harness import processes


class Training:
    """A model, its batch and its optimizer, with or without the wrapper."""

    def __init__(
        self,
        model: str,
        rank: int,
        way: str,
        params: str,
        learning_rate: float = problem.LEARNING_RATE,
        bucket_cap_mb: float = 25.0,
    ):
        """Makes them, from the parameters in a file."""
        self.model = models.MODELS[model]()
        models.load(self.model, params)
        self.forward = self.model
        if way != "alone":
            self.forward = DistributedDataParallel(
                self.model, bucket_cap_mb=bucket_cap_mb
            )
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=learning_rate, momentum=problem.MOMENTUM
        )
        x, y = problem.local_batch(model, rank)
        self.x, self.y = torch.from_numpy(x), torch.from_numpy(y).long().reshape(-1)

    def step(self) -> torch.Tensor:
        """One more step, which returns its loss."""
        self.optimizer.zero_grad()
        logits = self.forward(self.x)
        loss = F.cross_entropy(logits.flatten(0, -2), self.y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def main(rank: int, count: int, folder: str) -> None:
    """Serves the commands of `benchmarks.distributing`."""
    processes.pin(rank)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=(pathlib.Path(folder) / "rendezvous").as_uri(),
        rank=rank,
        world_size=count,
        timeout=datetime.timedelta(seconds=60),
    )
    kept: dict[tuple[str, str], Training] = {}

    def answer(
        model: str, way: str, steps: int, params: str, save: str = "", **options: float
    ) -> tuple[float, float]:
        """Takes steps; returns milliseconds of each, and the last loss."""
        if (model, way) not in kept:
            kept[model, way] = Training(model, rank, way, params, **options)
        training, loss = kept[model, way], torch.zeros(())
        start = time.perf_counter()
        for _ in range(steps):
            loss = training.step()
        milliseconds = 1e3 * (time.perf_counter() - start) / steps
        if save and rank == 0:
            models.save(training.model, params, save)
        return milliseconds, loss.item()

    processes.serve(answer)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
