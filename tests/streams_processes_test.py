"""Two streams in each of two processes, against the same design in one program."""

import pytest

from experiments.harness import fast
from experiments.harness.processes import Processes
from jaxdp.launch.environment import LOOPBACK, free_port


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    address = f"{LOOPBACK}:{free_port()}"
    with pytest.MonkeyPatch.context() as patch:
        # Without instructions that round a product and a sum once.
        patch.setenv("XLA_FLAGS", f"--xla_cpu_max_isa=AVX {fast.FLAGS}")
        folder = tmp_path_factory.mktemp("workers")
        with Processes("tests.streams_worker", 2, folder, address) as group:
            yield group


@pytest.fixture(scope="module")
def prompt(workers):
    """What each process found without any delay."""
    return workers.ask(program="streams", delay=0)


def test_the_bits_of_one_program_in_several_processes(workers, prompt):
    first, second = prompt
    assert first[:2] == second[:2]
    assert (first[3], second[3]) == (2, 2)
    assert first[2] != second[2]
    assert [answer[:2] for answer in workers.ask(program="one", delay=0)] == [
        first[:2],
        first[:2],
    ]


def test_a_delay_in_several_processes(workers, prompt):
    first, second = workers.ask(program="streams", delay=1)
    assert first[:2] == second[:2]
    (losses, digest, *_), _ = prompt
    assert first[0][0] == losses[0]
    assert first[0][1] != losses[1]  # on the weights of step 0
    assert first[1] != digest
