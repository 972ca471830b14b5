"""Builds hosts, counts what their links carry, cuts links, and takes all down."""

import itertools
import json
import os
import socket
import sys
from typing import Any, NamedTuple

from experiments.network import commands, leftovers, rates, signals

SUBNET = "10.77.0"  # seen inside the namespaces only
MOST = 250  # addresses of the subnet
# Just above one packet as the kernel hands it to a link before it cuts it to the MTU. A
# smaller bucket has the kernel cut every packet itself, which costs 10 to 30 % of time;
# a larger one lets a link that was idle make up for it.
BURST, QUEUE = "80kb", "4mb"
# How much of one connection may wait in a link's queue, as a network card keeps it: a
# few packets. Linux allows 4 MB, and behind these every acknowledgement that the host
# owes to others waits for up to 80 ms, so that their senders stall: a ring lost 4 % of
# its time, as hosts then send and acknowledge at once.
WAITING = "/proc/sys/net/ipv4/tcp_limit_output_bytes", "163840"
REMEDY = (
    "Run it as root on a Linux machine, or in a container with --privileged, whose "
    "kernel has network namespaces, bridge, veth and sch_tbf."
)


class Counter(NamedTuple):
    """Bytes that a host's link has carried since it was built, headers included."""

    sent_bytes: int
    received_bytes: int


class Hosts:
    """Hosts that reach each other by links of limited rate.

    Leaving the `with` block ends all that runs on them and removes them: after an
    exception, Ctrl-C, SIGTERM or SIGHUP, too. What a killed process leaves is removed
    by the next `Hosts`.

    Attributes:
        names: Of their namespaces.
        addresses: IPv4, in the same order.
    """

    _networks = itertools.count()

    def __init__(self, count: int, rate: str = "400mbit", mtu: int = 1500):
        """Says what is to be built; entering builds it.

        Args:
            count: How many hosts, 1 to 250.
            rate: Of each link in each direction, as `tc` writes it.
            mtu: Bytes of a packet without its Ethernet header, at least 576.

        Raises:
            ValueError: An argument that does not fit.
        """
        rates.bytes_per_s(rate)
        if not 1 <= count <= MOST or mtu < 576:
            raise ValueError(
                f"Hosts got count={count} and mtu={mtu}. The subnet has addresses for "
                f"1 to {MOST} hosts, and IPv4 packets have 576 bytes or more. Use "
                "Hosts(4, mtu=1500), for example."
            )
        network = next(self._networks)
        self.rate, self.mtu = rate, mtu
        self.names = [leftovers.name(network, f"host{i}") for i in range(count)]
        self.addresses = [f"{SUBNET}.{i + 1}" for i in range(count)]
        self._switch = leftovers.name(network, "switch")
        self._undo = lambda: None

    def __enter__(self) -> "Hosts":
        """Builds the hosts.

        Raises:
            RuntimeError: The system refuses; `missing` says why and what to do.
        """
        leftovers.remove_dead([*self.names, self._switch])
        self._undo = signals.raise_on_ending()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *failure: Any) -> None:
        """Removes the hosts."""
        self.close()

    def prefix(self, host: int) -> list[str]:
        """What stands before a command to run it on a host; it becomes that command."""
        return [commands.path("ip"), "netns", "exec", self.names[host]]

    def counters(self) -> list[Counter]:
        """What every link has carried, as the kernel counts it where it limits them.

        An interface counts the headers of a packet of 64 KiB once; its rate limit
        counts those of all the packets that it is cut to.
        """
        sent = [_carried(name, "eth0") for name in self.names]
        received = [_carried(self._switch, _port(i)) for i in range(len(self.names))]
        return [Counter(*pair) for pair in zip(sent, received, strict=True)]

    def cut(self, host: int) -> None:
        """Takes the link of a host down: packets vanish, and nobody is told."""
        commands.run(f"ip -n {self._switch} link set {_port(host)} down")

    def mend(self, host: int) -> None:
        """Takes the link of a host up again."""
        commands.run(f"ip -n {self._switch} link set {_port(host)} up")

    def close(self) -> None:
        """Removes everything; harmless if there is nothing."""
        with signals.ignored():
            for name in [*self.names, self._switch]:
                leftovers.remove(name)
        self._undo()

    def _build(self) -> None:
        """Makes the switch, then host by host."""
        run, switch = commands.run, self._switch
        run(f"ip netns add {switch}")
        run(f"ip -n {switch} link add bridge mtu {self.mtu} type bridge")
        run(f"ip -n {switch} link set bridge addrgenmode none up")
        for i, (name, address) in enumerate(
            zip(self.names, self.addresses, strict=True)
        ):
            port = _port(i)
            run(f"ip netns add {name}")
            _write_hosts_file(name, address)
            run(
                f"ip -n {switch} link add {port} mtu {self.mtu} type veth "
                f"peer name eth0 mtu {self.mtu} netns {name}"
            )
            for namespace, interface in ((switch, port), (name, "eth0")):
                run(f"ip -n {namespace} link set {interface} addrgenmode none")
                run(
                    f"tc -n {namespace} qdisc add dev {interface} root tbf "
                    f"rate {self.rate} burst {BURST} limit {QUEUE}"
                )
            run(f"ip -n {switch} link set {port} master bridge up")
            run(f"ip -n {name} addr add {address}/24 dev eth0")
            run(f"ip -n {name} link set eth0 up")
            run(f"ip -n {name} link set lo up")
            path, waiting = WAITING
            run(f"ip netns exec {name} tee {path}", check=False, given=waiting)


def missing() -> str:
    """Why hosts cannot be built here, and what to do; empty if they can."""
    if sys.platform != "linux":
        return f"Hosts are Linux network namespaces; this is {sys.platform}. {REMEDY}"
    if os.geteuid():
        return f"Only root may build hosts; this is user {os.geteuid()}. {REMEDY}"
    absent = commands.absent()
    if absent:
        return (
            f"Hosts are built by the commands ip and tc; {' and '.join(absent)} cannot "
            "be found. On Debian or Ubuntu: apt install iproute2"
        )
    try:
        with Hosts(1):
            return ""
    except RuntimeError as error:
        return f"{error}. {REMEDY}"


def _port(host: int) -> str:
    """The interface of the switch that leads to a host."""
    return f"port{host}"


def _carried(namespace: str, interface: str) -> int:
    """Bytes that an interface has sent through its rate limit."""
    said = commands.run(f"tc -n {namespace} -s -j qdisc show dev {interface}")
    return next(each["bytes"] for each in json.loads(said) if each.get("root"))


def _write_hosts_file(name: str, address: str) -> None:
    """Gives the machine's name the address of the host: gloo listens on that."""
    folder = leftovers.FILES / name
    folder.mkdir(parents=True, exist_ok=True)
    text = f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n"
    (folder / "hosts").write_text(text, encoding="utf-8")
