"""DistributedDataParallel: `python -m tests.torch_reference.ddp_torch DIRECTORY`.

All ranks are forks of one process. Everything is torch's own but `SynchronizedNorm`,
the hook of the design `by_hand`, and the factor of a loss whose rows have weights.
"""

import contextlib
import sys
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # the first optimizer would import it, once per process
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

from tests.torch_reference import ddp_hooks, ddp_jobs, files, group, worker
from tests.torch_reference import ddp_problem as problem


class MLP(nn.Module):
    """Three linear layers with tanh between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 16)
        self.second = nn.Linear(16, 6)
        self.third = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs))
        return self.third(torch.tanh(self.second(hidden)))


class NormNet(nn.Module):
    """Linear, BatchNorm, tanh, linear."""

    def __init__(self, norm: type[nn.BatchNorm1d]) -> None:
        super().__init__()
        self.first = nn.Linear(3, 16, bias=False)
        self.norm = norm(16, problem.BATCH_NORM_EPSILON, problem.BATCH_NORM_MOMENTUM)
        self.third = nn.Linear(16, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.third(torch.tanh(self.norm(self.first(inputs))))


def main(directory: Path) -> None:
    """Run every torch job, in one process per rank."""
    start_processes(run_rank, (directory,), max(problem.ENDS), start_method="fork")


def run_rank(rank: int, directory: Path) -> None:
    """Run every torch job that has this rank."""
    jobs = [job for job in ddp_jobs.all_jobs() if job.library == "torch"]
    for job in group.jobs_of_rank(jobs, directory, rank):
        made = train(job, problem.make_data(job))
        if rank == job.recorder:
            files.write_arrays(directory, job, made)


def train(job: problem.Job, data: problem.Data) -> problem.Arrays:
    """Return what `ddp_reference` says."""
    model = make_model(job, data.params)
    made = first_gradients(job, data, model)
    ddp = DistributedDataParallel(
        model,
        bucket_cap_mb=job.bucket_cap_mb,
        forward_sync_buffers=job.buffers == "broadcast",
    )
    ddp_hooks.register(job, ddp)
    optimizer = worker.make_optimizer(job, model)
    scaler = torch.amp.GradScaler(
        "cpu", enabled=bool(job.compute), **problem.LOSS_SCALE
    )
    averager = PeriodicModelAverager(job.sync_every or 2, problem.START_STEP)
    sums, steps = torch.zeros(2, problem.NUM_STEPS, dtype=torch.float64), []
    with make_join(job, ddp):
        for step in range(job.num_steps(dist.get_rank())):
            optimizer.zero_grad()
            sums[:, step] = backward(job, data, step, ddp, scaler)
            made_here = update(job, scaler, optimizer)
            if job.sync_every:
                averager.average_parameters(model.parameters())
            steps.append(made_here | host_state(model))
    dist.all_reduce(sums)
    rows = problem.ROWS if job.rows == "join_slots" else sums[1]
    made["losses"] = (sums[0] / rows).numpy().astype(job.dtype)
    made["bucket_bytes"] = bucket_bytes(ddp)
    stacked = {name: np.stack([each[name] for each in steps]) for name in steps[0]}
    return made | gathered(job, stacked, model)


def make_join(job: problem.Job, ddp: DistributedDataParallel) -> Join:
    """Let ranks run out of rows, if those of the job do."""
    return Join(
        [ddp],
        enable="join" in job.rows,
        divide_by_initial_world_size=job.rows == "join_slots",
    )


def make_model(job: problem.Job, params: problem.Arrays) -> nn.Module:
    """Build the model with the job's dtype and initial parameters."""
    if job.model == "mlp":
        model = MLP()
    elif job.buffers == "synchronized" and job.world_size > 1:
        model = NormNet(ddp_hooks.SynchronizedNorm)
    else:
        model = NormNet(nn.BatchNorm1d)
    model = model.to(getattr(torch, job.dtype))
    state = {name: torch.from_numpy(array) for name, array in params.items()}
    model.load_state_dict(model.state_dict() | state)
    return model


