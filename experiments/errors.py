"""Which errors do users of nn.DataParallel make, and what does jaxdp tell them?

Command:   make experiment EXP=errors          ARGS="--devices 4"
Hardware:  any; without GPUs, 4 forced host devices.
Runtime:   about 20 s on two cores.

Every typical mistake is made for real, and what is raised is kept word for word: device
ids, inputs, functions that replicas cannot share, outputs that cannot be joined, pieces
put together by hand, steps. A message must contain the numbers and names of the cause,
and the remedy. What only looks like a mistake is run too, and so is what articles say
about batches, output devices, replicate(), plain attributes and recurrent networks.

Expected numbers, for N = 4 devices:
  mistakes                   28, each refused with its cause and its remedy
  66 rows on 4 devices       slices of 17, 17, 17 and 15; 66 rows come out, and the
                             gradient is the full batch's
  output_device              all 4 devices give the same bits, 3 of them in device_ids
  replicate() alone          the original gets the full batch's gradient; a copy from
                             before an update is a copy of what was
  plain attributes           4 of 4 replicas find one; on a device of its own it is
                             refused
  hidden state, carried over state and gradients of a GRU are a single device's, if the
                             batch axis of the state is split
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from experiments.harness import config as harness
from experiments.harness import plots
from experiments.harness.result import Claim, Result, Rows
from experiments.ledger import catalogue
from experiments.parts import (
    allowed,
    beliefs,
    input_mistakes,
    mistakes,
    model_mistakes,
    pytorch,
    recurrent,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MISTAKES = {
    "devices": mistakes.about_devices,
    "inputs": input_mistakes.about_inputs,
    "shapes": input_mistakes.about_shapes,
    "models": model_mistakes.about_models,
    "steps": model_mistakes.about_steps,
}
EQUAL = 1e-5  # relative; float32 sums in another order differ by less


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(harness.Config):
    """Options of the experiment."""

    devices: int = 4  # how many
    times: int = 20  # of a window of the recurrent network; there are two windows

    def check(self) -> None:
        """Checks the options."""
        super().check()
        if self.devices < 2 or self.times < 1:
            raise ValueError(
                f"--devices got {self.devices} and --times {self.times}. Mistakes "
                "between devices need at least 2 of them, and a recurrent network at "
                "least 1 time. Use --devices 4 --times 20, for example."
            )


@harness.full_precision
def run(config: Config) -> Result:
    """Answers the question."""
    devices = jax.devices()[: config.devices]
    on = mistakes.Setting(devices)
    n = len(devices)
    uneven, programs = beliefs.uneven(devices, [17 * n - n // 2, 2 * n + 1, n - 1])
    outputs = beliefs.output_devices(devices)
    alone = beliefs.replicate_alone(devices)
    attributes = beliefs.attributes(devices)
    given = recurrent.problem(3 if config.tiny else config.times, 3 * n + 1)
    states = recurrent.compare(given, on.ids)
    return Result(
        claims=[
            claim_divisible(uneven),
            claim_output_device(outputs),
            claim_replicate(alone),
            claim_attributes(attributes, pytorch.sharing(n)),
            claim_recurrent(states),
        ],
        tables={
            f"mistakes_with_{name}": mistakes.provoke(make(on))
            for name, make in MISTAKES.items()
        }
        | {
            "what_works_here": allowed.situations(on),
            "uneven_batches": uneven,
            "output_devices": outputs,
            "replicate_alone": alone,
            "plain_attributes": attributes,
            "carried_state": states,
        },
        figures={"Who gets which rows": plot_slices(uneven, on.names)},
        programs=programs.found,
    )


def plot_slices(uneven: Rows, names: Sequence[str]) -> "Figure":
    """Every batch as a bar, cut into slices, each with its rows and its device."""
    title = "Who gets which rows"
    note = f"{len(names)} devices; slices as they were scattered, in order"
    figure, axes = plots.plot(title, "share of the rows", "", note, (7.0, 2.8))
    style = {"color": "#0072B2", "edgecolor": "white", "linewidth": 3}
    text = {"ha": "center", "va": "center", "fontsize": 8, "color": "white"}
    for i, row in enumerate(uneven):
        start = 0.0
        for size, name in zip(_sizes(row), names, strict=False):  # some have none
            share = size / row["rows"]
            axes.barh(i, share, 0.7, start, **style)
            axes.text(start + share / 2, i, f"{size}\n{name}", **text)
            start += share
    labels = [f"{row['rows']} rows,\n{len(_sizes(row))} devices" for row in uneven]
    axes.set_yticks(range(len(uneven)), labels)
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    return figure


def _sizes(row: Any) -> list[int]:
    return [int(size) for size in row["slices"].split(", ")]


def claim_divisible(uneven: Rows) -> Claim:
    """CA2."""
    row = uneven[0]
    count, others = len(_sizes(row)), [f"{r['rows']} to {r['slices']}" for r in uneven]
    works = all(
        each["rows out"] == each["rows"] == sum(_sizes(each))
        and max(each["output apart"], each["gradient apart"]) < EQUAL
        for each in uneven
    )
    return Claim(
        id="CA2",
        claim=catalogue.text("CA2"),
        expected=0,
        measured=row["rows out"],
        unit=f"of {row['rows']} rows come out of {count} devices",
        verdict="refuted" if works else "holds",
        why=f"{row['rows']} rows become slices of {row['slices']} (torch.chunk: "
        f"{row['torch.chunk']}). All rows come out, and the gradient of the mean loss "
        f"is the full batch's, up to {row['gradient apart']:.1e} of its largest entry. "
        f"So it is for all sizes tried: {'; '.join(others[1:])}, where devices without "
        "a slice stay out. What an uneven size costs is a second program.",
    )


def claim_output_device(outputs: Rows) -> Claim:
    """CA9."""
    works = [
        row["lies on"] == str(row["output_device"]) and not row["other bits"]
        for row in outputs
    ]
    inside = sum(row["in device_ids"] for row in outputs)
    return Claim(
        id="CA9",
        claim=catalogue.text("CA9"),
        expected=f"{len(outputs) - inside}, or {inside}",
        measured=sum(works),
        unit=f"of {len(outputs)} devices can be the output device",
        verdict="refuted" if all(works) else "partly" if any(works) else "holds",
        why=f"Replicas ran on {inside} devices, and each of {len(outputs)} was asked "
        f"for the outputs, {inside} of them in device_ids: they lay there, with the "
        "same bits every time.",
    )


def claim_replicate(alone: Rows) -> Claim:
    """CA12."""
    apart = {row["what"]: row["apart"] for row in alone}
    through = apart["the original's gradient, through replicate"]
    before = apart["a copy from before an update"]
    parts = [value for what, value in apart.items() if what.endswith("own gradient")]
    return Claim(
        id="CA12",
        claim=catalogue.text("CA12"),
        expected=1.0,
        measured=through,
        unit="of the full batch's gradient is lost (relative difference)",
        verdict="partly" if through < EQUAL < before else "holds",
        why="No gradient is lost: replicate, parallel_apply and gather without "
        "DataParallel leave the full batch's gradient with the original on the first "
        "device, which is all the optimizer has to see. In PyTorch too a replica's "
        ".grad is None because it is no leaf, and its gradient goes on to the original."
        f" Asked for, each replica's own gradient is a part ({min(parts):.0%} to "
        f"{max(parts):.0%} off), and their sum is the whole ("
        f"{apart['the sum of these']:.1e} off). What holds: copies are not tied to the "
        f"original. After an update they are off by {before:.1%}, until replicate is "
        "called again.",
    )


def claim_attributes(attributes: Rows, shared: int | None) -> Claim:
    """CA13."""
    right = {row["kept as"]: row["replicas right"] for row in attributes}
    count, found = right["parameter"], right["plain attribute"]
    fixed = attributes[-1]
    error = fixed["message"].partition(":")[0]
    refused = fixed["replicas right"] == 0 and "captured" in fixed["message"]
    torch = (
        f"{pytorch.ABSENT} here; by its source, a replica shares the tensor object."
        if shared is None
        else f"In PyTorch {shared} of {count} replicas hold the very same tensor "
        "object, which stays on its device."
    )
    copied = count == right["buffer"] > 0
    return Claim(
        id="CA13",
        claim=catalogue.text("CA13"),
        expected=0,
        measured=found,
        unit=f"of {count} replicas find a plain attribute",
        verdict="partly" if copied and found == count and refused else "refuted",
        why=f"Parameters and buffers reach all {count} replicas. {torch} The failure "
        "is a device mismatch, then, and no missing attribute. Here a replica is a "
        "compiled function, and a plain attribute an array that it captures: one that "
        "is tied to no device reaches all replicas, and one on the first device is "
        f"refused, on all, by a {error} that says where it lies.",
    )


def claim_recurrent(states: Rows) -> Claim:
    """CA14."""
    ran = [row for row in states if not row["refused"]]
    (refused,) = [row for row in states if row["refused"]]
    state, of_params, of_state = (
        max(row[name] for row in ran) for name in recurrent.APART
    )
    equal = len(ran) == len(states) - 1 and max(state, of_params, of_state) < EQUAL
    return Claim(
        id="CA14",
        claim=catalogue.text("CA14"),
        expected=1.0,
        measured=of_state,
        unit="of the first state's gradient is cut (relative difference)",
        verdict="refuted" if equal else "holds",
        why="A GRU of two layers, its state carried from one window to the next. With "
        f"the state as one more input, split along its batch axis (dim="
        f"{' or '.join(str(row['dim']) for row in ran)}), the last state is a single "
        f"device's up to {state:.1e}, the gradients of parameters and of the "
        f"first state up to {of_params:.1e} and {of_state:.1e}. It fails "
        f"where a state {refused['state']} meets a batch {refused['batch']} and both "
        "are split along axis 0, which is the state's layers. That is refused, since "
        "lengths differ; nothing is cut silently.",
    )
