"""NaN hunting: the stage of a step, the device, the layer and the line of the first.

The stages of one step are run by the programs that a step runs, and what each makes is
checked on its device. The first program with a NaN in its results is evaluated once
more, equation by equation, to find the operation that made it.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from jaxdp.replicated.devices import Device, name

if TYPE_CHECKING:
    from jaxdp.replicated.model import DataParallel
    from jaxdp.replicated.step import State

PyTree = Any
KINDS = {"nan": "NaN", "inf": "Infinity"}


class Anomaly(NamedTuple):
    """The first place of a step where a NaN appears.

    Attributes:
        kind: "nan" or "inf".
        stage: Which of the eight stages, such as "4 forward".
        device: Where.
        replica: Which replica; None for the root and the output device.
        where: A leaf, such as "params['w']" or "inputs[0], row 36"; of a program what
            it was about: the rows of the replica, the loss, or the gradient of a leaf.
        layer: The innermost Flax module that was being called, such as
            "blocks.0.conv1"; empty for none.
        operation: The primitive that made it out of good numbers, such as "log"; empty
            for data.
        source: File, line and function that called for the operation; empty for data.
    """

    kind: str
    stage: str
    device: Device
    replica: int | None
    where: str
    layer: str = ""
    operation: str = ""
    source: str = ""

    def __str__(self) -> str:
        """One sentence."""
        replica = "" if self.replica is None else f"replica {self.replica} "
        text = f"{KINDS[self.kind]} first appears in stage {self.stage}, "
        text += f"{replica}on {name(self.device)}"
        if not self.operation:
            return f"{text}: {self.where}"
        layer = f"layer {self.layer!r}, " if self.layer else ""
        line = self.source.rpartition(os.sep)[2]
        source = f", at {line}" if line else ""
        return f"{text} ({self.where}), {layer}operation {self.operation}{source}"


def find_nan(
    model: "DataParallel",
    inputs: Any,
    targets: PyTree = None,
    loss_fn: Callable[..., Any] | None = None,
    state: "State | None" = None,
    *,
    kinds: tuple[str, ...] = ("nan",),
    **keywords: Any,
) -> Anomaly | None:
    """Runs one step, stage by stage, until a NaN appears, and says where.

    In this order: the targets ("1 place"), the parameters and buffers ("2 replicate"),
    the slices of the inputs ("3 scatter"), every replica ("4 forward"); with a loss
    function also the loss with its gradient ("6 loss"), the gradients of every replica
    ("7 backward") and their mean ("8 reduce"). A NaN counts if a result depends on it:
    one that `jnp.where` drops does not, until it spoils a gradient.

    Without a NaN this costs a step without its optimizer; with one also the evaluation
    of one program operation by operation, in which a `scan` is unrolled, and a `while`
    or `cond` is one operation. Functions on the host are called again then. Nothing is
    changed: neither the model, nor its modules, nor the state.

    Args:
        model: The model.
        inputs: As of a train step: a tuple holds several positional inputs.
        targets: What `loss_fn` compares with.
        loss_fn: As of `train_step`; None stops after the forward pass.
        state: Of a train step; None takes the model's parameters and buffers.
        kinds: What to look for: "nan", "inf" or both.
        **keywords: Keyword inputs of `apply_fn`.

    Returns:
        The first place, or None.

    Raises:
        ValueError: `kinds` are others.
        RuntimeError: A state that was given to a step.
        Exception: What a train step raises.

    Example:
        >>> import jax.numpy as jnp, jaxdp
        >>> model = jaxdp.DataParallel(lambda w, x: jnp.log(w * x), jnp.array(2.0))
        >>> found = find_nan(model, jnp.array([3.0, 1.0, 4.0, 1.0, -5.0, 9.0]))
        >>> found.stage, found.replica, found.where, found.operation
        ('4 forward', 4, 'row 4', 'log')
    """
    from jaxdp.replicated.views.hunt import Hunt

    known = isinstance(kinds, tuple | list) and all(
        kind in list(KINDS) for kind in kinds
    )
    if not kinds or not known:
        raise ValueError(
            f"find_nan got kinds={kinds!r}. It looks for 2 kinds of numbers, 'nan' and "
            "'inf', given as a tuple of their names. Pass ('nan',), ('inf',) or both."
        )
    # The user may have told JAX to raise at a NaN: here it must be met, not raised.
    with jax.debug_nans(False), jax.debug_infs(False):
        hunt = Hunt(model, inputs, targets, loss_fn, state, keywords, tuple(kinds))
        return next((found for found in hunt.stages() if found), None)
