"""One launched training: what it logs, what the launcher says, what is left of it."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from experiments.parts.faults_process import STARTED
from experiments.parts.faults_training import LOSSES, Options

ROOT = pathlib.Path(__file__).parents[2]
GRACE_S = 1.0  # nobody here does anything when asked to end
PATIENCE_S = 90.0  # nothing may take longer; no training hangs for more than 60
LOOK_S = 0.005  # between two looks at what a training has logged
NOTICED = re.compile(r"rank \d+ of \d+ has ended: ")
FAILED = re.compile(r"rank (\d+) of \d+ failed first: (.*)")
Found = TypeVar("Found")


class Message(NamedTuple):
    """A line of the launcher, and when it came, by `time.time`."""

    time_s: float
    text: str


class Failure(NamedTuple):
    """What the launcher said about a failure, and when.

    Attributes:
        noticed_s: When it saw the first process end, by `time.time`.
        time_s: When all had ended.
        rank: Which one it named.
        how: In which words.
    """

    noticed_s: float
    time_s: float
    rank: int
    how: str


class Launch:
    """A training that runs beside this process, under the launcher.

    Leaving the `with` block kills it, if it still runs.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        digits: pathlib.Path,
        options: Options,
        processes: int,
        restarts: int = 0,
        hosts: Sequence[dict[str, Any]] = (),
    ):
        """Starts it.

        Args:
            folder: Of its own, empty or missing.
            digits: File of the data.
            options: Of the training.
            processes: How many.
            restarts: How often the launcher may start them again.
            hosts: Where each runs: its address, and the prefix of its command.
        """
        self.folder, self.processes = folder, processes
        self.start_s = time.time()
        (folder / STARTED).mkdir(parents=True)
        shutil.copy(digits, folder / "digits.npz")
        (folder / "options.json").write_text(json.dumps(options._asdict()))
        (folder / "hosts.json").write_text(json.dumps([*hosts]))
        command = [sys.executable, "-m", "jaxdp.launch", "-n", str(processes)]
        command += ["--platform", "cpu", "--max-restarts", str(restarts)]
        command += ["--grace-s", str(GRACE_S)]
        command += ["-m", "experiments.parts.faults_process", str(folder)]
        with (folder / "output.txt").open("wb") as output:
            self._launcher = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | {"XLA_FLAGS": "", "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=subprocess.PIPE,
                text=True,
            )
        self.messages: list[Message] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> "Launch":
        """Itself."""
        return self

    def __exit__(self, *failure: Any) -> None:
        """Kills the launcher, whose watcher then kills the processes."""
        self._launcher.kill()
        self._launcher.wait()
        self._reader.join(PATIENCE_S)

    def losses(self) -> list[dict[str, Any]]:
        """What has been logged so far: step, loss and time."""
        try:
            text = (self.folder / LOSSES).read_text()
        except FileNotFoundError:
            return []
        whole, _, _ = text.rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]

    def failures(self) -> list[Failure]:
        """What the launcher has named so far."""
        failures, noticed_s = [], None
        for message in [*self.messages]:
            if NOTICED.search(message.text):
                noticed_s = message.time_s
            elif found := FAILED.search(message.text):
                noticed_s = noticed_s or message.time_s
                failure = (noticed_s, message.time_s, int(found[1]), found[2])
                failures.append(Failure(*failure))
                noticed_s = None
        return failures

    def process(self, rank: int) -> int:
        """The number of a process of the present attempt, as soon as it has one."""
        path = self.folder / STARTED / f"{len(self.failures())}.{rank}"
        self.until(path.exists, f"process {path.name}")
        return int(path.read_text())

    def until(self, what: Callable[[], Found], named: str) -> Found:
        """Waits until something is true.

        Raises:
            RuntimeError: The training ends before, or nothing happens for too long.
        """
        deadline = time.monotonic() + PATIENCE_S
        while not (found := what()):
            if self._launcher.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(
                    f"faults waited for {named}, and the training "
                    f"{'hangs' if self._launcher.returncode is None else 'has ended'} "
                    f"after {len(self.losses())} steps. {self._tail()}"
                )
            time.sleep(LOOK_S)
        return found

    def end(self) -> None:
        """Waits until the training has ended well.

        Raises:
            RuntimeError: It fails, or hangs.
        """
        try:
            status = self._launcher.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            status = f"no end within {PATIENCE_S:.0f} s"
        self._reader.join(PATIENCE_S)
        if status != 0:
            raise RuntimeError(
                f"faults got {status} from a launcher that was to end with 0. "
                f"{self._tail()}"
            )

    def digests(self) -> set[str]:
        """Of the bits that each process ended with."""
        finals = [self.folder / f"final.{rank}" for rank in range(self.processes)]
        return {final.read_text() for final in finals}

    def orphans(self) -> list[int]:
        """Processes that are left of all attempts, with what they have started."""
        sessions = {int(path.read_text()) for path in (self.folder / STARTED).iterdir()}
        return [process for process in _running() if _session(process) in sessions]

    def _read(self) -> None:
        with self._launcher.stderr as lines:  # type: ignore[union-attr]
            for line in lines:
                self.messages.append(Message(time.time(), line.rstrip("\n")))

    def said(self) -> str:
        """What the launcher has said, with the seconds since its start."""
        return "\n".join(
            f"{message.time_s - self.start_s:7.2f} {message.text}"
            for message in [*self.messages]
        )

    def _tail(self) -> str:
        return f"The launcher said:\n{self.said()[-4000:]}"


def write_digits(path: pathlib.Path) -> pathlib.Path:
    """Scikit-learn's digits as a file, so that trainings need not import it."""
    from sklearn.datasets import load_digits

    pixels, labels = map(np.asarray, load_digits(return_X_y=True))  # [1797, 64]
    np.savez(path, x=(pixels / 16).astype(np.float32), y=labels.astype(np.int32))
    return path


def _running() -> list[int]:
    """All processes of this machine, on Linux; elsewhere none can be seen."""
    return [int(path.name) for path in pathlib.Path("/proc").glob("[0-9]*")]


def _session(process: int) -> int | None:
    """The session of a process; None if it has ended, or is a zombie."""
    try:
        status = pathlib.Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    state, _, _, session, *_ = status.rpartition(")")[2].split()
    return None if state == "Z" else int(session)
