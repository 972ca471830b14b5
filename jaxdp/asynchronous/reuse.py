"""Programs outlive their run: comparing policies compiles once, not once per policy."""

import functools
from collections.abc import Callable
from typing import Any


def reused(make: Callable[[Any], Callable]) -> Callable[[Any], Callable]:
    """Remembers the programs of the last 16 functions or optimizers.

    What cannot be hashed gets a program of its own.
    """
    remembered = functools.lru_cache(maxsize=16)(make)

    @functools.wraps(make)
    def get(given):
        try:
            hash(given)
        except TypeError:
            return make(given)
        return remembered(given)

    return get
