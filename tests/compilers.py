"""Marks of tests that compile for accelerators that are not here."""

import os

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
