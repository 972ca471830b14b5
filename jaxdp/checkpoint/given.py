"""What callers pass, checked; and what a manifest says of it."""

import json
from typing import Any

from jaxdp.checkpoint.content import kinds_of_keys
from jaxdp.state import TrainState, check_state
from jaxdp.trainer import Trainer
from jaxdp.training import trainer_of


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


def checked(train: Any, state: Any, caller: str) -> Trainer:
    """What is behind a training, whose state this is.

    Raises:
        TypeError: One of the two is none.
        ValueError: The state is another training's.
        RuntimeError: It was donated.
    """
    trainer = trainer_of(train, caller, "A checkpoint belongs to a training.")
    check_state(state, trainer.replica.design, trainer.replicated, caller)
    return trainer


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
