"""All torch processes: `python -m tests.torch_reference.server_torch DIRECTORY`.

A parameter server by hand, over gloo. Each worker computes the gradient of the mean
loss of its rows and pushes it; servers average, which makes it that of the global mean
loss. Server `s` owns part `s` of the flat parameters, padded with zeros to equal parts.
It updates that part and sends it to the workers, or it sends the averaged gradient and
each worker updates. Designs differ in how things travel:

- `send_recv`: point to point.
- `gather`: `dist.gather` to the one server, `dist.scatter` back.

The delay is a queue in front of the optimizer, see `Updater`.
"""

import collections
import sys
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # the first optimizer would import it, once per process
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.spawn import start_processes
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tests.torch_reference import files, group, worker
from tests.torch_reference import problem as parity_problem
from tests.torch_reference import server_problem as problem

OPTIMIZERS = {
    "sgd": lambda params, learning_rate: torch.optim.SGD(params, learning_rate),
    "momentum": lambda params, learning_rate, momentum: torch.optim.SGD(
        params, learning_rate, momentum
    ),
    "adam": lambda params, learning_rate, b1, b2, eps: torch.optim.Adam(
        params, learning_rate, (b1, b2), eps
    ),
}


class Updater:
    """Parameters, their optimizer, and the gradients that wait to be applied."""

    def __init__(self, job: problem.Job, params: torch.Tensor) -> None:
        self.params = nn.Parameter(params.clone())
        hyper = problem.HYPER_PARAMETERS[job.optimizer]
        self.optimizer = OPTIMIZERS[job.optimizer]([self.params], **hyper)
        self.max_staleness = job.max_staleness
        self.at_once = 1 if job.policy == "sliding" else job.max_staleness + 1
        self.waiting: collections.deque[torch.Tensor] = collections.deque()

    def push(self, gradient: torch.Tensor) -> torch.Tensor:
        """Queue a gradient, apply what is due, and return the parameters."""
        self.waiting.append(gradient)
        if len(self.waiting) > self.max_staleness:
            self.apply(self.at_once)
        return self.params.detach()

    def flush(self) -> torch.Tensor:
        """Apply what waits, and return the parameters."""
        self.apply(len(self.waiting))
        return self.params.detach()

    def apply(self, count: int) -> None:
        """Make one optimizer step with each of the `count` oldest gradients."""
        for _ in range(count):
            self.params.grad = self.waiting.popleft()
            self.optimizer.step()


def push_by_gather(job: problem.Job, parts: torch.Tensor) -> torch.Tensor | None:
    """Return the gradients of all workers, `[workers, L]`, on the server."""
    received = None
    if dist.get_rank() == 0:
        received = [torch.empty_like(parts[0]) for _ in range(job.world_size)]
    dist.gather(parts[0], received, dst=0)  # a dedicated server gives zeros
    if received is None:
        return None
    return torch.stack([received[rank] for rank in job.workers])


def pull_by_scatter(job: problem.Job, reply: torch.Tensor | None, like: torch.Tensor):
    """Return what the server replies, `[1, L]`, on every rank."""
    answer = torch.zeros_like(like)
    replies = None if reply is None else [reply] * job.world_size
    dist.scatter(answer[0], replies, src=0)
    return answer


def push_by_send(job: problem.Job, parts: torch.Tensor) -> torch.Tensor | None:
    """Return the parts that the workers sent, `[workers, L / S]`, on a server."""
    rank = dist.get_rank()
    received = parts.new_empty(len(job.workers), parts.shape[1])
    exchange(
        dict(enumerate(parts)) if rank in job.workers else {},
        dict(zip(job.workers, received, strict=True)) if rank < job.servers else {},
    )
    return received if rank < job.servers else None


def pull_by_receive(job: problem.Job, reply: torch.Tensor | None, like: torch.Tensor):
    """Return the parts that all servers reply, `[S, L / S]`, on every worker."""
    answer = torch.zeros_like(like)
    exchange(
        {} if reply is None else dict.fromkeys(job.workers, reply),
        dict(enumerate(answer)) if dist.get_rank() in job.workers else {},
    )
    return answer


