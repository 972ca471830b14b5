"""A memory watch: a step that uses less memory once the root passes a limit.

What the root needs is compared with what the device has. (A well-known script divides
PyTorch's reserved memory by its peak, which says nothing about capacity: the quotient
is near 1 on an empty device, too.)
"""

import contextlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdp.replicated import microbatches
from jaxdp.replicated.devices import Device, name
from jaxdp.replicated.micro import Micro
from jaxdp.replicated.microbatches import FALLBACKS, SMALLER_BATCH, Batch, Setting
from jaxdp.replicated.step import State, TrainStep, check_alive, check_step

PyTree = Any
NUMBERS = (int, float, np.integer, np.floating)
EXHAUSTED = "RESOURCE_EXHAUSTED"  # XLA's status of an allocation that failed


class WatchEvent(NamedTuple):
    """One decision of a `MemoryWatch`.

    Attributes:
        step: Which call of the watch, counted from 1.
        rows: Of its batch.
        measured_bytes: The root's peak; None if an allocation failed.
        limit_bytes: The limit.
        action: What the watch does, in words.
    """

    step: int
    rows: int
    measured_bytes: int | None
    limit_bytes: int
    action: str


class MemoryWatch:
    """Runs a training step, and lowers its memory when the root passes a limit.

    Called like the step: `state, metrics = watch(state, inputs, targets)`. A batch
    whose step passes the limit runs in more micro-batches from then on; batches of
    other shapes do not. All micro-batches of a step make one update: that of the whole
    batch, for a loss that is a mean over rows or a `jaxdp.Mean`. No step is lost: one
    whose memory cannot be allocated runs again, in more micro-batches, from the same
    state.

    With `fallback="smaller batch"` the batch runs in 2, 4, ... parts, while the root's
    slice of a part can get smaller, each on all devices. BatchNorm then sees these
    smaller slices, and its running statistics are updated once for every part; keys
    among inputs are others for every part. When that is not enough, or with
    `fallback="one device"`, the same slices run one after another on the root alone,
    which then receives no gradients. BatchNorm sees what it saw before, and the buffers
    are those that the root's slice left. 16-bit gradients are rounded once each.

    Devices: as the step; the sum of gradients is on the root. Micro-batches wait for
        each other, so that their arrays are not there together.

    Cost: parameters go out once for every part. Where the backend has
        `device.memory_stats()`, the measure is its `peak_bytes_in_use`. That never
        falls: once it is past the limit, and on backends without it, the measure is
        the root's peak in a `model.memory()` observation, which waits for devices, and
        is taken at the first step of each batch shape and setting. Only these steps
        wait before the update to see whether all was allocated; later ones rely on
        failures that are raised at dispatch.

    Attributes:
        step: The training step.
        limit_bytes: The limit.
        fallback: "smaller batch" or "one device".
        events: All decisions.
    """

    def __init__(
        self,
        step: TrainStep,
        *,
        limit: float = 0.9,
        limit_bytes: int | None = None,
        fallback: str = SMALLER_BATCH,
        on_event: Callable[[WatchEvent], Any] | None = None,
    ):
        """Binds a step and a limit.

        Args:
            step: From `DataParallel.train_step`.
            limit: The share of the root's memory that may be used, in (0, 1].
            limit_bytes: The limit itself, in place of that; required where the backend
                does not say how much memory a device has.
            fallback: "smaller batch" or "one device".
            on_event: Is given every decision; must not raise, for the state of a step
                that has ended would be lost.

        Raises:
            TypeError: No train step, or arguments of another type.
            ValueError: A limit out of range, no limit that could be known, or another
                fallback.
        """
        _check(step, limit, limit_bytes, fallback, on_event)
        self.step = step
        self.fallback = fallback
        self.limit_bytes = (
            _limit(step.model.root, limit) if limit_bytes is None else int(limit_bytes)
        )
        self.events: list[WatchEvent] = []
        self._on_event = on_event
        self._alone = microbatches.on_root(step)
        self._calls = 0
        self._settings: dict[Any, Setting] = {}  # by shape of the batch
        self._measured: set[tuple[Any, Setting]] = set()

    def __call__(
        self, state: State, inputs: Any, targets: PyTree, **keywords: Any
    ) -> tuple[State, dict[str, Any]]:
        """One optimizer update.

        Args:
            state: Donated: its arrays serve one step.
            inputs: As of the step.
            targets: As of the step; arrays need the rows of the inputs along `dim`.
            **keywords: As of the step.

        Returns:
            The next state, and the metrics, `"loss"` among them.

        Raises:
            ValueError: Targets that cannot be cut with the outputs.
            RuntimeError: Memory could not be allocated, and nothing lower is left; the
                state is untouched. Or a state that was given to a step before.
            Exception: What the step raises.
        """
        check_alive(state)
        dim = self.step.model.dim
        batch = microbatches.batch_of(inputs, targets, keywords, dim, "MemoryWatch")
        self._calls += 1
        while True:
            setting = self._settings.get(batch.shape, Setting())
            result, failure = self._try(state, batch, setting)
            if result is not None:
                return result
            self._retry(batch, setting, failure)

    def _try(
        self, state: State, batch: Batch, setting: Setting
    ) -> tuple[tuple[State, dict[str, Any]] | None, str]:
        """The results of a step, or why its memory could not be allocated."""
        is_new = (batch.shape, setting) not in self._measured
        before = _peak(self.step.model.root)
        observes = is_new and (before is None or before > self.limit_bytes)
        model = self.step.model
        with model.memory() if observes else contextlib.nullcontext() as memory:
            done, failure = self._run(state, batch, setting, is_new)
            if done is None:
                return None, failure
            step = self._alone if setting.alone else self.step
            result = step.update(state, done)
            if is_new:
                jax.block_until_ready(result)
        self._measured.add((batch.shape, setting))
        if memory is not None:
            self._judge(batch, setting, memory.peak(name(model.root)).nbytes)
        elif before is not None and (peak := _peak(model.root) or 0) > before:
            self._judge(batch, setting, peak)
        return result, ""

    def _run(
        self, state: State, batch: Batch, setting: Setting, waits: bool
    ) -> tuple[Micro | None, str]:
        """All but the update.

        Nothing that failed survives: the traceback would keep its arrays alive.
        """
        try:
            done = microbatches.run(self.step, self._alone, state, batch, setting)
            return (jax.block_until_ready(done) if waits else done), ""
        except Exception as error:
            if EXHAUSTED not in str(error):
                raise
            return None, str(error)

    def _judge(self, batch: Batch, setting: Setting, measured: int) -> None:
        """Lowers the setting of the steps to come if this one passed the limit."""
        if measured <= self.limit_bytes:
            return
        lower = self._lower(batch, setting)
        if lower is None:
            words = setting.words(batch.rows, self.step.model)
            self._tell(batch, measured, f"nothing lower is left, it stays at {words}")
            return
        words = lower.words(batch.rows, self.step.model)
        self._tell(batch, measured, f"from the next step on {words}")

    def _retry(self, batch: Batch, setting: Setting, failure: str) -> None:
        """Lowers the setting of a step that failed.

        Raises:
            RuntimeError: There is no lower one.
        """
        lower, model = self._lower(batch, setting), self.step.model
        if lower is not None:
            words = lower.words(batch.rows, model)
            self._tell(batch, None, f"an allocation failed, again with {words}")
            return
        words, first = setting.words(batch.rows, model), failure.splitlines()[0]
        other = ""
        if self.fallback != SMALLER_BATCH:
            other = f"fallback={SMALLER_BATCH!r}, "
        raise RuntimeError(
            f"MemoryWatch got {first.rstrip('.')} in step {self._calls}, with {words}. "
            f"Nothing lower is left of fallback={self.fallback!r} for {batch.rows} "
            "rows. The parameters, their gradients and one micro-batch do not fit on "
            f"the root, {name(model.root)}; the state is untouched. Use {other}fewer "
            "or smaller rows, or 16-bit parameters."
        )

    def _lower(self, batch: Batch, setting: Setting) -> Setting | None:
        """Takes the next lower setting for batches of this shape, if there is one."""
        devices = len(self.step.model.devices)
        lower = setting.lower(batch.rows, devices, self.fallback)
        if lower is not None:
            self._settings[batch.shape] = lower
        return lower

    def _tell(self, batch: Batch, measured: int | None, action: str) -> None:
        """Records a decision."""
        event = WatchEvent(self._calls, batch.rows, measured, self.limit_bytes, action)
        self.events.append(event)
        if self._on_event is not None:
            self._on_event(event)


