"""Compiled modules of real backends, as text; `fixtures/make.py` makes them."""

import functools
import gzip
import pathlib

_FIXTURES = pathlib.Path(__file__).parent / "fixtures"
_END = ".hlo.txt.gz"
NAMES = tuple(sorted(p.name.removesuffix(_END) for p in _FIXTURES.glob(f"*{_END}")))


@functools.cache
def module_text(name: str) -> str:
    """The text of one of `NAMES`, such as "h100-ring"."""
    return gzip.decompress((_FIXTURES / f"{name}{_END}").read_bytes()).decode()
