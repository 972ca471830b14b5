"""Launch processes, wait for them, and read what they wrote.

Importing torch and starting XLA take seconds, so one launch runs many jobs in
sequence: all torch jobs, or all jaxdp jobs of one dtype. A launch happens when its
first job is asked for, once per test process.
"""

import concurrent.futures
import contextlib
import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness import fast
from tests.torch_reference import files, problem

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240.0


def run_reference(job: problem.Job) -> problem.Trajectory:
    """Return the trajectory of `job`, running its whole launch if it has not run yet.

    A launch that failed is not tried again: its error is raised once more.

    Raises:
        ValueError: if `job` is not one of `problem.all_jobs()`.
        RuntimeError: if the launch fails, or takes over `TIMEOUT_S` seconds; the
            message holds what it wrote.
    """
    if job not in (jobs := problem.all_jobs()):
        raise ValueError(
            f"run_reference got {job}, which is not among the {len(jobs)} jobs of "
            "problem.all_jobs(). Add it there."
        )
    result = _launch(_launch_name(job))
    if isinstance(result, RuntimeError):
        raise result.with_traceback(None)
    return result[job]


def _launch_name(job: problem.Job) -> str:
    """Name the launch that runs `job`."""
    return "torch" if job.library == "torch" else f"jax-{job.dtype}"


@functools.cache
def _launch(name: str) -> dict[problem.Job, problem.Trajectory] | RuntimeError:
    """Run all jobs of one launch; return their trajectories, or why it failed."""
    jobs = [job for job in problem.all_jobs() if _launch_name(job) == name]
    module = "worker" if name == "torch" else "jax_side"
    given = environment(jobs[0].library, jobs[0].dtype)
    with tempfile.TemporaryDirectory() as folder:
        files.write_jobs(Path(folder), jobs)
        try:
            run([f"tests.torch_reference.{module}", folder], given, Path(folder))
        except RuntimeError as error:
            return error
        return {job: files.read_trajectory(Path(folder), job) for job in jobs}


def arrays_of(job: Any, name: str, jobs: tuple[Any, ...]) -> dict[str, np.ndarray]:
    """Return what `job` produced; both libraries run all jobs once per test process.

    Args:
        job: One of `jobs`; it has a `library`, "torch" or "jax".
        name: Of the modules `NAME_torch` and `NAME_jax`, which write to a folder.
        jobs: All.

    Raises:
        KeyError: if it is not one of them.
        RuntimeError: if a process fails; the message holds its stderr.
    """
    result = _launches(name, jobs)[job.library]
    if isinstance(result, RuntimeError):
        raise result.with_traceback(None)
    return result[job]


@functools.cache
def _launches(name: str, jobs: tuple[Any, ...]) -> dict[str, Any]:
    """Run both libraries beside each other; what they made, or why they failed."""
    libraries = ("torch", "jax")
    launch = functools.partial(_launch_library, name, jobs)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return dict(zip(libraries, pool.map(launch, libraries), strict=True))


def _launch_library(name: str, jobs: tuple[Any, ...], library: str) -> Any:
    """Run all jobs of one library."""
    with tempfile.TemporaryDirectory() as folder:
        command = [f"tests.torch_reference.{name}_{library}", folder]
        given = environment(library, "float64")
        try:
            # They share the cores, so each may take as long as both together.
            run(command, given, Path(folder), 2 * TIMEOUT_S)
        except RuntimeError as error:
            return error
        own = [job for job in jobs if job.library == library]
        return {job: files.read_arrays(Path(folder), job) for job in own}


def environment(library: str, dtype: str) -> dict[str, str]:
    """Return what a process of `library` needs around it."""
    return _torch_environment() if library == "torch" else _jax_environment(dtype)


def _torch_environment() -> dict[str, str]:
    """Keep gloo on the loopback interface, whatever the host name resolves to."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback}


def _jax_environment(dtype: str) -> dict[str, str]:
    """Choose the dtype and the devices of a JAX process."""
    return {
        "JAX_ENABLE_X64": str(int(dtype == "float64")),
        "JAX_NUM_CPU_DEVICES": str(problem.MAX_WORLD_SIZE),
        "JAX_PLATFORMS": "cpu",
        # (A device count forced in here would contradict the one above.)
        "XLA_FLAGS": fast.FLAGS,
    }


def run(
    command: list[str],
    environment: dict[str, str],
    directory: Path,
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Run `python -m COMMAND`, and wait for it; `directory` keeps what it writes.

    Raises:
        RuntimeError: if it fails or time is up; the message holds the end of that.
    """
    log, code = directory / "log.txt", None
    with log.open("wb") as output, contextlib.suppress(subprocess.TimeoutExpired):
        code = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            timeout=timeout_s,
            check=False,
        ).returncode
    if code != 0:
        raise RuntimeError(
            f"{command[0]} did not succeed within {timeout_s} s: exit code {code}, "
            f"where None means killed. It wrote:\n{log.read_text()[-4000:]}"
        )
