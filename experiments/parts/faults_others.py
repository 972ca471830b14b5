"""The other faults: a stopped process, a full disk, a link that is cut."""

import contextlib
import dataclasses
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from experiments.parts.faults_kills import resumption, wait_for_step
from experiments.parts.faults_launch import Launch
from experiments.parts.faults_training import Options

DISK_MB = 8  # far more than two checkpoints need, so that the ballast decides
CAUSE = "No space left on device"


@dataclasses.dataclass(frozen=True)
class Problem:
    """What all faults befall.

    Attributes:
        folder: Of all trainings.
        digits: File of the data.
        options: Of the training without faults.
        processes: How many.
        expected: The loss of every step without faults.
        digests: Of the bits that processes end with, without faults.
        seed: Of everything random.
    """

    folder: pathlib.Path
    digits: pathlib.Path
    options: Options
    processes: int
    expected: Mapping[int, str]
    digests: set[str]
    seed: int

    def launch(self, name: str, restarts: int, **options: Any) -> Launch:
        """Starts a training; its checkpoints go to a folder of its own."""
        hosts = options.pop("hosts", ())
        where = {"checkpoints": str(self.folder / name / "checkpoints")} | options
        return Launch(
            self.folder / name,
            self.digits,
            self.options._replace(**where),
            self.processes,
            restarts,
            hosts,
        )

    def same(self, launch: Launch) -> bool:
        """Whether a training ended with the bits of the one without faults."""
        return launch.digests() == self.digests


def stopped(problem: Problem) -> dict[str, Any]:
    """A process is stopped: it holds its connections, and says nothing any more."""
    chance = random.Random(problem.seed)
    rank = chance.randrange(problem.processes)
    step = chance.randrange(1, problem.options.steps // 2)
    with problem.launch("stopped", 1) as launch:
        wait_for_step(launch, step)
        os.kill(launch.process(rank), signal.SIGSTOP)
        return _went_on("stopped process", rank, problem, launch, lambda: None)


def full_disk(problem: Problem) -> dict[str, Any]:
    """The disk of the checkpoints is full, until the first failure is reported."""
    every, steps = problem.options.save_every, problem.options.steps
    step = every * max(1, steps // every // 2) + 1
    with _small_disk(problem.folder / "disk") as disk:
        checkpoints = str(disk / "checkpoints")
        with problem.launch("full-disk", 1, checkpoints=checkpoints) as launch:
            wait_for_step(launch, step)
            ballast = disk / "ballast"
            _fill(ballast)
            kept = _complete(disk)
            row = _went_on("full disk", None, problem, launch, ballast.unlink)
    resumed = row["goes on at"] - 1
    return row | {
        "says": CAUSE if CAUSE in launch.said() else "not the cause",
        "nothing lost": resumed == max(kept),
    }


def cut_link(problem: Problem) -> dict[str, Any]:
    """The link of a host is cut, until the first failure is reported."""
    from experiments.network import Hosts

    rank = problem.processes - 1
    with Hosts(problem.processes) as network:
        hosts = [
            {"address": address, "prefix": network.prefix(i)}
            for i, address in enumerate(network.addresses)
        ]
        with problem.launch("cut-link", 1, hosts=hosts) as launch:
            wait_for_step(launch, problem.options.steps // 3)
            network.cut(rank)
            return _went_on(
                "cut link", rank, problem, launch, lambda: network.mend(rank)
            )


def no_small_disk() -> str:
    """Why there can be no small disk here; empty if there can."""
    if sys.platform != "linux" or os.geteuid():
        return (
            "A full disk needs a small one of its own: a tmpfs, which only root on "
            "Linux may mount. Run it as root, or in a container with --privileged."
        )
    return ""


def no_links() -> str:
    """Why there can be no links here; empty if there can."""
    from experiments import network

    return network.missing()


def _went_on(
    fault: str,
    rank: int | None,
    problem: Problem,
    launch: Launch,
    repair: Callable[[], None],
) -> dict[str, Any]:
    """Waits for the report of a fault, repairs it, and sees how it goes on.

    Times count from the last step that was done.
    """
    fault_s = time.time()
    failure = launch.until(launch.failures, f"the report of a {fault}")[0]
    repair()
    launch.end()
    # A full disk hurts when the next save comes.
    done = [row["time_s"] for row in launch.losses()]
    stood_s = max([fault_s, *(t for t in done if t < failure.noticed_s)])
    row = resumption(launch, stood_s, float("inf"), problem.expected)
    return {
        "fault": fault,
        "rank": rank,
        "named": failure.rank,
        "says": failure.how,
        "noticed_s": round(failure.noticed_s - stood_s, 2),
        "ended_s": round(failure.time_s - stood_s, 2),
        **row,
        "same parameters": problem.same(launch),
        "orphans": len(launch.orphans()),
    }


@contextlib.contextmanager
def _small_disk(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """A disk of `DISK_MB`, in memory."""
    folder.mkdir()
    size = f"size={DISK_MB}m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def _fill(ballast: pathlib.Path) -> None:
    """Takes all the room that is left."""
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def _complete(disk: pathlib.Path) -> list[int]:
    """The steps of complete checkpoints."""
    folders = (disk / "checkpoints").iterdir()
    return [int(path.name) for path in folders if path.name.isdecimal()]
