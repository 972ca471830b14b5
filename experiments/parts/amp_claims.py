"""What the measurements say about the claims on mixed precision."""

from collections.abc import Iterable, Sequence
from typing import Any

from experiments.harness.result import Claim, Rows, Verdict
from experiments.ledger import catalogue
from experiments.parts import amp_memory as memory
from experiments.parts import amp_underflow as underflow
from jaxdp.precision import Precision

SAVED, TIME = 50, 20  # percent, as claimed


def saves(kept: Rows, planned: Rows, times: Rows, absent: str) -> Claim:
    """CA8.

    Args:
        kept: What a step keeps, by model and way.
        planned: What XLA plans, by target.
        times: Of steps.
        absent: Why nothing was compiled for a GPU; "" if it was.
    """
    network, transformer = (_way(kept, name, "bf16") for name in _models(kept))
    as_written = [_way(kept, name, memory.AS_WRITTEN) for name in _models(kept)]
    slower = {row["way"]: row["of f32"] for row in times}
    share = {row["model"]: row["products in 16 bits (%)"] for row in as_written}
    return Claim(
        id="CA8",
        claim=catalogue.text("CA8"),
        expected=f"{SAVED} % of memory, {TIME} % of time",
        measured=_measured((network, transformer), planned, slower["bf16"]),
        unit="",
        verdict=_verdict(network, transformer, slower["bf16"]),
        why="Counted in the traced program, for what the forward pass keeps beside "
        "parameters, gradients and optimizer state, which stay float32: "
        f"{network['model']} saves {network['saved, kept (%)']:.0f} % of that, "
        f"{transformer['model']} {transformer['saved, kept (%)']:.0f} %: norms and "
        "softmax keep float32, and copies of the parameters come on top. "
        f"{_planned(planned, absent)} Nothing is saved by itself: with layers as Flax "
        "makes them (nnx.Embed and nnx.BatchNorm widen their results), 16-bit products "
        f"are {' and '.join(f'{s:.0f} %' for s in share.values())} of all, and memory "
        f"grows. Time: on forced CPU devices a bf16 step takes {slower['bf16']:.2f} "
        f"times that of float32 and a fp16 step {slower['fp16, scaled']:.2f} times: "
        "CPUs emulate 16 bits. Whether 20 % are saved depends on how much faster a "
        "device multiplies in 16 bits, and on what else the step does.",
    )


def _verdict(network: Any, transformer: Any, of_f32: float) -> Verdict:
    """Whether both, some or none of it is saved."""
    saved = [row["saved, all (%)"] for row in (network, transformer)]
    if min(saved) >= SAVED and of_f32 <= 1 - TIME / 100:
        return "holds"
    return "partly" if max(saved) > 0 else "refuted"


def _measured(kept: Sequence[Any], planned: Rows, of_f32: float) -> str:
    """What is saved of memory and time, in percent."""
    memory_saved = _numbers(row["saved, all (%)"] for row in kept)
    compiled = _on_h100(planned)
    if not compiled:
        return f"{memory_saved} % of memory, {100 * (1 - of_f32):.0f} % of time on CPUs"
    there = f"{_numbers(row['all'] for row in compiled)} % of memory"
    times = _numbers(row["time"] for row in compiled if row["time"] is not None)
    time = f", {times} % of time (predicted)" if times else ""
    return f"{memory_saved} % of memory; compiled for H100 {there}{time}"


def _planned(rows: Rows, absent: str) -> str:
    """What XLA plans, in words."""
    compiled = _on_h100(rows)
    if not compiled:
        return f"{absent}; XLA for CPUs widens 16 bits and saves nothing."
    words = []
    for row in compiled:
        all_of_it = (
            f"{row['temporaries']:.0f} % of temporaries, {row['all']:.0f} % of all"
        )
        words.append(f"{row['model']} {all_of_it}")
        if row["time"] is not None:
            took = 1 - row["time"] / 100
            words[-1] += f", its kernels taking {took:.2f} of the time (predicted)"
    return f"Compiled for an H100, not run there: {'; '.join(words)}."


def _on_h100(rows: Rows) -> list[dict[str, Any]]:
    """What bfloat16 saves of each model there, in percent; no time if none is known."""
    there = [row for row in rows if row["target"] == "H100"]
    return [
        {
            "model": model,
            "temporaries": _saved(wide["temporaries_mb"], narrow["temporaries_mb"]),
            "all": _saved(wide["all_mb"], narrow["all_mb"]),
            "time": _saved(wide["predicted_ms"], narrow["predicted_ms"]),
        }
        for model in _models(there)
        for wide, narrow in [[_way(there, model, way) for way in ("f32", "bf16")]]
    ]


def _saved(wide: float | None, narrow: float) -> float | None:
    return 100 * (1 - narrow / wide) if wide else None


def _numbers(percent: Iterable[float]) -> str:
    return " and ".join(f"{each:.0f}" for each in percent)


def scaling(flushed: Rows, compared: Rows, run: underflow.Run, of: Precision) -> Claim:
    """A6.

    Args:
        flushed: Shares of gradients that are zero, by loss scale.
        compared: What the runs reached.
        run: That with a dynamic scale.
        of: Its precision.
    """
    first = flushed[0]["first layer, zero (%)"]
    start = next(r for r in flushed if r["loss scale"] == "2^16")
    reached = {row["run"]: row["loss, last tenth"] for row in compared}
    follows = run.scales == underflow.rule(run, of)
    works = follows and start["finite"] and start["first layer, zero (%)"] < first
    return Claim(
        id="A6",
        claim="16-bit forward with dynamic loss scaling: scale, unscale, skip the step "
        "on inf or NaN, grow after a run of good steps",
        expected=f"trains as float32 does: loss {reached['f32']:.3g}",
        measured=f"loss {reached[underflow.SCALED]:.3g}; {reached['fp16']:.3g} without "
        "a scale",
        unit="",
        verdict="holds" if works else "refuted",
        why=f"Float16 makes {first:.0f} % of the first layer's gradient zero, and "
        f"{start['first layer, zero (%)']:.1f} % at a loss scale of 2^16. Over "
        f"{len(run.losses)} steps {sum(run.skipped)} were skipped, and the scale "
        f"{'followed' if follows else 'did not follow'} PyTorch's rule at every step, "
        f"between {min(run.scales):,.0f} and {max(run.scales):,.0f}. bfloat16 reaches "
        f"{reached['bf16']:.3g} without any scale.",
    )


def _models(rows: Rows) -> list[str]:
    return list(dict.fromkeys(row["model"] for row in rows))


def _way(rows: Rows, model: str, way: str) -> Any:
    (row,) = (row for row in rows if (row["model"], row["way"]) == (model, way))
    return row
