"""Cases of several processes: `python -m tests.processes_cases_jobs FOLDER JOB...`.

Two processes of two devices. A job returns what this process saw; an error that all
processes get alike is part of it, and the next job goes on. A process's rank is its
`jax.process_index()`.
"""

import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import jaxdp
from jaxdp.processes import batches, copies_of_zero, from_zero
from tests import processes_helpers
from tests.processes_scatter_jobs import late, scattering

PyTree = Any
PARAMS = {"w": np.arange(3, dtype="f") / 4, "b": np.ones((), "f")}


def loss_fn(params: PyTree, batch: PyTree) -> jax.Array:
    return jnp.mean((batch["x"] @ params["w"] + params["b"]) ** 2)


def masked_loss(params: PyTree, batch: PyTree, mask: jax.Array) -> jaxdp.Mean:
    losses = (batch["x"] @ params["w"] + params["b"]) ** 2
    return jaxdp.masked_mean(losses, mask)


def rows(count: int, start: int = 0) -> PyTree:
    """Distinct rows `[count, 3]`."""
    return {
        "x": np.sin(np.arange(start, start + 3.0 * count, dtype="f")).reshape(-1, 3)
    }


def training(loss: Callable = loss_fn, **options: Any) -> Any:
    return jaxdp.data_parallel(loss, optax.sgd(0.1), jaxdp.data_mesh(), **options)


def error_of(function: Callable[[], Any]) -> dict[str, Any]:
    """What a call raised, and after how many seconds."""
    start = time.monotonic()
    try:
        function()
    except (RuntimeError, TimeoutError, ValueError) as error:
        seconds = time.monotonic() - start
        return {"type": type(error).__name__, "text": str(error), "seconds": seconds}
    return {"type": None}


def served(mesh: Any) -> None:
    """Batches of an epoch where the first device of process 0 only serves."""
    sampler = jaxdp.Sampler(
        *(8, 4), process_index=jax.process_index(), process_count=jax.process_count()
    )
    design = jaxdp.ParameterServer(dedicated=True)
    next(jaxdp.epoch_batches({"x": np.arange(8)}, sampler, mesh, design=design))


def sizes(_: pathlib.Path) -> dict[str, Any]:
    """Batches of 3 and 5 rows."""
    rank, mesh = jax.process_index(), jaxdp.data_mesh()
    batch = rows(*((3, 0), (5, 9))[rank])
    padded = jaxdp.shard_batch(batch, mesh, "pad")
    train = training(masked_loss)
    _, metrics = train.step(train.init(PARAMS), padded)
    return {
        "serving": error_of(lambda: served(mesh)),
        "refused": error_of(lambda: jaxdp.shard_batch(batch, mesh)),
        "refused by step": error_of(lambda: train.step(train.init(PARAMS), batch)),
        "padded": jaxdp.fetch(padded.batch["x"]),
        "mask": jaxdp.fetch(padded.mask),
        "loss": float(metrics["loss"]),
        "dropped": jaxdp.fetch(jaxdp.shard_batch(batch, mesh, "drop")["x"]),
    }


def fetching(_: pathlib.Path) -> dict[str, Any]:
    """Arrays split, replicated and of this process, and what is no array."""
    split = jaxdp.shard_batch(rows(2, 6 * jax.process_index()), jaxdp.data_mesh())["x"]
    whole = jax.jit(jnp.sum)(split)
    tree = {
        "split": split,
        "whole": whole,
        "local": jnp.zeros(10),
        "host": np.zeros(10),
        "key": jax.random.key(3),
        "none": None,
        "text": "as it is",
    }
    kept = jaxdp.fetch(tree)
    types = {name: type(value).__name__ for name, value in kept.items()}
    return kept | {"types": types, "float": float(whole)}


def starting(_: pathlib.Path) -> dict[str, Any]:
    """Parameters, model state or key that differ; copies of process 0."""
    rank = jax.process_index()
    train = training()
    own = {"w": np.asarray(jax.random.normal(jax.random.key(rank), (3,)))}
    both = {"w": own["w"], "b": PARAMS["b"]}
    statistics = {"norm": {"mean": np.full(4, rank, "f"), "count": np.int32(2)}}
    key = jax.random.key(rank)
    other = own | ({"extra": np.ones(2, "f")} if rank else {"b": PARAMS["b"]})
    wide = {"w": PARAMS["w"].astype("f2" if rank else "f4"), "b": PARAMS["b"]}
    state = train.init(copies_of_zero(both))
    return {
        "params": error_of(lambda: train.init(both)),
        "model_state": error_of(lambda: train.init(PARAMS, model_state=statistics)),
        "rng": error_of(lambda: train.init(PARAMS, rng=key)),
        "structure": error_of(lambda: train.init(other)),
        "dtype": error_of(lambda: train.init(wide)),
        "copied": jaxdp.fetch(train.params(state))["w"],
        "own": own["w"],
    }


def programs(_: pathlib.Path) -> dict[str, Any]:
    """A constant, a dtype or an order of devices that differs; a step left out."""
    rank, devices = jax.process_index(), jax.devices()
    batch = rows(4)

    def step(train, batch=batch):
        train.step(train.init(PARAMS), batch)

    scaled = training(lambda params, batch: (1.0 + rank) * loss_fn(params, batch))
    half = {"x": batch["x"].astype("f2" if rank else "f4")}
    turned = jaxdp.data_mesh(devices[::-1] if rank else devices)
    train = jaxdp.data_parallel(loss_fn, optax.sgd(0.1), turned)
    return {
        "constant": error_of(lambda: step(scaled)),
        "dtype": error_of(lambda: step(training(), half)),
        "devices": error_of(lambda: step(train)),
        "same": error_of(lambda: step(training())),
    }