def _stats(device: Device) -> dict[str, int]:
    """What the backend says about a device's memory; nothing on CPUs."""
    return device.memory_stats() or {}


def _peak(device: Device) -> int | None:
    """The most that was ever in use on a device, if the backend says."""
    return _stats(device).get("peak_bytes_in_use")


def _limit(device: Device, limit: float) -> int:
    """A share of what a device has.

    Raises:
        ValueError: The backend does not say.
    """
    available = _stats(device).get("bytes_limit")
    if available is None:
        raise ValueError(
            f"MemoryWatch got limit={limit} and no limit_bytes, for the root "
            f"{name(device)}. A share needs the device's memory, and its "
            "memory_stats() has no 'bytes_limit'; CPU devices have no statistics at "
            "all. Pass limit_bytes=, such as limit_bytes=2**30."
        )
    return int(limit * available)


def _check(step: Any, limit: Any, limit_bytes: Any, fallback: Any, on_event: Any):
    """Checks what a watch is made of."""
    check_step(step, "MemoryWatch")
    _check_number("limit", limit, 1.0, "a share of the device's memory, such as 0.9")
    if limit_bytes is not None:
        _check_number("limit_bytes", limit_bytes, math.inf, "bytes, such as 2**30")
    if fallback not in FALLBACKS:
        raise ValueError(
            f"MemoryWatch got fallback={fallback!r}. It must be one of "
            f"{len(FALLBACKS)} names, {' or '.join(map(repr, FALLBACKS))}. Leave it "
            "out for the first."
        )
    if on_event is not None and not callable(on_event):
        raise TypeError(
            f"MemoryWatch got on_event of type {type(on_event).__name__}. It must be a "
            "function of one WatchEvent. Pass print to see them."
        )


def _check_number(argument: str, value: Any, most: float, unit: str) -> None:
    """Checks a limit.

    Raises:
        TypeError: No number.
        ValueError: Not in (0, most].
    """
    if not isinstance(value, NUMBERS) or isinstance(value, bool):
        raise TypeError(
            f"MemoryWatch got {argument}={value!r}. It must be a number, {unit}. Pass "
            "an int or a float."
        )
    if not 0 < value <= most or math.isinf(value):
        least = "more than 0" if math.isinf(most) else f"more than 0, at most {most:g}"
        raise ValueError(
            f"MemoryWatch got {argument}={value!r}. It must be {least}, {unit}. Choose "
            "another limit, or leave it out."
        )
