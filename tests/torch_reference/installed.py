"""Whether PyTorch is here, and what becomes of a test where it is not."""

import importlib.util
import os
import sys

import pytest


def require_torch() -> None:
    """Skips without PyTorch; fails in CI, where a skip would hide a missing check.

    The extra `torch` pins a version for Python 3.11: elsewhere parity is not checked.
    """
    if importlib.util.find_spec("torch") is not None:
        return
    if sys.version_info >= (3, 12):
        pytest.skip("PyTorch is pinned for Python 3.11: run the tests there, too.")
    message = "torch is not installed. Install the extra: pip install -e '.[test]'."
    if os.environ.get("CI"):
        pytest.fail(f"{message} In CI (CI is set) a skipped parity test is a failure.")
    pytest.skip(message)
