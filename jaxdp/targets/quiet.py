"""Keeps compilers quiet that write to the terminal from C++."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quietly() -> Iterator[None]:
    """Keeps what C++ writes to stderr off the terminal; of an error it is added.

    Plugins log that they find no driver, that they guess a topology, that a library is
    missing: none of it matters for compiling. It is the process's stderr that is moved,
    so what other threads write there meanwhile is lost too.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        except Exception as error:
            written.seek(0)
            if text := written.read().decode(errors="replace").strip():
                error.add_note(f"The compiler wrote:\n{text[-2000:]}")
            raise
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
