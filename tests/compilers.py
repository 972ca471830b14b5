"""What tests share that compile for accelerators that are not here."""

import os
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxdp import targets


def needs_compiler(target: str) -> pytest.MarkDecorator:
    """Skips a test where a target's compiler is not installed; never in CI.

    There the test runs and fails, so that a broken installation is seen.
    """
    problem = targets.missing(target)
    return pytest.mark.skipif(
        bool(problem) and not os.environ.get("CI"), reason=problem
    )


def shape(*sizes: int, **more: Any) -> jax.ShapeDtypeStruct:
    """The shape of an array of float32."""
    return jax.ShapeDtypeStruct(sizes, jnp.float32, **more)


def text_of(compiled: jax.stages.Compiled) -> str:
    """The optimized program."""
    text = compiled.as_text()
    assert text is not None
    return text


def instructions(compiled: jax.stages.Compiled) -> list[str]:
    """The program with numbers for names, without places in source and fingerprints.

    Nor with shardings of parameters, which one version of XLA writes in two ways.
    """
    numbers: dict[str, int] = {}
    text = re.sub(r", metadata=\{[^}]*\}|, sharding=.*", "", text_of(compiled))
    text = re.sub(r"[\w.-]+: (?=\(|\w+\[)", "", text)  # names of parameters
    text = re.sub(
        r"%[\w.-]+", lambda name: f"%{numbers.setdefault(name[0], len(numbers))}", text
    )
    lines = text.splitlines()[1:]
    return [line for line in lines if line and not line[0].isdigit()]


def count(compiled: jax.stages.Compiled, kind: str) -> int:
    """How many instructions of a kind there are."""
    return len(re.findall(rf" {kind}(?:-start)?\(", text_of(compiled)))
