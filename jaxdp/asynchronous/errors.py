"""What a server refuses, and what is said of a run that came to a halt."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxdp.asynchronous.server import Server, Snapshot


def check_call(server: "Server", worker: int, caller: str) -> None:
    """Refuses unknown workers, and calls before `init`.

    Raises:
        ValueError: No such worker.
        RuntimeError: There are no parameters yet.
    """
    if not 0 <= worker < len(server.clocks):
        raise ValueError(
            f"Server.{caller} got worker={worker}. This server has "
            f"{len(server.clocks)} workers, 0 to {len(server.clocks) - 1}. Make it "
            "with Server(optimizer, workers=...)."
        )
    if server.params is None:
        raise RuntimeError(
            f"Server.{caller} by worker {worker} came before Server.init. Version 0 is "
            "the initial parameters. Call server.init(params) first."
        )


def check_turn(server: "Server", worker: int) -> None:
    """Refuses a pull for which the policy makes the worker wait.

    Raises:
        RuntimeError: Names the workers whose pushes are missing.
    """
    if missing := server.waits_for(worker):
        raise RuntimeError(
            f"Server.pull by worker {worker} came too early: {server.policy} starts "
            f"its iteration {server.next_iteration(worker)} after the pushes of "
            f"{_names(missing, server.clocks)}. Wait until server.waits_for({worker}) "
            "is empty."
        )


def check_snapshot(server: "Server", worker: int, snapshot: "Snapshot") -> None:
    """Refuses what would count a gradient twice, or come from another server.

    Raises:
        ValueError: A version that there is not, or an iteration that is pushed already.
    """
    if not 0 <= snapshot.version <= server.version:
        raise ValueError(
            f"Server.push by worker {worker} got a snapshot of version "
            f"{snapshot.version}. This server has handed out versions 0 to "
            f"{server.version}. Push what was computed on a pull from it."
        )
    if snapshot.iteration != server.clocks[worker]:
        raise ValueError(
            f"Server.push by worker {worker} got the snapshot of iteration "
            f"{snapshot.iteration}. The worker's clock is {server.clocks[worker]}, and "
            "each iteration is pushed once. Pull again before the next push."
        )


def deadlock(server: "Server", caller: str, states: Sequence[str]) -> RuntimeError:
    """The error for a run in which nobody can go on.

    Args:
        server: Of the run.
        caller: The public function.
        states: What each worker does, such as "has stopped"; whoever "waits" is said to
            wait for whom.
    """
    lines = []
    for worker, (state, clock) in enumerate(zip(states, server.clocks, strict=True)):
        missing = server.waits_for(worker) if state == "waits" else []
        whom = f" for {_names(missing, server.clocks)}" if missing else ""
        lines.append(f"worker {worker} (clock {clock}) {state}{whom}")
    return RuntimeError(
        f"{caller} came to a halt at {server.now():.6g} s: all workers that have not "
        f"finished wait or have stopped, so {server.policy} starts no iteration. "
        f"{'; '.join(lines)}. Let the worker return, or take a policy that does not "
        "wait for it: Eventual(), or Backup(extra) with enough extra workers."
    )


def _names(workers: Sequence[int], clocks: Sequence[int]) -> str:
    """Workers and their clocks, as a list to read."""
    return ", ".join(f"worker {worker} (clock {clocks[worker]})" for worker in workers)
