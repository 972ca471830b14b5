"""Where the time of a step goes: the four-step bottleneck hunt.

Are all devices used, is the split even, how long do arrays travel to and from the root,
and is the next batch there in time? Times of steps and batches are medians without
tracing; shares of a step come from a few traced ones. Each finding has its number, and
a remedy where it does not pass.
"""

import operator
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.replicated.devices import name
from jaxdp.replicated.inputs import Inputs, check, is_array
from jaxdp.replicated.step import State, TrainStep, check_alive, check_step
from jaxdp.replicated.views import findings, tables
from jaxdp.replicated.views.findings import Finding, Place
from jaxdp.replicated.views.trace import Record

PyTree = Any
TRACED_STEPS = 5  # a median of five is untouched by two disturbed ones


class Diagnosis(NamedTuple):
    """What `diagnose` found.

    Attributes:
        findings: One per question.
        step_ms: The median time of a step, without tracing.
        note: What the times do not show; empty if there is nothing to say.
    """

    findings: tuple[Finding, ...]
    step_ms: float
    note: str = ""

    @property
    def passes(self) -> bool:
        """Whether there is nothing to do."""
        return all(finding.passes for finding in self.findings)

    def rows(self) -> list[dict[str, Any]]:
        """The findings as rows of a table."""
        return [finding._asdict() for finding in self.findings]

    def table(self) -> Any:
        """The numbers as a `rich.table.Table`."""
        kept = ("question", "measured", "unit", "passes")
        rows = [{column: row[column] for column in kept} for row in self.rows()]
        title = f"Where does a step of {self.step_ms:.3f} ms go?"
        return tables.rich_table(title, rows, self.note)

    def __str__(self) -> str:
        """The table as text, and evidence and remedy of each finding."""
        lines = [tables.as_text(self.table())]
        for finding in self.findings:
            lines += [finding.question, f"  {finding.evidence}"]
            if finding.remedy:
                lines.append(f"  Remedy: {finding.remedy}")
        return "\n".join(lines)


class _Timed(NamedTuple):
    """Steps without tracing: medians, how many had how many rows, a usual batch."""

    step_ms: float
    wait_ms: float | None
    seen: Counter[int]
    batch: tuple[Any, Any]


def diagnose(
    step: TrainStep,
    state: State,
    batches: Any,
    *,
    steps: int = 10,
    warm_up: int = 2,
    **keywords: Any,
) -> Diagnosis:
    """Measures where the time of a training step goes, and says what to do.

    Runs `warm_up + steps` steps and 5 traced ones, on a copy of the state: for as long,
    the root holds parameters and optimizer state twice.

    Args:
        step: From `DataParallel.train_step`.
        state: Survives.
        batches: The input pipeline, an iterable of `(inputs, targets)`, whose `next()`
            is timed; it starts again at its end, if it can. Or one such tuple of two,
            used again and again: then the pipeline is not asked about.
        steps: How many steps are timed, one by one, each until its results are there.
        warm_up: How many run before, to compile.
        **keywords: Keyword inputs of `apply_fn`.

    Returns:
        A `Diagnosis`; `print` shows it.

    Raises:
        TypeError: No train step, no batches, or counts that are no integers.
        ValueError: No step to time, or batches that end too early.
        RuntimeError: A state that was given to a step before.
        Exception: What a step raises.
    """
    _check(step, steps, warm_up)
    check_alive(state)
    state = jax.tree.map(jnp.copy, state)
    timed, state = _time(step, state, batches, steps, warm_up, keywords)
    traced = _trace(step, state, timed.batch, keywords)
    model = step.model
    place = Place(
        tuple(map(name, model.devices)),
        name(model.output_device),
        tuple(name(d) for d in jax.local_devices() if d not in model.devices),
    )
    gradient_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state.params))
    found = (
        findings.devices_used(traced, place, findings.typical(timed.seen)),
        findings.even_split(timed.seen, place),
        findings.root_transfer(traced, place, gradient_bytes),
        findings.input_pipeline(timed.wait_ms, timed.step_ms),
    )
    return Diagnosis(found, timed.step_ms, _note(model.devices))


