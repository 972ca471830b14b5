"""Delayed training on one machine, in NumPy, with derivatives by hand.

Written from the index laws, not as a queue. Gradient `t` is computed at the weights
before step `t`; `applied_after` says which gradients are applied after which step; an
update depends on the list of all gradients applied so far.
"""

import numpy as np

from tests.torch_reference import problem as parity_problem
from tests.torch_reference import server_problem as problem


def train(
    optimizer: str, max_staleness: int, policy: str, data: parity_problem.Inputs
) -> problem.Arrays:
    """Return what `server_reference` says, of one worker."""
    weights = {name: array.astype(np.float64) for name, array in data.params.items()}
    gradients, applied, params, losses = [], [], [], []
    for step, batch in enumerate(zip(data.inputs, data.targets, strict=True)):
        loss, gradient = differentiate(weights, *batch)
        gradients.append(gradient)
        losses.append(loss)
        for index in applied_after(step, max_staleness, policy):
            applied.append(gradients[index])
            weights = update(optimizer, weights, applied)
        params.append(weights)
    for gradient in gradients[len(applied) :]:
        applied.append(gradient)
        weights = update(optimizer, weights, applied)
    return (
        {"losses": np.array(losses)}
        | problem.stacked("params", params)
        | {f"flushed/{name}": array for name, array in weights.items()}
    )


def applied_after(step: int, max_staleness: int, policy: str) -> range:
    """Return the indices of the gradients that are applied at the end of `step`."""
    if policy == "sliding":
        return range(max(step - max_staleness, 0), max(step - max_staleness + 1, 0))
    is_last = step % (max_staleness + 1) == max_staleness
    return range(step - max_staleness, step + 1) if is_last else range(0)


def differentiate(
    weights: problem.Arrays, inputs: np.ndarray, targets: np.ndarray
) -> tuple[float, problem.Arrays]:
    """Return the mean squared error of the whole batch, and its gradient."""
    hidden = np.tanh(inputs @ weights["hidden/kernel"] + weights["hidden/bias"])
    errors = hidden @ weights["out/kernel"] + weights["out/bias"] - targets
    to_out = 2 * errors / errors.size
    to_hidden = to_out @ weights["out/kernel"].T * (1 - hidden**2)
    return np.mean(errors**2).item(), {
        "hidden/kernel": inputs.T @ to_hidden,
        "hidden/bias": to_hidden.sum(axis=0),
        "out/kernel": hidden.T @ to_out,
        "out/bias": to_out.sum(axis=0),
    }


def update(
    optimizer: str, weights: problem.Arrays, applied: list[problem.Arrays]
) -> problem.Arrays:
    """Return the weights after the last of the `applied` gradients."""
    hyper = problem.HYPER_PARAMETERS[optimizer]
    new = {}
    for name, array in weights.items():
        history = np.stack([gradient[name] for gradient in applied])
        direction = DIRECTIONS[optimizer](history, hyper)
        new[name] = array - hyper["learning_rate"] * direction
    return new


def momentum(history: np.ndarray, hyper: dict[str, float]) -> np.ndarray:
    """Return the sum of all gradients, each times `momentum` per update since."""
    return np.tensordot(decay(hyper["momentum"], len(history)), history, 1)


def adam(history: np.ndarray, hyper: dict[str, float]) -> np.ndarray:
    """Return Adam's direction: with its bias correction, moments are averages."""
    first = np.average(history, axis=0, weights=decay(hyper["b1"], len(history)))
    second = np.average(history**2, axis=0, weights=decay(hyper["b2"], len(history)))
    return first / (np.sqrt(second) + hyper["eps"])


def decay(rate: float, length: int) -> np.ndarray:
    """Return `[..., rate ** 2, rate, 1]`."""
    return rate ** np.arange(length)[::-1]


DIRECTIONS = {
    "sgd": lambda history, hyper: history[-1],
    "momentum": momentum,
    "adam": adam,
}
