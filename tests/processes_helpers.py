"""Starts processes that join each other, and collects what each of them found.

A start costs seconds of CPU per process, so one start runs many jobs. Processes find
around them what the launcher would set; with one process, nothing of it.
"""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from experiments.harness import fast
from jaxdp.launch.environment import LOOPBACK, free_port

ROOT = pathlib.Path(__file__).parent.parent
TIMEOUT_S = 240.0
Results = list[dict[str, Any]]  # by rank


class Started(NamedTuple):
    """Processes, by rank, and where they write."""

    folder: pathlib.Path
    running: list[subprocess.Popen]
    deadline: float

    def results(self) -> Results:
        """Waits until all have ended well, and returns what they wrote.

        Raises:
            RuntimeError: One failed, or time is up; says where each of them was.
        """
        codes = self._wait(any)
        if any(code != 0 for code in codes):
            for process in self.running:
                process.send_signal(signal.SIGABRT)  # Python then says where it was
            time.sleep(1.0)
            logs = "\n".join(text[-3000:] for text in self._logs())
            raise RuntimeError(f"exit codes {codes}, None where time is up\n{logs}")
        return read(self.folder, len(self.running))

    def ends(self) -> list[tuple[int | None, str]]:
        """Waits until all have ended somehow; exit codes, and what they printed."""
        codes = self._wait(lambda codes: False)
        return [*zip(codes, self._logs(), strict=True)]

    def _wait(self, is_enough: Callable[[list[int | None]], bool]) -> list[int | None]:
        codes: list[int | None] = [None] * len(self.running)
        while None in codes and not is_enough(codes):
            if time.monotonic() > self.deadline:
                break
            time.sleep(0.05)
            codes = [process.poll() for process in self.running]
        return codes

    def _logs(self) -> list[str]:
        ranks = range(len(self.running))
        return [(self.folder / f"log-{rank}").read_text() for rank in ranks]


@contextlib.contextmanager
def started(
    module: str,
    processes: int,
    devices: int,
    *arguments: str,
    timeout_s: float = TIMEOUT_S,
) -> Iterator[Started]:
    """Processes of `tests.MODULE`, of which none is left when the block ends.

    Each runs `python -m tests.MODULE FOLDER ARGUMENTS...` and ends with `write`.

    Args:
        module: In this folder.
        processes: How many.
        devices: Of each process.
        arguments: The same for all.
        timeout_s: From the start, after which nobody waits for them, in seconds.
    """
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        command = [sys.executable, "-m", f"tests.{module}", str(folder), *arguments]
        group = Started(folder, [], time.monotonic() + timeout_s)
        stack.callback(lambda: [end(process) for process in group.running])
        for rank, variables in enumerate(environments(processes, devices)):
            log = stack.enter_context((folder / f"log-{rank}").open("wb"))
            group.running.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=os.environ | variables,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )
        yield group


def environments(processes: int, devices: int) -> list[dict[str, str]]:
    """What each process has around it, by rank."""
    common = {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "XLA_FLAGS": fast.FLAGS,
        "PYTHONFAULTHANDLER": "1",
    }
    if processes == 1:
        return [common]
    common |= {
        "JAX_COORDINATOR_ADDRESS": f"{LOOPBACK}:{free_port()}",
        "JAX_NUM_PROCESSES": str(processes),
    }
    return [common | {"JAX_PROCESS_ID": str(rank)} for rank in range(processes)]


def write(folder: str | pathlib.Path, rank: int, found: dict[str, Any]) -> None:
    """Leaves what a process found: JSON, and NumPy arrays bit for bit."""
    path = pathlib.Path(folder) / f"result-{rank}.json"
    path.write_text(json.dumps(found, default=_as_json))


def read(folder: pathlib.Path, processes: int) -> Results:
    """What so many processes have left with `write`."""
    texts = [folder / f"result-{rank}.json" for rank in range(processes)]
    return [json.loads(text.read_text(), object_hook=_from_json) for text in texts]


def end(process: subprocess.Popen) -> None:
    """Kills a process that still runs; JAX catches gentler signals."""
    if process.poll() is None:
        process.kill()
    process.wait()


def _as_json(value: Any) -> dict[str, Any]:
    array = np.asarray(value)
    return {
        "dtype": array.dtype.name,
        "shape": array.shape,
        "bytes": array.tobytes().hex(),
    }


def _from_json(value: dict[str, Any]) -> Any:
    if "bytes" not in value:
        return value
    array = np.frombuffer(bytes.fromhex(value["bytes"]), value["dtype"])
    return array.reshape(value["shape"])
