"""`python -m jaxdp.launch`: output, failures, restarts, and that nothing is left."""

import contextlib
import json
import os
import pathlib
import pty
import re
import signal
import subprocess
import sys
import time

import pytest

from jaxdp.launch import environment, report
from jaxdp.launch.__main__ import main
from jaxdp.launch.group import End, Group, Outcome
from jaxdp.launch.sweep import COOKIE

ROOT = pathlib.Path(__file__).parents[1]
PATIENCE_S = 20
# The launcher as a command, without the 2 s that importing JAX takes.
WITHOUT_JAX = f"""
import sys, types
package = types.ModuleType("jaxdp")
package.__path__ = [{str(ROOT / "jaxdp")!r}]
sys.modules["jaxdp"] = package
from jaxdp.launch.__main__ import main
assert "jax" not in sys.modules
sys.exit(main())
"""
# What every script begins with.
HEAD = """
import json, os, pathlib, signal, subprocess, sys, time
rank, here = int(os.environ["JAX_PROCESS_ID"]), pathlib.Path(__file__).parent
attempt = int(os.environ["JAXDP_RESTART"])
def note(name, text=""):
    unfinished = here / f".{name}"
    unfinished.write_text(str(text))
    unfinished.rename(here / name)
def until(name):
    while not (here / name).exists():
        time.sleep(0.01)
"""
# Writes its process number and that of a child which hears nothing, in a session of its
# own; then waits, as under jax.distributed, whatever the signal.
STUBBORN = """
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda *_: note(f"heard{rank}"))
child = subprocess.Popen(["sleep", "300"], start_new_session=True)
note(f"pid{rank}a", os.getpid())
note(f"pid{rank}b", child.pid)
while True:
    time.sleep(1)
"""


@pytest.fixture
def script(tmp_path):
    """Writes a script; gives its path. What it notes as a process is killed."""

    def write(text):
        path = tmp_path / "script.py"
        path.write_text(HEAD + text)
        return str(path)

    yield write
    for path in tmp_path.glob("pid*"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(path.read_text()), signal.SIGKILL)


@pytest.fixture
def launch(script, capsys):
    """Launches a script in this process; gives its status, output and messages."""

    def run(options, text, *arguments):
        limits = ["--platform", "cpu", "--timeout-s", str(PATIENCE_S), "--grace-s", "2"]
        status = main([*limits, *options.split(), script(text), *arguments])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


