"""What the torch side plugs into DistributedDataParallel: hooks and a BatchNorm."""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

from tests.torch_reference import ddp_problem as problem


class AllReduce(torch.autograd.Function):
    """The sum over ranks. Every rank's loss depends on it, so gradients add up, too."""

    @staticmethod
    def forward(ctx, local: torch.Tensor) -> torch.Tensor:
        del ctx
        total = local.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> torch.Tensor:
        return AllReduce.forward(ctx, *gradients)


class SynchronizedNorm(nn.BatchNorm1d):
    """What `torch.nn.SyncBatchNorm` computes, which does not run on CPUs.

    Ranks may have different numbers of rows, also none.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        assert self.running_mean is not None and self.running_var is not None
        assert self.momentum is not None and self.num_batches_tracked is not None
        count = AllReduce.apply(input.new_tensor(len(input)))
        mean = AllReduce.apply(input.sum(dim=0)) / count
        centered = input - mean
        var = AllReduce.apply(centered.square().sum(dim=0)) / count
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * count / (count - 1), self.momentum)
            self.num_batches_tracked += 1
        return centered / torch.sqrt(var + self.eps) * self.weight + self.bias


def register(job: problem.Job, ddp: DistributedDataParallel) -> None:
    """Register the communication hook of a job, if it has one."""
    if job.compression == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            None,
            matrix_approximation_rank=job.power_rank,
            start_powerSGD_iter=problem.START_STEP,
            min_compression_rate=1,  # whatever becomes smaller is compressed
            use_error_feedback=job.error_feedback,
        )
        ddp.register_comm_hook(state, seeded_power_hook)
    elif job.sync_every:
        state = post_localSGD_hook.PostLocalSGDState(
            None, None, problem.START_STEP, post_local_gradient_allreduce=False
        )
        ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    elif job.compression == "bf16" and job.design == "ddp":
        ddp.register_comm_hook(None, bf16_hook)
    elif job.compression == "bf16":
        ddp.register_comm_hook(None, rounded_twice_hook)


def seeded_power_hook(state: powerSGD_hook.PowerSGDState, bucket):
    """Run `powerSGD_hook`, which begins with given matrices instead of random ones.

    It draws none where the step before left some: one buffer per bucket, in which they
    lie one after the other, since no two matrices have the same shape.
    """
    rank, index, like = state.matrix_approximation_rank, bucket.index(), bucket.buffer()
    if state.iter >= state.start_powerSGD_iter and index not in state.p_memory_dict:
        shapes = [each.shape for each in bucket.gradients() if each.ndim == 2]
        thin = [shape for shape in shapes if rank * sum(shape) < shape.numel()]
        seeds = [problem.power_seed(columns, rank) for _, columns in thin]
        q = np.concatenate([np.empty(0), *(seed.ravel() for seed in seeds)])
        state.q_memory_dict[index] = torch.from_numpy(q).to(like.dtype)
        state.p_memory_dict[index] = like.new_empty(
            rank * sum(rows for rows, _ in thin)
        )
    future = powerSGD_hook.powerSGD_hook(state, bucket)
    future.wait()  # gloo's two threads would wait for themselves with two buckets
    return future


def bf16_hook(state, bucket):
    """Run `bf16_compress_hook`, which DDP knows by name and refuses without CUDA."""
    return default_hooks.bf16_compress_hook(state, bucket)


def rounded_twice_hook(state, bucket):
    """Average by hand as `jaxdp.Bf16` does: only what travels is rounded.

    `bf16_compress_hook` rounds every partial sum as well.
    """
    del state
    buffer = bucket.buffer()
    rounded = buffer.to(torch.bfloat16)
    copies = [torch.empty_like(rounded) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, rounded)
    mean = torch.stack(copies).to(buffer.dtype).mean(dim=0)
    future = torch.futures.Future()
    future.set_result(buffer.copy_(mean.to(torch.bfloat16)))
    return future
