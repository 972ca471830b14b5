"""nn.DataParallel by hand, in one process without CUDA.

`python -m tests.torch_reference.replicated_torch DIRECTORY`

A replica is what `torch.nn.parallel.replicate` makes: differentiable copies of the
parameters, whose gradients the backward pass sums in the original, and buffers of its
own, of which only those of replica 0 survive.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from tests.torch_reference import files, layout, worker
from tests.torch_reference import replicated_problem as problem

Tensors = dict[str, torch.Tensor]
Arrays = dict[str, np.ndarray]


class BatchNorm(nn.BatchNorm2d):
    """BatchNorm whose running variance is Flax's: of biased variances.

    PyTorch adds the variance of a batch times n / (n - 1), for n values per channel.
    What it has added is taken times (n - 1) / n here, which is exact.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        assert self.running_mean is not None and self.running_var is not None
        assert self.momentum is not None
        mean, var = self.running_mean.clone(), self.running_var.clone()
        output = F.batch_norm(
            input,
            mean,
            var,
            self.weight,
            self.bias,
            self.training,
            self.momentum,
            self.eps,
        )
        if self.training:
            n = input.numel() // input.shape[1]
            kept = (1 - self.momentum) * self.running_var
            self.running_mean.copy_(mean)
            self.running_var.copy_(kept + (var - kept) * (n - 1) / n)
        return output


class ConvNet(nn.Module):
    """Convolution, BatchNorm if there is one, ReLU, average pool, linear."""

    def __init__(self, has_norm: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1, bias=not has_norm)
        self.norm = nn.Identity()
        if has_norm:
            momentum = 1 - problem.BATCH_NORM_MOMENTUM
            self.norm = BatchNorm(4, problem.BATCH_NORM_EPSILON, momentum)
        self.linear = nn.Linear(36, 3)

    def forward(self, images: torch.Tensor) -> Tensors:
        hidden = self.norm(self.conv(images))
        pooled = F.avg_pool2d(F.relu(hidden), 2)
        logits = self.linear(to_nhwc(pooled).flatten(1))
        return {"outputs": logits, "hidden": to_nhwc(hidden)}


class MLP(worker.MLP):
    """The MLP of the other parity test, with its output named."""

    def forward(self, inputs: torch.Tensor) -> Tensors:
        return {"outputs": super().forward(inputs)}


MODELS = {
    "mlp": MLP,
    "conv_net": lambda: ConvNet(False),
    "norm_net": lambda: ConvNet(True),
}
LOSSES = {"mlp": F.mse_loss, "conv_net": F.cross_entropy, "norm_net": F.cross_entropy}


def to_nhwc(images: torch.Tensor) -> torch.Tensor:
    return images.permute(0, 2, 3, 1)


def main(directory: Path) -> None:
    """Run every torch run."""
    torch.set_num_threads(1)
    for run in problem.all_runs():
        if run.library == "torch":
            files.write_arrays(directory, run, train(run, problem.make_data(run)))


def train(run: problem.Run, data: problem.Data) -> Arrays:
    """Train; return what every step produced, see `replicated_reference`."""
    module = make_module(run, data)
    optimizer = worker.make_optimizer(run, module)
    made, steps = {"predicted/before": predict(module, data)}, []
    for array, labels in data.batches:
        inputs = torch.from_numpy(layout.inputs_to_torch(array))
        optimizer.zero_grad()
        if run.design == "full":
            outputs, copies = module(inputs), []
        else:
            outputs, copies = run_replicas(module, inputs)
        loss = LOSSES[run.model](outputs["outputs"], torch.from_numpy(labels))
        loss.backward()
        if copies and not steps:
            made |= describe(inputs, [gradients(copy) for copy in copies])
        grads = gradients(dict(module.named_parameters()))
        optimizer.step()
        steps.append(
            {"losses": loss.detach().numpy()}
            | {name: each.detach().numpy() for name, each in outputs.items()}
            | {f"gradients/{name}": each for name, each in grads.items()}
            | {f"after/{name}": each for name, each in host(module).items()}
        )
    made["predicted/after"] = predict(module, data)
    return made | problem.joined(steps)


def predict(module: nn.Module, data: problem.Data) -> np.ndarray:
    """Return outputs for the first batch, by the running statistics of BatchNorm."""
    module.eval()
    inputs = torch.from_numpy(layout.inputs_to_torch(data.batches[0][0]))
    outputs = module(inputs)["outputs"].detach().numpy()
    module.train()
    return outputs


def run_replicas(
    module: nn.Module, inputs: torch.Tensor
) -> tuple[Tensors, list[Tensors]]:
    """Return gathered outputs, and the copies of the parameters of every replica."""
    made, copies, buffers = [], [], []
    for chunk in torch.chunk(inputs, problem.NUM_DEVICES):
        params = {name: each.clone() for name, each in module.named_parameters()}
        own = {name: each.clone() for name, each in module.named_buffers()}
        for each in params.values():
            each.retain_grad()
        made.append(functional_call(module, params | own, (chunk,)))
        copies.append(params)
        buffers.append(own)
    for name, each in module.named_buffers():
        each.copy_(buffers[0][name])
    gathered = {name: torch.cat([each[name] for each in made]) for name in made[0]}
    return gathered, copies


def make_module(run: problem.Run, data: problem.Data) -> nn.Module:
    """Build the model with the run's dtype, initial parameters and buffers."""
    module = MODELS[run.model]().to(getattr(torch, run.dtype))
    state = {
        name_to_torch(name): torch.from_numpy(layout.weight_to_torch(array))
        for name, array in (data.params | data.buffers).items()
    }
    missing, unexpected = module.load_state_dict(state, strict=False)
    assert set(missing) <= {"norm.num_batches_tracked"} and not unexpected
    return module


NORM_NAMES = {
    "norm/scale": "norm.weight",
    "norm/mean": "norm.running_mean",
    "norm/var": "norm.running_var",
}


def name_to_torch(name: str) -> str:
    return NORM_NAMES.get(name) or layout.name_to_torch(name)


def to_jax(tensors: Tensors) -> Arrays:
    """Copy tensors to NumPy, under the names and in the layout of JAX."""
    names = {torch_name: name for name, torch_name in NORM_NAMES.items()}
    return {
        names.get(name) or layout.name_to_jax(name): layout.weight_to_jax(
            each.detach().numpy()
        ).copy()
        for name, each in tensors.items()
    }


def host(module: nn.Module) -> Arrays:
    """Copy parameters and buffers."""
    state = module.state_dict()
    state.pop("norm.num_batches_tracked", None)
    return to_jax(state)


def gradients(params: Mapping[str, torch.Tensor]) -> Arrays:
    """Copy gradients, which exist after the backward pass."""
    found = {name: each.grad for name, each in params.items()}
    return to_jax({name: each for name, each in found.items() if each is not None})


def describe(inputs: torch.Tensor, replicas: list[Arrays]) -> Arrays:
    """Return the sizes of the chunks, and the gradient of every replica."""
    chunks = torch.chunk(inputs, problem.NUM_DEVICES)
    return {"sizes": np.array([len(chunk) for chunk in chunks])} | {
        f"replicas/{name}": np.stack([each[name] for each in replicas])
        for name in replicas[0]
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