def _time(
    step: TrainStep,
    state: State,
    batches: Any,
    steps: int,
    warm_up: int,
    keywords: dict[str, Any],
) -> tuple[_Timed, State]:
    """Times steps and the batches before them, each until it is there."""
    asked = not _is_pair(batches)
    source = _endless(batches, steps + warm_up) if asked else None
    waits, times = [], []
    seen, kept = Counter(), {}
    for i in range(warm_up + steps):
        began = time.perf_counter()
        batch = next(source) if source is not None else batches
        inputs, targets = _checked(batch)
        there = time.perf_counter()
        state, metrics = step(state, inputs, targets, **keywords)
        jax.block_until_ready((state, metrics))
        ended = time.perf_counter()
        rows = _rows(step, inputs, keywords)
        kept.setdefault(rows, (inputs, targets))
        if i >= warm_up:
            seen[rows] += 1
            waits.append(1e3 * (there - began))
            times.append(1e3 * (ended - there))
    wait = statistics.median(waits) if asked else None
    usual = kept[findings.typical(seen)]
    return _Timed(statistics.median(times), wait, seen, usual), state


def _trace(
    step: TrainStep, state: State, batch: tuple[Any, Any], keywords: dict[str, Any]
) -> list[list[Record]]:
    """The records of some steps on one batch."""
    traces = []
    for _ in range(TRACED_STEPS):
        with step.model.trace() as trace:
            state, _ = step(state, *batch, **keywords)
        traces.append(trace.records)
    return traces


def _endless(batches: Any, needed: int) -> Iterator[Any]:
    """Batch after batch; an iterable that can start again does so at its end."""
    try:
        if is_array(batches) or isinstance(batches, str | bytes | dict):
            raise TypeError  # iterable, but not into batches
        iterator = iter(batches)
    except TypeError:
        raise TypeError(
            f"diagnose got batches of type {type(batches).__name__}. It must be an "
            "iterable of (inputs, targets), or one such tuple of 2. Pass the training "
            "loop's input pipeline, or (inputs, targets)."
        ) from None
    count = 0
    while True:
        before = count
        for batch in iterator:
            count += 1
            yield batch
        iterator = iter(batches)
        if count == before:
            raise ValueError(
                f"diagnose got batches that ended after {count}. It takes "
                f"{needed}, warm_up + steps. The iterator cannot start again. Pass a "
                "list or a data loader, a longer iterator, or fewer steps."
            )


def _is_pair(batches: Any) -> bool:
    """Whether this is one batch, not a pipeline."""
    return isinstance(batches, tuple) and len(batches) == 2


def _checked(batch: Any) -> tuple[Any, Any]:
    """A batch as inputs and targets."""
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    length = f" of length {len(batch)}" if isinstance(batch, tuple | list) else ""
    raise TypeError(
        f"diagnose got a batch of type {type(batch).__name__}{length}. It must be a "
        "tuple of 2, (inputs, targets), as a train step takes them. Put several "
        "inputs into a tuple: ((x, mask), targets)."
    )


def _rows(step: TrainStep, inputs: Any, keywords: dict[str, Any]) -> int:
    """The rows of a batch."""
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    return check(Inputs(inputs, keywords), step.model.dim, "diagnose")


def _note(devices: Any) -> str:
    """What times on these devices do not show."""
    if any(device.platform != "cpu" for device in devices):
        return ""
    return (
        "CPU devices of one host share its cores: these times are not a bandwidth "
        "measurement."
    )


def _check(step: Any, steps: Any, warm_up: Any) -> None:
    """Checks what to measure and how often."""
    check_step(step, "diagnose")
    for argument, value, least in (("steps", steps, 1), ("warm_up", warm_up, 0)):
        if not isinstance(value, int | np.integer) or isinstance(value, bool):
            raise TypeError(
                f"diagnose got {argument}={value!r}. It must be an integer, how many "
                f"steps, at least {least}. Leave it out for the default."
            )
        if operator.index(value) < least:
            raise ValueError(
                f"diagnose got {argument}={value}. At least {least} is needed. Leave "
                "it out for the default."
            )
