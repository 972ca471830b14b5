"""Processes of JAX and PyTorch on the same hosts, waiting for their turns."""

import contextlib
import importlib.util
import itertools
import pathlib
import tempfile
from typing import Any

from experiments.harness.processes import Processes
from experiments.network import Hosts

PORTS = itertools.count(9911)  # hosts are new, and nobody else listens there


class Groups(contextlib.ExitStack):
    """One process of each library on each of the first hosts; leaving ends them.

    What one of them does it does alone, as the other waits for its turn.

    Attributes:
        hosts: Where they run.
        count: On how many.
    """

    def __init__(self, hosts: Hosts, count: int, ours: str, theirs: str):
        """Starts them; without PyTorch, ours alone.

        Args:
            hosts: Where they run; entered.
            count: On how many of them.
            ours: A module of `experiments.parts`, which gets a coordinator's address.
            theirs: Another, which gets a folder.

        Raises:
            RuntimeError: One fails.
        """
        super().__init__()
        self.hosts, self.count = hosts, count
        self._theirs = None
        with contextlib.ExitStack() as starting:
            folder = starting.enter_context(tempfile.TemporaryDirectory())
            coordinator = f"{hosts.addresses[0]}:{next(PORTS)}"
            self._ours = self._start(starting, ours, folder, coordinator)
            if importlib.util.find_spec("torch"):
                self._theirs = self._start(starting, theirs, folder, folder)
            self.push(starting.pop_all())

    @property
    def torch(self) -> bool:
        """Whether PyTorch takes part."""
        return self._theirs is not None

    def ask(self, torch: bool, ranks: range | None = None, **command: Any) -> list[Any]:
        """What the processes of one library answer, by rank.

        Args:
            torch: Whether PyTorch's are asked.
            ranks: Who is asked; None asks all.
            command: What they get.

        Raises:
            RuntimeError: One fails, or does not answer in time.
        """
        group = self._theirs if torch else self._ours
        if group is None:
            raise RuntimeError(
                "PyTorch was asked, and is not installed. Leave its ways out, or "
                "install it: pip install 'jax-data-parallel[torch]'"
            )
        return group.ask(ranks, **command)

    def _start(
        self, stack: contextlib.ExitStack, module: str, folder: str, argument: str
    ) -> Processes:
        """One process of a library on each host."""
        group = Processes(
            f"experiments.parts.{module}",
            self.count,
            pathlib.Path(folder),
            argument,
            prefixes=[self.hosts.prefix(host) for host in range(self.count)],
        )
        stack.enter_context(group)
        group.ask(do="start")
        return group
