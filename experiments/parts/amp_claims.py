"""What the measurements say about the claims on mixed precision."""

from typing import Any

from experiments.harness.result import Claim, Rows, Verdict
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
        claim="Mixed precision saves about 50 % memory and 20 % time",
        expected=f"{SAVED} % of memory, {TIME} % of time",
        measured=f"{network['saved, all (%)']:.0f} and "
        f"{transformer['saved, all (%)']:.0f} % of memory; time: none on CPUs",
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


def _planned(rows: Rows, absent: str) -> str:
    """What XLA plans, in words."""
    gpu = [row for row in rows if row["target"] == "H100"]
    if not gpu:
        return f"{absent}; XLA for CPUs widens 16 bits and saves nothing."
    words = []
    for name in _models(gpu):
        wide, narrow = (_way(gpu, name, way) for way in ("f32", "bf16"))
        saved = 100 * (1 - narrow["temporaries_mb"] / wide["temporaries_mb"])
        everything = 100 * (1 - narrow["all_mb"] / wide["all_mb"])
        words.append(f"{name} {saved:.0f} % of temporaries, {everything:.0f} % of all")
        if wide["predicted_ms"]:
            took = narrow["predicted_ms"] / wide["predicted_ms"]
            words[-1] += f", its kernels taking {took:.2f} of the time (predicted)"
    return f"Compiled for an H100, not run there: {'; '.join(words)}."


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
