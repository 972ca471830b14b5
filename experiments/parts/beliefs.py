"""What is said about `nn.DataParallel`, measured on the port.

`N` devices; `rows` of a batch. Single-device references share nothing with the port.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.harness.result import Rows
from experiments.parts import pytorch
from experiments.parts.gradients import difference
from jaxdp import DataParallel, replicated
from jaxdp.replicated import observe

PyTree = Any


def network(params: PyTree, x: Any) -> jax.Array:
    """`[rows, 3]` to `[rows, 2]`."""
    return jnp.tanh(x @ params["w"]) @ params["v"]


def start(rows: int) -> tuple[PyTree, np.ndarray]:
    """Random parameters and a random batch."""
    random = np.random.default_rng(0)
    shapes = {"w": (3, 8), "v": (8, 2)}
    params = {
        name: random.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    return params, random.normal(size=(rows, 3)).astype(np.float32)


@jax.jit
def square(output: jax.Array) -> jax.Array:
    """A loss: the mean over all rows."""
    return jnp.mean(output**2)


@jax.jit
@jax.grad
def on_one_device(params: PyTree, x: Any) -> jax.Array:
    """The gradient of the whole batch."""
    return square(network(params, x))


class Programs:
    """An observer that compiles the forward programs it sees, by their rows."""

    def __init__(self):
        """Starts empty."""
        self.found: dict[str, jax.stages.Compiled] = {}

    def see(self, event: observe.Event) -> None:
        """Compiles a forward program of a new size."""
        if event.stage == "4 forward" and event.lower:
            name = f"Forward of {len(event.made['outputs'][0])} rows"
            if name not in self.found:
                self.found[name] = event.lower().compile()

    def settle(self) -> None:
        """Waits for nothing: it keeps no arrays."""


def uneven(devices: Sequence[Any], sizes: Sequence[int]) -> tuple[Rows, Programs]:
    """Batches that are not divisible, beside one device; programs of the first."""
    ids = [device.id for device in devices]
    programs = Programs()
    rows = []
    for size in sizes:
        params, x = start(size)
        model = DataParallel(network, params, device_ids=ids)
        parts = [len(part) for part in replicated.scatter(x, ids)]
        with observe.observed_by(programs):
            output = model(x)
        gradient = jax.grad(lambda p, m=model, x=x: square(m.apply(p, x)))(params)
        alone = on_one_device(params, x)
        row = {"rows": size, "slices": ", ".join(map(str, parts))}
        row |= {"torch.chunk": pytorch.chunks(size, len(ids)), "rows out": len(output)}
        row["output apart"] = difference(jax.device_get(output), network(params, x))
        rows.append(row | {"gradient apart": difference(gradient, alone)})
    return rows, programs


def output_devices(devices: Sequence[Any]) -> Rows:
    """All but the last device run replicas; every device is asked for the outputs."""
    ids = [device.id for device in devices]
    params, x = start(4 * len(ids))
    reference = np.asarray(DataParallel(network, params, device_ids=ids[:-1])(x))
    rows = []
    for device in devices:
        model = DataParallel(
            network, params, device_ids=ids[:-1], output_device=device.id
        )
        output = model(x)
        row = {"output_device": device.id, "in device_ids": device.id in ids[:-1]}
        row["lies on"] = ", ".join(str(each.id) for each in output.devices())
        rows.append(row | {"other bits": int(np.sum(np.asarray(output) != reference))})
    return rows


def replicate_alone(devices: Sequence[Any]) -> Rows:
    """Gradients through `replicate`, without `DataParallel`; then an update."""
    ids = [device.id for device in devices]
    params, x = start(4 * len(ids) - 1)
    parts = [(part,) for part in replicated.scatter(x, ids)]

    def of_copies(copies):
        outputs = replicated.parallel_apply(network, copies, parts)
        return square(replicated.gather(outputs, ids[0]))

    def of_original(params):
        return of_copies(replicated.replicate(params, ids))

    full = on_one_device(params, x)
    copies = replicated.replicate(params, ids)
    own = jax.grad(of_copies)(copies)
    through = jax.grad(of_original)(params)
    found = [
        (f"replica {i}'s own gradient", gradient, full)
        for i, gradient in enumerate(own)
    ]
    found.append(("the sum of these", _sum(own), full))
    found.append(("the original's gradient, through replicate", through, full))
    updated = jax.tree.map(lambda p, g: p - 0.1 * np.asarray(g), params, through)
    found.append(("a copy from before an update", copies[-1], updated))
    again = replicated.replicate(updated, ids)[-1]
    found.append(("a copy from after the update", again, updated))
    return [
        {
            "what": what,
            "on": _where(tree),
            "beside": "full batch's gradient" if other is full else "updated original",
            "apart": difference(jax.device_get(tree), jax.device_get(other)),
        }
        for what, tree, other in found
    ]


def _sum(trees: Sequence[PyTree]) -> PyTree:
    """On the host."""
    return jax.tree.map(lambda *leaves: sum(map(np.asarray, leaves)), *trees)


def _where(tree: PyTree) -> str:
    """The devices of a tree."""
    found = {
        f"{device.platform}:{device.id}"
        for leaf in jax.tree.leaves(tree)
        if isinstance(leaf, jax.Array)
        for device in leaf.devices()
    }
    return ", ".join(sorted(found)) or "host"


class Module:
    """An object with a plain attribute."""

    def __init__(self, scale: Any):
        """Keeps it, as `self.scale = tensor` does in PyTorch."""
        self.scale = scale


def attributes(devices: Sequence[Any]) -> Rows:
    """An array that is a parameter, a buffer or a plain attribute: who finds it?"""
    scale = np.array([[2, 3]], np.float32)
    plain = Module(jnp.asarray(scale))
    fixed = Module(jax.device_put(scale, devices[0]))
    x = np.arange(1, 8 * len(devices) + 1, dtype=np.float32).reshape(-1, 2)

    def with_buffer(params, x, *, model_state):
        return x * model_state, model_state

    kinds: dict[str, tuple[Callable[..., Any], Any]] = {
        "parameter": (lambda scale, x: x * scale, None),
        "buffer": (with_buffer, scale),
        "plain attribute": (lambda _, x: x * plain.scale, None),
        "plain attribute on the first device": (lambda _, x: x * fixed.scale, None),
    }
    rows = []
    for kind, (apply_fn, state) in kinds.items():
        model = DataParallel(
            apply_fn,
            scale,
            model_state=state,
            device_ids=[device.id for device in devices],
        )
        right, message = 0, ""
        try:
            parts = np.split(np.asarray(model(x)) == x * scale, len(devices))
            right = sum(bool(part.all()) for part in parts)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
        rows.append({"kept as": kind, "replicas right": right, "message": message})
    return rows