def missing(_: pathlib.Path) -> dict[str, Any]:
    """Process 1 does not come: to an agreement, to a step; comes last."""
    rank, train = jax.process_index(), training()
    state = train.init(PARAMS)
    batches.STEP_TIMEOUT_S = 1.5
    lonely = error_of(lambda: rank or jaxdp.processes.agree("lonely", 1, 1.5))
    absent = error_of(lambda: rank or train.step(state, rows(4)))
    jaxdp.processes.agree("has given up", rank)
    late = jaxdp.processes.agree("lonely", f"{rank}, late")
    return {"agreement": lonely, "step": absent, "late": late}


def agreeing(_: pathlib.Path) -> dict[str, Any]:
    """Values in order of rank, whoever comes first; again and again under one name."""
    rank = jax.process_index()
    time.sleep(0.3 * (1 - rank))
    agree = jaxdp.processes.agree
    return {
        "rounds": [agree("value", {"rank": rank, "round": i}) for i in range(3)],
        "decision": from_zero("decision", f"of {rank}"),
        "zero": jaxdp.process_zero(),
    }


def ends(_: pathlib.Path) -> dict[str, Any]:
    """3 batches on process 0 and 4 on process 1."""
    rank, train = jax.process_index(), training()
    state, losses = train.init(jax.tree.map(jnp.asarray, PARAMS)), []
    for batch in jaxdp.together([rows(2, 50 * rank + i) for i in range(3 + rank)]):
        state, metrics = train.step(state, batch)
        losses.append(float(metrics["loss"]))
    return {
        "losses": losses,
        "empty": len([*jaxdp.together([1] * rank)]),
        "cached": train.step.__self__.jitted_step._cache_size(),
    }


def orders(_: pathlib.Path) -> dict[str, Any]:
    """The samples of 2 epochs, and of runs that go on after 3, 5 and 7 steps."""
    return {str(count): _orders(count) for count in (2, 4)}


def _orders(devices: int) -> dict[str, Any]:
    each = devices // jax.process_count()
    processes = range(jax.process_count())
    mesh = jaxdp.data_mesh(
        [d for rank in processes for d in jax.local_devices(rank)[:each]]
    )
    data = {"id": np.arange(20)}

    def sampler():
        places = jax.process_index(), jax.process_count()
        return jaxdp.Sampler(20, 4, process_index=places[0], process_count=places[1])

    def ids(sampler):
        while sampler.state()["epoch"] < 2:
            for padded in jaxdp.epoch_batches(data, sampler, mesh):
                yield jaxdp.fetch(padded.batch["id"]).tolist(), sampler.state()

    whole = [*ids(sampler())]
    found = {"0": [batch for batch, _ in whole]}
    for steps in (3, 5, 7):
        resumed = sampler()
        resumed.restore(whole[steps - 1][1])
        found[str(steps)] = [batch for batch, _ in [*whole[:steps], *ids(resumed)]]
    return found


def saving(folder: pathlib.Path) -> dict[str, Any]:
    """All save a state that is split over processes; only process 0 sees the file."""
    rank = jax.process_index()
    train = training(design=jaxdp.ParameterServer(servers=4))
    state = train.init(PARAMS)
    for i in range(2):
        state, _ = train.step(state, rows(2, 9 * i + 50 * rank))
    path, note = folder / "state", folder / f"rank-{rank}" / "newest"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)
        checkpointer.wait_until_finished()
        if rank == 0:
            note.parent.mkdir()
            note.write_text("state")
        newest = note.read_text() if note.exists() else None
        decided = from_zero("newest checkpoint", newest)
        restored = checkpointer.restore(folder / decided, train.init(PARAMS))
    losses: list[list[float]] = [[], []]
    for run, kept in enumerate((state, restored)):
        for i in range(2, 4):
            kept, metrics = train.step(kept, rows(2, 9 * i + 50 * rank))
            losses[run].append(float(metrics["loss"]))
    step = train.step.__self__.jitted_step
    return {
        "seen": newest,
        "decided": decided,
        "losses": losses,
        "cached": step._cache_size(),
    }


def failing(folder: pathlib.Path) -> dict[str, Any]:
    """Process 1 fails where all save."""
    state = training().init(PARAMS)
    with ocp.StandardCheckpointer() as checkpointer:
        if jax.process_index() == 1:
            raise OSError("no room for the checkpoint")
        checkpointer.save(folder / "state", state)
    return {}


JOBS = {
    job.__name__: job
    for job in (
        *(sizes, fetching, starting, programs, missing, agreeing, ends, orders),
        *(saving, scattering, late, failing),
    )
}


def main(folder: str, *names: str) -> None:
    """Runs jobs, one after the other."""
    jaxdp.initialize()
    found = {}
    for name in names:
        print(name, flush=True)  # so that a log says where a start has failed
        found[name] = JOBS[name](pathlib.Path(folder))
    processes_helpers.write(folder, jax.process_index(), found)


if __name__ == "__main__":
    main(*sys.argv[1:])
