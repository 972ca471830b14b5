"""A training small enough to be saved and restored many times."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
import jaxdp.checkpoint
from jaxdp.checkpoint import Checkpoints, Restored
from jaxdp.compression import Int8, PowerSGD

ROWS = 24  # divided by 1, 2, 3, 4 and 8
DESIGNS = {
    "ring": jaxdp.RingAllReduce(),
    "root": jaxdp.GatherToRoot(root=1),
    "local": jaxdp.LocalSGD(sync_every=2),
    "server": jaxdp.ParameterServer(),
    "servers": jaxdp.ParameterServer(servers=2),
    "dedicated": jaxdp.ParameterServer(servers=2, dedicated=True),
    "worker": jaxdp.ParameterServer(servers=2, update_on="worker"),
    "late": jaxdp.ParameterServer(servers=2, max_staleness=1),
    "int8": jaxdp.RingAllReduce(compression=Int8(error_feedback=True)),
    "zero1": jaxdp.Zero(stage=1),
    "zero2": jaxdp.Zero(stage=2),
    "zero3": jaxdp.Zero(stage=3),
    "powersgd": jaxdp.RingAllReduce(compression=PowerSGD(rank=1)),
}


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"][:, :3] @ params["dense"]["k"])
    predicted = params["s"] * (batch["x"] @ params["w"]) + hidden.sum(axis=1)
    return jnp.mean((predicted - batch["y"]) ** 2)


def params() -> Any:
    random = np.random.default_rng(0)
    return {
        "dense": {"k": random.normal(size=(3, 4)).astype(np.float32)},
        "s": np.float32(0.5),
        "w": random.normal(size=10).astype(np.float32),
    }


def batch(number):
    random = np.random.default_rng(100 + number)
    x = random.normal(size=(ROWS, 10)).astype(np.float32)
    return {"x": x, "y": np.sin(x.sum(axis=1))}


def training(design: Any = "ring", devices=4, optimizer=None, **options) -> Any:
    """A training by the name of its design, and its first state."""
    train = jaxdp.data_parallel(
        options.pop("loss_fn", loss_fn),
        optimizer or optax.adam(0.01),
        jaxdp.data_mesh(devices),
        DESIGNS[design] if isinstance(design, str) else design,
        **options,
    )
    return train, train.init(params())


def run(train, state, numbers) -> tuple[Any, list[float]]:
    """The state after the steps of these batches, and their losses."""
    losses = []
    for number in numbers:
        state, metrics = train.step(state, batch(number))
        losses.append(float(metrics["loss"]))
    return state, losses


def saved(folder, train, state, **given):
    """The folder, with a checkpoint that is complete."""
    with Checkpoints(folder, keep=None) as checkpoints:
        checkpoints.save(train, state, **given)
    return folder


def restored(folder, train, state, quietly=False, **given) -> Restored:
    """What is there; with `quietly` whatever is not used of it."""
    with warnings.catch_warnings():
        if quietly:
            warnings.simplefilter("ignore", jaxdp.checkpoint.CheckpointWarning)
        found = Checkpoints(folder).restore(train, state, **given)
    assert found is not None
    return found


def kept(tmp_path, train, state):
    """What a checkpoint keeps of a state, by name."""
    folder = tmp_path / "seen"
    folder.mkdir(exist_ok=True)
    return jaxdp.checkpoint.load(saved(folder, train, state))


def assert_same(found, wanted):
    """The same trees, bit for bit."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.tobytes() == b.tobytes()
