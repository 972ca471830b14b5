"""Process groups over gloo, for every torch process of this package."""

import datetime
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from tests.torch_reference import problem

Job = TypeVar("Job", bound=problem.Job)


def jobs_of_rank(jobs: Iterable[Job], directory: Path, rank: int) -> Iterator[Job]:
    """Yield the jobs that have this rank, each while its process group is up.

    There is one group after the other, the largest first, because importing torch takes
    longer than all jobs of a group.
    """
    torch.set_num_threads(1)
    jobs = tuple(jobs)
    for world_size in sorted({job.world_size for job in jobs}, reverse=True):
        if rank >= world_size:
            return
        dist.init_process_group(
            "gloo",
            init_method=(directory / f"rendezvous-n{world_size}").as_uri(),
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=60),
        )
        yield from (job for job in jobs if job.world_size == world_size)
        dist.destroy_process_group()
