"""Two processes that save and restore: `python -m tests.checkpoint_processes_jobs`.

Arguments: the folder for results, and one with a checkpoint of a single process.
"""

import pathlib
import sys
import warnings

import jax

import jaxdp
from jaxdp.checkpoint import Checkpoints, manifest, restoring
from tests import processes_helpers
from tests.checkpoint_helpers import batch, params, training


def local(number):
    """This process's half of a batch."""
    rank = jax.process_index()
    return {k: v[12 * rank : 12 * rank + 12] for k, v in batch(number).items()}


def go(train, state, numbers):
    losses = []
    for number in numbers:
        state, metrics = train.step(state, local(number))
        losses.append(float(metrics["loss"]))
    return state, losses


def saving(folder, design):
    """Three steps, a checkpoint, and a step while it is written."""
    train, state = training(design)
    state, _ = go(train, state, range(3))
    with Checkpoints(folder / design) as checkpoints:
        checkpoints.save(train, state, data={"epoch": 3})
        state, losses = go(train, state, [3])
    return {"losses": losses, "params": jaxdp.fetch(train.params(state))["w"]}


def restoring_here(folder, design):
    """From a checkpoint of other processes."""
    train, fresh = training(design)
    back = Checkpoints(folder).restore(train, fresh)
    assert back is not None
    return {"losses": go(train, back.state, [3])[1], "data": back.data}


def disagreeing(folder):
    """Another position in the data on each process; then nothing is written."""
    train, state = training("ring")
    checkpoints = Checkpoints(folder / "odd")
    try:
        checkpoints.save(train, state, data=jax.process_index())
    except ValueError as error:
        return {"error": str(error), "there": (folder / "odd").exists()}
    return {}


def failing(folder):
    """The disk of the process that writes is full: all are told."""
    train, state = training("ring")
    (folder / "file").touch()
    checkpoints = Checkpoints(folder / "file" / "in")
    checkpoints.save(train, state)
    try:
        checkpoints.wait()
    except OSError as error:
        return {"error": str(error)}
    return {}


def damaged_for_one(folder):
    """Rank 1 cannot read the newest: both take the one before."""
    train, state = training("ring")
    with Checkpoints(folder / "two") as checkpoints:
        checkpoints.save(train, state, data="old")
        checkpoints.wait()
        checkpoints.save(train, go(train, state, [0])[0], data="new")
    read = restoring.arrays.read

    def unreadable(path, said):
        if jax.process_index() == 1 and path.parent.name == "00000001":
            raise manifest.DamagedError("arrays cannot be read: a test")
        return read(path, said)

    restoring.arrays.read = unreadable
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            back = checkpoints.restore(train, train.init(params()))
    finally:
        restoring.arrays.read = read
    assert back is not None
    return {"data": back.data, "told": [str(w.message) for w in told]}


def main(results, folder):
    jaxdp.initialize()
    folder = pathlib.Path(folder)
    shared = pathlib.Path(results)
    found = {design: saving(folder, design) for design in ("ring", "zero3", "server")}
    found |= {
        f"from_one_{design}": restoring_here(folder / "one", design)
        for design in ("ring", "zero3")
    }
    found["disagreeing"] = disagreeing(shared)
    found["failing"] = failing(shared)
    found["damaged_for_one"] = damaged_for_one(shared)
    processes_helpers.write(results, jax.process_index(), found)


if __name__ == "__main__":
    main(*sys.argv[1:])
