"""Processes that fail: all end, soon, and say on whose account."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from jaxdp.launch.environment import free_port

HEARTBEAT_S = 6
BOUND_S = 30  # for all to end, on a busy machine
PROGRAM = f"""
import sys, time
import jaxdp
jaxdp.initialize(heartbeat_timeout_s={HEARTBEAT_S}, timeout_s=60)
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
mesh = jaxdp.data_mesh()
add = jax.jit(jax.shard_map(
    lambda x: jaxdp.all_reduce(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
))
x = jaxdp.shard_batch(np.ones((1, 4), np.float32), mesh)
who, how = int(sys.argv[1]), sys.argv[2]
for step in range(100_000):
    assert float(add(x)[0, 0]) == jax.process_count()
    print("step", step, flush=True)
    if step == 3 and jax.process_index() == who:
        if how == "raise":
            raise ValueError("the boiler is out of coal")
        if how == "interrupt":
            raise KeyboardInterrupt
    time.sleep(0.02)
"""


class Group:
    """Processes that add, until one of them fails."""

    def __init__(self, count, who, how, folder):
        port = free_port()
        self.outputs = [folder / f"{rank}.txt" for rank in range(count)]
        self.processes = []
        for rank, output in enumerate(self.outputs):
            environment = os.environ | {
                "JAX_PLATFORMS": "cpu",
                "JAX_NUM_CPU_DEVICES": "1",
                "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
                "JAX_NUM_PROCESSES": str(count),
                "JAX_PROCESS_ID": str(rank),
            }
            with output.open("wb") as file:
                command = [sys.executable, "-c", PROGRAM, str(who), how]
                self.processes.append(
                    subprocess.Popen(command, env=environment, stdout=file, stderr=file)
                )

    def wait_for_steps(self):
        end = time.monotonic() + 100
        while time.monotonic() < end:
            texts = [output.read_text() for output in self.outputs]
            if all("step 3\n" in text for text in texts):
                return
            time.sleep(0.1)
        raise AssertionError(texts)

    def text(self, rank):
        return self.outputs[rank].read_text()

    def wait(self, *ranks):
        """Exit codes of those ranks, once they have ended."""
        end = time.monotonic() + BOUND_S
        for rank in ranks:
            self.processes[rank].wait(max(end - time.monotonic(), 0.1))
        return [self.processes[rank].returncode for rank in ranks]

    def kill(self):
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def group(request, tmp_path):
    count, who, how = request.param
    group = Group(count, who, how, tmp_path)
    try:
        group.wait_for_steps()
        yield group
    finally:
        group.kill()


@pytest.mark.parametrize("group", [(3, 1, "raise")], indirect=True)
def test_an_exception_ends_all_and_names_its_rank(group):
    assert group.wait(0, 1, 2) == [1, 1, 1]
    assert "ValueError: the boiler is out of coal" in group.text(1)
    for rank in (0, 2):
        assert "rank 1 failed first: ValueError: the boiler is out of coal" in (
            group.text(rank)
        )


@pytest.mark.parametrize("group", [(2, 0, "raise")], indirect=True)
def test_an_exception_of_the_coordinator_reaches_the_others(group):
    assert group.wait(0, 1) == [1, 1]
    assert "rank 0 failed first: ValueError: the boiler is out of coal" in group.text(1)


@pytest.mark.parametrize("group", [(2, 1, "interrupt")], indirect=True)
def test_an_interrupted_process_ends_all(group):
    assert group.wait(0, 1) == [1, 130]
    assert "rank 1 failed first: KeyboardInterrupt" in group.text(0)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("group", [(2, -1, "never")], indirect=True, ids=["by"])
def test_a_process_that_goes_without_a_word_is_named(group, name):
    group.processes[1].send_signal(getattr(signal, name))
    assert group.wait(0) != [0]
    named = r"Task 1 heartbeat timeout|stopped sending heartbeats\):\s+1\b"
    assert re.search(named, group.text(0)), group.text(0)[-3000:]


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("group", [(2, -1, "never")], indirect=True, ids=["by"])
def test_a_coordinator_that_goes_without_a_word_is_named(group, name):
    group.processes[0].send_signal(getattr(signal, name))
    assert group.wait(1) != [0]
    # If its connection breaks, JAX may end this process first, with a text of its own.
    named = r"rank 0, which coordinates, does not answer|the leader .*task 0"
    assert re.search(named, group.text(1)), group.text(1)[-3000:]
