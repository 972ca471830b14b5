"""Runs that never stop, and runs that go on from a checkpoint, of the same batches."""

import functools
import itertools
import math
import pathlib
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxdp
from experiments.parts import digits
from jaxdp.checkpoint import Checkpoints, CheckpointWarning

PyTree = Any
HIDDEN = 64
DESIGNS = {
    "ring": jaxdp.RingAllReduce(),
    "native": jaxdp.NativeAllReduce(),
    "gather to root": jaxdp.GatherToRoot(),
    "2 servers": jaxdp.ParameterServer(servers=2),
    "ZeRO 1": jaxdp.Zero(stage=1),
    "ZeRO 2": jaxdp.Zero(stage=2),
    "ZeRO 3": jaxdp.Zero(stage=3),
    "local SGD": jaxdp.LocalSGD(sync_every=4),
}


class Sizes(NamedTuple):
    """Of every run: steps, after how many it is saved, and rows of a batch."""

    steps: int
    saved_at: int
    batch_size: int


class Run(NamedTuple):
    """A run, or the part of one after a checkpoint.

    Attributes:
        name: The design.
        devices: How many.
        first: The number of its first step.
        losses: Of its steps.
        disk_bytes: Of the checkpoint it went on from, or has saved.
    """

    name: str
    devices: int
    first: int
    losses: list[float]
    disk_bytes: int

    def row(self, never: "Run") -> dict[str, Any]:
        """Beside the run that never stopped."""
        expected = never.losses[self.first - never.first :]
        apart = [
            abs(a - b) / abs(b) for a, b in zip(self.losses, expected, strict=True)
        ]
        differ = [self.first + i for i, difference in enumerate(apart) if difference]
        return {
            "from": f"{never.name} on {never.devices}",
            "to": self.name,
            "devices": self.devices,
            "first step that differs": differ[0] if differ else "none",
            "first loss apart": apart[0],
            "largest apart": max(apart),
            "bytes on disk": self.disk_bytes,
        }


def plan(devices: int, tiny: bool) -> list[tuple[str, int]]:
    """Which designs go on, on how many devices."""
    fewer = sorted({max(devices // 2, 2), max(devices // 4, 2)}, reverse=True)
    if tiny:
        return [("ring", devices), ("ZeRO 3", fewer[0])]
    found = [(name, devices) for name in DESIGNS]
    return found + [(name, n) for name in ("ring", "ZeRO 3") for n in fewer]


@functools.cache
def training(name: str, devices: int) -> tuple[Any, Any]:
    """The training of a design, and its first state, which restores leave as it is."""
    random = np.random.default_rng(0)
    shapes = {"in": (64, HIDDEN), "out": (HIDDEN, 10)}
    params = {
        name: (random.standard_normal(shape) / 8).astype(np.float32)
        for name, shape in shapes.items()
    }
    mesh = jaxdp.data_mesh(devices)
    train = jaxdp.data_parallel(loss_fn, optax.adam(1e-2), mesh, DESIGNS[name])
    return train, train.init(params)


def loss_fn(params: PyTree, batch: PyTree) -> jax.Array:
    """The mean loss of images `[B, 64]` with labels `[B]`."""
    hidden = jnp.tanh(batch["x"] @ params["in"])
    losses = optax.softmax_cross_entropy_with_integer_labels(
        hidden @ params["out"], batch["y"]
    )
    return losses.mean()


def batches(sizes: Sizes) -> list[PyTree]:
    """The batches of all steps."""
    pixels, labels = map(np.asarray, load_digits(return_X_y=True))
    data = ((pixels / 16).astype(np.float32), labels.astype(np.int32))
    epochs = math.ceil(sizes.steps * sizes.batch_size / (len(labels) // 2))
    found = digits.batches(data, sizes.batch_size, epochs, seed=0)
    return [{"x": x, "y": y} for x, y in itertools.islice(found, sizes.steps)]


def whole(folder: pathlib.Path, devices: int, sizes: Sizes) -> Run:
    """A ring that never stops; it saves one step before, and at, `saved_at`."""
    train, _ = training("ring", devices)
    _, fresh = training.__wrapped__("ring", devices)
    with Checkpoints(folder) as checkpoints:
        _, losses = _steps(train, fresh, batches(sizes), 1, checkpoints, sizes.saved_at)
    return Run("ring", devices, 1, losses, disk_bytes(folder, sizes.saved_at))


def resumed(folder: pathlib.Path, name: str, devices: int, sizes: Sizes) -> Run:
    """A design that goes on from the checkpoint of the ring."""
    train, fresh = training(name, devices)
    state = _restored(folder, train, fresh, sizes.saved_at)
    _, losses = _steps(train, state, batches(sizes)[sizes.saved_at :])
    size = disk_bytes(folder, sizes.saved_at)
    return Run(name, devices, sizes.saved_at + 1, losses, size)


def there_and_back(folder: pathlib.Path, devices: int, sizes: Sizes) -> Run:
    """The ring's checkpoint through ZeRO 3 on half of the devices, and back."""
    all_batches, half = batches(sizes), (sizes.saved_at + sizes.steps) // 2
    train, fresh = training("ZeRO 3", max(devices // 2, 2))
    state = _restored(folder / "run", train, fresh, sizes.saved_at)
    state, losses = _steps(train, state, all_batches[sizes.saved_at : half])
    with Checkpoints(folder / "zero") as checkpoints:
        checkpoints.save(train, state)
    train, fresh = training("ring", devices)
    state = _restored(folder / "zero", train, fresh, half)
    _, more = _steps(train, state, all_batches[half:])
    size = disk_bytes(folder / "zero", half)
    name = f"ZeRO 3 on {max(devices // 2, 2)}, then ring"
    return Run(name, devices, sizes.saved_at + 1, losses + more, size)


def disk_bytes(folder: pathlib.Path, step: int) -> int:
    """Of all files of a checkpoint."""
    files = (folder / f"{step:08d}").rglob("*")
    return sum(path.stat().st_size for path in files if path.is_file())


def _restored(folder: pathlib.Path, train: Any, fresh: Any, step: int) -> Any:
    """The state of a step."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)
        found = Checkpoints(folder).restore(train, fresh, step=step)
    assert found is not None
    return found.state


def _steps(
    train: Any,
    state: Any,
    given: list[PyTree],
    first: int = 0,
    checkpoints: Checkpoints | None = None,
    saved_at: int = 0,
) -> tuple[Any, list[float]]:
    """Trains; the losses of its steps."""
    losses = []
    for number, batch in enumerate(given, first):
        state, metrics = train.step(state, batch)
        losses.append(float(metrics["loss"]))
        if checkpoints and saved_at - 1 <= number <= saved_at:
            checkpoints.save(train, state)
    return state, losses
