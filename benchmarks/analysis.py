"""How long `jaxdp.analyze` takes, on a module of 10,000 lines.

The module is a real one of an H100, a training step with a ring for each bucket,
several times in one program.
"""

import re
import time
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.case import Case
from benchmarks.rows import Row
from jaxdp.program import analyze
from tests.modules import module_text

LIMIT_S = 2.0


class Analyzed(NamedTuple):
    """What was read, and how long it took."""

    lines: int
    collectives: int
    seconds: float


def repeated(name: str, times: int) -> str:
    """A module that calls the program of a real one several times."""
    text = module_text(name)
    start = text.index("\n%")
    head, code = text[:start], text[start:]
    copies = [re.sub(r"%[\w.\-]+", rf"\g<0>.copy{n}", code) for n in range(times)]
    entry = code[code.index("ENTRY ") :]
    given = {
        int(number): line
        for line in entry.splitlines()
        for number in re.findall(r" parameter\((\d+)\)", line)
    }
    parameters = [given[number] for number in sorted(given)]
    operands = ", ".join(line.split()[0] for line in parameters)
    shape = re.search(r"ROOT %\S+ = (.*?) [a-z\-]+\(", entry)
    main = re.match(r"ENTRY (%[\w.\-]+)", entry)
    assert shape is not None and main is not None
    calls = [
        f"  %call.{n} = {shape[1]} call({operands}), to_apply={main[1]}.copy{n}"
        for n in range(times)
    ]
    names = ", ".join(f"%call.{n}" for n in range(times))
    root = f"  ROOT %all = ({', '.join([shape[1]] * times)}) tuple({names})"
    body = "\n".join([*parameters, *calls, root])
    inner = "".join(copy.replace("ENTRY ", "") for copy in copies)
    return f"{head}{inner}\nENTRY %all_copies () -> () {{\n{body}\n}}\n"


def analyzed(times: int = 7) -> Analyzed:
    """Analyzes a module once, and prints it into a string."""
    text = repeated("h100-ring", times)
    start = time.process_time()
    report = analyze(text)
    str(report)
    seconds = time.process_time() - start
    return Analyzed(text.count("\n"), len(report.collectives), seconds)


def measured(name: str, seconds: float) -> Iterator[Row]:
    """Analyzes the module three times: seconds of the CPU, as a benchmark."""
    del seconds  # all three are short
    times = [analyzed().seconds for _ in range(3)]
    yield Row.of(name, "s", times, limit=LIMIT_S)


def cases() -> Iterator[Case]:
    """The one module."""
    yield Case(name="analyze 10,000 lines", group="programs", run=measured)
