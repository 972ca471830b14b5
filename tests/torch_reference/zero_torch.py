"""ZeRO in torch: `python -m tests.torch_reference.zero_torch DIRECTORY`.

All ranks are forks of one process. `ZeroRedundancyOptimizer` shards whole parameters
among ranks, `fully_shard` each of them along its first dimension; both run on CPUs over
gloo, and so does `clip_grad_norm_`, for DTensors too.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # the first optimizer would import it, once per process
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

from tests.torch_reference import files, group, layout, worker
from tests.torch_reference import zero_problem as problem

ADAM = {
    "lr": problem.ADAM["learning_rate"],
    "betas": (problem.ADAM["b1"], problem.ADAM["b2"]),
    "eps": problem.ADAM["eps"],
}


def main(directory: Path) -> None:
    """Run every torch job, in one process per rank."""
    start_processes(
        run_rank, (directory,), max(problem.WORLD_SIZES), start_method="fork"
    )


def run_rank(rank: int, directory: Path) -> None:
    """Run every torch job that has this rank."""
    jobs = [job for job in problem.all_jobs() if job.library == "torch"]
    for job in group.jobs_of_rank(jobs, directory, rank):
        made = train(job)
        if rank == 0:
            files.write_arrays(directory, job, made)


def train(job: problem.Job) -> problem.Arrays:
    """Return what `zero_reference` says."""
    data = job.data()
    model = worker.make_model(job, data.params)
    forward, optimizer = shard(job, model)
    params, losses, norms = [], [], []
    for inputs, targets in zip(data.inputs, data.targets, strict=True):
        local = worker.local_slice(layout.inputs_to_torch(inputs))
        optimizer.zero_grad()
        loss = worker.LOSSES[job.model](
            forward(torch.from_numpy(local)),
            torch.from_numpy(worker.local_slice(targets)),
        )
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), problem.MAX_NORM[job.model])
        optimizer.step()
        params.append(host_params(model))
        losses.append(worker.global_mean(loss))
        norms.append(whole(norm).item())
    made = {
        f"params/{name}": np.stack([step[name] for step in params])
        for name in params[0]
    }
    final = {f"final/{name}": on_ranks(array) for name, array in params[-1].items()}
    scalars = {"losses": np.array(losses), "norms": np.array(norms)}
    return made | final | scalars | {"held": on_ranks(np.array(held(optimizer)))}


def shard(
    job: problem.Job, model: nn.Module
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return what runs the forward pass, and the optimizer."""
    if job.stage == 1:
        ddp = DistributedDataParallel(model)
        adam = torch.optim.Adam
        return ddp, ZeroRedundancyOptimizer(model.parameters(), adam, **ADAM)
    for module in (*model.children(), model):  # a unit that is gathered together
        fully_shard(module, reshard_after_forward=job.stage == 3)
    return model, torch.optim.Adam(model.parameters(), **ADAM)


def held(optimizer: torch.optim.Optimizer) -> int:
    """Count the elements of Adam's moments that this rank holds."""
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer = optimizer.optim
    return sum(
        (value.to_local() if isinstance(value, DTensor) else value).numel()
        for state in optimizer.state.values()
        for name, value in state.items()
        if name.startswith("exp_avg")
    )


def host_params(model: nn.Module) -> problem.Arrays:
    """Gather the parameters, in JAX layout."""
    return {
        layout.name_to_jax(name): layout.weight_to_jax(whole(each).numpy()).copy()
        for name, each in model.named_parameters()
    }


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a tensor, if it is in shards."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def on_ranks(array: np.ndarray) -> np.ndarray:
    """Gather what each rank has, `[N, ...]`."""
    local = torch.from_numpy(array)
    copies = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, local)
    return torch.stack(copies).numpy()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
