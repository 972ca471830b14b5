"""What does jaxdp cost, and did it become slower?

Run by `make bench`; about nine minutes on two cores, `--all` some minutes more. Steps
and exchanges stand against the same programs written by hand, against XLA's own and
against each other, and seconds against limits. Every row goes to
results/bench/history.json with the commit, and is compared with what it was before on
the same kind of machine (`benchmarks.changes` says how); results/bench/index.html shows
it, and result.json has the last run.

Expected on forced CPU devices, which share memory and cores: the executor, and
RingAllReduce with one bucket, within 1.05 of hand-written rounds, NativeAllReduce
within 1.02 of a hand-written `psum` step, DataParallel within 1.05 of four programs and
their transfers written by hand; Zero in stages 1 and 2 within 1.05 of RingAllReduce, in
stage 3, which gathers parameters twice, within 1.5; a ring of 16 MB within 2.2 of
`psum` for two devices and 4 for four; halving-doubling below the ring up to 64 KB.
glibc keeps the memory that a run gives back (`benchmarks.machine.keep_memory`): else
page faults are timed, and the ring of two devices takes 2.3 to 3.1 times `psum`.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence

from benchmarks import catalogue, changes, machine, page, running, terminal
from benchmarks.history import History, Run
from experiments.harness import devices

OUTPUT = pathlib.Path("results/bench")
INTERRUPTED = 130  # as shells have it


def options(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=about)
    parser.add_argument("--seconds", type=float, default=12, help="per comparison")
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="part of a name; * is anything"
    )
    parser.add_argument("--all", action="store_true", help="the long ones, too")
    parser.add_argument("--list", action="store_true", help="print names, run nothing")
    parser.add_argument(
        "--check",
        action="store_true",
        help="exit with 1 if a row became slower or passes its limit",
    )
    parser.add_argument("--output", type=pathlib.Path, default=OUTPUT)
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """Runs benchmarks, keeps, shows and judges them; returns the exit status."""
    asked = options(given)
    try:
        found = catalogue.chosen(catalogue.every(), asked.only, asked.all or asked.list)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if asked.list:
        for case in found:
            print(f"{case.group}: {case.name}" + " (long: --all)" * case.long)
        return 0
    machine.keep_memory()
    devices.start(8, "auto")
    print(devices.describe(8))
    kept = History(asked.output / "history.json")
    under_way = running.begin(kept, asked.seconds)
    try:
        under_way.measure(found)
    except KeyboardInterrupt:
        print("interrupted: the rows that were measured are kept")
        return INTERRUPTED
    finally:
        attention = finish(kept, under_way.run, asked.output)
    return int(bool(under_way.run["failed"]) or (asked.check and bool(attention)))


def finish(kept: History, run: Run, output: pathlib.Path) -> list[str]:
    """Shows a run, and writes result.json and the page; returns what needs attention.

    A run without rows leaves the files of the last one as they are.
    """
    if not run["rows"]:
        return []
    runs = kept.runs()
    judged = changes.of_run(runs, run)
    terminal.show(judged, run)
    result = json.dumps(run, indent=2, allow_nan=False, ensure_ascii=False)
    (output / "result.json").write_text(result + "\n", encoding="utf-8")
    (output / "index.html").write_text(page.render(runs, run), encoding="utf-8")
    print(f"wrote index.html, result.json and history.json in {output}")
    return terminal.warnings(judged, run)


if __name__ == "__main__":
    sys.exit(main())
