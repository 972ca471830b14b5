"""The folder through which the launcher and its workers talk.

`jobs.json` lists the jobs; `inputs-NAME.npz` holds what they train on; the first worker
writes `JOB.npz`, and every worker its last parameters as `JOB.rankR.npz`.
"""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from tests.torch_reference import problem

Arrays = dict[str, np.ndarray]


def write_jobs(directory: Path, jobs: Iterable[problem.Job]) -> None:
    """Write the jobs and the inputs they need."""
    jobs = tuple(jobs)
    text = json.dumps([dataclasses.asdict(job) for job in jobs])
    (directory / "jobs.json").write_text(text)
    for job in {job.inputs_name: job for job in jobs}.values():
        made = problem.make_inputs(job.model, job.perturbed)
        np.savez(
            directory / f"inputs-{job.inputs_name}.npz",
            allow_pickle=False,
            inputs=made.inputs,
            targets=made.targets,
            **{f"params/{name}": array for name, array in made.params.items()},
        )


def read_jobs(directory: Path) -> list[problem.Job]:
    """Read the jobs that `write_jobs` wrote, in the same order."""
    jobs = json.loads((directory / "jobs.json").read_text())
    return [problem.Job(**fields) for fields in jobs]


def read_inputs(directory: Path, job: problem.Job) -> problem.Inputs:
    """Read the inputs of `job`, rounded to its dtype."""

    def cast(array: np.ndarray) -> np.ndarray:
        return array.astype(job.dtype) if array.dtype.kind == "f" else array

    with np.load(directory / f"inputs-{job.inputs_name}.npz") as arrays:
        return problem.Inputs(
            _with_prefix("params/", {name: cast(arrays[name]) for name in arrays}),
            cast(arrays["inputs"]),
            cast(arrays["targets"]),
        )


def write_trajectory(
    directory: Path,
    job: problem.Job,
    params: list[dict[str, np.ndarray]],
    losses: list[float],
) -> None:
    """Write the parameters after every step (JAX layout) and the losses."""
    stacked = {
        f"params/{name}": np.stack([step[name] for step in params])
        for name in params[0]
    }
    losses_array = np.asarray(losses, job.dtype)
    np.savez(
        directory / f"{job}.npz", allow_pickle=False, losses=losses_array, **stacked
    )


def write_final(
    directory: Path, job: problem.Job, rank: int, params: dict[str, np.ndarray]
) -> None:
    """Write the last parameters of worker `rank` (JAX layout)."""
    np.savez(directory / f"{job}.rank{rank}.npz", allow_pickle=False, **params)


def read_trajectory(directory: Path, job: problem.Job) -> problem.Trajectory:
    """Read what all workers of `job` wrote."""
    with np.load(directory / f"{job}.npz") as arrays:
        params = _with_prefix("params/", arrays)
        losses = arrays["losses"]
    workers = []
    for rank in range(job.world_size):
        with np.load(directory / f"{job}.rank{rank}.npz") as arrays:
            workers.append(dict(arrays))
    final = {name: np.stack([worker[name] for worker in workers]) for name in params}
    return problem.Trajectory(params, losses, final)


def write_arrays(directory: Path, job: problem.Job, arrays: Arrays) -> None:
    """Write any named arrays that `job` made."""
    np.savez(directory / f"{job}.npz", allow_pickle=False, **arrays)


def read_arrays(directory: Path, job: problem.Job) -> Arrays:
    """Read what `write_arrays` wrote."""
    with np.load(directory / f"{job}.npz") as arrays:
        return dict(arrays)


def _with_prefix(prefix: str, arrays) -> dict[str, np.ndarray]:
    """Select the arrays whose name starts with `prefix`, and drop it."""
    return {
        name.removeprefix(prefix): arrays[name]
        for name in arrays
        if name.startswith(prefix)
    }
