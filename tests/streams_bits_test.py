"""Training on two streams makes the bits of the same design in one program."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import pytest

from experiments.harness import fast
from tests.streams_problems import PROBLEMS

ROUNDING_TWICE = f"--xla_cpu_max_isa=AVX {fast.FLAGS}"
STILL = {"tied-unused-frozen": ["fixed", "unused"]}  # what must not move


@functools.cache
def found() -> dict[str, dict]:
    """What the script prints where a product and a sum are always rounded twice."""
    child = subprocess.run(
        [sys.executable, "-m", "tests.streams_problems"],
        cwd=pathlib.Path(__file__).parents[1],
        env=os.environ | {"XLA_FLAGS": ROUNDING_TWICE, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert not child.returncode, child.stderr[-4000:]
    return dict(
        json.loads(line) for line in child.stdout.splitlines() if line[0] == "["
    )


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_bits_of_one_program(name):
    problem = found()[name]
    assert problem["differing"] == []
    still = len(STILL.get(name, []))
    assert problem["moved"].count(False) == still < len(problem["moved"])


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_segment_and_an_exchange_for_each_bucket(name):
    problem = found()[name]
    numbers = range(1, problem["buckets"] + 1)
    assert len(numbers) > 2
    assert problem["programs"] == [
        *(f"{kind}_{i}" for i in numbers for kind in ("segment", "exchange")),
        "update",
    ]