def exchange(sent: dict[int, torch.Tensor], received: dict[int, torch.Tensor]) -> None:
    """Send to and receive from these ranks; copy what a rank would send to itself."""
    rank = dist.get_rank()
    if rank in received:
        received[rank].copy_(sent[rank])
    pending = [dist.isend(each, to) for to, each in sent.items() if to != rank]
    pending += [dist.irecv(each, by) for by, each in received.items() if by != rank]
    for request in pending:
        assert request is not None  # None only outside the group
        request.wait()


PUSHES = {"gather": push_by_gather, "send_recv": push_by_send}
PULLS = {"gather": pull_by_scatter, "send_recv": pull_by_receive}


def main(directory: Path) -> None:
    """Run every torch job, in one process per rank.

    They are forks, because importing torch takes longer than all jobs.
    """
    start_processes(
        run_rank, (directory,), max(problem.WORLD_SIZES), start_method="fork"
    )


def run_rank(rank: int, directory: Path) -> None:
    """Run every torch job that has this rank."""
    jobs = [job for job in problem.all_jobs() if job.library == "torch"]
    for job in group.jobs_of_rank(jobs, directory, rank):
        made = train(job, problem.make_data(job.dtype))
        if rank == job.workers[-1]:
            files.write_arrays(directory, job, made)


def train(job: problem.Job, data: parity_problem.Inputs) -> problem.Arrays:
    """Return what `server_reference` says."""
    rank = dist.get_rank()
    model = worker.make_model(job, data.params)
    parts = split(job, parameters_to_vector(model.parameters()).detach())
    on_server = job.update_on == "server"
    updater = Updater(job, parts[rank] if on_server and rank < job.servers else parts)
    params, losses = [], []
    for inputs, targets in zip(data.inputs, data.targets, strict=True):
        gradient, loss = compute(job, model, inputs, targets)
        pushed = PUSHES[job.design](job, split(job, gradient))
        reply = None if pushed is None else pushed.mean(dim=0)
        if on_server and reply is not None:
            reply = updater.push(reply)
        answer = PULLS[job.design](job, reply, parts)
        load(model, answer if on_server else updater.push(answer))
        params.append(worker.host_params(model))
        losses.append(loss)
    left = updater.flush()
    if on_server:
        reply = left if rank < job.servers else None
        left = PULLS[job.design](job, reply, parts)
    total = torch.stack(losses)
    dist.all_reduce(total)
    return (
        {"losses": total.numpy() / len(job.workers)}
        | problem.stacked("params", params)
        | problem.stacked("flushed", on_workers(job, model, left))
    )


def compute(
    job: problem.Job, model: nn.Module, inputs: np.ndarray, targets: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this worker's gradient and loss; zeros on a dedicated server."""
    model.zero_grad()
    loss = torch.zeros((), dtype=getattr(torch, job.dtype))
    if dist.get_rank() in job.workers:
        rows = len(inputs) // len(job.workers)
        start = job.workers.index(dist.get_rank()) * rows
        outputs = model(torch.from_numpy(inputs[start:][:rows]))
        loss = F.mse_loss(outputs, torch.from_numpy(targets[start:][:rows]))
        loss.backward()
    gradients = [
        torch.zeros_like(each) if each.grad is None else each.grad
        for each in model.parameters()
    ]
    return parameters_to_vector(gradients), loss.detach()


def split(job: problem.Job, flat: torch.Tensor) -> torch.Tensor:
    """Return the parts of the servers, `[S, L / S]`."""
    return F.pad(flat, (0, -len(flat) % job.servers)).view(job.servers, -1)


def load(model: nn.Module, parts: torch.Tensor) -> None:
    """Write the parameters, `[S, L / S]`, into the model."""
    vector_to_parameters(parts.flatten().clone(), model.parameters())


def on_workers(
    job: problem.Job, model: nn.Module, parts: torch.Tensor
) -> list[problem.Arrays]:
    """Return the parameters of every worker."""
    copies = [torch.empty_like(parts) for _ in range(job.world_size)]
    dist.all_gather(copies, parts)
    made = []
    for rank in job.workers:
        load(model, copies[rank])
        made.append(worker.host_params(model))
    return made


if __name__ == "__main__":
    main(Path(sys.argv[1]))
