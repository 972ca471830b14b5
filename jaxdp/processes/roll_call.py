"""Who is there, before JAX connects anybody.

`jax.distributed` aborts a process whose peers are missing, double or of another count,
with a text that does not say which. So the processes first meet at the coordinator's
address for a moment: each says who it is, and process 0 tells all of them whether they
are complete. Nothing of it is left when JAX starts its own service there.
"""

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

Found = dict[str, Any]
LINE = 4096  # bytes, at most, of what a process says
GRACE_S = 5.0  # for the verdict to arrive, after the time that it is about


def hold(
    address: str, bind: str, count: int, rank: int, about: Found, timeout_s: float
):
    """Meets all processes.

    Args:
        address: `HOST:PORT` where process 0 is found.
        bind: `HOST:PORT` where it listens.
        count: How many processes there must be.
        rank: Which one this is.
        about: What must be the same for all, such as versions.
        timeout_s: How long to wait for the others, in seconds.

    Raises:
        RuntimeError: The port is taken, or somebody is missing, double, or different.
    """
    deadline = time.monotonic() + timeout_s
    if rank == 0:
        verdict = _call(bind, address, count, about, deadline)
    else:
        verdict = _answer(address, {"rank": rank, "count": count} | about, deadline)
    if verdict:
        raise RuntimeError(f"jaxdp.initialize on rank {rank} of {count}: {verdict}")


def _call(bind: str, address: str, count: int, about: Found, deadline: float) -> str:
    """Process 0: hears everybody, and tells them what is wrong, if anything."""
    heard = [{"rank": 0, "count": count} | about]
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listening(bind))
        connections = []
        while len(heard) < count and not _wrong(heard, count):
            listener.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                break
            stack.enter_context(connection)
            if said := _said(connection):
                connections.append(connection)
                heard.append(said)
        verdict = _wrong(heard, count) or _missing(heard, count, address)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps(verdict).encode() + b"\n")
    return verdict


def _answer(address: str, said: Found, deadline: float) -> str:
    """Any other process: says who it is, and waits for the verdict."""
    host, port = split(address)
    problem = "nobody answered"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=left) as connection:
                connection.sendall(json.dumps(said).encode() + b"\n")
                connection.settimeout(left + GRACE_S)
                with connection.makefile() as lines:
                    if line := lines.readline(LINE):
                        return json.loads(line)
            problem = "it hung up"
        except (OSError, ValueError) as error:
            problem = str(error) or type(error).__name__
        time.sleep(0.1)
    return (
        f"rank 0 was not found at {address} ({problem}). Rank 0 must be running, and "
        "this address must lead to its host. Start it, and check the address and the "
        "firewall between the hosts."
    )


@contextlib.contextmanager
def _listening(bind: str) -> Iterator[socket.socket]:
    """A listener at an address that nobody else may have."""
    host, port = split(bind)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(1024)
        except OSError as error:
            raise RuntimeError(
                f"jaxdp.initialize on rank 0 cannot listen at {bind}: "
                f"{error.strerror}. The coordinator needs a free port at an address "
                "of this host. Choose another port, end what uses this one, or pass "
                "coordinator_bind_address."
            ) from error
        yield listener


def _said(connection: socket.socket) -> Found | None:
    """What a process says of itself; None if it is no process of ours."""
    connection.settimeout(GRACE_S)
    try:
        with connection.makefile() as lines:
            said = json.loads(lines.readline(LINE))
        return said if isinstance(said, dict) and "rank" in said else None
    except (OSError, ValueError):
        return None


def _wrong(heard: list[Found], count: int) -> str:
    """What two processes contradict each other in."""
    first = heard[0]
    for said in heard[1:]:
        rank = said["rank"]
        for what in sorted((first.keys() | said.keys()) - {"rank"}):
            if said.get(what) != first.get(what):
                named = "process count" if what == "count" else what
                return (
                    f"rank {rank} was started with {named} {said.get(what)}, and rank "
                    f"0 with {first.get(what)}. It must be the same for all. Start "
                    "all processes with the same settings and the same software."
                )
        if sum(other["rank"] == rank for other in heard) > 1:
            return (
                f"two processes say that they are rank {rank}. Each of the {count} "
                f"processes needs a rank of its own, from 0 to {count - 1}. Pass "
                "another process_id to each."
            )
    return ""


def _missing(heard: list[Found], count: int, address: str) -> str:
    """Who has not come."""
    missing = sorted(set(range(count)) - {said["rank"] for said in heard})
    if not missing:
        return ""
    ranks = "ranks" if len(missing) > 1 else "rank"
    return (
        f"{ranks} {', '.join(map(str, missing))} did not come to {address} in time; "
        f"{len(heard)} of {count} processes did. All must be started with this "
        "address within timeout_s of each other. Start those too, or wait longer."
    )


def split(address: str) -> tuple[str, int]:
    """Host and port.

    Raises:
        ValueError: No `HOST:PORT`.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(
            f"jaxdp.initialize got the address {address!r}. It must be HOST:PORT with "
            "a port from 1 to 65535. Pass, for example, '10.0.0.1:9876'."
        )
    return host.strip("[]"), int(port)
