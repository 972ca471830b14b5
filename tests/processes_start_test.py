"""Joining: who is there, and what `initialize` says if somebody is not."""

import re
import socket
import subprocess
import sys
import textwrap
import threading
import time

import jax
import pytest

import jaxdp
from jaxdp.launch.environment import free_port
from jaxdp.processes import roll_call

ABOUT = {"jax version": "1.2.3"}


def hold(people, timeout_s=20.0, bind=None):
    """What each of some `(rank, count, about)` hears: a text, empty if all is well."""
    address = f"127.0.0.1:{free_port()}"
    heard = ["nothing"] * len(people)

    def come(i, rank, count, about):
        try:
            roll_call.hold(address, bind or address, count, rank, about, timeout_s)
            heard[i] = ""
        except RuntimeError as error:
            heard[i] = str(error)

    threads = [
        threading.Thread(target=come, args=(i, *who), daemon=True)
        for i, who in enumerate(people)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return heard


@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_complete_roll_call_is_silent(count):
    assert hold([(rank, count, ABOUT) for rank in range(count)]) == [""] * count


def test_missing_ranks_are_named_to_those_who_came():
    start = time.monotonic()
    heard = hold([(0, 4, ABOUT), (2, 4, ABOUT)], timeout_s=0.5)
    assert time.monotonic() - start < 5
    for rank, text in zip((0, 2), heard, strict=True):
        assert f"rank {rank} of 4: ranks 1, 3 did not come to 127.0.0.1:" in text
        assert "2 of 4 processes did" in text and "wait longer" in text


def test_a_rank_that_two_processes_claim_is_named_to_all():
    for text in hold([(0, 3, ABOUT), (1, 3, ABOUT), (1, 3, ABOUT)]):
        assert "two processes say that they are rank 1" in text
        assert "from 0 to 2" in text and "process_id" in text


def test_counts_that_differ_are_named_to_all():
    for text in hold([(0, 2, ABOUT), (1, 3, ABOUT)]):
        assert "rank 1 was started with process count 3, and rank 0 with 2" in text


def test_versions_that_differ_are_named_to_all():
    for text in hold([(0, 2, ABOUT), (1, 2, {"jax version": "9.9"})]):
        assert "rank 1 was started with jax version 9.9, and rank 0 with 1.2.3" in text


def test_a_coordinator_that_is_not_there():
    start = time.monotonic()
    (text,) = hold([(1, 2, ABOUT)], timeout_s=0.5)
    assert time.monotonic() - start < 5
    assert "rank 0 was not found at 127.0.0.1:" in text
    assert "Connection refused" in text and "firewall" in text


def test_a_coordinator_that_starts_late_is_waited_for():
    address = f"127.0.0.1:{free_port()}"

    def late():
        time.sleep(0.5)
        roll_call.hold(address, address, 2, 0, ABOUT, 10.0)

    thread = threading.Thread(target=late)
    thread.start()
    roll_call.hold(address, address, 2, 1, ABOUT, 10.0)
    thread.join()


def test_a_port_that_is_taken():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = f"127.0.0.1:{holder.getsockname()[1]}"
        with pytest.raises(RuntimeError, match=re.escape(taken)) as caught:
            roll_call.hold(taken, taken, 2, 0, ABOUT, 1.0)
    assert "Address already in use" in str(caught.value)
    assert "Choose another port" in str(caught.value)


def test_an_address_of_another_host_cannot_be_listened_at():
    with pytest.raises(RuntimeError, match=r"192\.0\.2\.1:9876.*of this host"):
        roll_call.hold("192.0.2.1:9876", "192.0.2.1:9876", 2, 0, ABOUT, 1.0)


@pytest.mark.parametrize("says", [b"GET / HTTP/1.1\n", b"[1]\n", b"{}\n", b""])
def test_strangers_do_not_count(says):
    address = f"127.0.0.1:{free_port()}"
    caller = threading.Thread(
        target=roll_call.hold, args=(address, address, 2, 0, ABOUT, 20.0)
    )
    caller.start()
    host, port = roll_call.split(address)
    for _ in range(100):
        try:
            with socket.create_connection((host, port), timeout=1) as stranger:
                stranger.sendall(says)
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    roll_call.hold(address, address, 2, 1, ABOUT, 20.0)
    caller.join(10)
    assert not caller.is_alive()


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("10.0.0.1:99", ("10.0.0.1", 99)),
        ("[::1]:7", ("::1", 7)),
        ("a-b.c:1", ("a-b.c", 1)),
    ],
)
def test_addresses(address, parts):
    assert roll_call.split(address) == parts