@pytest.fixture
def start(script):
    """Starts the launcher as a process; kills it at the end."""
    started = []

    def run(options, text, stdout=subprocess.PIPE):
        process = subprocess.Popen(
            [sys.executable, "-c", WITHOUT_JAX, *options.split(), script(text)],
            stdout=stdout,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def wait_for(what):
    """Waits until something is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := what()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)
    return found


def noted(folder, count):
    """The process numbers that scripts have written, once there are so many."""
    paths = wait_for(lambda: (f := [*folder.glob("pid*")]) and len(f) == count and f)
    return [int(path.read_text()) for path in paths]


def runs(process):
    """Whether a process is alive, and no zombie."""
    try:
        status = pathlib.Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def assert_gone(processes):
    assert processes
    wait_for(lambda: not any(map(runs, processes)))


def test_lines_have_their_rank_and_their_order(launch):
    text = """
for i in range(50):
    print(rank, "out", i)
    print(rank, "error", i, file=sys.stderr)
print(sys.argv[1:], end="")
"""
    status, out, err = launch("-n 2", text, "--lr", "0.1", "-n")
    assert (status, err) == (0, "")
    for rank in range(2):
        own = [line for line in out.splitlines() if line.startswith(f"[{rank}] ")]
        both = [f"{rank} {name} {i}" for i in range(50) for name in ("out", "error")]
        expected = [*both, "['--lr', '0.1', '-n']"]
        assert own == [f"[{rank}] {line}" for line in expected]
    assert len(out.splitlines()) == 2 * 101


def test_a_terminal_gets_colours_and_a_pipe_does_not(start, tmp_path):
    ours, theirs = pty.openpty()
    process = start("-n 2", "print('here')", stdout=theirs)
    os.close(theirs)
    assert process.wait(PATIENCE_S) == 0
    shown = os.read(ours, 10_000).decode()
    os.close(ours)
    assert "\x1b[36m[0] \x1b[0mhere" in shown and "\x1b[33m[1] \x1b[0mhere" in shown


def test_what_a_process_finds_in_its_environment(launch, tmp_path):
    names = ["JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS"]
    names += ["JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_NUM_CPU_DEVICES"]
    names += ["JAX_PLATFORMS", "JAXDP_RESTART", "PYTHONUNBUFFERED"]
    text = f"print(json.dumps([os.environ[name] for name in {names}]))"
    _, out, _ = launch("-n 3 --devices-per-process 2", text)
    found = {line[:3]: json.loads(line[4:]) for line in out.splitlines()}
    address = found["[0]"][0]
    assert address.startswith("127.0.0.1:") and int(address.rpartition(":")[2]) > 1023
    for rank in range(3):
        own = [address, address, "3", str(rank), "2", "cpu", "0", "1"]
        assert found[f"[{rank}]"] == own


def test_gpus_are_shared_out(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,5")
    monkeypatch.setenv(COOKIE, "outer")
    for variable in ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    shape = environment.shape(2, 2, "auto")
    first, second = environment.environments(shape, 3, "inner", 1234)
    assert first["JAX_LOCAL_DEVICE_IDS"] == "0,1"
    assert second["JAX_LOCAL_DEVICE_IDS"] == "2,3"
    assert second["JAXDP_RESTART"] == "3" and second[COOKIE] == "outer:inner"
    assert not {"JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES"} & {*first}
    (insisted,) = environment.environments(environment.shape(1, 4, "gpu"), 0, "c", 1)
    assert insisted["JAX_PLATFORMS"] == "cuda,cpu"
    (on_cpu,) = environment.environments(environment.shape(1, 9, "cpu"), 0, "c", 1)
    assert on_cpu["JAX_NUM_CPU_DEVICES"] == "9"
    assert "JAX_LOCAL_DEVICE_IDS" not in on_cpu
    with pytest.raises(ValueError, match=r"3 x 2 = 6 GPUs.* has 4.*--platform cpu"):
        environment.shape(3, 2, "auto")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert not environment.shape(3, 2, "auto").gpus
    with pytest.raises(ValueError, match="1 x 1 = 1 GPUs, and this machine has 0"):
        environment.shape(1, None, "gpu")


@pytest.mark.parametrize(
    ("text", "expected", "says"),
    [
        ("sys.exit(3 if rank == 1 else 0)", 3, "rank 1 of 2 failed first: exit code 3"),
        (
            "os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(60)",
            137,
            "rank 1 of 2 failed first: killed by SIGKILL",
        ),
        (
            "os.kill(os.getpid(), signal.SIGSEGV) if rank == 0 else time.sleep(60)",
            139,
            "rank 0 of 2 failed first: killed by SIGSEGV",
        ),
        ("rank == 1 and time.sleep(0.3)", 0, ""),
    ],
    ids=["exit", "killed", "segfault", "ends earlier"],
)
def test_statuses(launch, text, expected, says):
    status, _, err = launch("-n 2", text)
    assert status == expected
    assert says in err and bool(err) == bool(says)


def test_the_first_failure_is_named_with_its_traceback(launch):
    text = """
def read(row):
    try:
        {}["rows"]
    except KeyError as error:
        raise ValueError(f"row {row} is\\ntorn") from error
if rank == 2:
    print("before")
    read(17)
until("never")
"""
    status, _, err = launch("-n 4", text)
    assert status == 1
    assert "[launch] rank 2 of 4 failed first: exit code 1" in err
    assert err.startswith("[launch] rank 2 of 4 has ended: exit code 1. The others")
    assert "before" not in err
    shown = err[err.index("Its last traceback") :]
    assert shown.index("KeyError: 'rows'") < shown.index("ValueError: row 17 is")
    assert "torn" in shown and "script.py" in shown
    assert "rank 0: ended by the launcher with SIGTERM" in err


def test_a_stopped_process_is_named_and_killed(launch, tmp_path):
    """Its peer gives up as JAX does: with a message, and an abort."""
    text = """
note(f"pid{rank}", os.getpid())
if rank == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
until("pid0")
status = pathlib.Path("/proc", (here / "pid0").read_text(), "stat")
while " T " not in status.read_text():
    time.sleep(0.01)
print("coordination_service.cc: tasks are unhealthy (stopped sending heartbeats)")
os.abort()
"""
    start = time.monotonic()
    status, _, err = launch("-n 2 --grace-s 15", text)
    assert time.monotonic() - start < 10  # who is stopped hears no request to end
    assert status == 137
    assert "rank 0 of 2 failed first: it was stopped (by SIGSTOP" in err
    assert "rank 1: killed by SIGABRT" in err
    assert_gone(noted(tmp_path, 2))


def ended(*ends, stopped=()):
    """An outcome; an end is (rank, returncode) or (rank, returncode, asked)."""
    made = [End(e[0], e[1], float(i), e[2:] == (True,)) for i, e in enumerate(ends)]
    return Outcome(made, frozenset(stopped), None, False)


RAISED = ["step 1", report.TRACEBACK, '  File "x.py"', "ValueError: bad rows"]
LOST = [
    report.TRACEBACK,
    "ValueError: Gloo all-reduce failed: Connection reset by peer",
]
FRAMES = [f"    @   0x7f00000000{i:02} xla::SetError()" for i in range(30)]
ABORTED = [
    "E1130 coordination_service_agent.cc:289] Polled an error",
    "*** Check",
    *FRAMES,
]
UNHEALTHY = [
    "coordination_service.cc: tasks are unhealthy (stopped sending heartbeats):",
    "2",
]


@pytest.mark.parametrize(
    ("outcome", "lines", "expected"),
    [
        (ended((2, 1), (0, 1)), {2: RAISED, 0: LOST}, 2),
        (ended((0, 1), (2, 1)), {2: RAISED, 0: LOST}, 2),
        (ended((0, 1), (2, -15, True)), {2: RAISED, 0: LOST}, 2),
        (ended((0, -6), (1, -6), (2, -9, True)), {0: ABORTED, 1: ABORTED}, 0),
        (ended((0, -6), (2, -9)), {0: ABORTED}, 2),
        (ended((0, -6), (2, -9, True), stopped=[2]), {0: ABORTED}, 2),
        (ended((1, 1), (2, -9, True), stopped=[2]), {1: RAISED}, 1),
        (ended((1, 1), (0, 1)), {1: ["rank 0 failed first: x"], 0: ["y"]}, 0),
        (ended((1, -6), (0, -6), (2, -9, True)), {1: UNHEALTHY, 0: ABORTED}, 2),
        (ended((1, 1), (0, 1)), {1: ["rank 7 failed first: x"], 0: LOST}, 1),
        (ended((0, 0), (1, 1)), {1: LOST}, 1),
        (ended((0, -6), (1, 5)), {0: ["assertion failed"], 1: []}, 0),
    ],
    ids=[
        "first to end",
        "a peer was quicker",
        "a peer was quicker and the culprit hung",
        "only consequences",
        "killed, noticed late",
        "stopped",
        "another failed while one was stopped",
        "named by jaxdp",
        "named by JAX",
        "named, but there is none",
        "a peer left too early",
        "an abort of its own",
    ],
)
def test_the_cause_is_told_from_its_consequences(outcome, lines, expected):
    assert report.first_failure(outcome, lambda rank: lines.get(rank, [])) == expected


def test_a_long_traceback_is_shortened_in_the_middle():
    lines = [report.TRACEBACK, *(f"  frame {i}" for i in range(60)), "Error: why"]
    shown = report.describe(ended((0, 1)), lambda rank: lines)
    assert "frame 18" in shown and "Error: why" in shown and "frame 30" not in shown
    assert "... 22 lines more ..." in shown  # 62 lines, of which 40 are shown


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name
)
def test_a_signal_leaves_nothing_behind(start, tmp_path, number):
    process = start("-n 2 --grace-s 0.5", STUBBORN)
    processes = noted(tmp_path, 4)
    assert all(map(runs, processes))
    process.send_signal(number)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + number
    assert f"ended by {number.name}" in err.decode()
    assert (tmp_path / "heard0").exists() and (tmp_path / "heard1").exists()
    assert_gone(processes)


@pytest.mark.parametrize(
    ("before", "expected"),
    [(signal.SIG_DFL, 128 + signal.SIGHUP), (signal.SIG_IGN, 0)],
    ids=["terminal", "nohup"],
)
def test_the_terminal_goes(launch, before, expected):
    previous = signal.signal(signal.SIGHUP, before)
    try:
        text = "os.kill(os.getppid(), signal.SIGHUP); time.sleep(0.5)"
        assert launch("-n 1", text)[0] == expected
        assert signal.getsignal(signal.SIGHUP) is before
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_a_second_interrupt_waits_no_longer(start, tmp_path):
    process = start("-n 2 --grace-s 300", STUBBORN)
    processes = noted(tmp_path, 4)
    process.send_signal(signal.SIGINT)
    wait_for((tmp_path / "heard1").exists)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert_gone(processes)


def test_a_killed_launcher_leaves_nothing_behind(start, tmp_path):
    process = start("-n 2 --grace-s 300", STUBBORN)
    processes = noted(tmp_path, 4)
    os.killpg(process.pid, signal.SIGKILL)
    assert_gone(processes)


def test_an_error_leaves_nothing_behind(launch, tmp_path):
    text = f"rank == 1 and (until('pid0b'), sys.exit(5))\n{STUBBORN}"
    status, _, err = launch("-n 2 --grace-s 0.3", text)
    assert status == 5 and "rank 1 of 2 failed first" in err
    assert "rank 0: ended by the launcher with SIGKILL" in err
    assert_gone(noted(tmp_path, 2))


def test_children_of_a_process_that_ended_well_are_gone(launch, tmp_path):
    text = """
child = subprocess.Popen(["sleep", "300"], start_new_session=rank == 1)
note(f"pid{rank}", child.pid)
"""
    assert launch("-n 2", text)[0] == 0
    assert_gone(noted(tmp_path, 2))


def test_nobody_reads_the_output(start, tmp_path):
    text = "note(f'pid{rank}', os.getpid())\nwhile True: print('x' * 1000)"
    process = start("-n 2 --grace-s 300", text)
    processes = noted(tmp_path, 2)
    process.stdout.close()
    assert process.wait(PATIENCE_S) == 128 + signal.SIGPIPE
    assert b"ended by SIGPIPE" in process.stderr.read()
    process.stderr.close()
    process.stdout = process.stderr = None
    assert_gone(processes)


def test_restarts_are_counted_and_have_a_new_coordinator(launch, tmp_path):
    text = """
note(f"port{attempt}{rank}", os.environ["JAX_COORDINATOR_ADDRESS"])
until(f"port{attempt}{1 - rank}")
if attempt < 2:
    sys.exit(7) if rank == attempt else time.sleep(60)
print("resumed from checkpoint", attempt)
"""
    status, out, err = launch("-n 2 --max-restarts 3", text)
    assert status == 0
    assert out.count("resumed from checkpoint 2") == 2
    assert err.count("killed after 2 s") == 2
    first, second = err.index("restart 1 of 3"), err.index("restart 2 of 3")
    assert err.index("rank 0 of 2 failed") < first < err.index("rank 1 of 2 failed")
    assert first < second and "restart 3" not in err
    ports = {path.name: path.read_text() for path in tmp_path.glob("port*")}
    assert all(ports[f"port{a}0"] == ports[f"port{a}1"] for a in range(3))
    assert len({*ports.values()}) == 3


def test_restarts_run_out(launch):
    status, _, err = launch("-n 2 --max-restarts 2", "sys.exit(4 + attempt)")
    assert status == 6
    assert err.count("failed first") == 3 and "restart 2 of 2" in err


def test_a_port_that_was_taken_meanwhile_costs_a_restart(launch, monkeypatch):
    text = """
import socket
if rank == 0:
    host, port = os.environ["JAX_COORDINATOR_ADDRESS"].split(":")
    with socket.socket() as server:
        server.bind((host, int(port)))
"""
    with environment.socket.socket() as squatter:
        squatter.bind(("127.0.0.1", 0))
        ports = iter([squatter.getsockname()[1], environment.free_port()])
        monkeypatch.setattr(environment, "free_port", lambda: next(ports))
        status, _, err = launch("-n 2 --max-restarts 1", text)
    assert status == 0
    assert "Address already in use" in err and "restart 1 of 1" in err


def test_time_is_limited_for_all_attempts(launch, tmp_path):
    start = time.monotonic()
    status, _, err = launch(
        "-n 2 --max-restarts 9 --timeout-s 2 --grace-s 0.3", STUBBORN
    )
    assert status == 124
    assert "ended after --timeout-s 2" in err and "restart" not in err
    assert time.monotonic() - start < PATIENCE_S
    assert_gone(noted(tmp_path, 4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("-n 0 x.py", "got -n 0.*at least 1"),
        ("-n -1 x.py", "got -n -1.*at least 1"),
        ("-n 2 --devices-per-process 0 x.py", "--devices-per-process 0.*at least 1"),
        ("-n 2", "got no script.*train.py"),
        ("-n 2 missing.py", r"script missing\.py.*no such file in .*Give the path"),
        ("-n 2 -m no_such_module.x", "no module 'no_such_module'.*install it"),
        ("-n 2 --max-restarts -1 x.py", "--max-restarts -1.*at least 0"),
        ("-n 2 --grace-s nan x.py", "--grace-s nan.*at least 0"),
        ("-n 2 --timeout-s -3 x.py", r"--timeout-s -3\.0.*at least 0"),
        ("-n 9999 --platform gpu x.py", "= 9999 GPUs, and this machine has"),
    ],
)
def test_wrong_command_lines(capsys, options, message):
    assert main(options.split()) == 2
    printed = capsys.readouterr()
    assert re.search(message, printed.err) and not printed.out


def test_a_process_that_does_not_start_ends_those_that_did(
    launch, tmp_path, monkeypatch
):
    """The third of three, for want of a program."""
    start_one = Group._start

    def start(self, rank, command, environment):
        if rank == 2:
            noted(tmp_path, 4)
            command = [str(tmp_path / "missing"), *command]
        start_one(self, rank, command, environment)

    monkeypatch.setattr(Group, "_start", start)
    status, _, err = launch("-n 3", STUBBORN)
    assert status == 1
    assert "launch got no 3 processes: [Errno 2]" in err
    assert_gone(noted(tmp_path, 4))


def test_modules_and_their_arguments(tmp_path, monkeypatch, capsys):
    (tmp_path / "a_package").mkdir()
    (tmp_path / "a_package" / "__main__.py").write_text("import sys; print(sys.argv)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert main("-n 1 --platform cpu -m a_package -m x".split()) == 0
    assert capsys.readouterr().out.rstrip().endswith("'-m', 'x']")


JAX = """
import jax, jaxdp, numpy as np

jaxdp.initialize()
spec, mesh = jax.sharding.PartitionSpec, jaxdp.data_mesh()
over = jax.sharding.NamedSharding(mesh, spec("data"))
rows = np.arange(2, dtype=np.float32) + 10 * rank
x = jax.make_array_from_process_local_data(over, rows)
body = lambda x: jax.lax.psum(x, "data")
total = jax.jit(
    jax.shard_map(body, mesh=mesh, in_specs=spec("data"), out_specs=spec())
)
print("sum", float(total(x).addressable_data(0)[0]), jax.device_count())
if rank == 1 and attempt == 0:
    raise ArithmeticError("row 17 is bad")
print("and again", float(total(x).addressable_data(0)[0]))
"""


def test_jax_sums_over_processes_and_one_that_raises_is_named(launch):
    """Its peer waits for it in a sum meanwhile."""
    options = "-n 2 --devices-per-process 2 --timeout-s 150 --max-restarts 1"
    status, out, err = launch(options, JAX)
    assert status == 0, out + err
    assert out.count("sum 22.0 4") == 4  # 0 + 1 + 10 + 11, by two processes, twice
    assert "[0] and again 22.0" in out and "[1] and again 22.0" in out
    assert "rank 1 of 2 failed first: exit code 1" in err
    assert "ArithmeticError: row 17 is bad" in err and err.count("failed first") == 1
