import os
import subprocess
import sys

import pytest

from jaxdp.targets.quiet import quietly
from tests.compilers import needs_compiler

# Importing JAX writes too, before anything of jaxdp runs.
COMPILE = """
import sys
import jax, jax.numpy as jnp
from jaxdp.targets import compile_for
{start}
print("here", flush=True)
print("here", file=sys.stderr, flush=True)
x = jax.ShapeDtypeStruct((128, 128), jnp.bfloat16)
for target in ("h100", "tpu-v5e"):
    compiled = compile_for(lambda x: x @ x, x, target=target, devices=1)
    assert compiled.memory_analysis().argument_size_in_bytes == 2 * 128 * 128
"""


@needs_compiler("h100")
@needs_compiler("tpu-v5e")
@pytest.mark.parametrize(
    ("platforms", "start"),
    [("cpu", "jax.devices()"), (None, "jax.devices()"), (None, "")],
    ids=["on CPUs", "anywhere", "before JAX has started"],
)
def test_compiling_writes_nothing(platforms, start):
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    if platforms:
        environment["JAX_PLATFORMS"] = platforms
    done = subprocess.run(
        [sys.executable, "-c", COMPILE.format(start=start)],
        capture_output=True,
        env=environment,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    for written in (done.stdout, done.stderr):
        assert written.split("here\n", 1)[1] == ""


def write(text):
    """As C++ does, past Python's own streams."""
    os.write(2, text.encode())


def test_what_cpp_writes_is_dropped(capfd):
    write("before ")
    with quietly():
        write("noise")
    write("after")
    assert capfd.readouterr().err == "before after"


def test_what_cpp_writes_is_added_to_errors(capfd):
    with pytest.raises(ValueError, match="no") as caught, quietly():
        write("ptxas of CUDA 13 does not know sm_70")
        raise ValueError("no")
    (note,) = caught.value.__notes__
    assert note == "The compiler wrote:\nptxas of CUDA 13 does not know sm_70"
    assert capfd.readouterr().err == ""


def test_an_error_without_noise_stays_as_it_is():
    with pytest.raises(ValueError, match="no") as caught, quietly():
        raise ValueError("no")
    assert not hasattr(caught.value, "__notes__")