def backward(
    job: problem.Job,
    data: problem.Data,
    step: int,
    ddp: DistributedDataParallel,
    scaler: torch.amp.GradScaler,
) -> torch.Tensor:
    """Leave the averaged gradients; return total and weight of this rank's losses."""
    batches = [
        batch_of(data, step, rows) for rows in job.micro_batches(dist.get_rank())
    ]
    count = torch.stack([weights.sum() for _, _, weights in batches]).sum()
    if job.is_weighted:
        dist.all_reduce(count)
    sums = torch.zeros(2, dtype=torch.float64)
    for index, (inputs, targets, weights) in enumerate(batches):
        is_last = index + 1 == job.accumulate
        with contextlib.nullcontext() if is_last else ddp.no_sync():
            losses = row_losses(job, ddp, inputs, targets)
            total = (losses * weights).sum()
            if job.is_weighted:
                loss = total * (job.world_size / count)  # DDP divides by world_size
            else:
                loss = losses.mean() / job.accumulate
            scaler.scale(loss).backward()
        sums += torch.stack([total.detach(), weights.sum()])
    return sums


def batch_of(data: problem.Data, step: int, rows: slice) -> list[torch.Tensor]:
    """Return inputs, targets and weights of those rows that have a weight."""
    has_weight = data.weights[step, rows] > 0
    return [torch.from_numpy(array[step, rows][has_weight]) for array in data[1:]]


def row_losses(
    job: problem.Job, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Return the squared error of every row, computed in the job's dtypes."""
    half = job.compute == "fp16"
    with torch.autocast("cpu", torch.float16, enabled=half):
        outputs = model(inputs)
    if half:
        targets = targets.half()
    return (outputs.to(inputs.dtype) - targets).square().mean(dim=1)


def update(
    job: problem.Job, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer
) -> problem.Arrays:
    """Make an optimizer step, unless gradients overflowed; return what became of it."""
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if not job.compute:
        return {}
    return {
        "scales": np.array(scale, np.float32),
        "skipped": np.array(scaler.get_scale() < scale),
        "good_steps": np.array(scaler.state_dict()["_growth_tracker"]),
    }


def first_gradients(
    job: problem.Job, data: problem.Data, model: nn.Module
) -> problem.Arrays:
    """Return every rank's own gradient of the first step, where it will be rounded."""
    if job.compression != "bf16":
        return {}
    (rows,) = job.micro_batches(dist.get_rank())
    inputs, targets, _ = batch_of(data, 0, rows)
    loss = row_losses(job, model, inputs, targets).mean()
    names, params = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, params)
    return {
        f"gradients/{name}": everywhere(gradient)
        for name, gradient in zip(names, gradients, strict=True)
    }


def gathered(
    job: problem.Job, steps: problem.Arrays, model: nn.Module
) -> problem.Arrays:
    """Return what this rank made, and with it what others made where ranks differ."""
    made = dict(steps)
    for name in steps:
        if name.startswith("buffers/"):
            made[name] = everywhere(torch.from_numpy(steps[name]))
        elif job.sync_every:
            own = everywhere(torch.from_numpy(steps[name]))
            made[name.replace("params", "replicas")] = own
            made[name] = own.mean(axis=0)
    for name, parameter in model.named_parameters():
        made[f"final/{name}"] = everywhere(parameter.detach())
    return made


def everywhere(tensor: torch.Tensor) -> np.ndarray:
    """Return what every rank has, `[N, ...]`."""
    copies = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, tensor.contiguous())
    return torch.stack(copies).numpy()


def bucket_bytes(ddp: DistributedDataParallel) -> np.ndarray:
    """Return the sizes of the buckets, as DDP logs them after step 1."""
    sizes = ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    return np.array([int(size) for size in sizes.split(",")])


def host_state(model: nn.Module) -> problem.Arrays:
    """Copy parameters and buffers to NumPy."""
    params = {f"params/{name}": each for name, each in model.named_parameters()}
    buffers = {f"buffers/{name}": each for name, each in model.named_buffers()}
    return {
        name: each.detach().numpy().copy() for name, each in (params | buffers).items()
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
