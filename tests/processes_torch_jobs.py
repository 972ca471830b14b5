"""Torch and jaxdp in the same processes: `... processes_torch_jobs FOLDER COUNT...`.

Every process belongs to a group of torch and to one of JAX, and makes each step with
both: `DistributedDataParallel` over gloo, then jaxdp's designs, from the same
parameters on the same rows. torch is imported where it is used, so that a test can read
the problem without it.
"""

import importlib
import itertools
import os
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from jaxdp.launch.environment import LOOPBACK, free_port
from tests import processes_helpers

STEPS = 12
ROWS = 24  # of all processes
SIZES = (5, 11, 6, 2)
# Three layers in float64 take 440 + 88, 528 + 48 and 96 + 16 bytes.
CAP_MB = 100 / 2**20
DESIGNS = {
    "ring": jaxdp.RingAllReduce(CAP_MB, CAP_MB),
    # Between two processes this is lax.psum, else a ring.
    "auto": jaxdp.AllReduce("auto", CAP_MB, CAP_MB),
    "root": jaxdp.GatherToRoot(root=1),
}
HYPER_PARAMETERS = {
    "sgd": {"learning_rate": 0.05, "momentum": 0.9},
    "adam": {"learning_rate": 0.01, "b1": 0.9, "b2": 0.999, "eps": 1e-8},
}
Arrays = dict[str, np.ndarray]


def first_params() -> Arrays:
    """Weights `[outputs, inputs]` and biases, by torch's names."""
    params = {}
    for i, (inputs, outputs) in enumerate(itertools.pairwise(SIZES)):
        wave = np.sin(1.7 * np.arange((inputs + 1) * outputs) + i)
        params[f"{2 * i}.weight"] = wave[outputs:].reshape(outputs, inputs)
        params[f"{2 * i}.bias"] = wave[:outputs]
    return params


def batches() -> list[Arrays]:
    """Rows of every step, for all processes together."""
    waves = np.sin(1.3 * np.arange(STEPS * ROWS * (SIZES[0] + SIZES[-1])))
    split = waves.reshape(STEPS, ROWS, -1)
    return [{"x": rows[:, : SIZES[0]], "y": rows[:, SIZES[0] :]} for rows in split]


def jax_loss(params: Arrays, batch: Arrays) -> jax.Array:
    """The mean squared error of three linear layers with tanh between them."""
    hidden = batch["x"]
    for layer in ("0", "2", "4"):
        hidden = hidden @ params[f"{layer}.weight"].T + params[f"{layer}.bias"][None]
        if layer != "4":
            hidden = jnp.tanh(hidden)
    return jnp.mean((hidden - batch["y"]) ** 2)


class Torch:
    """`DistributedDataParallel` of the same model."""

    def __init__(self, optimizer: str):
        """Starts from the first parameters."""
        import torch
        from torch import nn

        layers = [nn.Linear(*pair) for pair in itertools.pairwise(SIZES)]
        model = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])
        model = model.double()
        model.load_state_dict(
            {name: torch.from_numpy(array) for name, array in first_params().items()}
        )
        self.model, given = model, HYPER_PARAMETERS[optimizer]
        self.ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=CAP_MB)
        if optimizer == "sgd":
            momentum = given["momentum"]
            make = torch.optim.SGD
            self.optimizer = make(model.parameters(), given["learning_rate"], momentum)
        else:
            betas = given["b1"], given["b2"]
            make = torch.optim.Adam
            rate, eps = given["learning_rate"], given["eps"]
            self.optimizer = make(model.parameters(), rate, betas, eps)

    def step(self, batch: Arrays) -> dict[str, Any]:
        """One step on this process's rows; the loss is that of all."""
        import torch

        self.optimizer.zero_grad()
        outputs = self.ddp(torch.from_numpy(batch["x"]))
        loss = (outputs - torch.from_numpy(batch["y"])).square().mean()
        loss.backward()
        self.optimizer.step()
        total = loss.detach()
        torch.distributed.all_reduce(total)
        count = torch.distributed.get_world_size()
        params = {
            name: each.detach().numpy().copy()
            for name, each in self.model.named_parameters()
        }
        return {"loss": total.numpy() / count, "params": params}

    def buckets(self) -> int:
        """How many travel, as it logs them after the first step."""
        sizes = self.ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"]
        return len(sizes.split(","))


def compared(optimizer: str) -> dict[str, Any]:
    """Every step of torch and of all designs, one after the other."""
    make = {"sgd": optax.sgd, "adam": optax.adam}[optimizer]
    transformation = make(**HYPER_PARAMETERS[optimizer])
    mesh = jaxdp.data_mesh()
    trains = {
        name: jaxdp.data_parallel(jax_loss, transformation, mesh, design)
        for name, design in DESIGNS.items()
    }
    states = {name: train.init(first_params()) for name, train in trains.items()}
    torch, found = Torch(optimizer), {name: [] for name in ("torch", *trains)}
    each, rank = ROWS // jax.process_count(), jax.process_index()
    for batch in batches():
        own = {name: a[rank * each : (rank + 1) * each] for name, a in batch.items()}
        found["torch"].append(torch.step(own))
        for name, train in trains.items():
            states[name], metrics = train.step(states[name], own)
            params = jaxdp.fetch(train.params(states[name]))
            found[name].append({"loss": np.asarray(metrics["loss"]), "params": params})
    ours = len(trains["ring"].buckets(states["ring"], own))
    return found | {"buckets": [torch.buckets(), ours]}


def main(folder: str, *counts: str) -> None:
    """Runs so many processes, for each of these counts, one count after the other.

    They are forks, because importing torch and JAX takes longer than they do.
    """
    importlib.import_module("torch._dynamo")  # the first optimizer imports it
    from torch.multiprocessing.spawn import start_processes

    for count in map(int, counts):
        own = pathlib.Path(folder, str(count))
        own.mkdir()
        given = count, own, f"{LOOPBACK}:{free_port()}"
        start_processes(join, given, count, start_method="fork")


def join(rank: int, count: int, folder: pathlib.Path, address: str) -> None:
    """Joins both groups, and trains with each optimizer."""
    import torch

    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ["GLOO_SOCKET_IFNAME"] = loopback  # whatever the host name resolves to
    jax.config.update("jax_enable_x64", True)
    jaxdp.initialize(address, count, rank)
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=(folder / "rendezvous").as_uri(),
        rank=rank,
        world_size=count,
    )
    found = {optimizer: compared(optimizer) for optimizer in HYPER_PARAMETERS}
    torch.distributed.destroy_process_group()
    processes_helpers.write(folder, rank, found)


if __name__ == "__main__":
    main(*sys.argv[1:])
