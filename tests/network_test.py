"""Hosts in network namespaces: what links carry and when, and that all goes away."""

import contextlib
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys

import pytest

from experiments import network
from experiments.harness import registry
from experiments.network import commands, hosts, leftovers

WHY = network.missing()
needs_hosts = pytest.mark.skipif(bool(WHY), reason=WHY)

RECEIVE = """
import socket, sys
server = socket.create_server((sys.argv[1], 9))
print("listening", flush=True)
connection, _ = server.accept()
count = 0
while part := connection.recv(1 << 20):
    count += len(part)
connection.sendall(b"%d" % count)
"""
SEND = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 9), timeout=20)
start = time.perf_counter()
connection.sendall(bytes(int(sys.argv[2])))
connection.shutdown(socket.SHUT_WR)
assert int(connection.recv(99)) == int(sys.argv[2])
print(time.perf_counter() - start)
"""
BUILD = """
import sys, time
from experiments.network import Hosts
with Hosts(2) as hosts:
    print(*hosts.names, flush=True)
    {}
"""


@pytest.fixture
def python():
    """Starts scripts; all end with the test."""
    with contextlib.ExitStack() as stack:

        def start(text, *arguments, prefix=()):
            process = stack.enter_context(
                subprocess.Popen(
                    [*prefix, sys.executable, "-c", text, *map(str, arguments)],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    cwd=registry.FOLDER.parent,
                )
            )
            stack.callback(process.kill)
            return process

        yield start


def first_line(process):
    return process.stdout.readline()


def send(python, built, source, target, nbytes):
    """Seconds that it takes."""
    receiver = python(RECEIVE, built.addresses[target], prefix=built.prefix(target))
    assert first_line(receiver) == "listening\n"
    sender = python(SEND, built.addresses[target], nbytes, prefix=built.prefix(source))
    said, complained = sender.communicate(timeout=30)
    receiver.communicate(timeout=30)
    assert sender.returncode == 0, complained
    return float(said)


def remaining(names):
    listed = commands.run("ip netns list").split()
    return [n for n in names if n in listed or (leftovers.FILES / n).exists()]


@needs_hosts
def test_links_carry_what_their_rate_allows_and_count_it(python):
    size, rate = 4 * 2**20, 80e6 / 8
    with network.Hosts(3, rate="80mbit") as built:
        before = built.counters()
        seconds = send(python, built, 0, 2, size)
        after = built.counters()
        sent = [b.sent_bytes - a.sent_bytes for a, b in zip(before, after, strict=True)]
        received = [
            b.received_bytes - a.received_bytes
            for a, b in zip(before, after, strict=True)
        ]
        names = [*built.names]
    # A packet of 1,514 bytes carries 1,448: 1.046 of the size.
    for carried in (sent[0], received[2]):
        assert 1.04 < carried / size < 1.06
    for others in (sent[2], received[0], sent[1], received[1]):
        assert others < 0.02 * size  # acknowledgements, and who has which address
    assert 1 < seconds * rate / size < 1.5  # a full bucket saves 2 %
    assert remaining(names) == []


@needs_hosts
def test_a_host_has_a_name_and_an_address_of_its_own(python):
    ask = "import socket; print(socket.gethostbyname(socket.gethostname()))"
    with network.Hosts(2) as built:
        found = [
            python(ask, prefix=built.prefix(i)).communicate(timeout=30)[0].strip()
            for i in range(2)
        ]
        assert found == built.addresses == ["10.77.0.1", "10.77.0.2"]
    assert socket.gethostname()  # the machine itself is not renamed


@needs_hosts
def test_a_cut_link_carries_nothing_until_it_is_mended(python):
    with network.Hosts(2) as built:
        built.cut(1)
        # A host that hears somebody ask for a connection refuses at once.
        caller = python(SEND, built.addresses[1], 1, prefix=built.prefix(0))
        with pytest.raises(subprocess.TimeoutExpired):
            caller.communicate(timeout=1)
        built.mend(1)
        _, complained = caller.communicate(timeout=20)
        assert "Connection refused" in complained


@needs_hosts
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing(python, how):
    builder = python(BUILD.format("time.sleep(60)"))
    names = first_line(builder).split()
    assert remaining(names) == names
    builder.send_signal(how)
    builder.communicate(timeout=30)
    assert builder.returncode == (-how if how == signal.SIGINT else 128 + how)
    assert remaining(names) == []


@needs_hosts
def test_an_exception_leaves_nothing_that_runs(python):
    with pytest.raises(ArithmeticError), network.Hosts(1) as built:
        sleeper = python("import time; time.sleep(60)", prefix=built.prefix(0))
        raise ArithmeticError
    assert sleeper.wait(timeout=10) == -signal.SIGKILL
    assert remaining(built.names) == []


@needs_hosts
def test_what_a_killed_process_leaves_goes_with_the_next_hosts(python):
    builder = python(BUILD.format("time.sleep(60)"))
    names = first_line(builder).split()
    builder.kill()
    builder.communicate(timeout=30)
    assert remaining(names) == names
    with network.Hosts(1) as built:
        assert remaining(names) == []
        with network.Hosts(1):  # of a process that lives
            assert remaining(built.names) == built.names


@needs_hosts
def test_what_a_process_of_the_same_number_has_left_is_replaced():
    built = network.Hosts(1)
    commands.run(f"ip netns add {built.names[0]}")
    with built:
        assert remaining(built.names) == built.names
    assert remaining(built.names) == []


@needs_hosts
def test_hosts_that_cannot_be_built_to_the_end_leave_nothing(monkeypatch):
    run, done = commands.run, []

    def refuse(command, check=True, given=""):
        done.append(command)
        if "host1" in command and "tbf" in command:
            raise RuntimeError("as asked")
        return run(command, check, given)

    monkeypatch.setattr(commands, "run", refuse)
    built = network.Hosts(2)
    with pytest.raises(RuntimeError, match="as asked"), built:
        pass
    assert any("netns add" in command for command in done)
    assert remaining(built.names) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"platform": "darwin"}, "this is darwin.*as root on a Linux machine"),
        ({"user": 1000}, "this is user 1000.*Run it as root"),
        ({"absent": ["tc"]}, "; tc cannot be found.*apt install iproute2"),
        ({"refused": "`ip netns add x` was refused: no"}, "refused: no.*--privileged"),
    ],
    ids=["system", "user", "tools", "kernel"],
)
def test_says_what_is_missing(monkeypatch, change, message):
    monkeypatch.setattr(sys, "platform", change.get("platform", "linux"))
    monkeypatch.setattr(os, "geteuid", lambda: change.get("user", 0))
    monkeypatch.setattr(commands, "absent", lambda: change.get("absent", []))

    def refuse(command, check=True, given=""):
        if check:
            raise RuntimeError(change["refused"])
        return ""

    if "refused" in change:
        monkeypatch.setattr(commands, "run", refuse)
    else:
        monkeypatch.setattr(hosts, "Hosts", pytest.fail)
    assert re.search(message, network.missing())


def test_a_refused_command_says_why():
    if commands.absent():
        pytest.skip("needs iproute2")
    with pytest.raises(RuntimeError, match=r"`ip link show nosuch0` was refused.*no"):
        commands.run("ip link show nosuch0")
    assert commands.run("ip link show nosuch0", check=False) == ""


def test_rates():
    assert network.bytes_per_s("400mbit") == 50_000_000
    assert network.bytes_per_s("1.5Gbit") == 187_500_000
    assert network.bytes_per_s("8kbit") == 1000
    for wrong in ("400", "0mbit", "fast", "400 mbit", "1mbps"):
        with pytest.raises(ValueError, match=f"'{wrong}'.*400mbit"):
            network.bytes_per_s(wrong)


@pytest.mark.parametrize("options", [{"count": 0}, {"count": 251}, {"mtu": 100}])
def test_hosts_that_do_not_fit(options):
    with pytest.raises(ValueError, match=r"Hosts got count=.*Hosts\(4, mtu=1500\)"):
        network.Hosts(**{"count": 4} | options)


def test_only_names_of_this_kind_are_leftovers(monkeypatch, tmp_path):
    monkeypatch.setattr(leftovers, "FILES", tmp_path)
    for each in ("jaxdp-99-0-host1", "jaxdp-mine", "other"):
        (tmp_path / each).mkdir()
    listed = "jaxdp-12-3-switch (id: 4)\np0 (id: 0)\n"
    monkeypatch.setattr(commands, "run", lambda command, check: listed)
    assert leftovers.existing() == ["jaxdp-12-3-switch", "jaxdp-99-0-host1"]
    assert leftovers.name(3, "host1") == f"jaxdp-{os.getpid()}-3-host1"
    assert pathlib.Path("/etc/netns") != leftovers.FILES


@needs_hosts
def test_acknowledgements_do_not_wait_behind_a_hosts_own_data():
    path, waiting = hosts.WAITING
    with network.Hosts(1) as built:
        read = ["ip", "netns", "exec", built.names[0], "cat", path]
        said = subprocess.run(read, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == waiting
