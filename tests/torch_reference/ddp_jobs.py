"""Which jobs the DistributedDataParallel parity test runs."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from tests.torch_reference.ddp_problem import Job


def all_jobs() -> tuple[Job, ...]:
    """Return every job of either library, and torch's of one process."""
    jobs = tuple(
        itertools.chain(_averaged(), _batch_norm(), _compressed(), _local(), _scaled())
    )
    theirs = itertools.chain.from_iterable(map(torch_jobs_for, jobs))
    alone = (one_process_job(job) for job in jobs if in_one_process(job))
    return tuple(dict.fromkeys((*jobs, *theirs, *alone)))


def torch_jobs_for(job: Job) -> tuple[Job, ...]:
    """Return the torch jobs that do what the JAX job `job` does."""
    designs = ("ddp", "by_hand") if job.compression == "bf16" else ("ddp",)
    return tuple(
        dataclasses.replace(job, library="torch", design=design) for design in designs
    )


def in_one_process(job: Job) -> bool:
    """Whether one process with all rows does the same, as far as rounding goes."""
    return (
        job.rows in ("even", "tokens", "ragged")
        and job.buffers in ("", "synchronized")
        and not (job.compression or job.sync_every or job.compute)
    )


def one_process_job(job: Job) -> Job:
    """Return the torch job of one process that sees all rows at once."""
    return dataclasses.replace(
        job, library="torch", design="ddp", world_size=1, accumulate=1
    )


def _averaged() -> Iterator[Job]:
    """Buckets, accumulation, weights and ranks that run out of rows."""
    for world_size in (2, 4):
        for design in ("RingAllReduce", "NativeAllReduce"):
            yield _make_job(world_size=world_size, design=design)
        yield _make_job(world_size=world_size, accumulate=3)
        yield _make_job(world_size=world_size, accumulate=3, rows="tokens")
        yield _make_job(world_size=world_size, rows="join")
    yield _make_job(world_size=4, optimizer="adam")
    yield _make_job(world_size=4, dtype="float32")
    yield _make_job(world_size=4, accumulate=3, optimizer="adam", rows="tokens")
    yield _make_job(world_size=2, accumulate=3, design="NativeAllReduce")
    yield _make_job(world_size=4, rows="join", optimizer="adam")
    yield _make_job(world_size=4, rows="join_slots")


def _batch_norm() -> Iterator[Job]:
    """BatchNorm with statistics of each replica, or of all."""
    for world_size in (2, 4):
        for buffers in ("broadcast", "per_replica", "synchronized"):
            yield _make_job(world_size=world_size, model="norm_net", buffers=buffers)
    same: dict[str, Any] = dict(world_size=4, model="norm_net")
    yield _make_job(buffers="broadcast", accumulate=3, optimizer="adam", **same)
    yield _make_job(buffers="synchronized", rows="ragged", **same)


def _compressed() -> Iterator[Job]:
    """Communication hooks."""
    for world_size in (2, 4):
        yield _make_job(world_size=world_size, compression="bf16")
    power: dict[str, Any] = dict(compression="powersgd")
    for feedback in (True, False):
        yield _make_job(world_size=4, power_rank=2, error_feedback=feedback, **power)
    power |= dict(power_rank=1, error_feedback=True)
    yield _make_job(world_size=2, **power)
    yield _make_job(world_size=4, accumulate=3, rows="tokens", **power)


def _local() -> Iterator[Job]:
    """Local SGD. Torch's first average follows the first local step: step 2."""
    for world_size, optimizer in ((2, "sgd"), (4, "adam")):
        yield _make_job(
            design="LocalSGD", world_size=world_size, optimizer=optimizer, sync_every=3
        )


def _scaled() -> Iterator[Job]:
    """A dynamic loss scale."""
    same: dict[str, Any] = dict(dtype="float32", compute="f32")
    yield _make_job(world_size=2, optimizer="adam", **same)
    yield _make_job(world_size=4, **same)
    yield _make_job(world_size=2, model="norm_net", buffers="broadcast", **same)
    yield _make_job(world_size=2, **same | {"compute": "fp16"})


def _make_job(design: str = "RingAllReduce", **fields) -> Job:
    return Job(library="jax", design=design, **fields)
