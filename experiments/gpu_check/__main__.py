"""`python -m experiments.gpu_check`: runs all parts and writes what they find."""

import argparse
import pathlib
import sys
from typing import Any

from experiments import gpu_check
from experiments.gpu_check import predicted, rates, steps, suite
from experiments.gpu_check.clock import Clock
from experiments.harness import devices, result
from experiments.parts import gpu_models, gpu_steps

LIMIT_S = 290.0
SUITE_S, SECOND_S = 60.0, 90.0  # what the tests and the second model are left
PREDICTED_STEP = gpu_steps.NATIVE
REPEATS, TINY_REPEATS = 20, 3
# A step may cost so much more than plain JAX, and a prediction be off by so much.
ALLOWED_RATIO, ALLOWED_FACTOR = 1.05, 2.0


def main(arguments: list[str]) -> int:
    """Runs the check; returns 0, 1 if a test failed, or 2 for a wrong option."""
    options = _parser().parse_args(arguments)
    clock = Clock(LIMIT_S)
    try:
        devices.start(1, options.platform)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    clock.say(f"gpu-check on {devices.describe(1)}")
    tables = measure(options.tiny, clock)
    folder = options.output / "gpu-check"
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "experiment": "gpu-check",
        "question": (gpu_check.__doc__ or "").partition("\n")[0],
        "config": {"platform": options.platform, "tiny": options.tiny},
        "environment": result.environment(1),
        "claims": claims(tables),
        "tables": tables,
        "artifacts": [],
    }
    result.write(folder / "result.json", document)
    for claim in document["claims"]:
        print(f"{claim['verdict']:8} {claim['claim']} {claim['why']}")
    clock.say(f"{folder}/result.json")
    return 1 if any(row["failed"] or row["error"] for row in tables["tests"]) else 0


def measure(tiny: bool, clock: Clock) -> dict[str, list[dict[str, Any]]]:
    """The tables, by name."""
    repeats = TINY_REPEATS if tiny else REPEATS
    measured = rates.measure(tiny, repeats)
    _show(clock, measured, "operation", "rate", "unit")
    every = predicted.hardwares(
        rates.flops_per_s(measured), rates.bytes_per_s(measured)
    )
    times, guesses = [], []
    few = gpu_steps.designs(1, tiny=True)
    for model, designs, keep_s in (
        (gpu_models.transformer(tiny), gpu_steps.designs(1, tiny), SUITE_S + SECOND_S),
        (gpu_models.resnet50(tiny), few, SUITE_S),
    ):
        # What is predicted is compiled first, in case time runs short.
        chosen = {PREDICTED_STEP: designs[PREDICTED_STEP]}
        chosen |= {} if tiny else designs
        found = steps.measure(model, chosen, repeats, clock, keep_s)
        times += found.rows
        for row in found.rows:
            if row["step"] in (steps.PLAIN, PREDICTED_STEP):
                program = found.programs[row["step"]]
                guesses += predicted.rows(row, program, every)
    _show(clock, times, "model", "step", "median_ms", "of_plain_jax")
    _show(clock, guesses, "model", "step", "figures", "predicted_ms", "measured_ms")
    tests = [suite.run(tiny, max(SUITE_S, clock.left_s))]
    _show(clock, tests, *suite.COUNTED, "why")
    return {
        "rates": measured,
        "step_times": times,
        "predicted": guesses,
        "tests": tests,
    }


def claims(tables: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What is judged: designs beside plain JAX, and predictions beside steps."""
    slowest = max(tables["step_times"], key=lambda row: row["of_plain_jax"])
    off = max(tables["predicted"], key=_factor)
    return [
        {
            "id": "designs",
            "claim": "On one device no design costs more than plain JAX.",
            "expected": f"at most {ALLOWED_RATIO}",
            "measured": slowest["of_plain_jax"],
            "unit": "of plain JAX",
            "verdict": _verdict(slowest["of_plain_jax"] <= ALLOWED_RATIO),
            "why": f"The slowest is {slowest['step']} of {slowest['model']}: "
            f"{slowest['median_ms']:.3f} ms; {slowest['label']}.",
        },
        {
            "id": "predicted",
            "claim": "Steps take what is predicted from their programs.",
            "expected": f"within a factor of {ALLOWED_FACTOR}",
            "measured": off["measured_of_predicted"],
            "unit": "measured over predicted",
            "verdict": _verdict(_factor(off) <= ALLOWED_FACTOR),
            "why": f"Furthest off is {off['step']} of {off['model']}, by the "
            f"{off['figures']}: {off['predicted_ms']:.3f} ms predicted and "
            f"{off['measured_ms']:.3f} ms measured.",
        },
    ]


def _factor(row: dict[str, Any]) -> float:
    """How far a prediction is off, in either direction."""
    ratio = row["measured_of_predicted"]
    return max(ratio, 1 / ratio)


def _verdict(holds: bool) -> str:
    return "holds" if holds else "refuted"


def _show(clock: Clock, rows: list[dict[str, Any]], *columns: str) -> None:
    for row in rows:
        values = (row[column] for column in columns)
        clock.say(
            "  ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in values)
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.gpu_check",
        description=gpu_check.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--platform", choices=("auto", "cpu", "gpu"), default="auto")
    parser.add_argument("--tiny", action="store_true", help="smallest sizes")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("results"))
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
