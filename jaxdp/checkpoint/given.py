"""What callers pass, checked; and what a manifest says of it."""

import json
from typing import Any

from jaxdp.checkpoint.content import kinds_of_keys
from jaxdp.program.trained import trainer_of
from jaxdp.state import TrainState, is_deleted
from jaxdp.trainer import Trainer


def facts(trainer: Trainer, state: TrainState, step: int) -> dict[str, Any]:
    """What a manifest says besides arrays."""
    mesh = trainer.mesh
    return {
        "step": step,
        "design": repr(state.design),
        "devices": mesh.size,
        "mesh": dict(zip(mesh.axis_names, mesh.devices.shape, strict=True)),
        "keys": kinds_of_keys(state),
    }


def trainer(train: Any, caller: str) -> Trainer:
    """What is behind a training."""
    try:
        return trainer_of(train, caller)
    except TypeError:
        raise TypeError(
            f"{caller} got train={type(train).__name__}. A checkpoint belongs to a "
            "training. Pass what jaxdp.data_parallel returned."
        ) from None


def check_state(state: Any, trainer: Trainer, caller: str) -> None:
    """Refuses what is no state of this training, or was donated."""
    if not isinstance(state, TrainState):
        raise TypeError(
            f"{caller} got a state of type {type(state).__name__}. It must be a "
            "TrainState: pass what train.init or train.step returned."
        )
    if state.design != trainer.replica.design:
        raise ValueError(
            f"{caller} got a state made by {state.design}, and a training with "
            f"{trainer.replica.design}. Pass the training that the state belongs to."
        )
    if is_deleted(state.step):
        raise RuntimeError(
            f"{caller} got a state whose arrays have been deleted: train.step donates "
            "the state that it is given. Pass the one that it returned."
        )


def as_json(value: Any, name: str) -> Any:
    """The value, if JSON gives back what it is given."""
    try:
        back = json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"save got {name} that JSON cannot say: {error}. Pass numbers, texts, "
            "lists and dicts of them; arrays with .tolist()."
        ) from None
    if back != value:
        raise TypeError(
            f"save got {name}={value!r}, which JSON would give back as {back!r}. Pass "
            "lists instead of tuples, and texts as the keys of dicts."
        )
    return back
