"""Saving while training goes on, and restoring the newest that is whole."""

import errno
import os
import pathlib
import threading
import time
import warnings
from typing import Any, NamedTuple

import jax

from jaxdp.checkpoint import arrays, folders, given, manifest
from jaxdp.checkpoint.capture import capture, whole
from jaxdp.checkpoint.content import content_of, size_of
from jaxdp.checkpoint.folders import CheckpointWarning
from jaxdp.checkpoint.restoring import Source, restored
from jaxdp.processes import agreement
from jaxdp.state import TrainState
from jaxdp.trainer import Trainer

PyTree = Any


class Restored(NamedTuple):
    """What `Checkpoints.restore` gives.

    Attributes:
        state: The state, on the devices of the training it was restored for.
        data: What `save` was given as `data`.
        metadata: What `save` was given as `metadata`.
    """

    state: TrainState
    data: Any
    metadata: Any


class Checkpoints:
    """The checkpoints of a run, in a folder.

    `save` copies nothing on CPUs and waits for one transfer to the host elsewhere; the
    rest is done by a thread, and a step is there once it is whole. Errors of that
    thread come up in the next call. Leave the block, or call `wait`, before the program
    ends: what is not finished by then is not there.

    Processes: all of those that train call `save`, `wait` and `restore`, equally often;
    the first one writes, and all read the same folder.

    Attributes:
        folder: Where they lie; made by the first `save`.
        keep: How many steps, the newest and the one just saved; None for all.

    Raises:
        ValueError: `keep` is below 1.

    Example:
        >>> import jax.numpy as jnp, jaxdp, optax, tempfile
        >>> def loss_fn(params, batch):
        ...     return jnp.mean((batch * params - 1) ** 2)
        >>> train = jaxdp.data_parallel(loss_fn, optax.sgd(0.5), jaxdp.data_mesh(2))
        >>> state, _ = train.step(train.init(jnp.array(0.0)), jnp.ones(4))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with jaxdp.checkpoint.Checkpoints(folder) as checkpoints:
        ...         checkpoints.save(train, state, data={"epoch": 3})
        ...     back = checkpoints.restore(train, train.init(jnp.array(0.0)))
        >>> print(back.state.step, train.params(back.state), back.data)
        1 1.0 {'epoch': 3}
    """

    def __init__(self, folder: str | pathlib.Path, keep: int | None = 3):
        """Looks at nothing yet."""
        if keep is not None and keep < 1:
            raise ValueError(
                f"Checkpoints got keep={keep}. It is a number of steps, at least 1. "
                "Pass 3, or None to keep all of them."
            )
        self.folder = pathlib.Path(folder).absolute()
        self.keep = keep
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._ranks: tuple[int, ...] = (jax.process_index(),)

    def __enter__(self) -> "Checkpoints":
        """Itself."""
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Waits for the last save; for the other processes only if all is well."""
        if kind is None:
            self.wait()
        elif failed := self._joined():
            warnings.warn(str(failed), CheckpointWarning, stacklevel=2)

    def steps(self) -> list[int]:
        """The steps that are there, in order; damaged ones too, if they have files."""
        return sorted({place.step for place in folders.places(self.folder)})

    def save(
        self, train: Any, state: TrainState, data: Any = None, metadata: Any = None
    ) -> None:
        """Saves a state, and goes on before it is written.

        Cost: waits until the step that made the state is done, and the save before it.
        Holds the arrays of the state, of one device, until they are written.

        Args:
            train: What `jaxdp.data_parallel` returned.
            state: Of this training. It may be given to `train.step` at once.
            data: The position in the data, such as `sampler.state()`: anything that
                JSON gives back as it was, the same on all processes.
            metadata: Anything else of that kind.

        Raises:
            TypeError: `train` or `state` are none; JSON cannot say `data`.
            ValueError: A state of another design or of other devices; processes with
                different `data`.
            RuntimeError: A state that was donated.
            OSError: The save before failed: the folder cannot be written, or is full.
            TimeoutError: Another process did not come.
        """
        trainer = given.checked(train, state, "save")
        self._ranks = trainer.ranks
        said = {"data": given.as_json(data, "data")}
        said |= {"metadata": given.as_json(metadata, "metadata")}
        self._agree(said)
        writes = self._writes()
        step = int(state.step)
        captured = capture(state, writes)
        if writes:
            facts = given.facts(trainer, state, step) | said
            work = (trainer, captured, facts)
            self._thread = threading.Thread(
                target=self._guarded, args=work, name=f"jaxdp-checkpoint-{step}"
            )
            self._thread.start()

    def wait(self) -> None:
        """Waits until the last save is there, in all processes.

        Raises:
            OSError: It failed.
            TimeoutError: Another process did not come.
        """
        self._agree(None)

    def restore(
        self,
        train: Any,
        state: TrainState,
        step: int | None = None,
        cast: bool = False,
    ) -> Restored | None:
        """The newest checkpoint that is whole, as a state of this training.

        Design, devices and processes may be others than those that saved it. What
        cannot be used is passed over with a `CheckpointWarning` that says why.

        Cost: reads everything once, into the memory of the host.

        Args:
            train: What `jaxdp.data_parallel` returned.
            state: A fresh state, from its `init`: tells structure, shapes, dtypes and
                devices, and is left as it is.
            step: Which one; None for the newest.
            cast: Whether floating dtypes may differ, and are converted.

        Returns:
            State, data and metadata; None if nothing has been saved yet.

        Raises:
            ValueError: Another model, optimizer or precision: lists the leaves that
                differ. Damaged: the one asked for, or all there are. Gradients in
                flight that this design cannot apply.
            FileNotFoundError: The step asked for is not there.
            OSError: A save by this object has failed.
        """
        trainer = given.checked(train, state, "restore")
        self._ranks = trainer.ranks
        self._agree(None)
        source = Source(self.folder, trainer, state, cast)
        found = restored(source, step)
        return found and Restored(*found)

    def _writes(self) -> bool:
        """Whether this is the process that writes."""
        return jax.process_index() == self._ranks[0]

    def _agree(self, value: Any) -> None:
        """Ends the last save, and compares what all processes have been given.

        Raises what failed in the process that writes, in all of them.
        """
        failed = self._joined()
        said = {"failed": failed and str(failed), "given": agreement.digest(value)}
        everyone = agreement.agree(
            "a checkpoint", said, agreement.STEP_TIMEOUT_S, ranks=self._ranks
        )
        if failed is not None:
            raise failed
        for each in everyone:
            if each["failed"]:
                raise OSError(each["failed"])
        odd = [
            rank
            for rank, each in zip(self._ranks, everyone, strict=True)
            if each["given"] != everyone[0]["given"]
        ]
        if odd:
            raise ValueError(
                f"save got other data or metadata on rank {', '.join(map(str, odd))} "
                f"than on rank {self._ranks[0]}, which writes. A checkpoint has one of "
                "each for all processes. Pass what they share, such as sampler.state()."
            )

    def _joined(self) -> Exception | None:
        """Waits for the thread; what went wrong there, once."""
        if self._thread is not None:
            self._thread.join()
        self._thread, error, self._error = None, self._error, None
        return error

    def _guarded(self, trainer: Trainer, captured: Any, facts: dict[str, Any]) -> None:
        """Keeps errors of the thread for the next call."""
        try:
            self._write(trainer, captured, facts)
        except Exception as error:
            self._error = error

    def _write(self, trainer: Trainer, captured: Any, facts: dict[str, Any]) -> None:
        """Writes a step, and removes those that are not kept."""
        start_s, step, size = time.monotonic(), facts["step"], 0
        try:
            values = content_of(whole(captured), trainer).names()
            size = sum(map(size_of, values.values()))
            if size > folders.free_bytes(self.folder):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            with folders.placed(self.folder, step) as folder:
                checksums = arrays.write(folder / folders.ARRAYS, values)
                facts |= {"arrays": manifest.made_of(values, checksums)}
                facts |= {"seconds": round(time.monotonic() - start_s, 3)}
                manifest.write(folder, facts)
            self._forget(step)
        except Exception as error:
            raise OSError(folders.failure(self.folder, step, size, error)) from error

    def _forget(self, step: int) -> None:
        """Removes what was replaced, and steps older than those kept."""
        kept: list[int] = []
        for place in folders.places(self.folder):
            if place.step in kept:  # an earlier attempt
                folders.remove(place)
            elif self.keep is None or len(kept) < self.keep or place.step == step:
                if (place.path / manifest.MANIFEST).is_file():
                    kept.append(place.step)
            else:
                folders.remove(place)