@pytest.mark.parametrize(
    "address", ["host", ":1", "host:", "host:0", "host:65536", "h:x"]
)
def test_addresses_that_are_none(address):
    with pytest.raises(ValueError, match=rf"{re.escape(repr(address))}.*HOST:PORT"):
        roll_call.split(address)


def test_alone_nothing_happens(monkeypatch):
    for variable in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(variable, raising=False)
    jaxdp.initialize()
    jaxdp.initialize("127.0.0.1:1", num_processes=1, process_id=0)
    assert jax.process_count() == 1 and jaxdp.process_zero()


def test_too_late_once_jax_has_started():
    jax.devices()
    with pytest.raises(RuntimeError, match="after JAX had started with 8 device") as e:
        jaxdp.initialize(f"127.0.0.1:{free_port()}", 2, 0)
    assert "Call it first" in str(e.value)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("127.0.0.1:9876",), "no num_processes, process_id"),
        (("127.0.0.1:9876", 2, None), "no process_id"),
        (("127.0.0.1:9876", None, 1), "no num_processes"),
        ((None, 2, 1), "no coordinator_address"),
        (("127.0.0.1:9876", 2, 2), "process_id=2 of num_processes=2.*from 0 to 1"),
        (("127.0.0.1:9876", "two", 0), "num_processes='two'"),
        (("127.0.0.1:9876", 2, -1), "process_id='-1'"),
        (("127.0.0.1", 2, 1), "'127.0.0.1'.*HOST:PORT"),
    ],
)
def test_arguments_that_do_not_fit(given, expected, monkeypatch):
    for variable in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ValueError, match=expected):
        jaxdp.initialize(*given)


def test_a_number_in_the_environment_that_is_none(monkeypatch):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "many")
    with pytest.raises(ValueError, match="JAX_NUM_PROCESSES in the environment"):
        jaxdp.initialize()


def launcher(rank, port):
    return {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": str(rank),
    }


def slurm(rank, port):
    return {
        "SLURM_JOB_ID": "12",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "JAX_COORDINATOR_PORT": str(port),
    }


def open_mpi(rank, port):
    return {
        "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:34911",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "JAX_COORDINATOR_PORT": str(port),
    }


@pytest.mark.parametrize("surroundings", [launcher, slurm, open_mpi])
def test_the_environment_says_where_a_process_belongs(surroundings):
    """Two processes join; told of the loopback address, they listen nowhere else."""
    program = textwrap.dedent("""
        import jaxdp, sys
        jaxdp.initialize(timeout_s=60)
        import jax
        print(jax.process_count(), jax.device_count(), jaxdp.process_zero())
        open_ports = open("/proc/net/tcp").read() + open("/proc/net/tcp6").read()
        where = {line.split()[1] for line in open_ports.splitlines() if " 0A " in line}
        print(*(w for w in where if w.endswith(f":{int(sys.argv[1]):04X}")))
        jaxdp.processes.agree("the end", 1)
    """)
    port = free_port()
    shared = {
        "PATH": "/usr/bin:/bin",
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "3",
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(port)],
            env=shared | surroundings(rank, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [process.communicate(timeout=100) for process in started]
    finally:
        for process in started:
            process.kill()
    for rank, (out, err) in enumerate(printed):
        assert f"2 6 {rank == 0}\n" in out, err
        if surroundings is launcher:
            # 127.0.0.1 in hexadecimal, as an IPv4 or as an IPv6 address, and no other.
            assert re.search(rf"\n(0{{16}}FFFF0000)?0100007F:{port:04X}\n$", out)
