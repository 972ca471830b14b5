"""All torch workers: `python -m tests.torch_reference.worker DIRECTORY`.

Before and after every step all workers hold the same parameters; each one computes the
gradient of the mean loss over its slice of the batch. Slices are equal, so the mean of
these gradients is the gradient of the global mean loss. The designs differ in who
averages and who updates:

- `single`: one worker sees the whole batch.
- `ddp`: `DistributedDataParallel` averages during the backward pass; all update.
- `star`: gradients are reduced to rank 0, which alone holds optimizer state and
  updates; its parameters are broadcast.
- `ring`: a hand-written ring all-reduce of one flat buffer; all update.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # the first optimizer would import it, once per process
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

from tests.torch_reference import files, group, layout, problem


class MLP(nn.Module):
    """Two linear layers with tanh between them."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(2, 13)
        self.out = nn.Linear(13, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.hidden(inputs)))


class TinyNet(nn.Module):
    """Convolution, ReLU, global average pool, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.linear = nn.Linear(16, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(F.relu(self.conv(inputs)).mean(dim=(2, 3)))


MODELS = {"mlp": MLP, "tiny_net": TinyNet}
LOSSES = {"mlp": F.mse_loss, "tiny_net": F.cross_entropy}  # both: mean over the batch


def main(directory: Path) -> None:
    """Run every job of `directory`, in one process per rank.

    They are forks, because importing torch takes longer than all jobs.
    """
    start_processes(run_rank, (directory,), problem.MAX_WORLD_SIZE, start_method="fork")


def run_rank(rank: int, directory: Path) -> None:
    """Run every job that has a worker of this rank."""
    for job in group.jobs_of_rank(files.read_jobs(directory), directory, rank):
        run(job, directory)


def run(job: problem.Job, directory: Path) -> None:
    """Train and write what this worker has to write."""
    params, losses = train(job, files.read_inputs(directory, job))
    files.write_final(directory, job, dist.get_rank(), params[-1])
    if dist.get_rank() == 0:
        files.write_trajectory(directory, job, params, losses)


def train(
    job: problem.Job, data: problem.Inputs
) -> tuple[list[dict[str, np.ndarray]], list[float]]:
    """Return the parameters after every step and the global mean losses."""
    model = make_model(job, data.params)
    forward = DistributedDataParallel(model) if job.design == "ddp" else model
    optimizer = make_optimizer(job, model)
    params, losses = [], []
    for inputs, targets in zip(data.inputs, data.targets, strict=True):
        local_inputs = torch.from_numpy(layout.inputs_to_torch(local_slice(inputs)))
        local_targets = torch.from_numpy(local_slice(targets))
        optimizer.zero_grad()
        loss = LOSSES[job.model](forward(local_inputs), local_targets)
        loss.backward()
        UPDATES[job.design](model, optimizer)
        params.append(host_params(model))
        losses.append(global_mean(loss))
    return params, losses


def make_model(job: problem.Job, params: dict[str, np.ndarray]) -> nn.Module:
    """Build the model with the job's dtype and initial parameters."""
    model = MODELS[job.model]().to(getattr(torch, job.dtype))
    state = {
        layout.name_to_torch(name): torch.from_numpy(layout.weight_to_torch(array))
        for name, array in params.items()
    }
    model.load_state_dict(state, strict=True)
    return model


def make_optimizer(job: problem.Job, model: nn.Module) -> torch.optim.Optimizer:
    """Build SGD with momentum or Adam with the job's hyper-parameters."""
    hyper = problem.HYPER_PARAMETERS[job.optimizer]
    if job.optimizer == "sgd":
        return torch.optim.SGD(
            model.parameters(), lr=hyper["learning_rate"], momentum=hyper["momentum"]
        )
    return torch.optim.Adam(
        model.parameters(),
        lr=hyper["learning_rate"],
        betas=(hyper["b1"], hyper["b2"]),
        eps=hyper["eps"],
    )


def local_slice(array: np.ndarray) -> np.ndarray:
    """Return this worker's rows of a global batch."""
    size = len(array) // dist.get_world_size()
    return array[dist.get_rank() * size :][:size]


def update_everywhere(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Update with the gradients as they are: one worker, or averaged by DDP."""
    del model
    optimizer.step()


def update_star(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Reduce gradients to rank 0, update there, broadcast the parameters."""
    for parameter in model.parameters():
        dist.reduce(gradient(parameter), dst=0)
    if dist.get_rank() == 0:
        for parameter in model.parameters():
            gradient(parameter).div_(dist.get_world_size())
        optimizer.step()
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), src=0)


def update_ring(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Average one flat gradient over the ring, then update on every worker."""
    gradients = [gradient(parameter) for parameter in model.parameters()]
    flat = torch.cat([each.reshape(-1) for each in gradients])
    mean = ring_all_reduce(flat) / dist.get_world_size()
    sizes = [each.numel() for each in gradients]
    for each, averaged in zip(gradients, mean.split(sizes), strict=True):
        each.copy_(averaged.view_as(each))
    optimizer.step()


UPDATES = {
    "single": update_everywhere,
    "ddp": update_everywhere,
    "star": update_star,
    "ring": update_ring,
}


def ring_all_reduce(flat: torch.Tensor) -> torch.Tensor:
    """Sum `flat`, of any length, over all workers in 2 (N - 1) rounds.

    Reduce-scatter: in round s rank r sends chunk (r - s) mod N, and adds what it
    receives to chunk (r - s - 1) mod N. Then rank r owns the sum of chunk
    (r + 1) mod N. All-gather: in round s rank r sends chunk (r + 1 - s) mod N, and
    replaces chunk (r - s) mod N by what it receives.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    padding = -len(flat) % size
    chunks = F.pad(flat, (0, padding)).view(size, -1)
    for round_index in range(size - 1):
        received = exchange(chunks[(rank - round_index) % size])
        chunks[(rank - round_index - 1) % size] += received
    for round_index in range(size - 1):
        received = exchange(chunks[(rank + 1 - round_index) % size])
        chunks[(rank - round_index) % size] = received
    return chunks.view(-1)[: len(flat)]


def exchange(chunk: torch.Tensor) -> torch.Tensor:
    """Send `chunk` to the next rank and return what the previous one sent."""
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(chunk)
    pending = [
        dist.isend(chunk, (rank + 1) % size),
        dist.irecv(received, (rank - 1) % size),
    ]
    for request in pending:
        assert request is not None  # None only outside the group
        request.wait()
    return received


def gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Return the gradient, which exists after the backward pass."""
    assert parameter.grad is not None
    return parameter.grad


def global_mean(loss: torch.Tensor) -> float:
    """Return the mean of the local losses over all workers."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return (total / dist.get_world_size()).item()


def host_params(model: nn.Module) -> dict[str, np.ndarray]:
    """Copy the parameters to NumPy, in JAX layout."""
    return {
        layout.name_to_jax(name): layout.weight_to_jax(array.detach().numpy()).copy()
        for name, array in model.state_dict().items()
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
