"""One of the processes of `streams_processes_test.py`: `RANK COUNT ADDRESS`."""

import hashlib
import os
import sys
from typing import Literal

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdp
import jaxdp.streams
from experiments.harness import processes
from tests.streams_problems import layers, mlp_loss, rows

STEPS = 5
PARAMS = layers(6, *[9] * 11, 3)  # 24 leaves, and as many buckets
CAP_MB = 1e-6


def answer(program: str, delay: Literal[0, 1]) -> list:
    """Trains; losses, a digest of the parameters, and how many are where."""
    streams = jaxdp.streams.two_streams()
    mesh, optimizer = streams.compute, optax.sgd(0.1, momentum=0.9)
    if program == "streams":
        train = jaxdp.streams.data_parallel(
            *(mlp_loss, optimizer, streams),
            delay=delay,
            bucket_cap_mb=CAP_MB,
            first_bucket_mb=None,
        )
    else:
        design = jaxdp.RingAllReduce(CAP_MB, None)
        train = jaxdp.data_parallel(mlp_loss, optimizer, mesh, design)
    state, losses = train.init(PARAMS), []
    for step in range(STEPS):
        state, metrics = train.step(state, _batch(step, mesh))
        losses.append(metrics["loss"])
    params = [np.asarray(leaf) for leaf in jax.tree.leaves(train.params(state))]
    digest = hashlib.sha256(b"".join(leaf.tobytes() for leaf in params)).hexdigest()
    mine = [d.id for d in mesh.local_devices], len(mesh.devices)
    return [[float(loss) for loss in losses], digest, *mine]


def _batch(step: int, mesh) -> dict:
    """This process's half of the rows."""
    rank, sharding = jax.process_index(), NamedSharding(mesh, P("data"))
    half = jax.tree.map(
        lambda x: np.split(x, jax.process_count())[rank], rows(step, 8, 6, 3)
    )
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(sharding, x), half
    )


if __name__ == "__main__":
    jax.distributed.initialize(sys.argv[3], int(sys.argv[2]), int(sys.argv[1]))
    processes.serve(answer)
