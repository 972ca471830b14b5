"""What a checkpoint keeps of a state: nothing that depends on design or devices."""

from typing import Any, NamedTuple

PyTree = Any


class Portable(NamedTuple):
    """A training state that any design can go on from, on any number of devices.

    Attributes:
        params: The full parameters.
        opt_state: The optimizer state, as `optimizer.init(params)` would make it.
        carried: By name, what else a design carries from step to step, such as the
            residuals of a compression; empty for most.
    """

    params: PyTree
    opt_state: PyTree
    carried: dict[str, PyTree]
