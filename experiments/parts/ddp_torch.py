"""The same training and the same cost, beside PyTorch's DistributedDataParallel.

Real processes over gloo on the loopback interface; see `benchmarks.distributing`.
Everything here works, and says so, where PyTorch is not installed.
"""

import itertools
import pathlib
import tempfile
from typing import Any

import jax
import numpy as np
import optax

import jaxdp
from benchmarks import distributing
from benchmarks import distributing_problem as problem
from experiments import models
from experiments.harness.processes import Processes
from experiments.harness.result import Rows

MODEL = "cnn"
STEPS, LEARNING_RATE = 20, 0.05
CAP_MB = 0.03  # several buckets of 38,282 parameters


def parity(processes: int) -> Rows:
    """Parameters after the same steps of DDP and of jaxdp, with several buckets.

    Args:
        processes: Of PyTorch; as many devices here.
    """
    apply, params = models.functional(models.DigitsNet, seed=0)
    params = jax.tree.map(np.asarray, params)
    ours, buckets = _ours(apply, params, processes)
    theirs = _theirs(params, processes)
    distances = {name: float(np.abs(ours[name] - theirs[name]).max()) for name in ours}
    moved = max(
        float(np.abs(ours[name] - start).max()) for name, start in named(params).items()
    )
    return [
        {
            "model": "DigitsNet, 38,282 parameters",
            "processes": processes,
            "our buckets": buckets,
            "steps": STEPS,
            "parameters moved by": moved,
            "largest difference": max(distances.values()),
            "of parameter": max(distances, key=lambda name: distances[name]),
        }
    ]


def costs(seconds: float, processes: int) -> Rows:
    """What distributing costs, in short; `make bench` says more."""
    names = {design: way for way, design in distributing.WAYS.items()}
    label = (
        f"real processes, one thread each, gloo; {distributing.BASELINE}; median and "
        "quartiles of blocks in turns; "
        + "; ".join(f"{way}: {design}" for design, way in names.items())
    )
    return [
        {
            "ours": f"{cost.model}, {names[cost.design]}",
            "processes": cost.processes,
            "step, ours_ms": cost.ours_ms[1],
            "step, DDP_ms": cost.theirs_ms[1],
            "cost, ours_ms": cost.ours_cost_ms[1],
            "cost, DDP_ms": cost.theirs_cost_ms[1],
            "ours - DDP_ms": "{1:.2f} ({0:.2f} to {2:.2f})".format(*cost.more_ms),
            "label": label,
        }
        for cost in distributing.rows(seconds, (processes,))
    ]


def named(params: Any) -> dict[str, np.ndarray]:
    """Parameters by their paths, with dots."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }


def _ours(apply: Any, params: Any, devices: int) -> tuple[dict[str, np.ndarray], int]:
    """Parameters after all steps, and the number of buckets."""

    def loss_fn(params, batch):
        x, y = batch
        logits = apply(params, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    optimizer = optax.sgd(LEARNING_RATE, momentum=problem.MOMENTUM)
    design = jaxdp.RingAllReduce(CAP_MB, first_bucket_mb=CAP_MB)
    mesh = jaxdp.data_mesh(devices)
    train = jaxdp.data_parallel(loss_fn, optimizer, mesh, design)
    parts = [problem.local_batch(MODEL, rank) for rank in range(devices)]
    batch = tuple(np.concatenate(leaves) for leaves in zip(*parts, strict=True))
    state = train.init(params)
    buckets = len(train.buckets(state, batch))
    for _ in itertools.repeat(None, STEPS):
        state, _ = train.step(state, batch)
    return named(train.params(state)), buckets


def _theirs(params: Any, processes: int) -> dict[str, np.ndarray]:
    """Parameters of rank 0 after all steps; DDP checks that ranks start alike."""
    with tempfile.TemporaryDirectory() as folder:
        start, end = (pathlib.Path(folder) / f"{when}.npz" for when in ("start", "end"))
        np.savez(start, allow_pickle=False, **named(params))
        module, place = "benchmarks.distributing_torch", pathlib.Path(folder)
        with Processes(module, processes, place, folder) as workers:
            workers.ask(
                model=MODEL,
                way="ddp",
                steps=STEPS,
                params=str(start),
                learning_rate=LEARNING_RATE,
                bucket_cap_mb=CAP_MB,
                save=str(end),
            )
        with np.load(end) as saved:
            return dict(saved)
