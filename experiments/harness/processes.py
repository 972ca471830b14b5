"""Worker processes that answer commands: a line of JSON in, a line of JSON out.

Nothing survives: leaving the `with` block kills the workers, and a worker whose stdin
closes, because its parent has died, ends even if it waits in a collective.
"""

import contextlib
import json
import os
import pathlib
import queue
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

ROOT = pathlib.Path(__file__).parents[2]
START_S, ANSWER_S = 120.0, 120.0  # after which a worker counts as stuck
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Processes:
    """Workers of one library, rank by rank."""

    def __init__(
        self,
        module: str,
        count: int,
        folder: pathlib.Path,
        *arguments: str,
        prefixes: Sequence[Sequence[str]] | None = None,
    ):
        """Starts `python -m MODULE RANK COUNT ARGUMENTS...`, and waits until all serve.

        Args:
            module: Calls `serve`.
            count: How many processes.
            folder: Where they write what they print.
            arguments: The same for all.
            prefixes: What stands before the command of each rank, such as `ip netns
                exec NAME`; it must become the worker, and not wait for it.

        Raises:
            RuntimeError: A worker fails.
        """
        self.module, self.workers = module, []
        python = [sys.executable, "-m", module]
        before = [[]] * count if prefixes is None else prefixes
        self._logs = [folder / f"{module}.{rank}.txt" for rank in range(count)]
        self._replies = [queue.SimpleQueue() for _ in range(count)]
        try:
            for rank, prefix in enumerate(before):
                command = [*prefix, *python, str(rank), str(count), *arguments]
                self._start(command, self._logs[rank])
            self.collect(range(count), START_S)
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> "Processes":
        """Itself."""
        return self

    def __exit__(self, *failure: Any) -> None:
        """Kills the workers."""
        self.kill()

    def ask(self, ranks: Iterable[int] | None = None, **command: Any) -> list[Any]:
        """Sends a command to workers, all at once.

        Args:
            ranks: Who is asked; None asks all.
            command: What they receive.

        Returns:
            Their answers, in the order of `ranks`.

        Raises:
            RuntimeError: A worker fails, or does not answer within two minutes.
        """
        ranks = [*range(len(self.workers))] if ranks is None else [*ranks]
        for rank in ranks:
            with contextlib.suppress(BrokenPipeError):  # `collect` says why
                self.workers[rank].stdin.write(json.dumps(command) + "\n")
                self.workers[rank].stdin.flush()
        return self.collect(ranks, ANSWER_S)

    def collect(self, ranks: Iterable[int], timeout_s: float) -> list[Any]:
        """Waits for one answer of each."""
        answers = []
        for rank in ranks:
            line, found = "", f"no answer within {timeout_s:.0f} s"
            with contextlib.suppress(queue.Empty):
                line = self._replies[rank].get(timeout=timeout_s)
                if not line:
                    found = f"exit code {self.workers[rank].wait()}"
            if not line:
                self.kill()
                raise RuntimeError(
                    f"{self.module} got {found} from worker {rank} of "
                    f"{len(self.workers)}. What it printed:\n"
                    f"{self._logs[rank].read_text()[-4000:]}"
                )
            answers.append(json.loads(line))
        return answers

    def kill(self) -> None:
        """Ends all workers; `jax.distributed` catches any softer signal."""
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.wait()
            with contextlib.suppress(BrokenPipeError):
                worker.stdin.close()

    def _start(self, command: list[str], log: pathlib.Path) -> None:
        """Starts one worker, and a thread that reads its answers."""
        with log.open("wb") as stderr:
            worker = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | ONE_THREAD,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        replies = self._replies[len(self.workers)]
        self.workers.append(worker)

        def read():
            with worker.stdout:  # type: ignore[union-attr]
                for line in worker.stdout:  # type: ignore[union-attr]
                    replies.put(line)
            replies.put("")  # it has ended

        threading.Thread(target=read, daemon=True).start()


def serve(answer: Callable[..., Any]) -> NoReturn:
    """Answers commands from stdin until that closes, then ends the process.

    Args:
        answer: Called with each command as keywords; returns what JSON can say.
    """
    # Libraries print to stdout, too: that goes to stderr from here on.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    commands: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read():
        for line in sys.stdin:
            commands.put(line)
        os._exit(0)  # the parent has gone, whatever this process waits for

    threading.Thread(target=read, daemon=True).start()
    try:
        print(json.dumps("ready"), file=replies, flush=True)
        while True:
            reply = answer(**json.loads(commands.get()))
            print(json.dumps(reply), file=replies, flush=True)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # a regular end would wait for the other workers


def pin(rank: int) -> None:
    """Keeps this process on one core, where the system can do that."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
