"""The training that faults befall: python -m experiments.parts.faults_training FOLDER.

Digits, a small network, Adam, noise on the images. A checkpoint holds all that the next
step depends on: the state, and as its `data` the position in the data and the state of
the noise, the same for all processes. Rank 0 (of the processes) writes every loss as an
exact hexadecimal number. Nothing here knows of faults: it saves, and it starts from the
last complete checkpoint.
"""

import hashlib
import json
import os
import pathlib
import shutil
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from jaxdp.checkpoint import Checkpoints

PyTree = Any
LOSSES = "losses.jsonl"
HIDDEN, NOISE = 64, 0.1


class Options(NamedTuple):
    """Of a training, as its folder holds them in `options.json`.

    Attributes:
        steps: Where it ends.
        save_every: Steps between two checkpoints.
        batch_size: Rows of a step, over all processes.
        pause_s: Waited after every step, in seconds: a larger model's time.
        heartbeat_s: How long a process may give no sign of life.
        checkpoints: Folder.
    """

    steps: int
    save_every: int
    batch_size: int
    pause_s: float
    heartbeat_s: float
    checkpoints: str


def loss_fn(params: PyTree, batch: PyTree) -> jax.Array:
    """The mean loss of images `[B, 64]` with labels `[B]`."""
    hidden = jnp.tanh(batch["x"] @ params["in"])
    losses = optax.softmax_cross_entropy_with_integer_labels(
        hidden @ params["out"], batch["y"]
    )
    return losses.mean()


def first_params() -> PyTree:
    """Made by NumPy, the same in all processes."""
    random = np.random.default_rng(0)
    shapes = {"in": (64, HIDDEN), "out": (HIDDEN, 10)}
    return {
        name: (random.standard_normal(shape) / 8).astype(np.float32)
        for name, shape in shapes.items()
    }


class Feed:
    """Batches of this process, from any position on."""

    def __init__(self, data: dict[str, np.ndarray], batch_size: int):
        """Starts at the first batch."""
        self._data = data
        self._sampler = jaxdp.Sampler(
            len(data["y"]),
            batch_size,
            remainder="drop",
            process_index=jax.process_index(),
            process_count=jax.process_count(),
        )
        self._random = np.random.default_rng(1)

    def __iter__(self) -> Iterator[PyTree]:
        """Without an end."""
        rank, count = jax.process_index(), jax.process_count()
        while True:
            for rows, _ in self._sampler:
                # Noise of the whole batch: then all processes have the same state.
                noise = self._random.standard_normal((count, len(rows), 64))
                x = self._data["x"][rows] + NOISE * noise[rank]
                yield {"x": x.astype(np.float32), "y": self._data["y"][rows]}

    def state(self) -> dict[str, Any]:
        """The position, as JSON."""
        random = self._random.bit_generator.state
        return {"sampler": self._sampler.state(), "random": random}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes to a position."""
        self._sampler.restore(state["sampler"])
        self._random.bit_generator.state = state["random"]


def resumed(checkpoints: Checkpoints, train: Any, feed: Feed) -> tuple[int, Any]:
    """The newest checkpoint that is whole, or the start; `feed` goes to its position.

    What a save that was killed has left is removed, so that the next one can be seen.
    """
    state = train.init(first_params())
    if found := checkpoints.restore(train, state):
        state = found.state
        feed.restore(found.data)
    if jaxdp.process_zero():
        for left in checkpoints.folder.glob("tmp-*"):
            shutil.rmtree(left, ignore_errors=True)
    return int(state.step), state


def main(folder: pathlib.Path) -> None:
    """Trains from where the last checkpoint stands to the end."""
    options = Options(**json.loads((folder / "options.json").read_text()))
    jaxdp.initialize(heartbeat_timeout_s=options.heartbeat_s)
    train = jaxdp.data_parallel(
        loss_fn, optax.adam(1e-2), jaxdp.data_mesh(), jaxdp.RingAllReduce()
    )
    feed = Feed(dict(np.load(folder / "digits.npz")), options.batch_size)
    checkpoints = Checkpoints(options.checkpoints, keep=2)
    step, state = resumed(checkpoints, train, feed)
    with (folder / LOSSES).open("a") as log:
        for batch in feed:
            if step == options.steps:
                break
            state, metrics = train.step(state, batch)
            step += 1
            if jaxdp.process_zero():
                loss = float(metrics["loss"]).hex()
                row = {"step": step, "loss": loss, "time_s": time.time()}
                print(json.dumps(row), file=log, flush=True)
            else:
                jax.block_until_ready(metrics)
            if step % options.save_every == 0:
                checkpoints.save(train, state, feed.state())
                checkpoints.wait()  # so that a kill can be in a save
            time.sleep(options.pause_s)
    (folder / f"final.{jax.process_index()}").write_text(digest(state))


def digest(state: PyTree) -> str:
    """Of all bits that this process holds."""
    bits = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        for shard in leaf.addressable_shards:
            bits.update(np.asarray(shard.data).tobytes())
    return bits.hexdigest()


if __name__ == "__main__":
    if len(sys.argv) != 2 or "JAX_PROCESS_ID" not in os.environ:
        sys.exit("faults_training is started by EXP=faults: make experiment EXP=faults")
    main(pathlib.Path(sys.argv[1]))
